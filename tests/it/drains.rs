//! Orderly shutdown: running requests continue until they end or the deadline passes, no new
//! request starts, and every byte is returned.

use bursar_budgets::testing::HostControl;
use std::time::{Duration, Instant};

use bursar::{Bytes, Chat, ChatError, Gate, Hint, ModelHandle, ModelSource, RuntimeError, StartError};

use crate::stage::{about, answer, ask, demo, device, eventually, listen, runtime_on, small, story};

/// A drain time that is longer than any test takes.
const LONG: Duration = Duration::from_secs(3600);

/// A chat whose reply fills its stream. The chat runs forever if no task reads the reply.
fn endless(number: u32) -> Chat {
    about(number).max_tokens(200).temperature(20.0).top_k(0).top_p(1.0).seed(u64::from(number))
}

async fn refused(model: &ModelHandle) -> ChatError {
    ask(model, about(1)).await.expect_err("no new request is accepted")
}

/// Waits until the model accepts no more requests, and checks the error that it then returns.
async fn closed(model: &ModelHandle) {
    eventually("the model accepts no requests", async || {
        matches!(model.chat(Chat::new()).await, Err(ChatError::ShuttingDown | ChatError::Stopped { .. }))
    })
    .await;
}

#[test]
fn a_drain_admits_no_request_and_waits_for_running_requests() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let expected = [answer(&model, endless(1)).await, answer(&model, endless(2)).await];
        let replies =
            [model.chat(endless(1)).await.expect("accepted"), model.chat(endless(2)).await.expect("accepted")];
        let draining = tokio::spawn(runtime.clone().shutdown_within(LONG));
        closed(&model).await;
        let error = refused(&model).await;
        assert!(!error.hint().is_empty());
        let error = runtime.load(ModelSource::demo()).await.err().expect("no model loads during a shutdown");
        match &error {
            RuntimeError::Start(error) => assert!(matches!(**error, StartError::ShuttingDown), "{error:?}"),
            // The runtime ended before it could answer.
            error => assert!(matches!(error, RuntimeError::Unanswered(_)), "{error:?}"),
        }
        assert!(!error.hint().is_empty());
        for (reply, expected) in replies.into_iter().zip(expected) {
            assert_eq!(listen(reply).await.expect("the reply completes").text, expected);
        }
        assert_eq!(draining.await.expect("no panic"), 0, "no reply was cut off");
        assert_eq!(device.counts().backed, Bytes::ZERO);
        assert!(matches!(refused(&model).await, ChatError::Stopped { .. }), "the runtime has ended");
    });
}

#[test]
fn a_drain_without_requests_ends_at_once() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        demo(&runtime, small()).await;
        assert_eq!(runtime.shutdown_within(LONG).await, 0);
        assert_eq!(device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn a_drain_ends_and_counts_requests_at_its_deadline() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        // A reader that stops reading blocks its request forever, because the whole reply does
        // not fit its stream.
        let mut replies = Vec::new();
        for number in 0..3 {
            replies.push(model.chat(endless(number)).await.expect("accepted"));
        }
        let begun = Instant::now();
        let deadline = Duration::from_millis(300);
        let cut_off = runtime.shutdown_within(deadline).await;
        assert!(begun.elapsed() >= deadline, "the replies had the full drain time");
        assert_eq!(cut_off, 3, "all three replies were cut off");
        assert_eq!(device.counts().backed, Bytes::ZERO);
        for reply in replies {
            if let Err(error) = listen(reply).await {
                assert!(matches!(error, ChatError::Stopped { .. }), "{error:?}");
            }
        }
    });
}

#[test]
fn draining_one_model_disturbs_no_other_and_frees_its_name() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let (model, other) = (demo(&runtime, small()).await, demo(&runtime, small()).await);
        let expected = answer(&other, endless(1)).await;
        let reply = model.chat(endless(1)).await.expect("accepted");
        let draining = {
            let runtime = runtime.clone();
            tokio::spawn(async move { runtime.unload_within("demo", LONG).await })
        };
        closed(&model).await;
        assert_eq!(answer(&other, endless(1)).await, expected, "the other model takes requests");
        assert_eq!(listen(reply).await.expect("the reply completes").text, expected);
        assert_eq!(draining.await.expect("no panic").expect("the model unloads"), 0);
        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
        assert!(ledger.leases.iter().all(|line| line.model.to_string() == "demo 2"), "{ledger}");
        let again = demo(&runtime, small()).await;
        assert_eq!(again.serving().await.expect("the model serves").context.name, "demo");
        assert_eq!(runtime.unload_within("nobody", LONG).await.expect("unloading an unknown name is not an error"), 0);
        // An immediate unload ends the wait of an earlier unload.
        let unread = again.chat(endless(2)).await.expect("accepted");
        let patient = runtime.unload_within("demo", LONG);
        let hasty = async {
            closed(&again).await;
            runtime.unload("demo").await.expect("the model unloads");
        };
        let (cut_off, ()) = tokio::join!(patient, hasty);
        assert_eq!(cut_off.expect("the model unloads"), 1, "the earlier unload returns too");
        drop(unread);
    });
}

#[test]
fn a_model_that_dies_while_draining_restarts_for_its_requests() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        let expected = answer(&model, endless(1)).await;
        let reply = model.chat(endless(1)).await.expect("accepted");
        let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        let draining = tokio::spawn(runtime.shutdown_within(LONG));
        closed(&model).await;
        engine.kill();
        assert_eq!(listen(reply).await.expect("the reply completes").text, expected);
        assert_eq!(draining.await.expect("no panic"), 0);
        assert_eq!(device.counts().backed, Bytes::ZERO);
    });
}

#[test]
fn a_request_at_a_closed_gate_reports_the_models_end() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let model = demo(&runtime, small()).await;
        // Close the gate first, as an unload does.
        let closed = bursar_actors::testing::move_gate(runtime.budget(), "demo".into(), Gate::Teardown).await;
        closed.expect("the budget answers").expect("the gate was frozen");
        let mut listening = std::pin::pin!(listen(model.chat(endless(1)).await.expect("accepted")));
        // By now the request has been refused memory. If the caller saw that refusal, the
        // reply would end here.
        let early = tokio::time::timeout(Duration::from_millis(500), &mut listening).await;
        assert!(early.is_err(), "a request waits for its model's end, not for the budget's refusal: {early:?}");
        runtime.unload("demo").await.expect("the model unloads");
        let error = listening.await.expect_err("no model is left to answer");
        assert!(matches!(error, ChatError::Stopped { .. }), "{error:?}");
    });
}

#[test]
fn concurrent_drains_shutdowns_loads_and_unloads_all_end_cleanly() {
    story(async {
        for round in 0..6u32 {
            let device = device();
            let runtime = runtime_on(&device).await;
            let model = demo(&runtime, small()).await;
            let replies = [model.chat(endless(1)).await, model.chat(endless(2)).await];
            let load = {
                let runtime = runtime.clone();
                async move { runtime.load_with(ModelSource::demo(), small(), |_| {}).await.map(drop) }
            };
            let unload = {
                let runtime = runtime.clone();
                async move { runtime.unload("demo").await }
            };
            let (drain, shutdown) = (runtime.clone().shutdown_within(LONG), runtime.clone().shutdown());
            // Each round has a different order.
            let (load, unload, drain, shutdown) = match round % 3 {
                0 => (tokio::spawn(load), tokio::spawn(unload), tokio::spawn(drain), tokio::spawn(shutdown)),
                1 => {
                    let (drain, shutdown) = (tokio::spawn(drain), tokio::spawn(shutdown));
                    (tokio::spawn(load), tokio::spawn(unload), drain, shutdown)
                }
                _ => {
                    let (shutdown, load) = (tokio::spawn(shutdown), tokio::spawn(load));
                    (load, tokio::spawn(unload), tokio::spawn(drain), shutdown)
                }
            };
            if let Err(error) = load.await.expect("no panic") {
                assert!(matches!(error, RuntimeError::Start(_) | RuntimeError::Unanswered(_)), "{error:?}");
            }
            if let Err(error) = unload.await.expect("no panic") {
                assert!(matches!(error, RuntimeError::Unanswered(_)), "the runtime had already ended: {error:?}");
            }
            assert!(drain.await.expect("no panic") <= 2);
            shutdown.await.expect("no panic");
            for reply in replies {
                if let Err(error) = listen(reply.expect("accepted")).await {
                    assert!(matches!(error, ChatError::Stopped { .. }), "{error:?}");
                }
            }
            assert_eq!(device.counts().backed, Bytes::ZERO, "memory is backed after round {round}");
        }
    });
}

#[test]
fn a_runtime_is_unaffected_by_the_death_of_another() {
    story(async {
        let (one, two) = (device(), device());
        let (first, second) = (runtime_on(&one).await, runtime_on(&two).await);
        let (model, other) = (demo(&first, small()).await, demo(&second, small()).await);
        let expected = answer(&other, endless(1)).await;
        let before = second.budget().snapshot().await.expect("the budget answers");
        for way in ["engine", "runtime"] {
            let (lost, kept) = (model.chat(endless(2)).await, other.chat(endless(1)).await);
            match way {
                "engine" => first.supervised().await.expect("the runtime answers").engines["demo"].kill(),
                _ => first.cell().kill(),
            }
            assert_eq!(listen(kept.expect("accepted")).await.expect("the model answers").text, expected, "{way}");
            match listen(lost.expect("accepted")).await {
                Ok(_) => {}
                Err(error) => assert!(matches!(error, ChatError::Stopped { .. }) && way == "runtime", "{error:?}"),
            }
        }
        let after = second.budget().snapshot().await.expect("the budget answers");
        assert_eq!(after, before, "the other runtime's ledger is unchanged");
        drop((first, model));
        eventually("the first runtime's memory is released", async || one.counts().backed.is_zero()).await;
        assert_eq!(two.counts().backed, before.granted);
        // Several runtimes in one process: one after another, and at the same time.
        let again = runtime_on(&one).await;
        assert_eq!(answer(&demo(&again, small()).await, endless(1)).await, expected);
        assert_eq!(again.shutdown_within(LONG).await, 0);
        assert_eq!(second.shutdown_within(LONG).await, 0);
        assert_eq!((one.counts().backed, two.counts().backed), (Bytes::ZERO, Bytes::ZERO));
    });
}
