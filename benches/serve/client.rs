//! The client side of the benchmark: a model in this process, or a server.

use std::time::{Duration, Instant};

use base64::{Engine, engine::general_purpose::STANDARD};
use bursar::{Chat, ChatEvent, Image, ModelHandle};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep_until,
};

use crate::{Failure, Options};

#[derive(Clone, Debug)]
pub struct Request {
    /// Requests with different numbers share no prefix.
    pub number: u64,
    pub words: usize,
    /// Name of a picture file in the picture folder.
    pub picture: Option<String>,
    pub tokens: usize,
}

impl Request {
    fn text(&self) -> String {
        const WORDS: [&str; 8] = ["red", "boat", "seven", "under", "quiet", "paper", "north", "glass"];
        let word =
            |at: usize| WORDS[(self.number as usize).wrapping_mul(31).wrapping_add(at * at + at / 5) % WORDS.len()];
        (0..self.words).fold(self.number.to_string(), |text, at| text + " " + word(at))
    }

    fn picture(&self, folder: &str) -> std::io::Result<Option<Vec<u8>>> {
        self.picture.as_ref().map(|name| std::fs::read(format!("{folder}/{name}"))).transpose()
    }
}

/// The times of a reply.
pub struct Answered {
    /// Time until the first text.
    pub first: Duration,
    /// Time until the end.
    pub whole: Duration,
    pub tokens: usize,
}

/// One of the two ways to send requests.
#[derive(Clone)]
pub enum Client {
    InProcess(InProcess),
    Http(Http),
}

#[derive(Clone)]
pub struct InProcess {
    model: ModelHandle,
    pictures: String,
}

#[derive(Clone)]
pub struct Http {
    address: String,
    pictures: String,
}

impl Client {
    pub async fn ask(&self, request: &Request) -> Result<Answered, Failure> {
        match self {
            Client::InProcess(client) => client.ask(request).await,
            Client::Http(client) => client.ask(request).await,
        }
    }

    /// Waits until the model answers. A server refuses requests while it loads the model.
    pub async fn warm_up(&self, options: &Options) -> Result<(), Failure> {
        let request = Request { number: u64::MAX, words: options.words, picture: None, tokens: 4 };
        for _ in 0..6000 {
            if self.ask(&request).await.is_ok() {
                return Ok(());
            }
            sleep_until(tokio::time::Instant::now() + Duration::from_millis(100)).await;
        }
        Err("the model does not answer".into())
    }
}

impl InProcess {
    pub fn new(model: ModelHandle, options: &Options) -> Self {
        InProcess { model, pictures: options.pictures.clone() }
    }

    async fn ask(&self, request: &Request) -> Result<Answered, Failure> {
        let picture = request.picture(&self.pictures)?;
        let begun = Instant::now();
        let chat = picture.into_iter().fold(Chat::new(), |chat, bytes| chat.image(Image::from_bytes(bytes)));
        let chat = chat.user(request.text()).temperature(0.0).max_tokens(request.tokens).ignore_end();
        let mut reply = self.model.chat(chat).await?;
        let (mut first, mut tokens) = (None, 0);
        while let Some(event) = reply.next().await {
            match event? {
                ChatEvent::Text(_) | ChatEvent::Reasoning(_) => drop(first.get_or_insert_with(|| begun.elapsed())),
                ChatEvent::Done { usage, .. } => tokens = usage.completion_tokens,
                _ => {}
            }
        }
        let whole = begun.elapsed();
        Ok(Answered { first: first.unwrap_or(whole), whole, tokens })
    }
}

impl Http {
    pub fn new(address: &str, options: &Options) -> Self {
        Http { address: address.to_owned(), pictures: options.pictures.clone() }
    }

    async fn ask(&self, request: &Request) -> Result<Answered, Failure> {
        let picture = request.picture(&self.pictures)?;
        let begun = Instant::now();
        let mut content = Vec::new();
        if let Some(bytes) = picture {
            let bytes = STANDARD.encode(bytes);
            content.push(json!({"type": "image_url", "image_url": {"url": format!("data:image/jpeg;base64,{bytes}")}}));
        }
        content.push(json!({"type": "text", "text": request.text()}));
        let body = json!({
            "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": request.tokens,
            "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true},
        });
        let mut stream = self.send("POST /v1/chat/completions", &body.to_string()).await?;
        let (mut first, mut tokens, mut held, mut read) = (None, None, Vec::new(), vec![0; 1 << 14]);
        loop {
            let length = stream.read(&mut read).await?;
            if length == 0 {
                break;
            }
            held.extend_from_slice(&read[..length]);
            while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = held.drain(..=end).collect();
                let Some(data) = line.strip_prefix(b"data: {") else { continue };
                if first.is_none() && has(data, b"\"delta\":{\"content\"") || has(data, b"\"delta\":{\"reasoning") {
                    first.get_or_insert_with(|| begun.elapsed());
                }
                if has(data, b"\"choices\":[]") {
                    let event: Value = serde_json::from_slice(&line[b"data: ".len()..])?;
                    tokens = event["usage"]["completion_tokens"].as_u64();
                }
            }
        }
        let (whole, tokens) = (begun.elapsed(), tokens.ok_or("the stream ended without usage")?);
        Ok(Answered { first: first.unwrap_or(whole), whole, tokens: tokens as usize })
    }

    async fn send(&self, request: &str, body: &str) -> Result<TcpStream, Failure> {
        let mut stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await?;
        Ok(stream)
    }
}

fn has(text: &[u8], what: &[u8]) -> bool {
    text.windows(what.len()).any(|found| found == what)
}

/// Opens `count` connections that subscribe to the budget's events and read them.
pub async fn idle(address: &str, count: usize) -> Result<Vec<tokio::task::JoinHandle<()>>, Failure> {
    let mut waiting = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /v1/budget/events HTTP/1.1\r\nhost: localhost\r\n\r\n").await?;
        waiting.push(tokio::spawn(async move {
            let mut read = vec![0; 1 << 12];
            while stream.read(&mut read).await.is_ok_and(|length| length > 0) {}
        }));
    }
    Ok(waiting)
}
