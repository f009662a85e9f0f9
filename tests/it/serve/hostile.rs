//! Hostile clients: no request gets a 500, nothing hangs, and the ledger is unchanged afterward.

use std::time::Duration;

use bursar::Snapshot;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use serde_json::{Value, json};

use super::client::{Fixture, hello, pause, posted};
use crate::stage::story;

/// A request with every field that the server reads.
fn full() -> Value {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {
        "type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": false}}});
    hello(json!({
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}},
                {"type": "video_url", "video_url": {"url": "data:image/gif;base64,R0lGODlhAQABAAAALAAAAAABAAEAAAICRAEAOw=="}, "fps": 2}]},
            {"role": "assistant", "reasoning_content": "r", "content": "c", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "k"},
        ],
        "max_tokens": 3, "max_completion_tokens": 3, "n": 1, "seed": 1, "stop": ["x"], "top_p": 0.5, "top_k": 5, "min_p": 0.1,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5}, "logprobs": true,
        "top_logprobs": 1, "prompt_logprobs": 1, "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": false,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}},
        "chat_template_kwargs": {"enable_thinking": true}, "reasoning_effort": "low", "continue_final_message": false,
        "add_generation_prompt": true, "return_token_ids": true, "mm_processor_kwargs": {"max_pixels": 3136}, "modalities": ["text"],
        "stop_token_ids": [1], "ignore_eos": false, "min_tokens": 0, "cache_salt": "s", "use_beam_search": false,
        "structured_outputs": {"choice": ["a"]}, "stream": false, "stream_options": {"include_usage": true},
    }))
}

/// The JSON pointers of all values within a value.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(map) => map.iter().for_each(|(name, value)| places(value, &format!("{at}/{name}"), found)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| places(item, &format!("{at}/{index}"), found))
        }
        _ => {}
    }
}

fn wild() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop_oneof![
            Just(1e308),
            Just(-1e308),
            Just(0.0),
            Just(1e-300),
            any::<f64>().prop_filter("JSON has no others", |x| x.is_finite())
        ]
        .prop_map(Value::from),
        "\\PC{0,20}".prop_map(Value::from),
        Just(json!("\r\n\r\ndata: {}\n\n")),
        Just(json!("\u{0}")),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[[]]]]])),
        Just(json!({"$ref": "#"})),
        Just(json!("a".repeat(3000))),
    ]
}

/// The ledger after all requests have released their memory.
async fn settled(fixture: &Fixture, before: &Snapshot) -> Snapshot {
    let mut now = fixture.stage.runtime.budget().snapshot().await.expect("a ledger");
    for _ in 0..500 {
        if now == *before {
            break;
        }
        pause(Duration::from_millis(10)).await;
        now = fixture.stage.runtime.budget().snapshot().await.expect("a ledger");
    }
    now
}

#[test]
fn no_field_value_causes_a_500_answer() {
    let body = full();
    let mut all = Vec::new();
    places(&body, "", &mut all);
    assert!(all.len() > 80, "only {} places are listed", all.len());
    let threads = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("threads");
    let fixture = threads.block_on(Fixture::usual());
    let before = threads.block_on(fixture.stage.runtime.budget().snapshot()).expect("a ledger");
    let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
    let changes = proptest::collection::vec((0..all.len(), wild()), 0..3);
    let outcome = runner.run(&(changes, any::<bool>(), 0_usize..40), |(changes, is_streamed, cut)| {
        let mut body = body.clone();
        body["stream"] = json!(is_streamed);
        for (place, value) in changes {
            if let Some(at) = body.pointer_mut(&all[place]) {
                *at = value;
            }
        }
        let mut text = body.to_string().into_bytes();
        // The end of the body is missing in some cases.
        if cut > 35 {
            text.truncate(text.len().saturating_sub(cut));
        }
        let answer = threads.block_on(fixture.say(&posted("/v1/chat/completions", "", &text)));
        prop_assert!(matches!(answer.status, 200 | 400 | 404), "{} {}", answer.status, answer.body);
        prop_assert!(!answer.body.contains("server_error"), "{}", answer.body);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    threads.block_on(async {
        let after = settled(&fixture, &before).await;
        assert_eq!(after, before);
        fixture.end().await;
    });
    threads.shutdown_background();
}

#[test]
fn names_and_texts_cannot_break_out_of_a_stream() {
    story(async {
        let fixture = Fixture::usual().await;
        let evil = "f\n\ndata: {\"choices\":[]}\r\n\r\nHTTP/1.1 200 OK";
        let tool = json!({"type": "function", "function": {"name": evil, "parameters": {
            "type": "object", "properties": {"x": {"const": "\n\ndata: [DONE]\n\n"}}, "required": ["x"], "additionalProperties": false}}});
        let answer = fixture
            .chat(
                json!({"stream": true, "max_tokens": 120, "model": "demo", "tools": [tool], "tool_choice": "required"}),
            )
            .await;
        if answer.status == 200 {
            assert!(answer.events().iter().all(|event| event["object"] == "chat.completion.chunk"), "{}", answer.body);
        } else {
            assert_eq!(answer.status, 400, "{}", answer.body);
        }
        let unknown = fixture.chat(json!({"model": evil})).await;
        assert_eq!(unknown.status, 404);
        assert!(unknown.body.lines().count() == 1, "{}", unknown.body);
        fixture.end().await;
    });
}

#[test]
fn urls_outside_the_allowed_sources_are_refused() {
    story(async {
        let fixture = Fixture::usual().await;
        for url in [
            "http://127.0.0.1:1/a.png",
            "https://example.org/a.png",
            "http://169.254.169.254/latest/meta-data",
            "file:///etc/passwd",
            "gopher://127.0.0.1/",
            "data:image/png,raw",
            "data:image/png;base64,!!!",
            "data:",
            "",
            "javascript:alert(1)",
            "//example.org/a",
        ] {
            let answer = fixture
                .chat(json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}))
                .await;
            assert_eq!(answer.status, 400, "{url}: {}", answer.body);
            assert_eq!(answer.error()["param"], "messages[0].content[0].image_url.url", "{url}");
        }
        fixture.end().await;
    });
}

#[test]
fn foreign_origins_and_host_names_are_refused() {
    story(async {
        let fixture = Fixture::usual().await;
        let body = hello(json!({"max_tokens": 1})).to_string();
        let from = |headers: &str| posted("/v1/chat/completions", headers, body.as_bytes());
        let own = format!("origin: http://{}\r\n", fixture.server.addr());
        for headers in ["origin: http://evil.net\r\n", "origin: null\r\n", "origin: http://here.evil.net\r\n"] {
            assert_eq!(fixture.say(&from(headers)).await.status, 403, "{headers}");
        }
        assert_eq!(fixture.say(&from("")).await.status, 200);
        let named = |host: &str, headers: &str| {
            let text = String::from_utf8(from(headers)).expect("text");
            text.replace("host: localhost", &format!("host: {host}")).into_bytes()
        };
        assert_eq!(
            fixture.say(&named(&fixture.server.addr().to_string(), &own)).await.status,
            200,
            "the server's page"
        );
        for host in ["evil.net", "localhost.evil.net", "", "a b"] {
            let answer = fixture.say(&named(host, "")).await;
            assert!(matches!(answer.status, 400 | 403), "{host}: {}", answer.status);
        }
        for host in ["127.0.0.1:8000", "[::1]:8000", "localhost:1", "a.localhost"] {
            assert_eq!(fixture.say(&named(host, "")).await.status, 200, "{host}");
        }
        fixture.end().await;
    });
}

#[test]
fn ten_thousand_calls_and_results_are_refused_as_too_long() {
    story(async {
        let fixture = Fixture::usual().await;
        let calls: Vec<_> =
            (0..5_000).map(|id| json!({"id": id.to_string(), "function": {"name": "f", "arguments": "{}"}})).collect();
        let results =
            (0..5_000).rev().map(|id| json!({"role": "tool", "tool_call_id": id.to_string(), "content": "r"}));
        let mut messages = vec![json!({"role": "assistant", "tool_calls": calls})];
        messages.extend(results);
        let answer = fixture.chat(json!({"messages": messages})).await;
        assert_eq!(
            (answer.status, &answer.error()["code"]),
            (400, &json!("context_length_exceeded")),
            "{}",
            answer.body
        );
        fixture.end().await;
    });
}

#[test]
fn bodies_that_expand_in_memory_are_refused() {
    story(async {
        let fixture = Fixture::usual().await;
        let frames = format!("data:video/jpeg;base64,{}", ",".repeat(100_000));
        let videos =
            json!({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": frames}}]}]});
        assert_eq!(fixture.chat(videos).await.status, 400);
        let pictures = vec![json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}); 2000];
        let many = fixture.chat(json!({"messages": [{"role": "user", "content": pictures}]})).await;
        assert_eq!(many.status, 400, "{}", many.body);
        // All bodies together may take 1 GiB. Each of these values takes far more memory than
        // its byte of JSON.
        let mut flood = br#"{"messages": [], "metadata": ["#.to_vec();
        flood.extend(std::iter::repeat_n(&b"0,"[..], 5_000_000).flatten());
        flood.extend_from_slice(b"0]}");
        assert_eq!(fixture.say(&posted("/v1/chat/completions", "", &flood)).await.status, 503);
        fixture.end().await;
    });
}
