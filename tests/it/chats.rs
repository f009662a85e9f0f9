//! Chats that succeed.

use std::time::Duration;

use bursar::{Chat, ChatError, ChatEvent, Envelope, FinishReason, Hint, LoadOptions, StopReason};

use crate::{
    metrics_log::MetricsLog,
    stage::{Stage, about, answer, ask, listen, picture, small, small_envelope, story, text},
};

#[test]
fn a_chat_streams_text_and_ends_with_done_and_usage() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let whole = ask(&stage.model, about(1)).await.expect("the model answers");
        assert!(!whole.text.is_empty());
        assert_eq!(whole.pieces.concat(), whole.text, "the pieces add up to the whole text");
        assert!(whole.usage.picture_tokens > 0 && whole.usage.prompt_tokens > whole.usage.picture_tokens);
        assert!((1..=24).contains(&whole.usage.completion_tokens));
        stage.settled(&before).await;
    });
}

#[test]
fn a_length_limit_ends_a_reply_after_its_tokens() {
    story(async {
        let stage = Stage::set(small()).await;
        let whole = ask(&stage.model, about(1).max_tokens(2)).await.expect("the model answers");
        assert_eq!((whole.usage.completion_tokens, whole.finish_reason), (2, FinishReason::Length));
    });
}

#[test]
fn greedy_replies_repeat_and_seeds_determine_sampled_replies() {
    story(async {
        let stage = Stage::set(small()).await;
        assert_eq!(answer(&stage.model, about(2)).await, answer(&stage.model, about(2)).await);
        // The temperature is so high that two seeds give the same 24 tokens only if seeds are
        // ignored.
        let hot = |seed| text("Tell me something.").temperature(20.0).top_k(0).top_p(1.0).seed(seed);
        let first = answer(&stage.model, hot(7)).await;
        assert_eq!(first, answer(&stage.model, hot(7)).await, "the same seed gives the same reply");
        assert_ne!(first, answer(&stage.model, hot(8)).await, "another seed gives another reply");
        let warm = |seed| text("Tell me something.").temperature(1.0).seed(seed);
        assert_eq!(answer(&stage.model, warm(3)).await, answer(&stage.model, warm(3)).await);
    });
}

#[test]
fn text_chats_and_pictures_in_two_turns_are_answered() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let plain = ask(&stage.model, text("Who are you?")).await.expect("the model answers");
        assert_eq!(plain.usage.picture_tokens, 0);
        let first = answer(&stage.model, about(3)).await;
        let second = about(3).assistant(first).user("And now?").image(picture(4));
        let whole = ask(&stage.model, second).await.expect("the model answers");
        assert!(whole.usage.picture_tokens > plain.usage.picture_tokens);
        stage.settled(&before).await;
    });
}

#[test]
fn a_repeated_picture_counts_twice_in_the_prompt() {
    story(async {
        let stage = Stage::set(small()).await;
        let once = ask(&stage.model, about(5)).await.expect("the model answers").usage.picture_tokens;
        let twice = ask(&stage.model, about(5).image(picture(5))).await.expect("an answer").usage.picture_tokens;
        assert_eq!(twice, 2 * once);
    });
}

/// A mix of chats: shared pictures, unique pictures, text only, long and short.
fn mixed(number: u32) -> Chat {
    match number % 4 {
        0 => about(number),
        1 => text("Who are you?").max_tokens(8 + number as usize),
        2 => about(number % 3),
        _ => about(number % 5).image(picture(number)),
    }
}

#[test]
fn concurrent_chats_give_the_same_replies_as_sequential_ones() {
    story(async {
        // The KV cache is too small for all chats: some wait, and some
        // are preempted and recomputed.
        let stage = Stage::set(LoadOptions { kv_tokens: Some(512), ..small() }).await;
        let before = stage.snapshot().await;
        let mut alone = Vec::new();
        for number in 0..24 {
            alone.push(answer(&stage.model, mixed(number)).await);
        }
        let together: Vec<_> = (0..24)
            .map(|number| {
                let model = stage.model.clone();
                tokio::spawn(async move { answer(&model, mixed(number)).await })
            })
            .collect();
        for (number, reply) in together.into_iter().enumerate() {
            assert_eq!(reply.await.expect("no panic"), alone[number], "chat {number} alone and concurrently");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn a_reply_preempted_with_its_picture_continues_unchanged() {
    let metrics_log = MetricsLog::open();
    story(async {
        // On a busy machine the requests may begin so far apart that none is preempted.
        for attempt in 0..5 {
            let name = format!("come again {attempt}");
            replies_that_lose_pictures(&name).await;
            let wanted_again = metrics_log.most(&format!("bursar_pictures_wanted_again_total{{model={name}}}"));
            if wanted_again > Some(0.0) {
                return;
            }
        }
        panic!("in five attempts, no preempted sequence released the rows of its picture");
    });
}

async fn replies_that_lose_pictures(name: &str) {
    // The KV cache (8,192 tokens, the probe's size) cannot hold all sequences until they end. The
    // scheduler still admits them all, because the short replies that ran first made its
    // predictions optimistic, and because the prompts leave half of the cache free.
    let envelope = Envelope { sequences: 22, context_tokens: 512, step_tokens: 256, ..small_envelope() };
    let options = LoadOptions { name: Some(name.to_owned()), envelope: Some(envelope), ..small() };
    let stage = Stage::set(options).await;
    assert_eq!(stage.model.serving().await.expect("the model serves").record.kv_tokens(), 8192);
    let before = stage.snapshot().await;
    for number in 30..34 {
        answer(&stage.model, about(number).max_tokens(1).ignore_end()).await;
    }
    let long = |number| {
        let question = "Describe the picture. ".repeat(18);
        text(&question).image(picture(number)).max_tokens(310).ignore_end()
    };
    let together: Vec<_> = (0..22)
        .map(|number| {
            let model = stage.model.clone();
            tokio::spawn(async move { ask(&model, long(number)).await.expect("the model answers") })
        })
        .collect();
    let mut replies = Vec::new();
    for reply in together {
        replies.push(reply.await.expect("no panic"));
    }
    assert!(replies.iter().all(|reply| reply.usage.completion_tokens == 310));
    let tokens: usize = replies.iter().map(|reply| reply.usage.prompt_tokens + 310).sum();
    assert!(tokens > 8192, "all sequences would have fit: {tokens} tokens");
    // The youngest sequences are preempted first.
    for (number, reply) in (0..).zip(replies).skip(18) {
        assert_eq!(reply.text, answer(&stage.model, long(number)).await, "chat {number} alone and concurrently");
    }
    stage.settled(&before).await;
}

#[test]
fn dropping_a_reply_cancels_only_that_request() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let expected = answer(&stage.model, about(1)).await;
        for round in 0..4 {
            let others: Vec<_> = (0..4)
                .map(|_| {
                    let model = stage.model.clone();
                    tokio::spawn(async move { answer(&model, about(1)).await })
                })
                .collect();
            for number in 0..6 {
                let mut dropped = stage.model.chat(about(10 + number).max_tokens(100)).await.expect("accepted");
                // The reply is dropped either at once, while its picture is encoded, or after its
                // first token.
                if (number + round) % 2 == 0 {
                    drop(dropped.next().await);
                }
            }
            for other in others {
                assert_eq!(other.await.expect("no panic"), expected);
            }
        }
        stage.settled(&before).await;
    });
}

#[test]
fn rule_9_a_request_over_the_limit_is_refused_until_one_ends() {
    story(async {
        let stage = Stage::set(LoadOptions { requests: Some(2), ..small() }).await;
        for round in 0..3 {
            let first = stage.model.chat(about(1)).await.expect("the first request is accepted");
            let second = stage.model.chat(about(2)).await.expect("the second request is accepted");
            let third = stage.model.chat(about(3)).await.expect_err("the third request is refused");
            assert!(matches!(third, ChatError::Overloaded { limit: 2 }), "{third}");
            assert!(third.hint().contains("requests"));
            listen(first).await.expect("the model answers");
            let next = stage.model.chat(about(4)).await.unwrap_or_else(|error| panic!("round {round}: {error}"));
            listen(second).await.expect("the model answers");
            listen(next).await.expect("the model answers");
        }
    });
}

#[test]
fn a_stop_string_across_tokens_ends_the_reply_before_it() {
    story(async {
        let stage = Stage::set(small()).await;
        let free = ask(&stage.model, about(1)).await.expect("the model answers");
        // The stop string reaches from the middle of one piece to the middle of the next piece.
        let [first, second, ..] = &free.pieces[..] else { panic!("expected at least two pieces: {free:?}") };
        let half = |text: &str| text.chars().count() / 2;
        let stop: String = first.chars().skip(half(first)).chain(second.chars().take(half(second).max(1))).collect();
        let stopped = ask(&stage.model, about(1).stop(&stop)).await.expect("the model answers");
        let expected = free.text.split(&stop).next().expect("the text before it");
        assert_eq!(stopped.text, expected);
        assert_eq!(stopped.pieces.concat(), expected, "no part of the stop string is shown");
        assert_eq!(stopped.finish_reason, FinishReason::Stop);
        assert_eq!((stopped.stop_reason, free.stop_reason), (Some(StopReason::String(stop)), None));
    });
}

#[test]
fn a_slow_reader_delays_only_its_own_reply() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let long = || text("Tell me something.").temperature(20.0).top_k(0).top_p(1.0).seed(1).max_tokens(200);
        let expected = answer(&stage.model, long()).await;
        let slow = stage.model.chat(long()).await.expect("accepted");
        for number in 0..4 {
            answer(&stage.model, about(number)).await;
        }
        let mut slow = slow;
        let mut text = String::new();
        while let Some(event) = slow.next().await {
            match event.expect("the model answers") {
                ChatEvent::Text(piece) => text.push_str(&piece),
                ChatEvent::Done { text: whole, .. } => assert_eq!(whole, text),
                event => panic!("only text was asked for: {event:?}"),
            }
        }
        assert_eq!(text, expected);
        stage.settled(&before).await;
    });
}

#[test]
fn an_unread_reply_does_not_delay_a_shutdown() {
    story(async {
        let stage = Stage::set(small()).await;
        let unread = stage.model.chat(text("Who are you?")).await.expect("accepted");
        tokio::time::timeout(Duration::from_secs(20), stage.runtime.clone().shutdown()).await.expect("in time");
        // The reply may have ended before the shutdown. In both cases the reply ends exactly once.
        drop(listen(unread).await);
    });
}
