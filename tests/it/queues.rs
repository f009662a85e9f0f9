//! The order of the queue and its deadlines: priorities, tenants, and requests
//! that waited too long.

use std::time::Duration;

use bursar::{Chat, ChatError, Deadline, Deadlines, Envelope, LoadOptions, TenantWeights};

use crate::{
    metrics_log::MetricsLog,
    stage::{Stage, about, answer, ask, eventually, listen, small, small_envelope, story, text},
};

/// A model that runs one sequence at a time.
fn narrow(name: &str) -> LoadOptions {
    let envelope = Some(Envelope { sequences: 1, ..small_envelope() });
    LoadOptions { name: Some(name.to_owned()), envelope, ..small() }
}

fn long() -> Chat {
    text("Tell me something.").max_tokens(200).ignore_end()
}

#[test]
fn an_urgent_chat_preempts_another_without_losing_text() {
    let metrics_log = MetricsLog::open();
    story(async {
        let stage = Stage::set(narrow("urgent")).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, long()).await;
        let mut slow = stage.model.chat(long().priority(5)).await.expect("accepted");
        slow.next().await.expect("the request runs").expect("a token");
        let mut waiting = Vec::new();
        for number in 0..3 {
            waiting.push(stage.model.chat(text(&format!("Question {number}?")).priority(5)).await.expect("accepted"));
        }
        eventually("the other requests wait", async || {
            metrics_log.now("bursar_sequences_waiting{model=urgent}") >= 3.0
        })
        .await;
        ask(&stage.model, about(9).priority(-1)).await.expect("the model answers");
        assert!(stage.model.requests().0 >= 2, "the other requests have not ended");
        assert_eq!(metrics_log.now("bursar_preemptions_total{model=urgent,reason=priority}"), 1.0);
        assert_eq!(listen(slow).await.expect("the model answers").text, expected);
        for waiting in waiting {
            listen(waiting).await.expect("the model answers");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn a_chat_past_a_deadline_names_it_and_holds_nothing() {
    let metrics_log = MetricsLog::open();
    story(async {
        let stage = Stage::set(narrow("late")).await;
        let before = stage.snapshot().await;
        let mut ahead = Vec::new();
        for _ in 0..4 {
            ahead.push(stage.model.chat(long()).await.expect("accepted"));
        }
        let limit = Duration::from_millis(20);
        for (chat, expected) in [
            (about(1).queue_deadline(limit), Deadline::Queue),
            (about(1).first_token_deadline(limit), Deadline::FirstToken),
            (about(1).deadline(limit), Deadline::Reply),
            (about(1).queue_deadline(limit * 2).first_token_deadline(limit), Deadline::FirstToken),
        ] {
            match ask(&stage.model, chat).await {
                Err(ChatError::TooLate { deadline, limit: of, waited }) => {
                    assert_eq!((deadline, of), (expected, limit));
                    // A first-token or reply deadline ends a request early, as soon as the request
                    // can no longer meet it.
                    assert!(waited >= limit || deadline != Deadline::Queue, "{waited:?}");
                }
                other => panic!("{expected:?}: {other:?}"),
            }
        }
        let missed = |reason| metrics_log.now(&format!("bursar_deadlines_missed_total{{model=late,reason={reason}}}"));
        assert_eq!([missed("queue"), missed("first_token"), missed("reply")], [1.0, 2.0, 1.0]);
        assert_eq!(metrics_log.now("bursar_requests_total{model=late,reason=too_late}"), 4.0);
        for ahead in ahead {
            listen(ahead).await.expect("the model answers");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn a_models_deadlines_apply_to_chats_without_deadlines() {
    story(async {
        let deadlines = Deadlines { queue: Some(Duration::ZERO), ..Deadlines::default() };
        let stage = Stage::set(LoadOptions { deadlines, ..small() }).await;
        let error = ask(&stage.model, about(1)).await.expect_err("a deadline of 0 ms is missed");
        assert!(matches!(error, ChatError::TooLate { deadline: Deadline::Queue, .. }), "{error:?}");
        assert!(error.to_string().contains("0 ms"), "{error}");
        ask(&stage.model, about(1).queue_deadline(Duration::MAX)).await.expect("a request without a limit is answered");
        let samples = stage.model.samples(about(1).queue_deadline(Duration::from_secs(60)), 3).await.expect("accepted");
        for sample in samples {
            listen(sample).await.expect("the model answers");
        }
    });
}

#[test]
fn a_tenants_chat_overtakes_another_tenants_backlog() {
    let metrics_log = MetricsLog::open();
    story(async {
        let weights = TenantWeights::of([("calm", 2)]).expect("a valid weight");
        let stage = Stage::set(LoadOptions { tenant_weights: weights, ..narrow("tenants") }).await;
        // Two long chats, so that all other chats are queued before the first one ends.
        let mut busy = Vec::new();
        for _ in 0..2 {
            busy.push(stage.model.chat(long()).await.expect("accepted"));
        }
        for number in 0..10 {
            let chat = text(&format!("Question {number}?")).max_tokens(20).ignore_end();
            busy.push(stage.model.chat(chat.tenant("someone's own name")).await.expect("accepted"));
        }
        eventually("the other requests wait", async || {
            metrics_log.now("bursar_sequences_waiting{model=tenants}") >= 10.0
        })
        .await;
        ask(&stage.model, text("And mine?").tenant("calm")).await.expect("the model answers");
        assert!(stage.model.requests().0 >= 6, "most of the other requests wait: {:?}", stage.model.requests());
        for busy in busy {
            listen(busy).await.expect("the model answers");
        }
        let tokens = |tenant| metrics_log.now(&format!("bursar_tenant_tokens_total{{model=tenants,tenant={tenant}}}"));
        assert!(tokens("calm") > 0.0 && tokens("other") >= 10.0 * 20.0);
        assert!(
            !metrics_log.names().iter().any(|name| name.contains("someone")),
            "rule 15: a tenant's name is not a label"
        );
        let error = ask(&stage.model, about(1).tenant("t".repeat(65))).await.expect_err("the tenant's name is long");
        assert!(matches!(error, ChatError::TenantName { bytes: 65, limit: 64 }), "{error:?}");
    });
}
