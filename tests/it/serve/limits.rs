//! Limits for clients: keys, sizes, numbers and times.

use std::time::Duration;

use bursar::{Bytes, LoadOptions};
use bursar_serve::ServeOptions;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{Fixture, hello, pause, posted, rest, until_requests};
use crate::stage::{small, story};

#[test]
fn without_a_key_only_health_is_answered() {
    story(async {
        let serve = ServeOptions::default().with_keys("# ours\nfirst-key\nsecond-key\n").expect("keys");
        let fixture = Fixture::with(small(), serve).await;
        let body = hello(json!({"max_tokens": 1})).to_string();
        let with = |header: &str| posted("/v1/chat/completions", header, body.as_bytes());
        for (header, status) in [
            ("authorization: Bearer first-key\r\n", 200),
            ("x-api-key: second-key\r\n", 200),
            ("authorization: Bearer first-ke\r\n", 401),
            ("authorization: Bearer \r\n", 401),
            ("", 401),
        ] {
            let answer = fixture.say(&with(header)).await;
            assert_eq!(answer.status, status, "{header}");
            assert!(!answer.body.contains("first-key") && !answer.body.contains("second-key"));
        }
        for path in ["/v1/models", "/v1/budget", "/v1/budget/events", "/events", "/v1/embeddings"] {
            assert_eq!(fixture.get(path).await.status, 401, "{path}");
        }
        assert_eq!(fixture.get("/health").await.status, 200);
        fixture.end().await;
    });
}

#[test]
fn a_full_model_answers_429_until_a_client_leaves() {
    story(async {
        let options = LoadOptions { requests: Some(2), ..small() };
        let fixture = Fixture::with(options, ServeOptions::default()).await;
        let endless = hello(json!({"stream": true, "ignore_eos": true, "max_tokens": 200})).to_string();
        let mut streams = Vec::new();
        for _ in 0..2 {
            let mut stream = fixture.connect().await;
            stream.write_all(&posted("/v1/chat/completions", "", endless.as_bytes())).await.expect("the server reads");
            streams.push(stream);
        }
        until_requests(&fixture.stage.model, 2).await;
        let refused = fixture.chat(json!({})).await;
        assert_eq!((refused.status, refused.error()["code"].as_str()), (429, Some("overloaded")));
        assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
        drop(streams);
        until_requests(&fixture.stage.model, 0).await;
        assert_eq!(fixture.chat(json!({})).await.status, 200);
        // A client of a response that is not streamed can disconnect too.
        let mut stream = fixture.connect().await;
        let whole = hello(json!({"ignore_eos": true, "max_tokens": 200})).to_string();
        stream.write_all(&posted("/v1/chat/completions", "", whole.as_bytes())).await.expect("the server reads");
        until_requests(&fixture.stage.model, 1).await;
        drop(stream);
        until_requests(&fixture.stage.model, 0).await;
        fixture.end().await;
    });
}

#[test]
fn a_client_that_half_closes_after_its_request_is_answered() {
    story(async {
        let fixture = Fixture::usual().await;
        for is_streamed in [false, true] {
            let mut stream = fixture.connect().await;
            let asked = hello(json!({"ignore_eos": true, "max_tokens": 150, "stream": is_streamed})).to_string();
            // Leave out `connection: close`, because the half-close already says that no further
            // request follows.
            let request = String::from_utf8(posted("/v1/chat/completions", "", asked.as_bytes())).expect("text");
            let request = request.replace("connection: close\r\n", "");
            stream.write_all(request.as_bytes()).await.expect("the server reads");
            stream.shutdown().await.expect("the stream closes");
            let received = String::from_utf8(rest(stream).await).expect("text");
            let ends = if is_streamed { "[DONE]" } else { "\"completion_tokens\":150" };
            assert!(received.starts_with("HTTP/1.1 200") && received.contains(ends), "{received}");
        }
        fixture.end().await;
    });
}

#[test]
fn a_half_close_ends_incomplete_bodies_and_no_complete_ones() {
    story(async {
        let fixture = Fixture::usual().await;
        let answer = async |head: &str, body: &[u8]| {
            let mut stream = fixture.connect().await;
            let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n");
            stream.write_all(&[head.as_bytes(), body].concat()).await.expect("the server reads");
            stream.shutdown().await.expect("the stream closes");
            // The answer must not wait for the time limit of bodies, which is 60 s.
            let received = tokio::time::timeout(Duration::from_secs(20), rest(stream)).await.expect("an early answer");
            String::from_utf8(received).expect("text")
        };
        // The server reads this body in many parts, and hyper passes it on in several pieces.
        let asked = hello(json!({"user": "u".repeat(1 << 20), "max_tokens": 1})).to_string();
        let length = format!("content-length: {}", asked.len());
        let received = answer(&length, &asked.as_bytes()[..asked.len() - 1]).await;
        assert!(received.starts_with("HTTP/1.1 400") && received.contains("the body ended early"), "{received}");
        let received = answer(&length, asked.as_bytes()).await;
        assert!(received.starts_with("HTTP/1.1 200"), "{received}");
        let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        let (first, second) = asked.split_at(asked.len() / 2);
        let chunks = [chunk(first), chunk(second)].concat();
        let received = answer("transfer-encoding: chunked", chunks.as_bytes()).await;
        assert!(received.starts_with("HTTP/1.1 400") && received.contains("the body ended early"), "{received}");
        let received = answer("transfer-encoding: chunked", [chunks.as_str(), "0\r\n\r\n"].concat().as_bytes()).await;
        assert!(received.starts_with("HTTP/1.1 200"), "{received}");
        fixture.end().await;
    });
}

#[test]
fn bodies_are_limited_with_or_without_a_content_length() {
    story(async {
        let serve = ServeOptions { body_bytes: Bytes::kib(4), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        let large = hello(json!({"user": "u".repeat(5000)})).to_string();
        let found = fixture.say(&posted("/v1/chat/completions", "", large.as_bytes())).await;
        assert_eq!((found.status, found.error()["code"].as_str()), (413, Some("request_too_large")));
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
        let untold = [head, &format!("{:x}\r\n{large}\r\n0\r\n\r\n", large.len())].concat();
        assert_eq!(fixture.say(untold.as_bytes()).await.status, 413);
        let claimed = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 99999999999\r\n\r\n";
        assert_eq!(fixture.say(claimed.as_bytes()).await.status, 413);
        fixture.end().await;
    });
}

#[test]
fn all_bodies_together_are_limited_in_bytes() {
    story(async {
        let serve = ServeOptions { bodies_bytes: Bytes::kib(8), body_bytes: Bytes::kib(6), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        let asked = hello(json!({"user": "u".repeat(3000), "max_tokens": 1}));
        let slow = loop {
            // Send all but the last bytes of a 6 kB body.
            let mut slow = fixture.connect().await;
            let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 6000\r\n\r\n";
            slow.write_all(head.as_bytes()).await.expect("the server reads");
            slow.write_all(&[b' '; 5900]).await.expect("the server reads");
            let answer = fixture.post("/v1/chat/completions", &asked).await;
            match answer.status {
                503 => break slow,
                // Either this request was admitted before the slow request, or the server has not
                // read the headers of the slow request yet.
                status => assert_eq!(status, 200, "{}", answer.body),
            }
        };
        // The body of a client that is gone is dropped long before the time limit of bodies, 60 s.
        drop(slow);
        let until_free = async {
            while fixture.post("/v1/chat/completions", &asked).await.status != 200 {
                pause(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), until_free).await.expect("the memory is free again");
        fixture.end().await;
    });
}

#[test]
fn slow_headers_bodies_and_readers_are_dropped() {
    story(async {
        let patience = Duration::from_millis(300);
        let serve = ServeOptions { head_time: patience, body_time: patience, ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        for silent in ["", "GET /health HT", "GET /health HTTP/1.1\r\nhost: localhost\r\nx: "] {
            let mut stream = fixture.connect().await;
            stream.write_all(silent.as_bytes()).await.expect("the server reads");
            let received = rest(stream).await;
            assert!(received.is_empty() || received.starts_with(b"HTTP/1.1 408"), "{silent:?}");
        }
        let mut stream = fixture.connect().await;
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 10\r\n\r\n{";
        stream.write_all(head.as_bytes()).await.expect("the server reads");
        assert!(rest(stream).await.starts_with(b"HTTP/1.1 408"));
        // The reply to a reader that stops is cancelled after a write has been blocked for
        // `body_time`, which happens only when the system's socket buffers are full.
        let mut stream = fixture.connect().await;
        let body = hello(
            json!({"stream": true, "ignore_eos": true, "max_tokens": 230, "logprobs": true, "top_logprobs": 20, "n": 8}),
        );
        stream.write_all(&posted("/v1/chat/completions", "", body.to_string().as_bytes())).await.expect("a write");
        until_requests(&fixture.stage.model, 8).await;
        until_requests(&fixture.stage.model, 0).await;
        let mut received = [0; 12];
        stream.read_exact(&mut received).await.expect("the reply has begun");
        assert_eq!(&received, b"HTTP/1.1 200");
        fixture.end().await;
    });
}

#[test]
fn request_headers_are_limited() {
    story(async {
        let fixture = Fixture::usual().await;
        let large = format!(
            "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: {}\r\n\r\n",
            "h".repeat(100_000)
        );
        assert_eq!(fixture.say(large.as_bytes()).await.status, 431);
        let many = format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{}\r\n", "a: b\r\n".repeat(500));
        assert_eq!(fixture.say(many.as_bytes()).await.status, 431);
        fixture.end().await;
    });
}

#[test]
fn connections_beyond_the_limit_wait_for_a_slot() {
    story(async {
        let serve = ServeOptions { connections: 2, head_time: Duration::from_millis(300), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        let idle = [fixture.connect().await, fixture.connect().await];
        // The two idle connections are dropped because they stay silent. The next
        // connection is then accepted.
        assert_eq!(fixture.get("/health").await.status, 200);
        drop(idle);
        fixture.end().await;
    });
}

#[test]
fn concurrent_streams_are_limited_for_each_key() {
    story(async {
        let serve =
            ServeOptions { streams_per_key: Some(1), ..ServeOptions::default().with_keys("one\ntwo").expect("keys") };
        let fixture = Fixture::with(small(), serve).await;
        let endless = hello(json!({"stream": true, "ignore_eos": true, "max_tokens": 200})).to_string();
        let mut stream = fixture.connect().await;
        stream
            .write_all(&posted("/v1/chat/completions", "x-api-key: one\r\n", endless.as_bytes()))
            .await
            .expect("the server reads");
        until_requests(&fixture.stage.model, 1).await;
        let asked = hello(json!({"max_tokens": 1})).to_string();
        let ask = |key: &str| posted("/v1/chat/completions", &format!("x-api-key: {key}\r\n"), asked.as_bytes());
        assert_eq!(fixture.say(&ask("one")).await.error()["code"], "streams_exhausted");
        assert_eq!(fixture.say(&ask("two")).await.status, 200);
        drop(stream);
        while fixture.say(&ask("one")).await.status != 200 {
            pause(Duration::from_millis(5)).await;
        }
        fixture.end().await;
    });
}
