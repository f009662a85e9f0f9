//! Priorities and deadlines of requests, in each API.

use bursar::{Envelope, LoadOptions};
use bursar_serve::ServeOptions;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{Fixture, hello, posted, until_requests};
use crate::stage::{small, small_envelope, story};

/// Each API's path with a short request.
fn requests(more: &Value) -> [(&'static str, Value); 4] {
    let with = |mut body: Value| {
        body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        body
    };
    [
        ("/v1/chat/completions", with(hello(json!({"max_tokens": 2})))),
        ("/v1/completions", with(json!({"prompt": "Hello!", "max_tokens": 2}))),
        ("/v1/responses", with(json!({"input": "Hello!", "max_output_tokens": 2}))),
        ("/v1/messages", with(json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}))),
    ]
}

/// A server that runs one sequence at a time, with ten long streams of this priority.
/// The first stream runs.
async fn busy(priority: i32) -> (Fixture, Vec<tokio::net::TcpStream>) {
    let envelope = Some(Envelope { sequences: 1, ..small_envelope() });
    let fixture = Fixture::with(LoadOptions { envelope, ..small() }, ServeOptions::default()).await;
    let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": 200, "priority": priority});
    let mut streams = Vec::new();
    for number in 1..=10 {
        let mut stream = fixture.connect().await;
        let body = hello(fields.clone()).to_string();
        stream.write_all(&posted("/v1/chat/completions", "", body.as_bytes())).await.expect("the server reads");
        until_requests(&fixture.stage.model, number).await;
        streams.push(stream);
    }
    // The headers are sent with the first event.
    streams[0].read_exact(&mut [0; 16]).await.expect("the request is answered");
    (fixture, streams)
}

#[test]
fn a_missed_deadline_is_503_while_queued_and_504_afterwards() {
    story(async {
        let (fixture, streams) = busy(0).await;
        for (path, body) in requests(&json!({})) {
            let asked = async |header: &str| fixture.say(&posted(path, header, body.to_string().as_bytes())).await;
            let queue = asked("x-queue-deadline-ms: 15\r\n").await;
            assert_eq!((queue.status, queue.head.contains("retry-after: 1")), (503, true), "{path}: {}", queue.body);
            let first = asked("x-first-token-deadline-ms: 15\r\n").await;
            let reply = asked("x-deadline-ms: 15\r\n").await;
            assert_eq!((first.status, reply.status), (504, 504), "{path}: {}", first.body);
            assert!(first.head.contains("x-should-retry: false") && !queue.head.contains("x-should-retry"), "{path}");
            let found = [&queue, &first, &reply].map(|answer| match path {
                "/v1/messages" => answer.error()["type"].clone(),
                _ => answer.error()["code"].clone(),
            });
            match path {
                "/v1/messages" => assert_eq!(found, ["overloaded_error", "timeout_error", "timeout_error"]),
                _ => assert_eq!(found, ["queue_deadline", "deadline_exceeded", "deadline_exceeded"]),
            }
            let wrong = asked("x-deadline-ms: soon\r\n").await;
            assert_eq!(wrong.status, 400, "{path}");
        }
        drop(streams);
        until_requests(&fixture.stage.model, 0).await;
        fixture.end().await;
    });
}

#[test]
fn an_urgent_request_overtakes_streams_in_openai_apis() {
    story(async {
        for place in 0..3 {
            let (fixture, streams) = busy(5).await;
            let (path, body) = requests(&json!({"priority": -1})).into_iter().nth(place).expect("a valid request");
            let answer = fixture.post(path, &body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.body);
            assert!(fixture.stage.model.requests().0 >= 2, "{path}: the streams have not ended");
            let wrong = fixture.post(path, &requests(&json!({"priority": "high"}))[place].1).await;
            assert_eq!((wrong.status, wrong.error()["param"].as_str()), (400, Some("priority")), "{path}");
            drop(streams);
            fixture.end().await;
        }
    });
}
