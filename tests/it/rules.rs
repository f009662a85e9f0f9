//! The tests of rules 4, 9, 13 and 15 (`docs/rules.md`) that need a whole runtime.

use std::{collections::BTreeMap, pin::Pin, time::Duration};

use bursar::{
    Bytes, Chat, ChatError, Class, Envelope, FaultInjection, Hint, Image, LoadOptions, MIB, ModelHandle, ModelSource,
    Runtime,
};
use bursar_actors::{
    budget::BudgetMessage, compute::lane::Answer, order::Priority, responder::Responder, runtime::RuntimeMessage,
    scheduler::SchedulerMessage, sleep::SleepLevel, sleep::SleepOrder, testing, tree, tree::QUESTIONS, tree::Question,
    vision::VisionMessage,
};
use bursar_budgets::{Gate, Label, Lease, Owner, Request};
use bursar_model::{flow::EncodedImage, flow::Media, flow::PrefixKeys, processor::MediaLimits};

use crate::{
    metrics_log::MetricsLog,
    stage::{
        Stage, about, answer, ask, demo, device, eventually, listen, picture, runtime_on, small, small_envelope, story,
        text,
    },
};

#[test]
fn rule_4_no_more_sequences_run_at_once_than_were_stressed() {
    let metrics_log = MetricsLog::open();
    story(async {
        let options = LoadOptions {
            name: Some("rule 4".to_owned()),
            envelope: Some(Envelope { sequences: 2, ..small_envelope() }),
            ..small()
        };
        let stage = Stage::set(options).await;
        assert_eq!(stage.model.serving().await.expect("the model serves").record.sequences, 2);
        let mut replies = Vec::new();
        for number in 0..8 {
            replies.push(stage.model.chat(about(number)).await.expect("accepted"));
        }
        for reply in replies {
            listen(reply).await.expect("the model answers");
        }
        assert_eq!(
            metrics_log.most("bursar_sequences_running{model=rule 4}"),
            Some(2.0),
            "exactly two sequences run at once"
        );
        assert!(metrics_log.most("bursar_sequences_waiting{model=rule 4}") > Some(0.0), "the other sequences waited");
    });
}

type Asked<'w> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'w>>;

/// A runtime with every actor that answers questions.
struct Answerers {
    runtime: Runtime,
    model: ModelHandle,
    /// A lease to resize.
    lease: Lease,
}

/// Sends one question of the table to its actor. A question that is not listed here fails the test.
fn put<'w>(question: &'w Question, world: &'w Answerers) -> Asked<'w> {
    let budget = world.runtime.budget();
    let request = |class, bytes| Request::new(Owner::new("rule 13", 0), class, "rule 13", bytes);
    let message_of = |error: &dyn std::fmt::Display| error.to_string();
    match (question.what, question.to) {
        ("load a model", _) => Box::pin(async move {
            let name = Some("another".to_owned());
            let loaded = world.runtime.load_with(ModelSource::demo(), LoadOptions { name, ..small() }, |_| {}).await;
            loaded.map(drop).map_err(|error| message_of(&error))
        }),
        ("shut down", _) => {
            Box::pin(async move { world.runtime.unload("nobody").await.map_err(|error| message_of(&error)) })
        }
        ("supervised actors", _) => {
            Box::pin(async move { world.runtime.supervised().await.map(drop).map_err(|error| message_of(&error)) })
        }
        ("health", _) => Box::pin(async move {
            let is_live = world.runtime.health().await.is_live;
            is_live.then_some(()).ok_or_else(|| "the runtime does not answer".to_owned())
        }),
        ("measure", _) => Box::pin(async move { budget.measure().await.map(drop).map_err(|error| message_of(&error)) }),
        ("snapshot", _) => {
            Box::pin(async move { budget.snapshot().await.map(drop).map_err(|error| message_of(&error)) })
        }
        ("clear a dead owner", _) => Box::pin(async move {
            testing::clear(budget, Owner::new("nobody", 0)).await.map_err(|error| message_of(&error))
        }),
        ("move the gate", _) => Box::pin(async move {
            let moved = testing::move_gate(budget, Label::from("rule 13"), Gate::Open).await;
            moved.map(drop).map_err(|error| message_of(&error))
        }),
        ("evidence", _) => {
            Box::pin(async move { testing::evidence(budget).await.map(drop).map_err(|error| message_of(&error)) })
        }
        ("available memory" | "memory for a start", _) => {
            Box::pin(async move { budget.available().await.map(drop).map_err(|error| message_of(&error)) })
        }
        ("put a model to sleep", _) => Box::pin(async move {
            let (reply, answer) = Responder::new();
            let order = SleepOrder::Sleep { level: SleepLevel::Level2, within: Duration::ZERO, reply };
            let message = RuntimeMessage::SleepOrder { name: "nobody".to_owned(), load: 0, order };
            world.runtime.cell().send_message(message).map_err(|error| message_of(&error))?;
            // The error that no such model exists also counts as an answer.
            question.wait(answer).await.map(drop).map_err(|error| message_of(&error))
        }),
        ("lease or resize" | "resize keys and values" | "lease memory for weights", _) => Box::pin(async move {
            let resized = testing::resize(budget, *question, &world.lease, Bytes::mib(2)).await;
            resized.map_err(|error| message_of(&error))
        }),
        ("lease" | "lease host memory", _) => Box::pin(async move {
            let class = if question.what == "lease" { Class::external("rule 13") } else { Class::Host };
            let lease = testing::lease(budget, *question, request(class, Bytes::mib(1)), true).await;
            lease.map(drop).map_err(|error| message_of(&error))
        }),
        ("run a worst case" | "capture a graph" | "capture a graph again", _) => Box::pin(async move {
            // A lane answers through an `Answer` even if its thread dies with the job. Dropping the
            // `Answer` simulates such a death.
            let (reply, answer) = Responder::new();
            drop(Answer::<()>::to(|outcome| reply.answer(outcome)));
            let outcome = question.wait(answer).await.map_err(|error| message_of(&error))?;
            outcome.map_err(|error| message_of(&error))
        }),
        ("embed pictures", _) => Box::pin(async move {
            let serving = world.model.serving().await.map_err(|error| message_of(&error))?;
            let vision = serving.vision.expect("the demo model takes pictures");
            let picture = EncodedImage::new(crate::stage::png(&image::RgbImage::new(56, 56)));
            let limits = MediaLimits { envelope: &serving.context.envelope, image: &serving.context.image_limits };
            let processors = serving.context.processors.as_ref().expect("the demo model takes pictures");
            let pictures = processors.plan(&[Media::Image(picture)], limits).map_err(|error| message_of(&error))?;
            let embedded = question
                .ask(&vision, |reply| VisionMessage::Embed { pictures, priority: Priority::default(), reply })
                .await;
            embedded.map_err(|error| message_of(&error))?.map(drop).map_err(|error| message_of(&error))
        }),
        ("hash pictures", _) => Box::pin(async move {
            let serving = world.model.serving().await.map_err(|error| message_of(&error))?;
            let vision = serving.vision.expect("the demo model takes pictures");
            let named = question.ask(&vision, |reply| VisionMessage::Name { files: Vec::new(), reply }).await;
            named.map(drop).map_err(|error| message_of(&error))
        }),
        ("look up a prefix", _) => Box::pin(async move {
            let serving = world.model.serving().await.map_err(|error| message_of(&error))?;
            let look_up = |reply| SchedulerMessage::LookUp { prefix: PrefixKeys::default(), reply };
            question.ask(&serving.scheduler, look_up).await.map(drop).map_err(|error| message_of(&error))
        }),
        ("use another number of blocks", _) => Box::pin(async move {
            let serving = world.model.serving().await.map_err(|error| message_of(&error))?;
            let blocks = serving.record.kv_blocks;
            let resized = question.ask(&serving.scheduler, |reply| SchedulerMessage::Resize { blocks, reply }).await;
            resized.map_err(|error| message_of(&error))
        }),
        other => panic!("{other:?} is in the table of questions but is not asked here"),
    }
}

async fn answerers() -> Answerers {
    let runtime = runtime_on(&device()).await;
    let model = demo(&runtime, small()).await;
    let lease = runtime.budget().lease(Class::external("mine"), MIB).await.expect("memory is free");
    Answerers { runtime, model, lease }
}

#[test]
fn rule_13_every_question_is_answered_once_despite_deaths() {
    story(async {
        // Well below any deadline, so that a result within this time is an answer and not a
        // timeout.
        let soon = Duration::from_secs(30);
        for ending in ["nothing", "a death", "an error", "a shutdown", "the end"] {
            let world = answerers().await;
            if ending == "the end" {
                world.runtime.clone().shutdown().await;
            }
            let world = &world;
            let asked = QUESTIONS.iter().map(|question| async move {
                // Repeat the question without a pause, so that every kind of death meets some
                // questions in progress.
                let mut answers = BTreeMap::new();
                for _ in 0..3 {
                    let answer = tokio::time::timeout(soon, put(question, world)).await;
                    let answer = answer.unwrap_or_else(|_| panic!("{question:?} is not answered, {ending}"));
                    assert!(!answer.as_ref().is_err_and(String::is_empty), "{question:?}: an error has a text");
                    *answers.entry(answer.is_ok()).or_insert(0usize) += 1;
                }
                assert_eq!(answers.values().sum::<usize>(), 3, "{question:?} is answered once each time");
                // An actor that is alive and undisturbed answers every question without an error.
                // The questions to lanes end in an error, because `put` simulates the death of a
                // lane.
                let refused = answers.contains_key(&false);
                let of_a_lane =
                    [tree::STRESS, tree::CAPTURE, tree::RECAPTURE].iter().any(|lanes| lanes.what == question.what);
                assert!(ending != "nothing" || refused == of_a_lane, "{question:?}: {answers:?}");
            });
            let inject_fault = async {
                let serving = world.model.serving().await;
                let Ok(serving) = serving else { return };
                let supervised = world.runtime.supervised().await;
                let drill = match ending {
                    "a death" => FaultInjection::Panic,
                    "an error" => FaultInjection::Fail,
                    "a shutdown" => {
                        world.runtime.clone().shutdown().await;
                        return;
                    }
                    _ => return,
                };
                drop(serving.scheduler.send_message(SchedulerMessage::InjectFault(drill)));
                drop(serving.vision.map(|vision| vision.send_message(VisionMessage::InjectFault(drill))));
                if let Ok(supervised) = supervised {
                    drop(supervised.budget.send_message(BudgetMessage::InjectFault(drill)));
                }
                tokio::task::yield_now().await;
                drop(world.runtime.cell().send_message(RuntimeMessage::InjectFault(drill)));
            };
            tokio::join!(all(asked.collect()), inject_fault);
        }
    });
}

/// Runs all futures concurrently.
async fn all<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut futures: Vec<_> = futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    std::future::poll_fn(|context| {
        for slot in &mut futures {
            if slot.as_mut().is_some_and(|future| future.as_mut().poll(context).is_ready()) {
                *slot = None;
            }
        }
        if futures.iter().all(Option::is_none) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// Text that must never appear outside its request.
const SECRET: &str = "Xylophon42";

fn all_texts_of(error: &ChatError) -> String {
    format!("{error} {error:?} {}", error.hint())
}

#[test]
fn rule_15_no_error_or_metric_contains_prompt_picture_or_reply() {
    let metrics_log = MetricsLog::open();
    story(async {
        let stage = Stage::set(LoadOptions { requests: Some(3), ..small() }).await;
        let secret = || text(&format!("The word is {SECRET}. Describe.")).image(picture(1)).stop(SECRET);
        let bytes = |bytes: &[u8]| Image::from_bytes(bytes);
        let png = crate::stage::png(&image::RgbImage::from_pixel(90, 70, image::Rgb([1, 2, 3])));
        let mut cut = png[..png.len() / 2].to_vec();
        cut.extend(SECRET.as_bytes());
        let chats: Vec<(&str, Chat)> = vec![
            ("too long", text(&format!("{SECRET} ").repeat(400))),
            ("too many pictures", secret().image(picture(2)).image(picture(3))),
            ("no picture", secret().image(bytes(SECRET.as_bytes()))),
            ("half a picture", secret().image(bytes(&cut))),
            ("no temperature", secret().temperature(f64::NAN)),
            ("no tokens", secret().max_tokens(0)),
        ];
        let mut parts = Vec::new();
        for (name, chat) in chats {
            let error = ask(&stage.model, chat).await.expect_err(name);
            parts.push(all_texts_of(&error));
        }
        let reply = answer(&stage.model, secret().temperature(9.0).top_k(0).seed(1)).await;
        assert!(reply.len() > 8, "the reply has only {} bytes of text to search for", reply.len());

        // Errors of accepted requests: overload, deaths, and shutdown.
        let under_way = [stage.model.chat(secret().max_tokens(150)).await, stage.model.chat(secret()).await];
        let mut unread = Vec::new();
        loop {
            match stage.model.chat(secret()).await {
                Ok(reply) => unread.push(reply),
                Err(error) => break parts.push(all_texts_of(&error)),
            }
        }
        let serving = stage.model.serving().await.expect("the model serves");
        drop(serving.scheduler.send_message(SchedulerMessage::InjectFault(FaultInjection::Panic)));
        eventually("it is ready again", async || {
            stage.model.serving().await.is_ok_and(|now| now.generation > serving.generation)
        })
        .await;
        stage.runtime.unload("demo").await.expect("the model unloads");
        for reply in under_way.into_iter().map(|reply| reply.expect("accepted")).chain(unread) {
            parts.extend(listen(reply).await.err().as_ref().map(all_texts_of));
        }
        parts.push(all_texts_of(&ask(&stage.model, secret()).await.expect_err("the model has ended")));

        assert!(parts.len() >= 8, "only {} errors were collected", parts.len());
        for error in parts {
            assert!(!error.contains(SECRET) && !error.contains(&reply), "an error shows content of a request");
        }
        let names = metrics_log.names();
        assert!(names.iter().any(|name| name.contains("model=demo")), "metrics of the model were recorded: {names:?}");
        assert!(names.iter().all(|name| !name.contains(SECRET) && !name.contains(&reply)), "a metric shows content");
    });
}

#[test]
fn rule_9_every_queue_is_counted_and_refuses_beyond_its_limit() {
    story(async {
        let stage = Stage::set(small()).await;
        let budget = stage.runtime.budget();
        let free = stage.snapshot().await.free;
        let all = budget.lease(Class::external("all"), free).await.expect("memory is free");
        // At most 256 leases wait in the queue. One more is refused at once.
        let waiting: Vec<_> = (0..256)
            .map(|_| {
                let budget = budget.clone();
                tokio::spawn(async move { budget.lease(Class::external("more"), MIB).await.map(drop) })
            })
            .collect();
        eventually("all 256 requests wait", async || stage.snapshot().await.waiting.len() == 256).await;
        let refused = budget.lease(Class::external("more"), MIB).await.expect_err("the queue of leases is full");
        assert!(!refused.hint().is_empty() && refused.to_string().contains("256"), "{refused}");
        assert!(!answer(&stage.model, about(1)).await.is_empty(), "the model works with the memory that it has");
        drop(all);
        for waited in waiting {
            waited.await.expect("no panic").expect("each waiting lease is granted");
        }
    });
}
