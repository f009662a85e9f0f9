//! A chat streamed from an axum handler as server-sent events. The body of a request is
//! a picture or empty.
//!
//! ```sh
//! cargo run --release --example 6_chat_over_http            # serves on port 8080 until it is interrupted
//! curl -N --data-binary @model/demo/pictures/shapes.png '127.0.0.1:8080/chat?question=Describe+the+picture.'
//! cargo run --release --example 6_chat_over_http -- --once  # sends itself requests and exits
//! ```
//!
//! An event is `text` (`{"text":…}`), `done` (`{"finish_reason":…,"usage":{…}}`) or `error`
//! (`{"error":…,"hint":…}`). A refused chat gets a status code instead: 400 if the chat is invalid,
//! 503 if the model cannot answer now. A client that disconnects cancels its chat.

use std::{convert::Infallible, time::Duration};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Query, State},
    http::StatusCode,
    response::{
        IntoResponse, Response, Sse,
        sse::{Event, KeepAlive},
    },
    routing::post,
};
use bursar::{
    Chat, ChatError, ChatEvent, ErrorKind, Hint, Image, LoadOptions, ModelHandle, ModelSource, Runtime, RuntimeConfig,
    demo,
};
use futures_util::{Stream, StreamExt};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Limit on concurrent chats. A real server allows more. Two are few enough that the client below
/// exceeds the limit.
const REQUESTS: usize = 2;

#[derive(Deserialize)]
struct Question {
    question: String,
    max_tokens: Option<usize>,
    min_tokens: Option<usize>,
}

fn app(model: ModelHandle) -> Router {
    Router::new().route("/chat", post(chat)).layer(DefaultBodyLimit::max(20 << 20)).with_state(model)
}

async fn chat(
    State(model): State<ModelHandle>,
    Query(asked): Query<Question>,
    picture: Bytes,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Refused> {
    let mut chat = Chat::new().user(asked.question);
    if !picture.is_empty() {
        chat = chat.image(Image::from_bytes(&picture[..]));
    }
    chat = chat.max_tokens(asked.max_tokens);
    chat = chat.min_tokens(asked.min_tokens);
    // The reply is a stream. When the client disconnects, the stream is dropped and the
    // chat is canceled.
    let events = model.chat(chat).await?.map(|event| Ok(as_event(event)));
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

fn as_event(event: Result<ChatEvent, ChatError>) -> Event {
    let (name, data) = match event {
        Ok(ChatEvent::Done { finish_reason, usage, .. }) => {
            let usage = json!({ "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens });
            ("done", json!({ "finish_reason": finish_reason.label(), "usage": usage }))
        }
        Ok(event) => ("text", json!({ "text": event.text() })),
        // The status code has already been sent.
        Err(error) => ("error", explained(&error)),
    };
    Event::default().event(name).data(data.to_string())
}

fn explained(error: &ChatError) -> Value {
    json!({ "error": error.to_string(), "hint": error.hint() })
}

struct Refused(ChatError);

impl From<ChatError> for Refused {
    fn from(error: ChatError) -> Self {
        Refused(error)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let body = Json(explained(&self.0));
        match self.0.kind() {
            ErrorKind::Request => (StatusCode::BAD_REQUEST, body).into_response(),
            ErrorKind::Busy => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], body).into_response(),
            ErrorKind::Model => (StatusCode::SERVICE_UNAVAILABLE, body).into_response(),
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let runtime = Runtime::start(RuntimeConfig::default()).await?;
    let options = LoadOptions { requests: Some(REQUESTS), ..LoadOptions::small() };
    let model = runtime.load_with(ModelSource::demo(), options, |_| {}).await?;
    if std::env::args().any(|argument| argument == "--once") {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let server = tokio::spawn(axum::serve(listener, app(model.clone())).into_future());
        let asked = tokio::time::timeout(Duration::from_secs(60), ask_myself(port, &model)).await;
        server.abort();
        runtime.shutdown().await;
        return asked?;
    }
    let listener = TcpListener::bind(("127.0.0.1", 8080)).await?;
    println!("POST a picture to http://{}/chat?question=Describe+the+picture.", listener.local_addr()?);
    axum::serve(listener, app(model)).await?;
    Ok(())
}

/// The built-in client, which uses plain sockets.
async fn ask_myself(port: u16, model: &ModelHandle) -> Result<(), Failure> {
    println!("A picture, and the reply as it arrives:");
    let whole = Answer::to(port, "question=Describe+the+picture.", demo::pictures()[0].bytes).await?.whole().await?;
    println!("{whole}");
    expect("a stream that ends with `done`", whole.contains("200 OK") && whole.contains("event: done"))?;

    println!("An invalid chat:");
    let whole = Answer::to(port, "question=Hello&max_tokens=0", b"").await?.whole().await?;
    println!("{whole}\n");
    expect(
        "the server refuses the chat",
        whole.contains("400 Bad Request") && whole.contains("`max_tokens` is 0; expected at least 1"),
    )?;

    println!("Two long chats, and a third chat beyond the limit:");
    let mut long = Vec::new();
    for _ in 0..REQUESTS {
        long.push(Answer::to(port, "question=Tell+me+something.&min_tokens=400", b"").await?);
    }
    let whole = Answer::to(port, "question=Hello", b"").await?.whole().await?;
    println!("{whole}\n");
    expect("the server is overloaded", whole.contains("503 Service Unavailable") && whole.contains("retry-after"))?;

    println!("{} chats are running. Their connections are dropped.", model.requests().0);
    drop(long);
    let mut looks = tokio::time::interval(Duration::from_millis(1));
    while model.requests().0 > 0 {
        looks.tick().await;
    }
    println!("No chat is running.");
    Ok(())
}

fn expect(what: &str, holds: bool) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(format!("expected: {what}").into()) }
}

/// A response whose first line has been read.
struct Answer {
    connection: BufReader<TcpStream>,
    status: String,
}

impl Answer {
    async fn to(port: u16, query: &str, body: &[u8]) -> Result<Answer, Failure> {
        let mut connection = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
        let head = format!(
            "POST /chat?{query} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        connection.write_all(head.as_bytes()).await?;
        connection.write_all(body).await?;
        let mut status = String::new();
        connection.read_line(&mut status).await?;
        Ok(Answer { connection, status })
    }

    async fn whole(mut self) -> Result<String, Failure> {
        let mut rest = String::new();
        self.connection.read_to_string(&mut rest).await?;
        Ok(self.status + &rest)
    }
}
