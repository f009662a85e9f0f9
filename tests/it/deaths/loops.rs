//! Crash loops: an actor that keeps dying is restarted as often as its intensity allows, each time
//! after a longer wait. Then the model or the runtime stops and reports the reason, and all leased
//! memory is returned. A crash loop never becomes a busy loop.

use bursar_budgets::testing::HostControl;
use std::time::{Duration, Instant};

use bursar::{
    Chat, ChatError, DeviceChoice, FaultInjection, Intensity, LoadOptions, ModelHandle, ModelSource, Progress, Runtime,
    RuntimeConfig, RuntimeError, StartError,
};
use bursar_actors::{
    budget::BudgetMessage, engine::EngineMessage, profile::ProfileMessage, scheduler::SchedulerMessage,
    vision::VisionMessage,
};

use crate::stage::{about, answer, ask, demo, device, eventually, placed, small, story};

/// An intensity of two restarts. The wait before the second restart is twice as long as the wait
/// before the first.
const TWO: Intensity =
    Intensity { restarts_max: 2, within: Duration::from_secs(3600), back_off: Duration::from_millis(40) };
/// The minimum total wait of two restarts.
const WAITS: Duration = Duration::from_millis(40 + 80);

async fn reason_of_the_end(model: &ModelHandle) -> String {
    eventually("the model has stopped", async || {
        matches!(ask(model, about(1).max_tokens(1)).await, Err(ChatError::Stopped { .. }))
    })
    .await;
    match ask(model, Chat::new().user("Are you there?")).await {
        Err(ChatError::Stopped { reason }) => reason.to_string(),
        other => panic!("{other:?}"),
    }
}

async fn assert_home(runtime: &Runtime, device: &bursar::HostDevice) {
    eventually("the ledger is empty", async || {
        runtime.budget().snapshot().await.expect("the budget answers").leases.is_empty()
    })
    .await;
    eventually("all memory is unbacked", async || device.counts().backed.is_zero()).await;
}

async fn replaced(model: &ModelHandle, generation: u64) {
    eventually("there is a successor", async || {
        model.serving().await.is_ok_and(|serving| serving.generation > generation)
    })
    .await;
}

#[test]
fn each_serving_actors_crash_loop_stops_the_model_with_the_reason() {
    story(async {
        for victim in ["vision", "scheduler"] {
            let device = device();
            let runtime = crate::stage::runtime_on(&device).await;
            // `intensity` limits only vision and scheduler restarts; the engine has
            // `engine_intensity`.
            let model = demo(&runtime, LoadOptions { intensity: TWO, ..small() }).await;
            let begun = Instant::now();
            for death in 0..3 {
                let serving = model.serving().await.expect("the model serves");
                let injected = match victim {
                    "vision" => serving
                        .vision
                        .expect("the demo model takes pictures")
                        .send_message(VisionMessage::InjectFault(FaultInjection::Fail))
                        .is_ok(),
                    _ => serving.scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Fail)).is_ok(),
                };
                assert!(injected, "{victim} lives");
                if death < 2 {
                    replaced(&model, serving.generation).await;
                }
            }
            let reason = reason_of_the_end(&model).await;
            assert!(begun.elapsed() >= WAITS, "{victim}: each restart waits longer: {:?}", begun.elapsed());
            assert!(
                reason.contains("2 restarts") && reason.contains("this error was injected by a drill"),
                "{victim}: {reason}"
            );
            assert_home(&runtime, &device).await;
            answer(&demo(&runtime, small()).await, about(1)).await;
        }
    });
}

#[test]
fn an_engines_crash_loop_stops_the_model_with_the_reason() {
    story(async {
        let device = device();
        let runtime = crate::stage::runtime_on(&device).await;
        let model = demo(&runtime, LoadOptions { engine_intensity: TWO, ..small() }).await;
        let begun = Instant::now();
        for death in 0..3 {
            let serving = model.serving().await.expect("the model serves");
            let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
            assert!(engine.send_message(EngineMessage::InjectFault(FaultInjection::Panic)).is_ok(), "the engine lives");
            if death < 2 {
                replaced(&model, serving.generation).await;
            }
        }
        let reason = reason_of_the_end(&model).await;
        assert!(begun.elapsed() >= WAITS, "each restart waits longer: {:?}", begun.elapsed());
        assert!(reason.contains("2 times") && reason.contains("this error was injected by a drill"), "{reason}");
        assert_home(&runtime, &device).await;
        answer(&demo(&runtime, small()).await, about(1)).await;
    });
}

#[test]
fn a_budget_crash_loop_ends_the_runtime_with_a_reason() {
    story(async {
        let device = device();
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            budget_intensity: TWO,
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, small()).await;
        let begun = Instant::now();
        for _ in 0..3 {
            runtime.budget().snapshot().await.expect("the budget or its successor answers");
            let budget = runtime.supervised().await.expect("the runtime answers").budget;
            assert!(budget.send_message(BudgetMessage::InjectFault(FaultInjection::Panic)).is_ok(), "the budget lives");
            budget.wait(None).await.expect("a wait without a time limit");
        }
        let reason = reason_of_the_end(&model).await;
        assert!(begun.elapsed() >= WAITS, "each restart waits longer: {:?}", begun.elapsed());
        assert!(reason.contains("budget") && reason.contains("2 times") && reason.contains("drill"), "{reason}");
        let error = runtime.load(ModelSource::demo()).await.err().expect("the runtime has ended");
        assert!(matches!(error, RuntimeError::Unanswered(_)), "{error:?}");
        runtime.budget().snapshot().await.expect_err("the budget has ended too");
        drop(runtime);
        eventually("all memory is unbacked", async || device.counts().backed.is_zero()).await;
        answer(&demo(&crate::stage::runtime_on(&device).await, small()).await, about(1)).await;
    });
}

#[test]
fn a_profile_dying_in_every_attempt_fails_the_start() {
    story(async {
        let device = device();
        let runtime = crate::stage::runtime_on(&device).await;
        let (moments, mut moment) = tokio::sync::mpsc::channel(64);
        let watch = move |progress| {
            if matches!(progress, Progress::Profiling { done: 0, .. }) {
                let _ = moments.try_send(());
            }
        };
        let begun = Instant::now();
        let loading = {
            let runtime = runtime.clone();
            tokio::spawn(async move { runtime.load_with(ModelSource::demo(), small(), watch).await.map(drop) })
        };
        for attempt in 0..4 {
            moment.recv().await.unwrap_or_else(|| panic!("attempt {attempt} begins"));
            let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
            for child in engine.get_children() {
                assert!(
                    child.send_message(ProfileMessage::InjectFault(FaultInjection::Fail)).is_ok(),
                    "the engine's only child is a profile"
                );
            }
        }
        let error = loading.await.expect("no panic").expect_err("the profile died in every attempt");
        let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        assert!(matches!(start.as_ref(), StartError::Profile { attempt: 4, .. }), "{start:?}");
        assert!(error.to_string().contains("this error was injected by a drill"), "{error}");
        assert!(begun.elapsed() >= Duration::from_millis(10 + 20 + 40), "each attempt waits longer");
        assert_home(&runtime, &device).await;
        answer(&demo(&runtime, small()).await, about(1)).await;
    });
}

#[test]
fn each_supervised_actor_has_a_separate_restart_limit() {
    let defaults = (LoadOptions::default(), RuntimeConfig::default());
    assert_eq!(defaults.0.intensity, Intensity::SERVING);
    assert_eq!(defaults.0.engine_intensity, Intensity::ENGINE);
    assert_eq!(defaults.1.budget_intensity, Intensity::BUDGET);
    let all = [Intensity::SERVING, Intensity::ENGINE, Intensity::BUDGET];
    assert!(all.iter().all(|intensity| !intensity.back_off.is_zero() && intensity.restarts_max > 0));
    assert!(all.iter().enumerate().all(|(place, one)| !all[..place].contains(one)), "all intensities differ");
    story(async {
        // Deaths of the budget and of serving actors do not count against the engine's limit, and
        // deaths of the engine do not count against the limits of the other actors.
        let once = Intensity { restarts_max: 1, back_off: Duration::ZERO, ..TWO };
        let device = device();
        let config = RuntimeConfig {
            device: DeviceChoice::Custom(placed(&device)),
            budget_intensity: once,
            ..RuntimeConfig::default()
        };
        let runtime = Runtime::start(config).await.expect("a host device starts");
        let model = demo(&runtime, LoadOptions { intensity: once, engine_intensity: once, ..small() }).await;
        let supervised = runtime.supervised().await.expect("the runtime answers");
        supervised.budget.kill();
        supervised.budget.wait(None).await.expect("a wait without a time limit");
        let serving = model.serving().await.expect("the model serves");
        serving.scheduler.kill();
        replaced(&model, serving.generation).await;
        let serving = model.serving().await.expect("the model serves");
        supervised.engines["demo"].kill();
        replaced(&model, serving.generation).await;
        assert!(!answer(&model, about(1)).await.is_empty(), "each actor may die once");
    });
}
