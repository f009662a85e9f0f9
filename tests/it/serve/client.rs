//! A raw HTTP client that sends given bytes.

use std::time::Duration;

use bursar::{LoadOptions, ModelHandle};
use bursar_serve::{ServeOptions, Server, Service};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::stage::{Stage, small};

/// Time limit of a response, longer than any response takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server with the demo model.
pub struct Fixture {
    pub stage: Stage,
    pub service: Service,
    pub server: Server,
}

impl Fixture {
    pub async fn with(options: LoadOptions, serve: ServeOptions) -> Fixture {
        let stage = Stage::set(options).await;
        let service = Service::new(&stage.runtime, serve);
        service.add(["demo", "other-name"], stage.model.clone());
        let server = Server::start(service.clone(), "127.0.0.1:0", None).await.expect("a free port");
        Fixture { stage, service, server }
    }

    pub async fn usual() -> Fixture {
        Fixture::with(small(), ServeOptions::default()).await
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.addr()).await.expect("the server listens")
    }

    /// Sends these bytes and reads until the server closes the connection.
    pub async fn say(&self, sent: &[u8]) -> Answer {
        let mut stream = self.connect().await;
        // A server that refuses early may close before everything is written.
        drop(stream.write_all(sent).await);
        Answer::of(&rest(stream).await)
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.say(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.say(&posted(path, "", body.to_string().as_bytes())).await
    }

    pub async fn chat(&self, fields: Value) -> Answer {
        self.post("/v1/chat/completions", &hello(fields)).await
    }

    pub async fn end(self) {
        self.server.shutdown().await;
        self.stage.runtime.shutdown().await;
    }
}

/// A chat request with these fields in addition to its messages.
pub fn hello(fields: Value) -> Value {
    let mut body = json!({"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0});
    let map = body.as_object_mut().expect("an object");
    map.extend(fields.as_object().cloned().unwrap_or_default());
    body
}

/// The bytes of a complete POST request.
pub fn posted(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Reads until the server closes the connection.
pub async fn rest(mut stream: TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    // A connection reset after a refusal also counts as the end.
    drop(timeout(PATIENCE, stream.read_to_end(&mut received)).await.expect("the server closes in time"));
    received
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    fn of(bytes: &[u8]) -> Answer {
        let received = String::from_utf8_lossy(bytes).into_owned();
        let (head, body) = received.split_once("\r\n\r\n").unwrap_or((&received, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    /// The error, in OpenAI's format.
    pub fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    /// The events of a stream, without the last event.
    pub fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<_> = data.collect();
        assert_eq!(events.last(), Some(&"[DONE]"), "{}", self.body);
        let parsed = events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).expect("JSON"));
        parsed.collect()
    }

    /// The text of all chunks.
    pub fn streamed(&self) -> String {
        let events = self.events();
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
    }
}

/// Waits until the model has this many requests.
pub async fn until_requests(model: &ModelHandle, requests: usize) {
    let looks = async {
        while model.requests().0 != requests {
            pause(Duration::from_millis(2)).await;
        }
    };
    timeout(PATIENCE, looks).await.unwrap_or_else(|_| panic!("there are {} requests", model.requests().0));
}

pub async fn pause(moment: Duration) {
    tokio::time::sleep_until(tokio::time::Instant::now() + moment).await;
}
