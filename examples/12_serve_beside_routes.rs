//! OpenAI's and Anthropic's APIs as routes of a program's own server, next to its other routes.
//!
//! ```sh
//! cargo run --release --example 12_serve_beside_routes            # serves on port 8080 until it is interrupted
//! curl 127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
//! cargo run --release --example 12_serve_beside_routes -- --once  # sends itself two requests and exits
//! ```

use axum::{Json, Router, extract::State, routing::get};
use bursar::{LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig};
use bursar_serve::{ServeOptions, Service};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// One of the program's own routes, which uses the same model.
async fn busy(State(model): State<ModelHandle>) -> Json<Value> {
    let (requests, limit) = model.requests();
    Json(json!({"model": model.name(), "requests": requests, "limit": limit}))
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let model = runtime.load_with(ModelSource::demo(), LoadOptions::small(), |_| {}).await?;
    let service = Service::new(&runtime, ServeOptions::default());
    service.add(["demo", "gpt-4o"], model.clone()); // a second name, for programs that ask for it
    let app = Router::new().route("/busy", get(busy)).with_state(model).merge(service.router());

    let once = std::env::args().any(|argument| argument == "--once");
    let listener = TcpListener::bind(("127.0.0.1", if once { 0 } else { 8080 })).await?;
    let port = listener.local_addr()?.port();
    println!("listening on http://127.0.0.1:{port}");
    let server = tokio::spawn(axum::serve(listener, app).into_future());
    if once {
        let hello = json!({"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0});
        let answer = ask(port, "POST /v1/chat/completions", &hello.to_string()).await?;
        println!("{answer}");
        let json: Value = serde_json::from_str(&answer)?;
        assert_eq!(json["choices"][0]["message"]["content"], "Hello! Show me a picture.");
        println!("{}", ask(port, "GET /busy", "").await?);
    } else {
        tokio::signal::ctrl_c().await?;
    }
    server.abort();
    runtime.shutdown().await;
    Ok(())
}

/// Sends a request and returns the body of its response. A real program would use a client library.
async fn ask(port: u16, what: &str, body: &str) -> Result<String, Failure> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let head = format!("{what} HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut received = String::new();
    stream.read_to_string(&mut received).await?;
    let (_, answer) = received.split_once("\r\n\r\n").ok_or("the answer has no body")?;
    Ok(answer.to_owned())
}
