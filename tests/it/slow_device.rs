//! A device that takes long to back and unback memory, as a GPU does when all of its memory is
//! backed. Only the operations that need the memory wait for the device.

use bursar_budgets::testing::HostControl;
use std::{
    any::Any,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, ThreadId},
    time::Duration,
};

use bursar::{
    Address, Bytes, Class, Device, DeviceChoice, DeviceError, DeviceMemory, Fence, HostDevice, LoadOptions, MIB,
    ModelSource, Progress, Runtime, RuntimeConfig, Timeline,
};
use bursar_actors::{engine::EngineMessage, engine::WhichLane, responder::Responder};

use tokio::time::timeout;

use crate::stage::{about, answer, demo, device, eventually, runtime_on, small, story, text};

/// Time limit of a wait, longer than a start takes. A test that exceeds the limit fails and says
/// where.
const LONG: Duration = Duration::from_secs(30);

/// Waits until the device holds a call.
async fn until_held(device: &HostDevice) {
    eventually("a call is under way", async || device.counts().held_calls > 0).await;
}

#[test]
fn a_model_answers_while_another_model_backs_memory() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let expected = answer(&model, about(1)).await;
        let undisturbed = device.counts().backs;
        device.hold_calls();
        let loading = tokio::spawn({
            let (runtime, options) = (runtime.clone(), LoadOptions { name: Some("slow".into()), ..small() });
            async move { runtime.load_with(ModelSource::demo(), options, |_| {}).await.map(drop) }
        });
        // Every call of a start that backs memory is slow: weights, workspaces, KV cache.
        for backs in 1..=undisturbed {
            until_held(&device).await;
            assert_eq!(answer(&model, about(1)).await, expected);
            drop(runtime.budget().lease(Class::external("mine"), MIB).await.expect("memory is free"));
            assert_eq!(device.counts().backs, undisturbed + backs - 1, "the start has not backed more memory");
            device.let_one_call_pass();
            eventually("the start has backed more memory", async || device.counts().backs == undisturbed + backs).await;
        }
        device.let_calls_pass();
        loading.await.expect("no panic").expect("the model starts");
    });
}

#[test]
fn an_unload_disturbs_no_model_and_waits_for_its_memory() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let other = demo(&runtime, small()).await;
        let kept = runtime.budget().snapshot().await.expect("the budget answers").granted;
        let going = LoadOptions { name: Some("going".into()), ..small() };
        runtime.load_with(ModelSource::demo(), going, |_| {}).await.expect("the model starts");
        let expected = answer(&other, about(1)).await;
        device.hold_calls();
        let unloading = tokio::spawn({
            let runtime = runtime.clone();
            async move { runtime.unload("going").await }
        });
        until_held(&device).await;
        assert_eq!(answer(&other, about(1)).await, expected);
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert!(ledger.granted > kept && ledger.deficit.is_zero(), "memory waits for the device: {ledger}");
        assert!(!unloading.is_finished(), "the unload waits for the device");
        device.let_calls_pass();
        unloading.await.expect("no panic").expect("the model unloads");
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!((ledger.granted, device.counts().backed), (kept, kept), "{ledger}");
    });
}

#[test]
fn a_killed_engines_successor_waits_until_its_memory_is_returned() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let (reached, mut sizing) = tokio::sync::mpsc::channel(1);
        let (watched, loads) = (device.clone(), AtomicUsize::new(0));
        let loading = tokio::spawn({
            let runtime = runtime.clone();
            // Weights are backed before they are copied, so the next call that backs memory belongs
            // to the sizing attempt.
            let watch = move |progress| {
                if matches!(progress, Progress::Loading { .. }) && loads.fetch_add(1, SeqCst) == 0 {
                    watched.hold_calls();
                    reached.try_send(()).expect("the moment is reported once");
                }
            };
            async move { runtime.load_with(ModelSource::demo(), small(), watch).await }
        });
        sizing.recv().await.expect("the weights are backed");
        until_held(&device).await;
        let backed = device.counts().backed;
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        engine.kill_and_wait(Some(LONG)).await.expect("the actor ends");
        // The engine's thread still waits in a device call. No successor starts before the call
        // returns, but the runtime still answers questions.
        for _ in 0..20 {
            let engines = runtime.supervised().await.expect("the runtime answers").engines;
            assert_eq!(engines["demo"].get_id(), engine.get_id(), "no successor starts before the call returns");
            assert_eq!(device.counts().held_calls, 1, "only one attempt runs");
            tokio::task::yield_now().await;
        }
        assert_eq!(device.counts().backed, backed);
        device.let_calls_pass();
        let loaded = timeout(LONG, loading).await.expect("the successor starts in time");
        let model = loaded.expect("no panic").expect("the successor starts");
        let answer = timeout(LONG, answer(&model, text("Who are you?").max_tokens(2))).await;
        assert!(!answer.expect("the model answers in time").is_empty());
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert_eq!(ledger.granted, device.counts().backed, "{ledger}");
        timeout(LONG, runtime.shutdown()).await.expect("the runtime ends in time");
        eventually("all memory is unbacked", async || device.counts().backed == Bytes::ZERO).await;
    });
}

/// A device that records the threads on which lanes were made.
struct Watched {
    host: Arc<HostDevice>,
    lanes_made_on: Mutex<Vec<ThreadId>>,
}

impl Device for Watched {
    fn timeline(&self) -> Timeline {
        self.lanes_made_on.lock().expect("no holder panicked").push(thread::current().id());
        self.host.timeline()
    }

    fn name(&self) -> &str {
        self.host.name()
    }

    fn page(&self) -> Bytes {
        self.host.page()
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }

    fn is_host_memory(&self) -> bool {
        self.host.is_host_memory()
    }

    fn memory(&self) -> Result<DeviceMemory, DeviceError> {
        self.host.memory()
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.host.check()
    }

    fn overhead(&self) -> Bytes {
        self.host.overhead()
    }

    fn reserve(&self, bytes: Bytes) -> Result<Address, DeviceError> {
        self.host.reserve(bytes)
    }

    fn release_reservation(&self, address: Address) -> Result<(), DeviceError> {
        self.host.release_reservation(address)
    }

    fn back(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.host.back(address, bytes)
    }

    fn unback(&self, address: Address, bytes: Bytes) -> Result<(), DeviceError> {
        self.host.unback(address, bytes)
    }

    fn fence_here(&self) -> Fence {
        self.host.fence_here()
    }
}

#[test]
fn lanes_are_created_outside_actor_threads() {
    let watched = Arc::new(Watched { host: device(), lanes_made_on: Mutex::default() });
    let made_on = || watched.lanes_made_on.lock().expect("no holder panicked").clone();
    // All actors run on this thread.
    let actors = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    actors.block_on(async {
        let config = RuntimeConfig { device: DeviceChoice::Custom(watched.clone()), ..RuntimeConfig::default() };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, small()).await;
        let expected = answer(&model, about(1)).await;
        assert_eq!(made_on().len(), 2, "one lane for steps and one for pictures");
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        let (ended, end) = Responder::new();
        let drill = EngineMessage::KillLane { which: WhichLane::Step, ended };
        engine.send_message(drill).expect("the engine lives");
        end.await.expect("the lane ends");
        assert_eq!(answer(&model, about(1)).await, expected);
        assert_eq!(made_on().len(), 3, "another lane for steps");
        runtime.shutdown().await;
    });
    let here = thread::current().id();
    assert!(!made_on().contains(&here), "lanes were made on {:?}, but actors run on {here:?}", made_on());
}
