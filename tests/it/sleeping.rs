//! Models that sleep: they hold no device memory, wake up for requests without losing any, and
//! share a device that is too small for all of them at once.

use bursar_actors::engine::WhichLane;
use bursar_budgets::testing::HostControl;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use bursar::{
    Bytes, ChatError, Class, Device, DeviceChoice, DeviceError, Envelope, Hint, HostDevice, Intensity, LoadOptions,
    ModelHandle, ModelHealth, ModelSource, Runtime, RuntimeConfig, SleepError, SleepLevel, Snapshot,
    messages::{EngineMessage, Responder},
};

use crate::stage::{
    Folder, Stage, Whole, about, answer, ask, demo, device, device_of, eventually, listen, placed, ranks, small,
    small_envelope, story, text,
};

const LEVELS: [SleepLevel; 2] = [SleepLevel::Level1, SleepLevel::Level2];

/// An intensity that allows any number of deaths.
const PATIENT: Intensity = Intensity { restarts_max: 1000, within: Duration::from_secs(60), back_off: Duration::ZERO };

/// A time limit that is longer than any test takes.
const LONG: Duration = Duration::from_secs(3600);

async fn ledger_of(runtime: &Runtime) -> Snapshot {
    runtime.budget().snapshot().await.expect("the budget answers")
}

/// Checks that no device memory is held, and returns the ledger.
async fn assert_free(runtime: &Runtime, device: &HostDevice) -> Snapshot {
    assert_eq!(device.counts().backed, Bytes::ZERO);
    let ledger = ledger_of(runtime).await;
    assert_eq!(ledger.granted, Bytes::ZERO, "{ledger}");
    ledger
}

/// A chat whose reply fills its stream. The chat runs forever if no task reads the reply.
fn endless(number: u32) -> bursar::Chat {
    about(number).max_tokens(200).temperature(20.0).top_k(0).top_p(1.0).seed(u64::from(number))
}

#[test]
fn a_sleeping_model_holds_no_device_memory_and_answers_as_before() {
    story(async {
        let stage = Stage::set(small()).await;
        let (model, runtime) = (&stage.model, &stage.runtime);
        let chats = || [about(1), about(2), text("Who are you?")];
        let mut expected = Vec::new();
        for chat in chats() {
            expected.push(ask(model, chat).await.expect("the model answers").text);
        }
        let before = stage.snapshot().await;
        let record = model.serving().await.expect("the model serves").record;
        for level in LEVELS.into_iter().chain(LEVELS) {
            model.sleep(level, LONG).await.expect("the model sleeps");
            let ledger = assert_free(runtime, &stage.device).await;
            let kept = if level == SleepLevel::Level1 { before.of_class(&Class::Weights) } else { Bytes::ZERO };
            assert_eq!(ledger.host_granted, kept * ranks() as u64, "level {level}");
            assert_eq!(model.is_asleep(), Some(level));
            let health = runtime.health().await;
            assert!(health.models["demo"] == ModelHealth::Asleep && health.is_ready(), "{health:?}");
            assert_eq!(model.facts().await.expect("the facts are known").name, "demo");
            model.sleep(level, LONG).await.expect("the model sleeps already");
            model.wake().await.expect("the model wakes up");
            assert_eq!(model.is_asleep(), None);
            let serving = model.serving().await.expect("the model serves");
            assert_eq!((serving.record.kv_blocks, &serving.record.peaks), (record.kv_blocks, &record.peaks));
            for (chat, expected) in chats().into_iter().zip(&expected) {
                assert_eq!(answer(model, chat).await, *expected, "after level {level}");
            }
            let after = stage.snapshot().await;
            assert_eq!((after.granted, after.host_granted), (before.granted, Bytes::ZERO), "{after}");
            for class in [Class::Weights, Class::Kv, Class::StepWorkspace, Class::VisionCache] {
                assert_eq!(after.of_class(&class), before.of_class(&class), "{class}");
            }
        }
        model.wake().await.expect("the model is awake");
        // From level 1 to level 2: the weights in host memory are released.
        model.sleep(SleepLevel::Level1, LONG).await.expect("the model sleeps");
        model.sleep(SleepLevel::Level2, LONG).await.expect("the model sleeps deeper");
        assert_eq!(assert_free(runtime, &stage.device).await.host_granted, Bytes::ZERO);
        assert_eq!(answer(model, about(1)).await, expected[0], "a request wakes the model");
    });
}

#[test]
fn a_model_may_sleep_again_before_its_last_copy_is_freed() {
    story(async {
        let stage = Stage::set(small()).await;
        for _ in 0..40 {
            stage.model.sleep(SleepLevel::Level1, LONG).await.expect("host memory for one copy is enough");
            stage.model.wake().await.expect("the model wakes up");
        }
        let expected = answer(&stage.model, about(1)).await;
        eventually("the copy is freed", async || stage.snapshot().await.host_granted == Bytes::ZERO).await;
        assert_eq!(answer(&stage.model, about(1)).await, expected);
    });
}

#[test]
fn level_1_wakes_without_files_and_level_2_needs_them() {
    story(async {
        let folder = Folder::empty();
        let golden = bursar_golden::path("qwen2");
        for file in std::fs::read_dir(golden).expect("the file is there") {
            let file = file.expect("a readable file");
            if !file.path().is_file() {
                continue;
            }
            std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("the file is copied");
        }
        let device = device();
        let runtime = crate::stage::runtime_on(&device).await;
        let source = || ModelSource::folder(folder.path());
        let model = runtime.load_with(source(), small(), |_| {}).await.expect("the model starts");
        let chat = || text("Hello!").max_tokens(8).ignore_end();
        let expected = answer(&model, chat()).await;
        let away = folder.path().with_extension("away");
        std::fs::rename(folder.path(), &away).expect("the folder is moved");
        for _ in 0..2 {
            model.sleep(SleepLevel::Level1, LONG).await.expect("the model sleeps");
            assert_eq!(answer(&model, chat()).await, expected);
        }
        model.sleep(SleepLevel::Level2, LONG).await.expect("the model sleeps");
        let error = model.wake().await.expect_err("the model's files are gone");
        assert!(matches!(error, SleepError::NotWoken(_)) && !error.hint().is_empty(), "{error:?}");
        let error = ask(&model, chat()).await.expect_err("the model's files are gone");
        assert!(matches!(error, ChatError::Asleep(_)) && !error.hint().is_empty(), "{error:?}");
        assert_eq!(model.is_asleep(), Some(SleepLevel::Level2), "the model stays asleep");
        assert_free(&runtime, &device).await;
        std::fs::rename(&away, folder.path()).expect("the folder is moved back");
        assert_eq!(answer(&model, chat()).await, expected);
        runtime.shutdown().await;
        assert_eq!(device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn requests_to_a_sleeping_model_wake_it_exactly_once() {
    story(async {
        let stage = Stage::set(small()).await;
        let mut expected = Vec::new();
        for number in 0..6 {
            expected.push(answer(&stage.model, about(number)).await);
        }
        let mut events = stage.runtime.events();
        for level in LEVELS {
            stage.model.sleep(level, LONG).await.expect("the model sleeps");
            let asking: Vec<_> = (0..6).map(|number| tokio::spawn(ask_of(stage.model.clone(), number))).collect();
            // One request is cancelled while it waits.
            drop(tokio::time::timeout(Duration::ZERO, stage.model.chat(about(9))).await);
            for (asked, expected) in asking.into_iter().zip(&expected) {
                assert_eq!(asked.await.expect("no panic").expect("the model answers").text, *expected);
            }
        }
        assert_eq!(stage.model.requests().0, 0);
        stage.runtime.shutdown().await;
        let mut wakes = 0;
        while let Some(recorded) = events.next().await {
            wakes += usize::from(recorded.is_ok_and(|recorded| recorded.event.name() == "awake"));
        }
        assert_eq!(wakes, 2, "the model woke once for each sleep");
    });
}

async fn ask_of(model: ModelHandle, number: u32) -> Result<Whole, ChatError> {
    ask(&model, about(number)).await
}

#[test]
fn weights_are_copied_while_requests_end() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, endless(1)).await;
        let unread = stage.model.chat(endless(1)).await.expect("accepted");
        stage.device.hold_calls();
        let model = stage.model.clone();
        let sleeping = tokio::spawn(async move { model.sleep(SleepLevel::Level1, LONG).await });
        eventually("a copy has begun", async || stage.device.counts().held_calls > 0).await;
        assert_eq!((stage.model.requests().0, stage.model.is_asleep()), (1, None));
        stage.device.let_calls_pass();
        assert_eq!(listen(unread).await.expect("the reply is complete").text, expected);
        sleeping.await.expect("no panic").expect("the model sleeps");
        assert_eq!(stage.model.is_asleep(), Some(SleepLevel::Level1));
        assert_eq!(answer(&stage.model, endless(1)).await, expected);
    });
}

#[test]
fn running_requests_end_first_or_keep_the_model_awake() {
    story(async {
        let stage = Stage::set(LoadOptions { requests: Some(3), ..small() }).await;
        let (model, before) = (&stage.model, stage.snapshot().await);
        let expected = answer(model, endless(1)).await;
        let unread = model.chat(endless(1)).await.expect("accepted");
        let within = Duration::from_millis(50);
        let error = model.sleep(SleepLevel::Level1, within).await.expect_err("a running request keeps the model awake");
        assert!(matches!(error, SleepError::Busy { running: 1, .. }) && !error.hint().is_empty(), "{error:?}");
        eventually("nothing has happened", async || ledger_of(&stage.runtime).await == before).await;
        assert_eq!(answer(model, about(2)).await, answer(model, about(2)).await, "the model is awake");
        // Requests that arrive while the model goes to sleep wait, up to the request limit.
        let sleeping = tokio::spawn({
            let model = model.clone();
            async move { model.sleep(SleepLevel::Level1, LONG).await }
        });
        let waiting = [tokio::spawn(ask_of(model.clone(), 2)), tokio::spawn(ask_of(model.clone(), 3))];
        eventually("both requests wait", async || model.requests().0 == 3).await;
        assert!(matches!(ask(model, about(4)).await, Err(ChatError::Overloaded { limit: 3 })));
        assert_eq!(listen(unread).await.expect("the reply is complete").text, expected);
        sleeping.await.expect("no panic").expect("the model sleeps");
        for asked in waiting {
            asked.await.expect("no panic").expect("the request wakes the model");
        }
        stage.runtime.shutdown().await;
        assert_eq!(stage.device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn waiting_requests_time_out_and_a_wake_without_memory_fails() {
    story(async {
        let options = LoadOptions { wake_within: Duration::from_millis(300), ..small() };
        let stage = Stage::set(options).await;
        let expected = answer(&stage.model, about(1)).await;
        let unread = stage.model.chat(endless(1)).await.expect("accepted");
        let sleeping = tokio::spawn({
            let model = stage.model.clone();
            async move { model.sleep(SleepLevel::Level1, LONG).await }
        });
        eventually("the model admits no more requests", async || {
            matches!(ask(&stage.model, about(1)).await, Err(ChatError::Asleep(error)) if matches!(*error, SleepError::TooLate { .. }))
        })
        .await;
        drop(unread);
        sleeping.await.expect("no panic").expect("the model sleeps");
        // The model may be waking up for the request that was refused after its wait.
        eventually("the model sleeps and a tenant holds its memory", async || {
            drop(stage.model.sleep(SleepLevel::Level1, LONG).await);
            let ledger = stage.snapshot().await;
            let all = ledger.total - ledger.canary_wanted;
            let Ok(tenant) = stage.runtime.budget().try_lease(Class::external("index"), all).await else {
                return false;
            };
            let error = stage.model.wake().await.expect_err("no memory is free");
            assert!(matches!(error, SleepError::NotWoken(_)), "{error:?}");
            assert_eq!(stage.model.is_asleep(), Some(SleepLevel::Level1));
            let facts = tokio::time::timeout(Duration::from_secs(5), stage.model.facts()).await;
            facts.expect("facts need no wake").expect("the facts are known");
            drop(tenant);
            true
        })
        .await;
        eventually("the model wakes up", async || stage.model.wake().await.is_ok()).await;
        assert_eq!(answer(&stage.model, about(1)).await, expected);
        // Without enough host memory for its weights, the model stays awake or sleeps at level 2.
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device())),
            host_bytes: Bytes::mib(1),
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, LoadOptions { sleep_after: Some(Duration::from_millis(1)), ..small() }).await;
        if let Err(error) = model.sleep(SleepLevel::Level1, LONG).await {
            assert!(matches!(error, SleepError::Host(_)) && error.hint().contains("host_bytes"), "{error:?}");
        }
        eventually("it falls asleep by itself", async || model.is_asleep() == Some(SleepLevel::Level2)).await;
        runtime.shutdown().await;
    });
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Engine,
    Budget,
    StepLane,
    Unload,
    Shutdown,
}

/// Injects one fault while the model suspends, sleeps or resumes, after this many yields
/// to the tokio scheduler.
async fn inject_fault(stage: &Stage, fault: Fault, after: usize) {
    for _ in 0..after {
        tokio::task::yield_now().await;
    }
    let supervised = stage.runtime.supervised().await.expect("the runtime answers");
    match fault {
        Fault::Engine => supervised.engines["demo"].kill(),
        Fault::Budget => supervised.budget.kill(),
        Fault::StepLane => {
            let (ended, end) = Responder::new();
            let kill = EngineMessage::KillLane { which: WhichLane::Step, ended };
            // A sleeping model has no running engine.
            if supervised.engines["demo"].send_message(kill).is_ok() {
                drop(end.await);
            }
        }
        Fault::Unload => stage.runtime.unload("demo").await.expect("the model unloads"),
        Fault::Shutdown => stage.runtime.clone().shutdown().await,
    }
}

#[test]
fn deaths_during_sleep_or_wake_lose_no_request_or_byte() {
    story(async {
        for (at, fault) in
            [Fault::Engine, Fault::Budget, Fault::StepLane, Fault::Unload, Fault::Shutdown].into_iter().enumerate()
        {
            let stage = Stage::set(LoadOptions { engine_intensity: PATIENT, intensity: PATIENT, ..small() }).await;
            let expected = answer(&stage.model, about(1)).await;
            // The budget may die five times per minute.
            for round in 0..5 {
                let level = LEVELS[(at + round) % 2];
                let model = &stage.model;
                let sleeping = async {
                    let slept = model.sleep(level, LONG).await;
                    let replies = [ask(model, about(1)).await, ask(model, about(1)).await];
                    (slept, replies)
                };
                let running = ask(model, about(1));
                let ((slept, replies), ran, ()) =
                    tokio::join!(sleeping, running, inject_fault(&stage, fault, round * round * 12));
                let is_over = matches!(fault, Fault::Unload | Fault::Shutdown);
                for reply in replies.into_iter().chain([ran]) {
                    match reply {
                        Ok(whole) => assert_eq!(whole.text, expected, "{fault:?} in round {round}"),
                        Err(error) => assert!(
                            is_over && matches!(error, ChatError::Stopped { .. } | ChatError::ShuttingDown),
                            "{fault:?} in round {round}: {error:?}"
                        ),
                    }
                }
                if let Err(error) = slept {
                    assert!(is_over, "{fault:?} in round {round}: {error:?}");
                }
                if is_over {
                    break;
                }
                eventually("host memory is back", async || stage.snapshot().await.host_granted.is_zero()).await;
                let ledger = stage.snapshot().await;
                assert_eq!(ledger.granted, stage.device.counts().backed, "{fault:?} in round {round}: {ledger}");
            }
            if !matches!(fault, Fault::Shutdown) {
                drop(stage.runtime.unload("demo").await);
                let ledger = assert_free(&stage.runtime, &stage.device).await;
                assert_eq!(ledger.host_granted, Bytes::ZERO);
            }
            assert_eq!(stage.device.counts().backed, Bytes::ZERO, "after {fault:?}");
        }
    });
}

#[test]
fn a_model_that_slept_during_a_restart_reports_its_facts() {
    story(async {
        let stage = Stage::set(LoadOptions { engine_intensity: PATIENT, ..small() }).await;
        let model = &stage.model;
        for round in 0..8 {
            let serving = model.serving().await.expect("the model serves");
            serving.scheduler.kill();
            for _ in 0..round * round {
                tokio::task::yield_now().await;
            }
            model.sleep(LEVELS[round % 2], LONG).await.expect("the model sleeps");
            let facts = tokio::time::timeout(Duration::from_secs(5), model.facts()).await;
            assert_eq!(&*facts.expect("facts need no wake").expect("the facts are known").name, "demo");
            assert!(model.is_asleep().is_some());
            assert!(!answer(model, about(1)).await.is_empty(), "the model wakes up in round {round}");
        }
    });
}

#[test]
fn an_unload_of_a_sleeping_model_returns_its_host_memory() {
    story(async {
        for level in LEVELS {
            let stage = Stage::set(small()).await;
            stage.model.sleep(level, LONG).await.expect("the model sleeps");
            assert_eq!(stage.runtime.unload_within("demo", LONG).await.expect("the model unloads"), 0);
            assert_eq!(assert_free(&stage.runtime, &stage.device).await.host_granted, Bytes::ZERO);
            assert!(matches!(ask(&stage.model, about(1)).await, Err(ChatError::Stopped { .. })));
            assert!(matches!(stage.model.wake().await, Err(SleepError::Stopped { .. })));
            assert!(matches!(stage.model.sleep(level, LONG).await, Err(SleepError::Stopped { .. })));
            let again = demo(&stage.runtime, small()).await;
            assert!(!answer(&again, about(1)).await.is_empty(), "the model's name is free again");
        }
    });
}

#[test]
fn a_model_that_slept_on_a_lost_device_wakes_elsewhere() {
    story(async {
        let devices = [device(), device()];
        let (first, spares) = (devices[0].clone(), Mutex::new(devices.clone().into_iter()));
        let make = move || match spares.lock().expect("no holder panicked").next() {
            Some(device) => Ok(placed(&device)),
            None => Err(DeviceError::Lost { reason: "there are two".to_owned() }),
        };
        let device = DeviceChoice::Made(Arc::new(make));
        let runtime = Runtime::start(RuntimeConfig { device, ..RuntimeConfig::default() }).await.expect("a runtime");
        let model = demo(&runtime, LoadOptions { name: Some("sleeper".into()), ..small() }).await;
        let expected = answer(&model, about(1)).await;
        model.sleep(SleepLevel::Level1, LONG).await.expect("the model sleeps");
        first.lose("a script says so");
        eventually("the device was replaced", async || runtime.device().memory().is_ok()).await;
        eventually("the copy of the weights is dropped", async || model.is_asleep() == Some(SleepLevel::Level2)).await;
        assert_eq!(answer(&model, about(1)).await, expected);
        assert_eq!(ledger_of(&runtime).await.granted, devices[1].counts().backed);
        runtime.shutdown().await;
    });
}

/// A model that needs memory mostly for weights, with the smallest KV cache.
fn slim(name: &str) -> LoadOptions {
    let envelope = Some(Envelope { sequences: 2, ..small_envelope() });
    LoadOptions { name: Some(name.into()), envelope, kv_tokens: Some(512), ..small() }
}

/// A runtime on a device with memory for one of two models. `turn` is
/// the value of [`RuntimeConfig::sleep_for_memory`].
async fn cramped(turn: Option<Duration>) -> (Arc<HostDevice>, Runtime) {
    let probe = Stage::set(slim("probe")).await;
    let ledger = probe.snapshot().await;
    probe.runtime.shutdown().await;
    // The capacity covers one model, the canary (a sixteenth of the device), and a small margin.
    let capacity = (ledger.granted + ledger.granted / 8).round_up(probe.device.page());
    assert!(ledger.of_class(&Class::Weights) * 2 > capacity, "the weights of two models exceed the device: {ledger}");
    let device = device_of(capacity);
    let config = RuntimeConfig {
        device: DeviceChoice::Custom(placed(&device)),
        sleep_for_memory: turn,
        ..RuntimeConfig::default()
    };
    (device, Runtime::start(config).await.expect("a host device starts"))
}

#[test]
fn two_models_larger_than_the_device_take_turns() {
    story(async {
        let alone = Stage::set(small()).await;
        let mut expected = Vec::new();
        for number in 0..3 {
            expected.push(answer(&alone.model, about(number)).await);
        }
        alone.runtime.shutdown().await;
        let (device, runtime) = cramped(Some(Duration::from_millis(20))).await;
        let models = [demo(&runtime, slim("one")).await, demo(&runtime, slim("two")).await];
        assert!(models[0].is_asleep().is_some(), "the first model sleeps to free memory");
        for round in 0..8 {
            assert_eq!(answer(&models[round % 2], about(round as u32 % 3)).await, expected[round % 3], "{round}");
            let ledger = ledger_of(&runtime).await;
            assert!(ledger.granted + ledger.canary <= ledger.total && ledger.deficit.is_zero(), "{ledger}");
        }
        // Both models get requests all the time.
        let mut asking = Vec::new();
        for (which, model) in models.iter().enumerate() {
            for caller in 0..4 {
                let (model, expected) = (model.clone(), expected.clone());
                asking.push(tokio::spawn(async move {
                    for number in 0..5 {
                        let number = (which + caller + number) % 3;
                        assert_eq!(answer(&model, about(number as u32)).await, expected[number]);
                    }
                }));
            }
        }
        for asked in asking {
            asked.await.expect("each request is answered");
        }
        assert!(models.iter().any(|model| model.is_asleep().is_some()));
        runtime.unload("one").await.expect("the model unloads");
        runtime.unload("two").await.expect("the model unloads");
        assert_eq!(assert_free(&runtime, &device).await.host_granted, Bytes::ZERO);
    });
}

#[test]
fn an_unread_reply_does_not_block_other_models() {
    story(async {
        let (_, runtime) = cramped(Some(Duration::from_millis(20))).await;
        let soon = |name| LoadOptions { wake_within: Duration::from_millis(400), requests: Some(4), ..slim(name) };
        let models = [demo(&runtime, soon("one")).await, demo(&runtime, soon("two")).await];
        let expected = answer(&models[1], about(2)).await;
        let unread = models[1].chat(endless(1)).await.expect("accepted");
        let error = ask(&models[0], about(1)).await.expect_err("the other model does not sleep in time");
        assert!(
            matches!(&error, ChatError::Asleep(error) if matches!(**error, SleepError::TooLate { .. })),
            "{error:?}"
        );
        // The second model tried to sleep, and accepts requests again before the wait of these
        // requests reaches its limit.
        for _ in 0..3 {
            assert_eq!(answer(&models[1], about(2)).await, expected);
        }
        drop(unread);
        eventually("the first model answers", async || {
            ask(&models[0], about(2)).await.is_ok_and(|reply| reply.text == expected)
        })
        .await;
        runtime.shutdown().await;
    });
}

#[test]
fn a_wake_waits_for_memory_that_a_tenant_releases() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, about(1)).await;
        stage.model.sleep(SleepLevel::Level1, LONG).await.expect("the model sleeps");
        let ledger = stage.snapshot().await;
        let all = ledger.total - ledger.canary_wanted;
        let tenant = stage.runtime.budget().try_lease(Class::external("index"), all).await.expect("the memory is free");
        let model = stage.model.clone();
        let asked = tokio::spawn(async move { ask(&model, about(1)).await });
        let is_refused = |event: &serde_json::Value| event["event"] == "not_woken";
        eventually("the wake finds no memory", async || {
            serde_json::json!(stage.runtime.recent_events())
                .as_array()
                .is_some_and(|events| events.iter().any(is_refused))
        })
        .await;
        drop(tenant);
        assert_eq!(asked.await.expect("no panic").expect("the model answers").text, expected);
    });
}

#[test]
fn a_load_without_memory_fails_unless_models_may_sleep() {
    story(async {
        let (_, runtime) = cramped(None).await;
        let model = demo(&runtime, slim("one")).await;
        let error =
            runtime.load_with(ModelSource::demo(), slim("two"), |_| {}).await.map(drop).expect_err("no memory is free");
        assert!(error.to_string().contains("does not fit"), "{error}");
        assert!(!answer(&model, about(1)).await.is_empty() && model.is_asleep().is_none());
        // A model that would not fit even on an empty device puts no other model to sleep.
        let (_, runtime) = cramped(Some(LONG)).await;
        let model = demo(&runtime, slim("one")).await;
        let large = LoadOptions { kv_tokens: Some(1 << 20), ..slim("two") };
        let error = runtime.load_with(ModelSource::demo(), large, |_| {}).await.map(drop).expect_err("cache too large");
        assert!(error.to_string().contains("does not fit"), "{error}");
        assert_eq!(model.is_asleep(), None);
    });
}
