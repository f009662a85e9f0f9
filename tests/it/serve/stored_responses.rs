//! Stored responses: their owners, their number, and the memory that a cancelled response returns.

use bursar_serve::ServeOptions;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{Answer, Fixture, posted, rest, until_requests};
use crate::stage::{small, story};

async fn asked(fixture: &Fixture, key: &str, fields: Value) -> Answer {
    let mut body = json!({"model": "demo", "input": "Hello!", "max_output_tokens": 2});
    body.as_object_mut().expect("an object").extend(fields.as_object().cloned().unwrap_or_default());
    fixture.say(&posted("/v1/responses", &format!("x-api-key: {key}\r\n"), body.to_string().as_bytes())).await
}

async fn sent(fixture: &Fixture, key: &str, request: &str) -> Answer {
    let head = format!(
        "{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-api-key: {key}\r\ncontent-length: 0\r\n\r\n"
    );
    fixture.say(head.as_bytes()).await
}

fn id_of(answer: &Answer) -> String {
    answer.json()["id"].as_str().expect("an id").to_owned()
}

#[test]
fn a_stored_response_is_visible_only_to_its_key() {
    story(async {
        let serve = ServeOptions::default().with_keys("first-key\nsecond-key\n").expect("keys");
        let fixture = Fixture::with(small(), serve).await;
        let id = id_of(&asked(&fixture, "first-key", json!({})).await);
        let others = [
            format!("GET /v1/responses/{id}"),
            format!("DELETE /v1/responses/{id}"),
            format!("POST /v1/responses/{id}/cancel"),
        ];
        for request in &others {
            assert_eq!(sent(&fixture, "second-key", request).await.status, 404, "{request}");
        }
        let next = json!({"previous_response_id": id});
        let refused = asked(&fixture, "second-key", next.clone()).await;
        assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("previous_response_not_found")));
        assert_eq!(asked(&fixture, "first-key", next).await.status, 200);
        assert_eq!(sent(&fixture, "first-key", &others[1]).await.status, 200);
        assert_eq!(sent(&fixture, "first-key", &others[0]).await.status, 404);
        fixture.end().await;
    });
}

#[test]
fn vllm_routes_put_models_to_sleep_and_wake_them() {
    story(async {
        let fixture = Fixture::usual().await;
        let is_sleeping = async |query: &str| fixture.get(&format!("/is_sleeping{query}")).await.json();
        let before = fixture.chat(json!({})).await.json()["choices"].clone();
        assert_eq!(is_sleeping("").await, json!({"is_sleeping": false, "levels": {"demo": null}}));
        for (query, level) in [("", 1), ("?level=2&model=other-name&within=5", 2)] {
            assert_eq!(fixture.post(&format!("/sleep{query}"), &json!({})).await.status, 200);
            assert_eq!(is_sleeping("").await, json!({"is_sleeping": true, "levels": {"demo": level}}));
            let health = fixture.get("/health").await;
            assert_eq!((health.status, &health.json()["models"]["demo"]["state"]), (200, &json!("asleep")));
            assert_eq!(fixture.post("/wake_up", &json!({})).await.status, 200);
            assert_eq!(is_sleeping("?model=demo").await["is_sleeping"], false);
        }
        assert_eq!(fixture.post("/sleep", &json!({})).await.status, 200);
        assert_eq!(fixture.chat(json!({})).await.json()["choices"], before, "a request wakes the model");
        for (query, param) in [("?level=3", "level"), ("?level=x", "level"), ("?tags=weights", "tags")] {
            let refused = fixture.post(&format!("/sleep{query}"), &json!({})).await;
            assert_eq!((refused.status, &refused.error()["param"]), (400, &json!(param)), "{query}");
        }
        assert_eq!(fixture.post("/sleep?model=nobody", &json!({})).await.status, 404);
        fixture.end().await;
    });
}

#[test]
fn the_oldest_stored_response_is_evicted_beyond_the_limit() {
    story(async {
        let fixture = Fixture::with(small(), ServeOptions { responses: 2, ..ServeOptions::default() }).await;
        let mut ids = Vec::new();
        for _ in 0..3 {
            ids.push(id_of(&asked(&fixture, "", json!({})).await));
        }
        let mut events = Vec::new();
        for id in &ids {
            events.push(fixture.get(&format!("/v1/responses/{id}")).await.status);
        }
        assert_eq!(events, [404, 200, 200]);
        fixture.end().await;
    });
}

/// A background response that ends only at its token limit or when its context is full.
fn long() -> Value {
    let schema = json!({"type": "array", "items": {"enum": [1, 2]}, "minItems": 1000});
    let form = json!({"format": {"type": "json_schema", "name": "long", "schema": schema}});
    json!({"background": true, "text": form, "max_output_tokens": 200})
}

#[test]
fn a_cancelled_response_releases_its_request_slot() {
    story(async {
        let fixture = Fixture::usual().await;
        let id = id_of(&asked(&fixture, "", long()).await);
        let cancelled = sent(&fixture, "", &format!("POST /v1/responses/{id}/cancel")).await;
        assert_eq!(cancelled.json()["status"], "cancelled");
        until_requests(&fixture.stage.model, 0).await;
        assert_eq!(fixture.get(&format!("/v1/responses/{id}")).await.json()["status"], "cancelled");
        fixture.end().await;
    });
}

#[test]
fn a_streaming_client_sees_the_cancellation_of_its_response() {
    story(async {
        let fixture = Fixture::usual().await;
        let mut body = json!({"model": "demo", "input": "Hello!", "stream": true});
        body.as_object_mut().expect("an object").extend(long().as_object().cloned().unwrap_or_default());
        let mut stream = fixture.connect().await;
        stream.write_all(&posted("/v1/responses", "", body.to_string().as_bytes())).await.expect("the server reads");
        let mut received = String::new();
        while !received.contains("output_text.delta") {
            let mut piece = vec![0; 1024];
            let length = stream.read(&mut piece).await.expect("a stream");
            assert!(length > 0, "{received}");
            received += std::str::from_utf8(&piece[..length]).expect("text");
        }
        let id = received.split("\"id\":\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id").to_owned();
        assert_eq!(sent(&fixture, "", &format!("POST /v1/responses/{id}/cancel")).await.status, 200);
        received += &String::from_utf8(rest(stream).await).expect("text");
        let kinds: Vec<_> = received.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
        assert_eq!(kinds.last(), Some(&"response.cancelled"), "{received}");
        until_requests(&fixture.stage.model, 0).await;
        fixture.end().await;
    });
}
