//! Replies when actors die or the server shuts down.

use std::time::Duration;

use bursar_serve::ServeOptions;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{Fixture, hello, pause, posted, rest, until_requests};
use crate::stage::{small, story};

#[test]
fn a_model_restart_only_pauses_a_stream() {
    story(async {
        let fixture = Fixture::usual().await;
        let fields = json!({"stream": true, "ignore_eos": true, "max_tokens": 60, "seed": 3});
        let whole = fixture.chat(fields.clone()).await.streamed();
        let mut stream = fixture.connect().await;
        stream
            .write_all(&posted("/v1/chat/completions", "", hello(fields).to_string().as_bytes()))
            .await
            .expect("the server reads");
        let mut read = vec![0; 900];
        stream.read_exact(&mut read).await.expect("the reply streams");
        fixture.stage.model.serving().await.expect("the model serves").scheduler.kill();
        read.extend(rest(stream).await);
        let received = String::from_utf8(read).expect("text");
        let texts: String = received
            .lines()
            .filter_map(|line| serde_json::from_str::<serde_json::Value>(line.strip_prefix("data: ")?).ok())
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(texts, whole);
        assert!(received.contains("data: [DONE]") && !received.contains("\"error\""), "{received}");
        fixture.end().await;
    });
}

#[test]
fn a_shutdown_finishes_running_requests_and_refuses_new_ones() {
    story(async {
        let fixture = Fixture::usual().await;
        let body = hello(json!({"stream": true, "ignore_eos": true, "max_tokens": 100})).to_string();
        let mut running = fixture.connect().await;
        running.write_all(&posted("/v1/chat/completions", "", body.as_bytes())).await.expect("the server reads");
        until_requests(&fixture.stage.model, 1).await;
        let address = fixture.server.addr();
        fixture.service.end();
        assert_eq!(fixture.get("/health").await.status, 503);
        assert_eq!(fixture.get("/health/live").await.status, 200);
        let late = fixture.chat(json!({})).await;
        assert_eq!((late.status, late.error()["type"].as_str()), (503, Some("service_unavailable_error")));
        let (received, ()) = tokio::join!(rest(running), fixture.server.shutdown());
        let received = String::from_utf8(received).expect("text");
        assert!(received.contains("\"finish_reason\":\"length\"") && received.contains("[DONE]"), "{received}");
        assert!(tokio::net::TcpStream::connect(address).await.is_err(), "the server no longer listens");
        fixture.stage.runtime.shutdown().await;
    });
}

#[test]
fn a_request_that_outlasts_the_drain_is_cut_off() {
    story(async {
        let serve = ServeOptions { drain: Duration::from_millis(50), ..ServeOptions::default() };
        let fixture = Fixture::with(small(), serve).await;
        // This client sends only the headers of a request, so the request would never end.
        let mut silent = fixture.connect().await;
        silent
            .write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n")
            .await
            .expect("the server reads");
        pause(Duration::from_millis(20)).await;
        fixture.end().await;
        rest(silent).await;
    });
}

#[test]
fn budget_event_streams_do_not_delay_a_shutdown() {
    story(async {
        let fixture = Fixture::usual().await;
        let mut watching = fixture.connect().await;
        watching.write_all(b"GET /v1/budget/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("a write");
        let mut received = Vec::new();
        // The stream begins with events from before the connection.
        let is_reported = |received: &[u8]| {
            ["event: budget", "\"event\":\"ready\""].iter().all(|part| String::from_utf8_lossy(received).contains(part))
        };
        while !is_reported(&received) {
            let mut piece = [0; 4096];
            let read = watching.read(&mut piece).await.expect("the reply streams");
            assert!(read > 0, "the stream ended");
            received.extend_from_slice(&piece[..read]);
        }
        let begun = std::time::Instant::now();
        fixture.end().await;
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    });
}
