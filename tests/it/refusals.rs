//! Refused memory: in each phase of each attempt, at each device call of a start, and
//! while requests are served.

use bursar_budgets::testing::HostControl;
use std::sync::{Arc, Mutex};

use bursar::{
    AttemptReport, Bytes, ChatError, FaultPlan, Hint, HostDevice, LoadOptions, ModelHandle, ModelSource, Outcome,
    Phase, Progress, Runtime, RuntimeError, StartError,
};
use bursar_actors::{engine::EngineMessage, engine::WhichLane};
use bursar_budgets::testing::Script;

use crate::stage::{Stage, about, answer, device, eventually, listen, runtime_on, small, story, text};

/// Load options with which a start determines the size of the KV cache. Most other tests set this
/// size.
fn sized() -> LoadOptions {
    LoadOptions { kv_tokens: None, ..small() }
}

/// A start with its attempts. A ready model also gets one request, so that memory can be
/// refused while it serves.
struct Tried {
    attempts: Vec<AttemptReport>,
    outcome: Result<ModelHandle, RuntimeError>,
}

async fn try_with(runtime: &Runtime, options: LoadOptions) -> Tried {
    let reports = Arc::new(Mutex::new(Vec::<AttemptReport>::new()));
    let attempts = reports.clone();
    let listen = move |progress| {
        if let Progress::Attempt(report) = progress {
            let mut attempts = attempts.lock().expect("no holder panicked");
            attempts.retain(|earlier| earlier.attempt != report.attempt);
            attempts.push(report);
        }
    };
    let outcome = runtime.load_with(ModelSource::demo(), options, listen).await;
    let attempts = || reports.lock().expect("no holder panicked").clone();
    if let Ok(model) = &outcome {
        let reply = model.chat(text("Who are you?").max_tokens(4)).await.expect("accepted");
        let reply = crate::stage::listen(reply).await;
        assert!(reply.is_ok() || attempts().len() == 4, "{reply:?}");
    }
    Tried { attempts: attempts(), outcome }
}

/// Checks that the targets are 1, 0.95, 0.95² and 0.95³ of the first, in whole blocks.
fn assert_targets_shrink(attempts: &[AttemptReport], when: &str) {
    assert!(!attempts.is_empty() && attempts.len() <= 4, "{when}: {attempts:?}");
    let first = attempts[0].target_tokens / 16;
    for (nth, report) in attempts.iter().enumerate() {
        let (of, parts) = (95usize.pow(nth as u32), 100usize.pow(nth as u32));
        assert_eq!(report.attempt as usize, nth + 1, "{when}");
        assert_eq!(report.target_tokens, first * of / parts * 16, "{when}: {attempts:?}");
    }
}

async fn assert_nothing_leaks(runtime: &Runtime, device: &HostDevice, when: &str) {
    runtime.unload("demo").await.expect("the model unloads");
    let ledger = runtime.budget().snapshot().await.expect("the budget answers");
    assert!(ledger.leases.is_empty() && ledger.granted.is_zero(), "{when}: {ledger}");
    assert_eq!(device.counts().backed, Bytes::ZERO, "{when}");
}

#[test]
fn refused_memory_in_any_phase_shrinks_the_cache_or_advises() {
    story(async {
        for phase in Phase::ALL {
            for refused in 1..=4 {
                let when = format!("{phase}:{refused}");
                let device = device();
                let runtime = runtime_on(&device).await;
                let faults = FaultPlan::none().refuse(phase, refused);
                let Tried { attempts, outcome } = try_with(&runtime, LoadOptions { faults, ..sized() }).await;
                assert_targets_shrink(&attempts, &when);
                let refusals = attempts.iter().take(refused as usize);
                for AttemptReport { phase: at, outcome, .. } in refusals {
                    let Outcome::Refused { evidence } = outcome else { panic!("{when}: {attempts:?}") };
                    assert_eq!((*at, evidence.phase), (phase, phase), "{when}");
                    assert!(!evidence.asked.is_zero() && evidence.foreign.is_zero(), "{when}: {evidence}");
                }
                match outcome {
                    Ok(model) if refused < 4 => {
                        assert_eq!(attempts.len() as u32, refused + 1, "{when}");
                        let last = attempts.last().expect("at least one attempt");
                        assert_eq!((&last.outcome, last.phase), (&Outcome::Ready, Phase::Serve), "{when}");
                        let record = model.serving().await.expect("the model serves").record.clone();
                        assert_eq!(record.kv_tokens(), last.target_tokens, "{when}: the model has the reported size");
                        let ledger = runtime.budget().snapshot().await.expect("the budget answers");
                        assert_eq!(ledger.granted, device.counts().backed, "{when}: {ledger}");
                    }
                    Ok(model) => {
                        assert_eq!((phase, attempts.len()), (Phase::Serve, 4));
                        let error = model.serving().await.err().expect("the model has stopped");
                        let ChatError::NotStarted(start) = &error else { panic!("{when}: {error:?}") };
                        let StartError::Profile { attempts: reported, .. } = start.as_ref() else {
                            panic!("{start:?}")
                        };
                        assert_eq!(reported, &attempts, "{when}");
                        assert!(error.hint().contains("kv_tokens"), "{when}: {}", error.hint());
                    }
                    Err(error) => {
                        assert!(refused == 4 && phase != Phase::Serve, "{when}: {error}");
                        let RuntimeError::Start(start) = &error else { panic!("{when}: {error:?}") };
                        let StartError::Profile { attempts: reported, knobs, .. } = start.as_ref() else {
                            panic!("{when}: {start:?}")
                        };
                        assert_eq!(reported, &attempts, "{when}");
                        for name in ["kv_tokens", "step_tokens", "sequences", "context_tokens", "launch_patches"] {
                            assert!(knobs.iter().any(|knob| knob.knob == name), "{when}: no {name} in {knobs:?}");
                            assert!(error.hint().contains(name), "{when}: {}", error.hint());
                        }
                    }
                }
                assert_nothing_leaks(&runtime, &device, &when).await;
                runtime.shutdown().await;
            }
        }
    });
}

#[test]
fn any_script_of_refusals_keeps_the_ledger_and_shrinks_targets() {
    // Scripts of two refusals each, in a fixed shuffled order, limited to what the
    // test has time for.
    let parts: Vec<(Phase, u32)> = Phase::ALL.into_iter().flat_map(|phase| (1..=4).map(move |n| (phase, n))).collect();
    let scripts: Vec<_> = (0..24).map(|nth| (parts[nth * 7 % 24], parts[(nth * 11 + nth / 24 + 5) % 24])).collect();
    story(async move {
        for ((one, first), (other, second)) in scripts {
            let when = format!("{one}:{first},{other}:{second}");
            let faults: FaultPlan = when.parse().expect("a script");
            let device = device();
            let runtime = runtime_on(&device).await;
            let Tried { attempts, outcome } = try_with(&runtime, LoadOptions { faults, ..sized() }).await;
            assert_targets_shrink(&attempts, &when);
            let refused = attempts.iter().filter(|report| matches!(report.outcome, Outcome::Refused { .. })).count();
            let is_over = refused == 4;
            assert_eq!(refused + usize::from(!is_over), attempts.len(), "{when}: {attempts:?}");
            // Attempt n is refused if either count is at least n, regardless of the
            // order of the phases.
            assert_eq!(refused as u32, first.max(second), "{when}: {attempts:?}");
            assert!(outcome.is_ok() || is_over, "{when}");
            assert_nothing_leaks(&runtime, &device, &when).await;
            runtime.shutdown().await;
        }
    });
}

#[test]
fn steps_and_launches_that_were_refused_memory_run_again() {
    story(async {
        let stage = Stage::set(sized()).await;
        let expected = [answer(&stage.model, about(1)).await, answer(&stage.model, about(2)).await];
        let before = stage.snapshot().await;
        let tokens = stage.model.serving().await.expect("the model serves").record.kv_tokens();
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        for (round, which) in [WhichLane::Step, WhichLane::Vision, WhichLane::Step].into_iter().enumerate() {
            let mut serving = stage.model.serving().await.expect("the model serves");
            if which == WhichLane::Vision {
                // The vision actor outlives the scheduler and can still report a refusal.
                serving.scheduler.kill();
                serving = stage.model.serving_after(serving.generation).await.expect("the model serves again");
            }
            assert!(engine.send_message(EngineMessage::RefuseMemory(which)).is_ok(), "the engine lives");
            // The numbers include new pictures, so that both the encoder and decoder steps are
            // needed.
            let numbers = [1, 2, 10 + round as u32, 20 + round as u32];
            let mut replies = Vec::new();
            for number in numbers {
                replies.push(stage.model.chat(about(number)).await.expect("accepted"));
            }
            for (number, reply) in numbers.into_iter().zip(replies) {
                let reply = listen(reply).await.expect("the reply ends well").text;
                if let Some(expected) = expected.get(number as usize - 1) {
                    assert_eq!(&reply, expected, "round {round}");
                }
            }
            eventually("new actors serve", async || {
                stage.model.serving_after(serving.generation).await.is_ok_and(|now| now.refusals as usize == round + 1)
            })
            .await;
        }
        let after = stage.model.serving().await.expect("the model serves").record.kv_tokens();
        assert_eq!(after, tokens / 16 * 95 * 95 * 95 / 1_000_000 * 16);
        let ledger = stage.snapshot().await;
        assert_eq!(ledger.granted, stage.device.counts().backed, "{ledger}");
        assert!(ledger.granted < before.granted, "the KV cache gave up memory");
        assert!(stage.device.counts().unbacks > 0);
        assert_nothing_leaks(&stage.runtime, &stage.device, "at the end").await;
    });
}

#[test]
fn both_lanes_may_be_refused_at_once() {
    story(async {
        let stage = Stage::set(sized()).await;
        let expected = answer(&stage.model, about(1)).await;
        let engine = stage.runtime.supervised().await.expect("the runtime answers").engines["demo"].clone();
        for which in [WhichLane::Step, WhichLane::Vision] {
            assert!(engine.send_message(EngineMessage::RefuseMemory(which)).is_ok(), "the engine lives");
        }
        // The chat with the cached picture needs only steps. The other also needs the encoder.
        let replies = [stage.model.chat(about(1)).await, stage.model.chat(about(30)).await];
        let [known, new] = replies.map(|reply| tokio::spawn(listen(reply.expect("accepted"))));
        assert_eq!(known.await.expect("no panic").expect("the reply ends well").text, expected);
        new.await.expect("no panic").expect("the reply ends well");
        // The second refusal may be reported while the first is being handled. The second refusal
        // then concerns actors that are gone, so it is not counted.
        let refusals = stage.model.serving().await.expect("the model serves").refusals;
        assert!((1..=2).contains(&refusals), "{refusals}");
        assert_nothing_leaks(&stage.runtime, &stage.device, "at the end").await;
    });
}

#[test]
fn a_request_survives_three_refusals_of_memory() {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let faults = FaultPlan::none().refuse(Phase::Serve, 3);
        let model = runtime.load_with(ModelSource::demo(), LoadOptions { faults, ..sized() }, |_| {}).await;
        let reply = answer(&model.expect("the model starts"), about(1)).await;
        assert!(!reply.is_empty());
        runtime.shutdown().await;
    });
}

#[test]
fn a_fixed_kv_size_is_stressed_and_never_shrunk() {
    story(async {
        for phase in [Phase::Probe, Phase::Validate, Phase::Serve] {
            let device = device();
            let runtime = runtime_on(&device).await;
            let faults = FaultPlan::none().refuse(phase, 2);
            let Tried { attempts, outcome } = try_with(&runtime, LoadOptions { faults, ..small() }).await;
            let targets: Vec<_> = attempts.iter().map(|report| report.target_tokens).collect();
            assert_eq!(targets.len(), 3, "{attempts:?}");
            let tokens = outcome.expect("the model starts").serving().await.expect("a model").record.kv_tokens();
            assert_eq!(targets, [tokens; 3], "{phase}");
            runtime.shutdown().await;
        }
    });
}

#[test]
fn refusals_at_any_one_or_two_calls_end_ready_or_typed() {
    story(async {
        let calls = {
            let device = device();
            let runtime = runtime_on(&device).await;
            assert!(try_with(&runtime, sized()).await.outcome.is_ok());
            runtime.shutdown().await;
            device.counts().calls
        };
        // Twice the number of calls in a start without refusals, because a second attempt
        // makes its own calls.
        let singles = (1..=calls).map(|one| vec![one]);
        // Every ninth call, with a different offset for each first call.
        let others = |one: u64| (one + 1 + one % 9..=2 * calls).step_by(9);
        let pairs = (1..=calls).flat_map(|one| others(one).map(move |other| vec![one, other]));
        let (mut ready, mut failed) = (0, 0);
        for refused in singles.chain(pairs) {
            let when = format!("calls {refused:?} of {calls} refused");
            let device = device();
            device.play(refused.iter().fold(Script::new(), |script, nth| script.refuse_call(*nth)));
            let runtime = runtime_on(&device).await;
            let Tried { attempts, outcome } = try_with(&runtime, sized()).await;
            assert!(attempts.len() <= 4, "{when}: {attempts:?}");
            match outcome {
                Ok(_) => {
                    ready += 1;
                    let ledger = runtime.budget().snapshot().await.expect("the budget answers");
                    assert_eq!(ledger.granted, device.counts().backed, "{when}: {ledger}");
                }
                Err(error) => {
                    failed += 1;
                    assert!(matches!(error, RuntimeError::Start(_)), "{when}: {error:?}");
                    assert!(!error.hint().is_empty(), "{when}");
                }
            }
            assert_nothing_leaks(&runtime, &device, &when).await;
            runtime.shutdown().await;
        }
        println!("{calls} calls a start; {ready} ready, {failed} with a typed error");
        assert!(ready > 0 && failed > 0, "refused backing is retried, refused reservations are not");
    });
}
