//! A lost device: every request fails with that reason, everything on the device ends with a
//! consistent ledger, and the runtime continues on another device, once.

use bursar_budgets::testing::HostControl;
use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc::sync_channel,
    },
    time::Duration,
};

use bursar::{
    Bytes, ChatError, Class, Device, DeviceChoice, DeviceError, Hint, HostDevice, LoadOptions, MIB, ModelSource,
    Progress, Runtime, RuntimeConfig, RuntimeError, Segment, StartError, WatchOptions,
};
use bursar_budgets::testing::Script;

use crate::stage::{Whole, about, answer, ask, demo, device, eventually, listen, placed, small, story, text};

/// A configuration in which the budget checks the device only when a test makes it do so. By
/// default, the budget checks the device once a second.
fn unwatched(device: DeviceChoice) -> RuntimeConfig {
    let watch = WatchOptions { every: Duration::from_secs(3600), ..WatchOptions::default() };
    RuntimeConfig { device, watch, ..RuntimeConfig::default() }
}

/// A runtime that takes the next device of this list each time it opens a device.
struct Spares {
    devices: Vec<Arc<HostDevice>>,
    made: Arc<AtomicUsize>,
    runtime: Runtime,
}

impl Spares {
    async fn of(devices: Vec<Arc<HostDevice>>) -> Spares {
        let made = Arc::new(AtomicUsize::new(0));
        let (spares, count) = (devices.clone(), made.clone());
        let make = move || match spares.get(count.fetch_add(1, SeqCst)) {
            Some(device) => Ok(placed(device)),
            None => Err(DeviceError::Lost { reason: "the driver makes no other context".to_owned() }),
        };
        let config = unwatched(DeviceChoice::Made(Arc::new(make)));
        let runtime = Runtime::start(config).await.expect("a host device starts");
        Spares { devices, made, runtime }
    }

    /// Checks that the lost device is empty and that every lease is on its replacement.
    async fn assert_whole(&self) {
        assert_eq!(self.made.load(SeqCst), 2, "the device was replaced once");
        assert_eq!(self.devices[0].counts().backed, Bytes::ZERO, "the lost device holds no memory");
        eventually("the ledger and the device agree", async || {
            let ledger = self.runtime.budget().snapshot().await.expect("the budget answers");
            ledger.granted == self.devices[1].counts().backed && ledger.deficit.is_zero()
        })
        .await;
        assert_eq!(
            self.runtime.device().memory().expect("the device answers"),
            self.devices[1].memory().expect("the device answers")
        );
    }
}

fn assert_lost(outcome: Result<Whole, ChatError>, when: &str) {
    let error = outcome.expect_err(when);
    assert!(matches!(error, ChatError::DeviceLost { .. }), "{when}: {error:?}");
    assert!(error.to_string().contains("lost") && !error.hint().is_empty(), "{when}: {error}");
}

#[test]
fn a_device_loss_fails_running_requests_and_moves_the_model() {
    story(async {
        let spares = Spares::of(vec![device(), device()]).await;
        let model = demo(&spares.runtime, small()).await;
        let expected = answer(&model, about(1)).await;
        let mut replies = Vec::new();
        for number in 0..12 {
            replies.push(model.chat(about(number).max_tokens(150).ignore_end()).await.expect("accepted"));
        }
        // Request 1, whose prompt is cached, decodes. Some of the other requests prefill, and some
        // wait. Without the cached prompt, on a busy host, the first request could end before
        // another request began.
        drop(replies[1].next().await.expect("the reply begins").expect("the device is not lost yet"));
        spares.devices[0].lose("a script says so");
        for (number, reply) in replies.into_iter().enumerate() {
            assert_lost(listen(reply).await, &format!("request {number}"));
        }
        assert_eq!(answer(&model, about(1)).await, expected, "the same handle and model work on the other device");
        assert_eq!(model.requests().0, 0, "all credits are free");
        spares.assert_whole().await;
    });
}

#[test]
fn an_unnoticed_loss_fails_only_the_next_request() {
    story(async {
        let spares = Spares::of(vec![device(), device()]).await;
        let model = demo(&spares.runtime, small()).await;
        spares.devices[0].lose("a script says so");
        assert_lost(ask(&model, about(1)).await, "its prefill");
        answer(&model, about(1)).await;
        spares.assert_whole().await;
    });
}

#[test]
fn a_device_lost_at_any_back_is_replaced_and_starting_continues() {
    story(async {
        let backs = {
            let device = device();
            let runtime = crate::stage::runtime_on(&device).await;
            demo(&runtime, small()).await;
            runtime.shutdown().await;
            device.counts().backs
        };
        assert!(backs > 4, "a start backs weights, workspaces, keys and values");
        for nth in 1..=backs {
            let spares = Spares::of(vec![device(), device()]).await;
            spares.devices[0].play(Script::new().lose_at_back(nth));
            let model = demo(&spares.runtime, small()).await;
            answer(&model, about(1)).await;
            spares.assert_whole().await;
            spares.runtime.shutdown().await;
            assert_eq!(spares.devices[1].counts().backed, Bytes::ZERO, "back {nth}, after the shutdown");
        }
    });
}

#[test]
fn a_device_lost_during_a_worst_case_is_replaced() {
    story(async {
        let spares = Spares::of(vec![device(), device()]).await;
        let (lost, stressed) = (spares.devices[0].clone(), AtomicUsize::new(0));
        let watch = move |progress| {
            if matches!(progress, Progress::Profiling { done: 1, .. }) && stressed.fetch_add(1, SeqCst) == 0 {
                lost.lose("a script says so");
            }
        };
        let model = spares.runtime.load_with(ModelSource::demo(), small(), watch).await.expect("the model starts");
        answer(&model, about(1)).await;
        spares.assert_whole().await;
    });
}

#[test]
fn a_device_lost_during_a_reclaim_keeps_the_ledger_consistent() {
    story(async {
        let spares = Spares::of(vec![device(), device()]).await;
        let other = demo(&spares.runtime, small()).await;
        let going = LoadOptions { name: Some("going".into()), ..small() };
        spares.runtime.load_with(ModelSource::demo(), going, |_| {}).await.expect("the model starts");
        let device = &spares.devices[0];
        device.hold_calls();
        let unloading = tokio::spawn({
            let runtime = spares.runtime.clone();
            async move { runtime.unload("going").await }
        });
        eventually("a call is under way", async || device.counts().held_calls > 0).await;
        device.lose("a script says so");
        device.let_calls_pass();
        unloading.await.expect("no panic").expect("the model unloads");
        eventually("the second device was opened", async || spares.made.load(SeqCst) == 2).await;
        answer(&other, about(1)).await;
        spares.assert_whole().await;
        let engines = spares.runtime.supervised().await.expect("the runtime answers").engines;
        assert_eq!(engines.into_keys().collect::<Vec<_>>(), ["demo"], "an unloaded model does not return");
    });
}

#[test]
fn user_leases_on_a_lost_device_are_void_and_harmless() {
    story(async {
        let spares = Spares::of(vec![device(), device()]).await;
        let model = demo(&spares.runtime, small()).await;
        let lease = spares.runtime.budget().lease(Class::external("mine"), MIB).await.expect("memory is free");
        let mine = Segment::reserve(spares.runtime.device(), MIB.into(), lease).expect("addresses are reserved");
        mine.back_to(MIB.into()).expect("memory is free");
        spares.devices[0].lose("a script says so");
        // Either this request or the budget notices the loss first. The budget notices the loss
        // when it handles the `ReleaseNote` of a segment.
        drop(ask(&model, about(1)).await);
        eventually("the second device was opened", async || spares.made.load(SeqCst) == 2).await;
        answer(&model, about(1)).await;
        let before = spares.runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(before.of_class(&Class::external("mine")), Bytes::ZERO);
        let another = spares.runtime.budget().lease(Class::external("mine"), MIB).await.expect("memory is free");
        drop(mine);
        let after = spares.runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(
            after.of_class(&Class::external("mine")),
            Bytes::mib(1),
            "dropping a segment of the lost device ends no later lease"
        );
        drop(another);
        spares.assert_whole().await;
    });
}

/// Checks that the runtime has ended and that callers get the reason.
async fn assert_ended(runtime: &Runtime, model: &bursar::ModelHandle) {
    let error = model.chat(about(1)).await.expect_err("the runtime has ended");
    assert!(matches!(&error, ChatError::Stopped { reason } if reason.contains("lost")), "{error:?}");
    eventually("the runtime has ended", async || runtime.supervised().await.is_err()).await;
    let error = runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("the runtime has ended");
    assert!(matches!(&error, RuntimeError::Device(lost) if lost.is_lost()), "{error:?}");
    assert!(error.hint().contains("start the program again"), "{}", error.hint());
}

#[test]
fn an_irreplaceable_device_ends_the_runtime_with_the_reason() {
    story(async {
        let spares = Spares::of(vec![device()]).await;
        let model = demo(&spares.runtime, small()).await;
        spares.devices[0].lose("a script says so");
        assert_lost(ask(&model, about(1)).await, "its prefill");
        assert_ended(&spares.runtime, &model).await;
        assert_eq!((spares.made.load(SeqCst), spares.devices[0].counts().backed), (2, Bytes::ZERO));
    });
}

#[test]
fn a_second_loss_ends_the_runtime_with_the_reason() {
    story(async {
        let spares = Spares::of(vec![device(), device(), device()]).await;
        let model = demo(&spares.runtime, small()).await;
        for lost in &spares.devices[..2] {
            // This chat has no picture. The `ReleaseNote` of a picture's pixels would make the
            // budget check the device.
            answer(&model, text("Who are you?").max_tokens(2)).await;
            lost.lose("a script says so");
            assert_lost(ask(&model, about(1)).await, "its prefill");
        }
        assert_ended(&spares.runtime, &model).await;
        assert_eq!(spares.made.load(SeqCst), 2, "the third device is not opened");
        assert!(spares.devices.iter().all(|device| device.counts().backed.is_zero()));
    });
}

#[test]
fn a_load_during_a_fatal_loss_fails_with_the_reason() {
    story(async {
        let spares = Spares::of(vec![device()]).await;
        spares.devices[0].play(Script::new().lose_at_back(3));
        let error = spares.runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("a lost device");
        let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        assert!(matches!(&**start, StartError::Stopped { reason } if reason.contains("lost")), "{start:?}");
        assert_eq!(spares.devices[0].counts().backed, Bytes::ZERO);
    });
}

#[test]
fn a_shutdown_during_a_loss_ends_everything_once() {
    story(async {
        let (at_it, (go_on, released)) = (Arc::new(AtomicUsize::new(0)), sync_channel::<()>(1));
        let (devices, making, released) = ([device(), device()], at_it.clone(), Mutex::new(released));
        let spares = devices.clone();
        let make = move || {
            let nth = making.fetch_add(1, SeqCst);
            // Opening the second device waits until the test allows it.
            if nth == 1 {
                let _ = released.lock().expect("no holder panicked").recv();
            }
            Ok(spares[nth].clone() as Arc<dyn Device>)
        };
        let config = unwatched(DeviceChoice::Made(Arc::new(make)));
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, small()).await;
        devices[0].lose("a script says so");
        assert_lost(ask(&model, about(1)).await, "its prefill");
        eventually("the second device is being opened", async || at_it.load(SeqCst) == 2).await;
        runtime.shutdown().await;
        let error = model.chat(about(1)).await.expect_err("the runtime has ended");
        assert!(matches!(error, ChatError::Stopped { .. }), "{error:?}");
        drop(go_on);
        assert!(devices.iter().all(|device| device.counts().backed.is_zero()));
    });
}
