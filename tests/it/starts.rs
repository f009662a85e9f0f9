//! Failed starts, and restarts.

use bursar_budgets::testing::HostControl;
use std::sync::{Arc, Mutex};

use bursar::{
    Bytes, Depth, Hint, Limits, LoadOptions, ModelSource, Notice, Progress, RuntimeError, Shortfall, Snapshot,
    StartError,
};
use bursar_budgets::testing::Script;

use crate::stage::{about, answer, ask, demo, device, device_of, eventually, listen, runtime_on, small, story, text};

async fn snapshot(runtime: &bursar::Runtime) -> Snapshot {
    runtime.budget().snapshot().await.expect("the budget answers")
}

/// Checks that all bytes were returned, in the ledger and on the device.
async fn assert_all_returned(runtime: &bursar::Runtime, device: &bursar::HostDevice, when: &str) {
    let ledger = snapshot(runtime).await;
    assert!(ledger.leases.is_empty() && ledger.granted.is_zero(), "{when}: {ledger}");
    // Handles of dead actors may drop their address reservations a moment later,
    // but nothing is backed.
    assert_eq!(device.counts().backed, Bytes::ZERO, "{when}");
}

#[test]
fn a_start_on_a_small_device_reports_shortfall_and_fix() {
    story(async {
        let device = device_of(Bytes::mib(6));
        let runtime = runtime_on(&device).await;
        let error = runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("the model cannot fit");
        let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        let StartError::DoesNotFit(unfit) = start.as_ref() else { panic!("{start:?}") };
        let Shortfall::Memory { needed, available, short_by } = unfit.shortfall else { panic!("{unfit}") };
        assert_eq!(short_by, needed - available);
        assert!(error.to_string().contains(&short_by.exact()), "{error}");
        assert!(error.hint().contains("`capacity` "), "{}", error.hint());
        assert_all_returned(&runtime, &device, "after a start that does not fit").await;
        assert_eq!(device.counts().backs, 0, "no memory was backed");
    });
}

#[test]
fn host_worst_cases_run_only_the_layers_that_prove_the_plan() {
    story(async {
        for (full_stress, expected) in [(false, &[Depth::First(1)][..]), (true, &[Depth::Whole; 2])] {
            let runtime = runtime_on(&device()).await;
            let messages = Arc::new(Mutex::new(Vec::new()));
            let seen = messages.clone();
            let note = move |progress| {
                if let Progress::Profiling { what, depth, .. } = progress {
                    seen.lock().expect("no panic").push((what, depth));
                }
            };
            let options = LoadOptions { full_stress, ..small() };
            let model = runtime.load_with(ModelSource::demo(), options, note).await.expect("the model starts");
            let (record, messages) =
                (model.serving().await.expect("the model serves").record, messages.lock().expect("no panic").clone());
            assert!(record.peaks.len() >= 3, "a vision model has several worst cases: {:?}", record.peaks);
            for (worst_case, _) in &record.peaks {
                let depths: Vec<Depth> =
                    messages.iter().filter(|(what, _)| what == worst_case).map(|messages| messages.1).collect();
                assert_eq!(depths, expected, "{worst_case}");
            }
        }
    });
}

#[test]
fn a_start_reports_a_lowered_picture_limit() {
    story(async {
        let runtime = runtime_on(&device_of(Bytes::mib(128))).await;
        // The model's own picture size is 256 tokens, which fills this context.
        let limits =
            Limits { context_tokens: Some(256), sequences: Some(2), step_tokens: Some(32), ..Limits::default() };
        let options = LoadOptions { limits, kv_tokens: Some(1024), ..LoadOptions::default() };
        let notices = Arc::new(Mutex::new(Vec::new()));
        let listener = notices.clone();
        let note = move |progress| {
            if let Progress::Notice(notice) = progress {
                listener.lock().expect("no panic").push(notice);
            }
        };
        let model = runtime.load_with(ModelSource::demo(), options, note).await.expect("the model starts");
        let envelope = model.serving().await.expect("the model serves").context.envelope.clone();
        assert_eq!(envelope.picture_patches, 192 * 4, "a chat with a picture leaves a quarter for text");
        let lowered = Notice::PicturesLowered { from: 200_704, to: 192 * 28 * 28, context_tokens: 256 };
        assert_eq!(*notices.lock().expect("no panic"), [lowered]);
    });
}

#[test]
fn a_failed_model_can_be_loaded_again_with_other_limits() {
    story(async {
        let device = device_of(Bytes::mib(24));
        let runtime = runtime_on(&device).await;
        let greedy = LoadOptions { kv_tokens: Some(4_000_000), ..small() };
        let error = runtime.load_with(ModelSource::demo(), greedy, |_| {}).await.err().expect("the model cannot fit");
        assert!(
            matches!(&error, RuntimeError::Start(start) if matches!(**start, StartError::DoesNotFit(_))),
            "{error:?}"
        );
        assert_all_returned(&runtime, &device, "after a start that was refused").await;
        let model = demo(&runtime, small()).await;
        assert_eq!(model.serving().await.expect("the model serves").context.name, "demo");
        answer(&model, about(1)).await;
    });
}

#[test]
fn a_refused_back_ends_in_a_smaller_cache_or_typed_error() {
    story(async {
        let sized = || LoadOptions { kv_tokens: None, ..small() };
        let undisturbed = {
            let device = device();
            let runtime = runtime_on(&device).await;
            let blocks = demo(&runtime, sized()).await.serving().await.expect("the model serves").record.kv_blocks;
            runtime.shutdown().await;
            (device.counts().backs, blocks)
        };
        let (mut ready, mut failed) = (0, 0);
        for nth in 1..=undisturbed.0 {
            let device = device();
            device.play(Script::new().refuse_back(nth));
            let runtime = runtime_on(&device).await;
            match runtime.load_with(ModelSource::demo(), sized(), |_| {}).await {
                Ok(model) => {
                    ready += 1;
                    let blocks = model.serving().await.expect("the model serves").record.kv_blocks;
                    assert!(blocks < undisturbed.1, "back {nth}: {blocks} of {} blocks", undisturbed.1);
                    assert!(!answer(&model, text("Who are you?").max_tokens(2)).await.is_empty(), "back {nth}");
                    let ledger = snapshot(&runtime).await;
                    assert_eq!(
                        ledger.granted,
                        device.counts().backed,
                        "back {nth}: no memory of the failed attempt is left"
                    );
                }
                Err(error) => {
                    failed += 1;
                    assert!(matches!(error, RuntimeError::Start(_)), "back {nth}: {error:?}");
                    assert!(!error.hint().is_empty(), "back {nth}");
                    assert_all_returned(&runtime, &device, &format!("back {nth} refused")).await;
                }
            }
            runtime.shutdown().await;
            assert_eq!(device.counts().backed, Bytes::ZERO, "back {nth}, after the shutdown");
        }
        assert!(ready > failed, "{ready} ready, {failed} failed: only weights are not retried");
    });
}

#[test]
fn a_start_fails_after_four_refused_attempts() {
    story(async {
        let device = device();
        // The first call that backs memory is for the weights. All later calls are refused.
        device.play((2..200).fold(Script::new(), Script::refuse_back));
        let runtime = runtime_on(&device).await;
        let error = runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("all attempts fail");
        let RuntimeError::Start(start) = &error else { panic!("{error:?}") };
        assert!(matches!(start.as_ref(), StartError::Profile { attempt: 4, .. }), "{start:?}");
        assert_all_returned(&runtime, &device, "after four attempts").await;
    });
}

#[test]
fn a_device_lost_during_a_start_is_the_stated_reason() {
    story(async {
        for nth in [1, 3, 6] {
            let device = device();
            device.play(Script::new().lose_at_back(nth));
            let runtime = runtime_on(&device).await;
            let error = runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("a device is lost");
            assert!(error.to_string().contains("lost") || error.hint().contains("again"), "back {nth}: {error}");
        }
    });
}

#[test]
fn another_process_taking_memory_during_sizing_shrinks_the_cache() {
    story(async {
        let sized = || LoadOptions { kv_tokens: None, ..small() };
        let device = device();
        let runtime = runtime_on(&device).await;
        let undisturbed = demo(&runtime, sized()).await.serving().await.expect("the model serves").record.kv_blocks;
        let backs = device.counts().backs;
        runtime.shutdown().await;
        for nth in 2..=backs {
            let device = crate::stage::device();
            device.play(Script::new().foreign_takes_before_back(nth, Bytes::mib(16)));
            let runtime = runtime_on(&device).await;
            match runtime.load_with(ModelSource::demo(), sized(), |_| {}).await {
                Ok(model) => {
                    let serving = model.serving().await.expect("the model serves");
                    assert!(serving.record.kv_blocks < undisturbed, "back {nth}");
                    assert!(device.counts().backed + device.counts().foreign <= Bytes::mib(64));
                }
                Err(error) => assert!(matches!(error, RuntimeError::Start(_)), "back {nth}: {error:?}"),
            }
            runtime.shutdown().await;
        }
    });
}

#[test]
fn memory_freed_by_another_process_enlarges_the_next_cache() {
    story(async {
        let device = device();
        assert_eq!(device.foreign_takes(Bytes::mib(16)), Bytes::mib(16));
        let runtime = runtime_on(&device).await;
        let sized = || LoadOptions { kv_tokens: None, ..small() };
        let before = demo(&runtime, sized()).await.serving().await.expect("the model serves").record.kv_blocks;
        runtime.unload("demo").await.expect("the model unloads");
        device.foreign_gives_back(Bytes::mib(16));
        let after = demo(&runtime, sized()).await.serving().await.expect("the model serves").record.kv_blocks;
        assert!(after > before, "{before} blocks while another process held 16 MiB, {after} afterward");
    });
}

#[test]
fn an_unload_returns_every_byte_and_a_reload_works() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let first = demo(&runtime, small()).await;
        let expected = answer(&first, about(1)).await;
        let loaded = snapshot(&runtime).await;
        for _ in 0..3 {
            runtime.unload("demo").await.expect("the model unloads");
            assert_all_returned(&runtime, &device, "after unloading").await;
            let again = demo(&runtime, small()).await;
            assert_eq!(answer(&again, about(1)).await, expected);
            eventually("as many bytes are leased as before the unload", async || {
                snapshot(&runtime).await.granted == loaded.granted
            })
            .await;
        }
        let gone = first.chat(about(1)).await.expect_err("the model has ended");
        assert!(matches!(gone, bursar::ChatError::Stopped { .. }), "{gone:?}");
        runtime.unload("nobody").await.expect("unloading an unknown name is not an error");
    });
}

#[test]
fn an_unload_ends_each_running_request_once() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let mut replies = Vec::new();
        for number in 0..12 {
            replies.push(model.chat(about(number).max_tokens(150)).await.expect("accepted"));
        }
        drop(replies[0].next().await);
        runtime.unload("demo").await.expect("the model unloads");
        assert_all_returned(&runtime, &device, "after unloading under load").await;
        for reply in replies {
            if let Err(error) = listen(reply).await {
                assert!(matches!(error, bursar::ChatError::Stopped { .. }), "{error:?}");
            }
        }
    });
}

#[test]
fn an_unload_at_any_moment_of_a_start_frees_everything() {
    story(async {
        // All progress reports of a start, which are the moments to unload at.
        let moments = Arc::new(Mutex::new(Vec::new()));
        {
            let device = device();
            let runtime = runtime_on(&device).await;
            let seen = moments.clone();
            let note = move |progress| seen.lock().expect("no panic").push(progress);
            runtime.load_with(ModelSource::demo(), small(), note).await.expect("the model starts");
        }
        let moments: Vec<Progress> = std::mem::take(&mut moments.lock().expect("no panic"));
        let step = (moments.len() / 12).max(1);
        for (index, moment) in moments.iter().enumerate().step_by(step) {
            let device = device();
            let runtime = runtime_on(&device).await;
            let (reached, mut at_moment) = tokio::sync::mpsc::channel(1);
            let seen = Mutex::new(0);
            let note = move |_| {
                let mut seen = seen.lock().expect("no panic");
                if *seen == index {
                    let _ = reached.try_send(());
                }
                *seen += 1;
            };
            let loading = {
                let runtime = runtime.clone();
                tokio::spawn(async move { runtime.load_with(ModelSource::demo(), small(), note).await.map(drop) })
            };
            at_moment.recv().await;
            runtime.unload("demo").await.expect("the model unloads");
            assert_all_returned(&runtime, &device, &format!("unloaded at {moment:?}")).await;
            if let Err(error) = loading.await.expect("no panic") {
                assert!(matches!(error, RuntimeError::Start(_)), "unloaded at {moment:?}: {error:?}");
            }
        }
    });
}

#[test]
fn an_abandoned_load_is_cancelled() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let (reached, mut loading) = tokio::sync::mpsc::channel(1);
        let note = move |progress| {
            if matches!(progress, Progress::Profiling { .. }) {
                let _ = reached.try_send(());
            }
        };
        let abandoned = {
            let runtime = runtime.clone();
            tokio::spawn(async move { runtime.load_with(ModelSource::demo(), small(), note).await.map(drop) })
        };
        loading.recv().await;
        abandoned.abort();
        eventually("its leases are returned", async || snapshot(&runtime).await.leases.is_empty()).await;
        eventually("its memory is unbacked", async || device.counts().backed.is_zero()).await;
        answer(&demo(&runtime, small()).await, about(1)).await;
    });
}

#[test]
fn a_runtime_starts_and_ends_three_times_on_one_device() {
    story(async {
        let device = device();
        let mut texts = Vec::new();
        for round in 0..3 {
            let runtime = runtime_on(&device).await;
            texts.push(answer(&demo(&runtime, small()).await, about(1)).await);
            runtime.clone().shutdown().await;
            assert_eq!(device.counts().backed, Bytes::ZERO, "round {round}");
            let error = runtime.load_with(ModelSource::demo(), small(), |_| {}).await.err().expect("the runtime ended");
            assert!(!error.hint().is_empty());
            // A second shutdown does nothing.
            runtime.shutdown().await;
        }
        assert!(texts.windows(2).all(|pair| pair[0] == pair[1]), "{texts:?}");
    });
}

#[test]
fn a_shutdown_ends_every_request_once_and_frees_everything() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let mut replies = Vec::new();
        for number in 0..10 {
            replies.push(model.chat(about(number).max_tokens(150)).await.expect("accepted"));
        }
        runtime.shutdown().await;
        assert_eq!(device.counts().backed, Bytes::ZERO);
        for reply in replies {
            if let Err(error) = listen(reply).await {
                assert!(matches!(error, bursar::ChatError::Stopped { .. }), "{error:?}");
            }
        }
        let error = model.chat(about(1)).await.expect_err("the runtime ended");
        assert!(matches!(error, bursar::ChatError::Stopped { .. }), "{error:?}");
    });
}

#[test]
fn dropping_the_last_runtime_handle_ends_requests_too() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let reply = model.chat(about(1).max_tokens(150)).await.expect("accepted");
        drop(runtime);
        drop(listen(reply).await);
        eventually("its memory is unbacked", async || device.counts().backed.is_zero()).await;
        let error = ask(&model, about(1)).await.expect_err("the runtime ended");
        assert!(matches!(error, bursar::ChatError::Stopped { .. }), "{error:?}");
    });
}

#[test]
fn two_runtimes_in_one_process_are_independent() {
    story(async {
        let (one, two) = (device(), device());
        let (first, second) = (runtime_on(&one).await, runtime_on(&two).await);
        let (model, other) = (demo(&first, small()).await, demo(&second, small()).await);
        let expected = answer(&model, about(1)).await;
        assert_eq!(answer(&other, about(1)).await, expected);
        first.shutdown().await;
        assert_eq!(answer(&other, about(1)).await, expected, "the other runtime still answers");
    });
}
