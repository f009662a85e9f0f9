//! Requests with values out of range: every number that a chat can set, and texts that are too
//! long. Each fails at once and affects no other request.

use std::time::Duration;

use bursar::{Chat, ChatError, Hint, LoadOptions};
use bursar_model::error::TextError;

use crate::stage::{
    Stage, about, answer, ask, blocking_threads_kept, eventually, listen, small, story, story_with_blocking_threads,
    text,
};

/// Values that no parameter accepts.
const NO_NUMBERS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

type Set = fn(Chat, f64) -> Chat;

/// Each parameter with out-of-range values (in addition to `NO_NUMBERS`) and with some valid
/// values.
fn parameters() -> Vec<(&'static str, Set, &'static [f64], &'static [f64])> {
    vec![
        ("temperature", Chat::temperature, &[-1.0, -1e-9, 100.1], &[0.0, 1e-6, 100.0]),
        ("top_p", Chat::top_p, &[0.0, -0.5, 1.0001], &[1e-9, 1.0]),
        ("min_p", Chat::min_p, &[-0.1, 1.1], &[0.0, 1.0]),
        ("repetition_penalty", Chat::repetition_penalty, &[0.0, -1.0, 100.1], &[0.01, 1.0, 100.0]),
        ("presence_penalty", Chat::presence_penalty, &[-2.1, 2.1], &[-2.0, 0.0, 2.0]),
        ("frequency_penalty", Chat::frequency_penalty, &[-2.1, 2.1], &[-2.0, 0.0, 2.0]),
        ("logit_bias", |chat, bias| chat.logit_bias(5, bias), &[-100.1, 100.1], &[-100.0, 0.0, 100.0]),
    ]
}

#[test]
fn each_number_is_checked_against_its_range_and_refused_by_name() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, about(1)).await;
        let before = stage.snapshot().await;
        for (name, set, refused, taken) in parameters() {
            for &value in refused.iter().chain(&NO_NUMBERS) {
                let other = stage.model.chat(about(1)).await.expect("the good request is accepted");
                let error = ask(&stage.model, set(about(2), value)).await.expect_err(name);
                assert!(matches!(error, ChatError::Sampling(_)), "{name} {value}: {error:?}");
                let message = error.to_string();
                assert!(message.contains(name) && message.contains(&value.to_string()), "{name} {value}: {message}");
                assert!(error.hint().contains(name), "{name} {value}: {}", error.hint());
                assert_eq!(listen(other).await.expect("the model answers").text, expected, "during {name} {value}");
            }
            for &value in taken {
                let whole = ask(&stage.model, set(text("Who are you?").temperature(1.0), value).max_tokens(2)).await;
                whole.unwrap_or_else(|error| panic!("{name} {value}: {error}"));
            }
        }
        stage.settled(&before).await;
    });
}

#[test]
fn zero_and_huge_counts_have_a_meaning_or_an_error() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        // No limit, a single candidate, and more candidates than the vocabulary has.
        for top_k in [0, 1, usize::MAX] {
            let whole = ask(&stage.model, text("Who?").temperature(1.0).top_k(top_k).max_tokens(2)).await;
            whole.unwrap_or_else(|error| panic!("top_k {top_k}: {error}"));
        }
        let whole = ask(&stage.model, text("Who?").max_tokens(usize::MAX)).await.expect("limited by the context size");
        assert!(whole.usage.prompt_tokens + whole.usage.completion_tokens <= 256);
        let error = ask(&stage.model, text("Who?").max_tokens(0)).await.expect_err("a reply has at least one token");
        assert!(matches!(error, ChatError::NoTokens) && error.hint().contains("one token"), "{error:?}");
        let error = ask(&stage.model, text("Who?").min_tokens(usize::MAX)).await.expect_err("the minimum is too large");
        assert!(matches!(error, ChatError::MinTokens { tokens_min: usize::MAX, .. }), "{error:?}");
        let error = ask(&stage.model, text("Who?").logit_bias(u32::MAX, 1.0)).await.expect_err("the token is unknown");
        assert!(matches!(error, ChatError::Sampling(_)) && error.to_string().contains("4294967295"), "{error}");
        // Lists of biases and stop tokens go to the device with every step.
        let biased =
            |count: u32| (0..count).fold(text("Who?").max_tokens(2), |chat, token| chat.logit_bias(token, 1.0));
        let ended =
            |count: u32| (0..count).fold(text("Who?").max_tokens(2), |chat, token| chat.stop_token(token % 800));
        ask(&stage.model, biased(850)).await.expect("a bias for each token of the vocabulary");
        ask(&stage.model, ended(850).min_tokens(1)).await.expect("repeated stop tokens count once");
        for samples in [0, 5000, usize::MAX] {
            let error = stage.model.samples(text("Who?"), samples).await.map(drop).expect_err("an impossible number");
            assert!(error.to_string().contains(&samples.to_string()) && !error.hint().is_empty(), "{error}");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn stop_strings_are_limited_in_number_and_length() {
    story(async {
        let stage = Stage::set(small()).await;
        let before = stage.snapshot().await;
        let many =
            |count: usize| (0..count).fold(text("Who are you?"), |chat, number| chat.stop(format!("so{number}")));
        let long = |bytes: usize| text("Who are you?").stop("x".repeat(bytes));
        for (name, chat) in [
            ("an empty string", text("Who?").stop("")),
            ("an empty string among others", many(3).stop("")),
            ("one more than allowed", many(17)),
            ("a million strings", many(1_000_000)),
            ("a long string", long(1025)),
            ("a huge string", long(64 << 20)),
        ] {
            let error = ask(&stage.model, chat).await.expect_err(name);
            let ChatError::Text(source) = &error else { panic!("{name}: {error:?}") };
            assert!(
                matches!(**source, TextError::StopStrings { count_max: 16, bytes_max: 1024, .. }),
                "{name}: {error:?}"
            );
            assert!(error.hint().contains("16") && error.to_string().len() < 200, "{name}: {error}");
        }
        for chat in [many(16), long(1024)] {
            ask(&stage.model, chat.max_tokens(2)).await.expect("the request is just within the limit");
        }
        stage.settled(&before).await;
    });
}

#[test]
fn empty_turns_and_oversized_prompts_fail_only_their_chat() {
    story(async {
        let stage = Stage::set(small()).await;
        let expected = answer(&stage.model, about(1)).await;
        let before = stage.snapshot().await;
        // The template decides whether these chats are valid. Its decision affects only this chat.
        let only_system = Chat::new().system("Answer briefly.").max_tokens(2);
        for (name, chat) in [
            ("an empty question", text("").max_tokens(2)),
            ("a turn of nothing", Chat::new().turn(bursar::Role::User, Vec::new()).max_tokens(2)),
            ("only a system turn", only_system),
            ("only an assistant turn", Chat::new().assistant("I say.").max_tokens(2)),
        ] {
            match ask(&stage.model, chat).await {
                Ok(whole) => assert!(whole.usage.prompt_tokens > 0, "{name}"),
                Err(error) => {
                    assert!(matches!(error, ChatError::Text(_)) && !error.hint().is_empty(), "{name}: {error}")
                }
            }
        }
        // Send a prompt that is longer than the context, and a prompt so much longer that only its
        // beginning is tokenized.
        for (bytes, more) in [(8_000, false), (17 << 20, true)] {
            let error = ask(&stage.model, text(&"so ".repeat(bytes / 3 + 1))).await.expect_err("too many tokens");
            let ChatError::TooLong { limit: 256, has_more, .. } = error else { panic!("{error:?}") };
            assert_eq!((has_more, error.hint().is_empty()), (more, false), "{bytes} bytes: {error}");
        }
        assert_eq!(answer(&stage.model, about(1)).await, expected);
        stage.settled(&before).await;
    });
}

#[test]
fn a_full_queue_refuses_at_once_and_holds_nothing() {
    story(async {
        let stage = Stage::set(LoadOptions { requests: Some(3), ..small() }).await;
        let before = stage.snapshot().await;
        let mut accepted = Vec::new();
        for number in 0..3 {
            accepted.push(stage.model.chat(about(number)).await.expect("the queue is not full"));
        }
        for _ in 0..50 {
            let error = stage.model.chat(about(9)).await.expect_err("the queue is full");
            assert!(matches!(error, ChatError::Overloaded { limit: 3 }), "{error:?}");
            assert!(error.to_string().contains('3') && error.hint().contains("requests"), "{error}: {}", error.hint());
        }
        for reply in accepted {
            listen(reply).await.expect("accepted requests are answered");
        }
        // A request that is refused frees its slot in the queue too.
        for _ in 0..4 {
            ask(&stage.model, about(1).temperature(f64::NAN)).await.expect_err("NaN is not a temperature");
        }
        ask(&stage.model, about(1)).await.expect("the queue has a free slot");
        stage.settled(&before).await;
    });
}

#[test]
fn a_dropped_chat_counts_as_running_until_its_preparation_ends() {
    story_with_blocking_threads(4, async {
        let stage = Stage::set(LoadOptions { requests: Some(1), ..small() }).await;
        let kept = blocking_threads_kept(4);
        let asking = tokio::time::timeout(Duration::from_millis(50), stage.model.chat(text("Who?"))).await;
        assert!(asking.is_err(), "no thread is free to prepare the request");
        assert_eq!(stage.model.requests().0, 1, "the request still counts");
        let error = ask(&stage.model, text("Who?")).await.expect_err("one request more than the limit");
        assert!(matches!(error, ChatError::Overloaded { limit: 1 }), "{error:?}");
        drop(kept);
        eventually("the request has ended", async || stage.model.requests().0 == 0).await;
        ask(&stage.model, text("Who?").max_tokens(2)).await.expect("the model answers");
    });
}
