//! Failures on a GPU that other processes use too. Each operation succeeds or returns a typed
//! error, nothing hangs, and no byte is lost. Without a GPU, each story prints a note and passes.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::gpu::{
    Stage, all_memory_returned, answer, eventually, options,
    other_process::{self, OtherProcess},
    picture, question, started, story,
};
use bursar_actors::{
    chat::{ChatError, ModelHandle},
    engine::{EngineMessage, LoadOptions, Progress, Shortfall, StartError, Unfit, WhichLane},
    profile::ProfileError,
    responder::Responder,
    runtime::{ModelSource, RuntimeError},
    scheduler::SchedulerMessage,
    supervise::Intensity,
};
use bursar_budgets::{Bytes, Class, Hint};
use bursar_model::Envelope;

/// The name of the test that runs as the other process.
const OTHER_PROCESS: &str = "faults::another_process_takes_the_requested_bytes";

#[test]
fn another_process_takes_the_requested_bytes() {
    other_process::live();
}

/// Steps as large as those of a GPU's envelope, with the picture limits of `small`.
fn large() -> Envelope {
    Envelope { step_tokens: 8192, sequences: 256, context_tokens: 512, ..Envelope::small() }
}

async fn load(stage: &Stage, options: LoadOptions) -> Result<ModelHandle, Arc<StartError>> {
    started(stage.runtime.load_with(ModelSource::demo(), options, |_| {}).await)
}

#[test]
fn a_load_fails_while_another_process_fills_the_card() {
    story(async |stage| {
        let before = stage.measured().await;
        let other_process = Arc::new(Mutex::new(Some(OtherProcess::moves_in(OTHER_PROCESS))));
        let (moving, has_filled) = (other_process.clone(), AtomicBool::new(false));
        // The GPU fills up while the weights, which are leased and backed by then, are being
        // copied.
        let fill = move |progress| {
            if matches!(progress, Progress::Loading { .. }) && !has_filled.swap(true, Ordering::SeqCst) {
                let mut other_process = moving.lock().expect("the lock is not poisoned");
                let left = other_process.as_mut().expect("the other process was started").leave(Bytes::mib(16));
                println!("{left} are left while weights are copied");
            }
        };
        let options = LoadOptions { envelope: Some(large()), ..options() };
        let refused = stage.runtime.load_with(ModelSource::demo(), options.clone(), fill).await;
        let error = refused.map(drop).expect_err("the model does not fit");
        let RuntimeError::Start(error) = error else { panic!("{error}") };
        println!("{error}; {}", error.hint());
        let StartError::Profile { source, .. } = &*error else { panic!("{error}") };
        assert!(matches!(**source, ProfileError::Device { .. } | ProfileError::Lease { .. }), "{source:?}");
        assert!(source.is_out_of_memory() && !error.hint().is_empty());
        all_memory_returned(&stage, &before).await;
        let full = stage.measured().await;
        assert!(full.foreign * 2 > full.total, "the ledger counts the memory as foreign: {full}");
        // The other process ends, and the same load is tried again.
        drop(other_process.lock().expect("the lock is not poisoned").take());
        let model =
            load(&stage, LoadOptions { kv_tokens: Some(1 << 18), ..options }).await.expect("the model fits now");
        let chat = question("Describe the picture.", 20).image(picture(1));
        assert!(!answer(&model, chat).await.expect("the chat is answered").is_empty());
        stage.runtime.unload("demo").await.expect("the model unloads");
        all_memory_returned(&stage, &before).await;
    });
}

#[test]
fn each_suggestion_for_a_small_card_starts_when_applied() {
    story(async |stage| {
        let before = stage.measured().await;
        let mut other_process = OtherProcess::moves_in(OTHER_PROCESS);
        // First find out how much memory the model needs. Then leave three quarters of that free,
        // plus the memory for kernels and the canary.
        let (left, first) = too_little(&stage, &mut other_process, Bytes::mib(300)).await;
        let Shortfall::Memory { needed, available, .. } = first.shortfall else { panic!("{first}") };
        let left = Bytes(needed.0 / 4 * 3) + left.saturating_sub(available);
        let wanted = LoadOptions { envelope: Some(large()), ..options() };
        let mut applied = 0;
        for knob in first.suggestions.iter().map(|suggestion| suggestion.knob) {
            // Ask again each time, because the driver keeps some memory of an unloaded model.
            let (_, error) = too_little(&stage, &mut other_process, left).await;
            let named = error.suggestions.iter().find(|suggestion| suggestion.knob == knob);
            let suggestion = named.expect("the error suggests the same knobs");
            let Some(changed) = suggestion.over(&wanted) else { continue };
            let (name, value) = (&suggestion.name, suggestion.to.expect("the suggestion has a value"));
            assert!(error.hint().contains(&format!("`{name}` to {value} instead of")));
            let speaks = changed.limits.context_tokens.is_none_or(|tokens| tokens >= 64);
            let started = load(&stage, changed).await;
            let model = started.unwrap_or_else(|error| panic!("{name} {value}: {error}; {}", error.hint()));
            if speaks {
                let reply = answer(&model, question("Who are you?", 8)).await.expect("the chat is answered");
                assert!(!reply.is_empty());
            }
            let now = stage.snapshot().await;
            let (granted, graphs, overhead) = (now.granted, now.of_class(&Class::Graphs), now.overhead);
            println!("{name} {value} starts: {granted} granted, graphs {graphs}, overhead {overhead}");
            stage.runtime.unload("demo").await.expect("the model unloads");
            all_memory_returned(&stage, &before).await;
            applied += 1;
        }
        assert!(applied > 0, "at least one suggestion was applied");
    });
}

/// Tries a load with `left` bytes free. Returns the bytes that were actually free, and the error.
async fn too_little(stage: &Stage, other_process: &mut OtherProcess, left: Bytes) -> (Bytes, Box<Unfit>) {
    let left = other_process.leave(left);
    let error = load(stage, LoadOptions { envelope: Some(large()), ..options() }).await.map(drop);
    let error = error.expect_err("memory is short");
    println!("{left} are left: {error}; {}", error.hint());
    let StartError::DoesNotFit(error) = &*error else { panic!("{error}") };
    (left, error.clone())
}

#[test]
fn one_refused_launch_is_retried_and_repeated_refusals_fail_typed() {
    story(async |stage| {
        let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
        let options = LoadOptions { kv_tokens: Some(4096), intensity, ..options() };
        let model = load(&stage, options).await.expect("the model starts");
        let chat = || question("Describe the picture.", 30).image(picture(3));
        let expected = answer(&model, chat().cache_salt("undisturbed")).await.expect("the chat is answered");
        let (ready, counts) = (stage.snapshot().await, stage.device.counts());
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        let drill = |which, after, count| {
            let injected = engine.send_message(EngineMessage::FailLaunches { which, after, count });
            injected.expect("the engine is running");
        };
        // Fail once, in the middle of a prompt and of an encoder batch. The lost work is computed
        // again.
        for (which, after) in [(WhichLane::Step, 7), (WhichLane::Vision, 5)] {
            let before = model.serving().await.expect("the model serves").generation;
            drill(which, after, 1);
            let salted = chat().cache_salt(format!("{which:?}"));
            let fresh = if which == WhichLane::Vision { salted.image(picture(40)) } else { salted };
            let reply = answer(&model, fresh).await.expect("the chat is answered after the refusals");
            assert!(which == WhichLane::Vision || reply == expected, "the reply is {reply}, expected {expected}");
            let serving = model.serving().await.expect("the model serves");
            assert!(serving.generation > before, "{which:?}: no launch was refused");
        }
        // Fail repeatedly. Only this request ends, with an error that contains the number of
        // failures.
        drill(WhichLane::Step, 7, 3);
        let error = answer(&model, chat().cache_salt("again and again"))
            .await
            .expect_err("each lane that served the chat died");
        println!("{error}; {}", error.hint());
        assert!(matches!(error, ChatError::GivenUp { deaths: 3 }), "{error:?}");
        assert_eq!(answer(&model, chat().cache_salt("behind it")).await.expect("the chat is answered"), expected);
        assert_eq!(stage.device.counts(), counts, "the engine recovered in its existing memory");
        let serving = model.serving().await.expect("the model serves");
        eventually("all blocks are free", async || {
            let (reply, usage) = Responder::new();
            drop(serving.scheduler.send_message(SchedulerMessage::KvUse(reply)));
            usage.await.is_ok_and(|usage| usage.held == 0)
        })
        .await;
        assert_eq!(stage.snapshot().await, ready, "the ledger has not changed");
    });
}
