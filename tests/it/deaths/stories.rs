//! Deaths that the table does not cover: several at once, repeated deaths, and a death at each
//! moment of a start.

use bursar_budgets::testing::HostControl;
use std::time::Duration;

use bursar::{Bytes, ChatError, LoadOptions, ModelHandle, Runtime, RuntimeError};
use bursar_actors::{engine::Serving, responder::Responder, scheduler::SchedulerMessage, supervise::Intensity};
use tokio::task::JoinHandle;

use crate::stage::{Stage, about, answer, eventually, listen, small, story};

/// The moments of an engine's death: before any request, before the first token, between tokens.
const MOMENTS: [&str; 3] = ["idle", "prefilling", "decoding"];

fn kill(serving: &Serving, victim: &str) {
    match victim {
        "scheduler" => serving.scheduler.kill(),
        "vision" => serving.vision.as_ref().expect("the demo model takes pictures").kill(),
        other => panic!("no actor is called {other}"),
    }
}

/// Waits until actors of a later generation serve.
async fn replaced(model: &ModelHandle, generation: u64) -> Serving {
    loop {
        let serving = model.serving().await.expect("the model serves again");
        if serving.generation > generation {
            return serving;
        }
        tokio::task::yield_now().await;
    }
}

fn long(number: u32) -> bursar::Chat {
    about(number).max_tokens(60).temperature(9.0).top_k(0).top_p(1.0).seed(u64::from(number))
}

#[test]
fn simultaneous_deaths_leave_one_actor_of_each_kind() {
    story(async {
        let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
        let stage = Stage::set(LoadOptions { intensity, ..small() }).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, long(1)).await;
        for order in [["scheduler", "vision"], ["vision", "scheduler"]] {
            let serving = stage.model.serving().await.expect("the model serves");
            let reply = stage.model.chat(long(1)).await.expect("accepted");
            order.iter().for_each(|victim| kill(&serving, victim));
            assert_eq!(listen(reply).await.expect("the model answers").text, expected, "{order:?}");
            stage.settled(&before).await;
        }
    });
}

#[test]
fn a_restarted_engine_reuses_its_loaded_weights() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, long(1)).await;
        for moment in MOMENTS {
            let serving = stage.model.serving().await.expect("the model serves");
            let engine = serving.scheduler.try_get_supervisor().expect("the engine supervises the scheduler");
            let weights = |snapshot: &bursar::Snapshot| snapshot.of_class(&bursar::Class::Weights);
            let mut replies = Vec::new();
            if moment != "idle" {
                replies.push(stage.model.chat(long(1)).await.expect("accepted"));
            }
            let mut text = String::new();
            if moment == "decoding" {
                text.push_str(replies[0].next().await.expect("an event").expect("text").text());
            }
            engine.kill();
            replaced(&stage.model, serving.generation).await;
            for reply in replies {
                let whole = listen(reply).await.unwrap_or_else(|error| panic!("{moment}: {error}"));
                assert_eq!(whole.text, expected, "{moment}");
                text.push_str(&whole.pieces.concat());
                assert_eq!(text, expected, "{moment}");
            }
            let now = stage.snapshot().await;
            assert_eq!(weights(&now), weights(&before));
            assert_eq!(now.granted, before.granted, "{moment}: {now}");
            let lease = |snapshot: &bursar::Snapshot| {
                snapshot.leases.iter().find(|line| line.class == bursar::Class::Weights).map(|line| line.id)
            };
            assert_eq!(lease(&now), lease(&before), "rule 10: the weights keep their lease");
            assert_eq!(stage.device.counts().backed, now.granted);
        }
    });
}

/// Begins to load the demo model, and returns at its progress report number `at`.
async fn loading_at(runtime: &Runtime, at: usize) -> JoinHandle<Result<ModelHandle, RuntimeError>> {
    let (reached, mut at_moment) = tokio::sync::mpsc::channel::<()>(1);
    let seen = std::sync::Mutex::new(0usize);
    let note = move |_| {
        let mut seen = seen.lock().expect("no panic");
        if *seen == at {
            let _ = reached.try_send(());
        }
        *seen += 1;
    };
    let runtime = runtime.clone();
    let loading = tokio::spawn(async move { runtime.load_with(bursar::ModelSource::demo(), small(), note).await });
    at_moment.recv().await;
    loading
}

#[test]
fn a_profile_or_engine_killed_during_a_start_is_replaced() {
    story(async {
        for at in 0..12usize {
            let device = crate::stage::device();
            let runtime = crate::stage::runtime_on(&device).await;
            let loading = loading_at(&runtime, at).await;
            let engine = runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
            if at % 2 == 0 {
                engine.kill();
            } else {
                engine.get_children().iter().for_each(|child| child.kill());
            }
            let model =
                loading.await.expect("no panic").unwrap_or_else(|error| panic!("killed at moment {at}: {error}"));
            answer(&model, about(1)).await;
            let ledger = runtime.budget().snapshot().await.expect("the budget answers");
            assert_eq!(ledger.granted, device.counts().backed, "killed at moment {at}");
            runtime.shutdown().await;
            assert_eq!(device.counts().backed, Bytes::ZERO);
        }
    });
}

#[test]
fn a_crash_loop_stops_the_model_and_returns_every_byte() {
    story(async {
        let intensity = Intensity { restarts_max: 2, back_off: Duration::ZERO, ..Intensity::default() };
        let stage = Stage::set(LoadOptions { intensity, ..small() }).await;
        let waiting = stage.model.chat(about(1).max_tokens(200)).await.expect("accepted");
        for _ in 0..2 {
            let serving = stage.model.serving().await.expect("the model serves");
            kill(&serving, "scheduler");
            replaced(&stage.model, serving.generation).await;
        }
        let serving = stage.model.serving().await.expect("the model serves");
        kill(&serving, "scheduler");
        if let Err(error) = listen(waiting).await {
            match &error {
                ChatError::Stopped { reason } => {
                    assert!(reason.contains("2 restarts") && reason.contains("killed"), "{reason}");
                }
                // The request was given up after its third death, before the model stopped.
                ChatError::GivenUp { deaths } => assert_eq!(*deaths, 3),
                error => panic!("{error:?}"),
            }
        }
        eventually("the model has stopped", async || {
            matches!(stage.model.chat(about(1)).await, Err(ChatError::Stopped { .. }))
        })
        .await;
        eventually("all leases have ended", async || stage.snapshot().await.leases.is_empty()).await;
        eventually("all memory is unbacked", async || stage.device.counts().backed.is_zero()).await;
        // Another runtime can use the device.
        answer(&crate::stage::demo(&stage.runtime, small()).await, about(1)).await;
    });
}

#[test]
fn a_request_that_keeps_killing_actors_is_given_up() {
    story(async {
        let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
        let stage = Stage::set(LoadOptions { intensity, ..small() }).await;
        let unlucky = stage.model.chat(about(1).max_tokens(200).temperature(20.0).top_k(0)).await.expect("accepted");
        let listening = tokio::spawn(listen(unlucky));
        for _ in 0..40 {
            let serving = stage.model.serving().await.expect("the model serves");
            // An actor that answers `KvUse` has the request, or receives it before it dies.
            let (reply, count) = Responder::new();
            drop(serving.scheduler.send_message(SchedulerMessage::KvUse(reply)));
            drop(count.await);
            kill(&serving, "scheduler");
            replaced(&stage.model, serving.generation).await;
            if listening.is_finished() {
                break;
            }
        }
        match listening.await.expect("no panic") {
            Ok(_) => {}
            Err(ChatError::GivenUp { deaths }) => assert!(deaths > 1),
            Err(error) => panic!("{error:?}"),
        }
        assert!(!answer(&stage.model, about(1)).await.is_empty(), "the model still answers");
    });
}

#[test]
fn a_killed_budgets_successor_finds_everything_unchanged() {
    story(async {
        let stage = Stage::set(small()).await;
        let budget = stage.runtime.budget();
        let tenant = budget.lease(bursar::Class::external("mine"), bursar::MIB).await.expect("memory is free");
        let short = budget.lease(bursar::Class::external("mine"), bursar::MIB).await.expect("memory is free");
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, about(1)).await;
        for round in 0..4 {
            let replies = [stage.model.chat(about(1)).await, stage.model.chat(about(2)).await];
            stage.runtime.supervised().await.expect("the runtime answers").budget.kill();
            let [first, second] = replies.map(|reply| reply.expect("accepted"));
            assert_eq!(listen(first).await.expect("the model answers").text, expected, "the reply in round {round}");
            listen(second).await.expect("the model answers");
            eventually("the ledger is as before", async || stage.snapshot().await == before).await;
        }
        drop(short);
        eventually("the lease dropped later is released", async || {
            stage.snapshot().await.of_class(&bursar::Class::external("mine")) == Bytes::mib(1)
        })
        .await;
        drop(tenant);
        // Memory that was backed before the deaths can still be released.
        stage.runtime.unload("demo").await.expect("the model unloads");
        assert_eq!(stage.device.counts().backed, Bytes::ZERO);
        assert!(stage.snapshot().await.leases.is_empty());
    });
}

#[test]
fn a_budget_killed_during_a_start_is_replaced_and_starting_continues() {
    story(async {
        for at in [0usize, 1, 3, 5, 7] {
            let device = crate::stage::device();
            let runtime = crate::stage::runtime_on(&device).await;
            let loading = loading_at(&runtime, at).await;
            runtime.supervised().await.expect("the runtime answers").budget.kill();
            let model =
                loading.await.expect("no panic").unwrap_or_else(|error| panic!("killed at moment {at}: {error}"));
            answer(&model, about(1)).await;
            runtime.shutdown().await;
            assert_eq!(device.counts().backed, Bytes::ZERO);
        }
    });
}

#[test]
fn a_lane_that_dies_or_fails_is_replaced() {
    use bursar_actors::{
        kv::SequenceId, scheduler::Admission, scheduler::Drafter, scheduler::NewSequence, scheduler::Placeholder,
        scheduler::SchedulingParams,
    };
    use bursar_model::{
        flow::ContentSpan, flow::PictureHash, flow::PrefixKeys, sampling::Sampler, sampling::SamplingParams,
    };
    story(async {
        let intensity = Intensity { restarts_max: 100, back_off: Duration::ZERO, ..Intensity::default() };
        let stage = Stage::set(LoadOptions { intensity, ..small() }).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, long(1)).await;
        let backs = stage.device.counts().backs;
        // Sequences that no driver creates: a token outside the vocabulary, and a row
        // outside the vision cache.
        let content = ContentSpan { tokens: 0..1, hash: PictureHash([0; 32]) };
        let place = Placeholder { content, cache_rows: [u32::MAX].into() };
        for (token, pictures) in [(u32::MAX, Vec::new()), (5, vec![place])] {
            let serving = stage.model.serving().await.expect("the model serves");
            let reply = stage.model.chat(long(1)).await.expect("accepted");
            let sequence = NewSequence {
                id: SequenceId(u64::MAX),
                tokens: vec![token; 3],
                positions: vec![[0; 3]; 3],
                next_position: 3,
                produced: 0,
                tokens_max: 4,
                pictures,
                prefix: PrefixKeys::default(),
                scheduling_params: SchedulingParams::default(),
                group: None,
                score_prompt: None,
                stop_tokens: [].into(),
                sampler: std::sync::Arc::new(Sampler::new(SamplingParams::default(), 1).expect("greedy sampling")),
                prompt_read: [].into(),
                drafter: Drafter::None,
            };
            let (deliveries, _delivered) = tokio::sync::mpsc::channel(8);
            let admission =
                Admission { sequence, pins: None, deliveries, span: tracing::Span::none(), last_token: None };
            drop(serving.scheduler.send_message(SchedulerMessage::Admit(Box::new(admission))));
            replaced(&stage.model, serving.generation).await;
            assert_eq!(listen(reply).await.expect("the model answers").text, expected);
            assert_eq!(stage.device.counts().backs, backs, "no memory was backed again");
            stage.settled(&before).await;
        }
    });
}
