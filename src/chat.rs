//! `bursar chat`: one question, or a session with history.

use std::{
    io::{BufRead, IsTerminal, Write, stdin, stdout},
    path::PathBuf,
    process::ExitCode,
};

use bursar::{Chat, ChatEvent, Image, ModelHandle, ScoredToken, TokenScore, Usage};
use clap::Args;
use serde_json::{Value, json};

use crate::{
    DeviceOptions,
    failure::{Failure, report},
    model,
};

/// Options of `bursar chat`.
#[derive(Args)]
pub struct Options {
    /// A Hugging Face checkpoint folder, a model of the hub (`org/name` or `org/name@revision`), or `demo`.
    #[arg(long, default_value = "demo")]
    model: String,
    /// A picture (PNG, JPEG, WebP); may be given several times.
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// Tokens that a reply may have at most.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// 0 takes the likeliest token.
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Equal seeds give equal replies.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// One JSON event a line.
    #[arg(long)]
    json: bool,
    /// The question. Without it: a session with history.
    question: Option<String>,
}

/// Runs the command.
pub async fn run(device: &DeviceOptions, options: Options) -> ExitCode {
    let json = options.json;
    let outcome = talk(device, options).await;
    match (json, outcome) {
        (true, Err(failure)) => {
            println!("{}", json!({"type": "error", "error": failure.error, "hint": failure.hint}));
            ExitCode::FAILURE
        }
        (_, outcome) => report(outcome),
    }
}

async fn talk(device: &DeviceOptions, options: Options) -> Result<(), Failure> {
    // What can be refused at once is, before a model is loaded.
    let images = options.image.iter().map(Image::open).collect::<Result<Vec<_>, _>>()?;
    let runtime = model::start(device).await?;
    let model = model::load(&runtime, &options.model, !options.json).await?;
    let blank = blank(&options);
    let outcome = match &options.question {
        Some(question) => {
            let chat = images.into_iter().fold(blank.user(question), Chat::image);
            stream(&model, chat, options.json).await.map(drop)
        }
        None => session(&model, blank, images, options.json).await,
    };
    runtime.shutdown().await;
    outcome
}

/// A chat without turns, answered as the options say.
fn blank(options: &Options) -> Chat {
    let mut chat = Chat::new();
    if let Some(tokens) = options.max_tokens {
        chat = chat.max_tokens(tokens);
    }
    if let Some(temperature) = options.temperature {
        chat = chat.temperature(temperature);
    }
    if let Some(seed) = options.seed {
        chat = chat.seed(seed);
    }
    chat
}

/// Reads turns from standard input until its end. A turn that fails is told and forgotten; the session goes on.
async fn session(model: &ModelHandle, blank: Chat, images: Vec<Image>, json: bool) -> Result<(), Failure> {
    let is_terminal = stdin().is_terminal() && !json;
    if is_terminal {
        println!("/image FILE adds a picture to the next question, /quit ends.");
    }
    let (mut chat, mut images) = (blank, images);
    loop {
        if is_terminal {
            print!("? ");
            stdout().flush()?;
        }
        let Some(line) = tokio::task::block_in_place(|| stdin().lock().lines().next()).transpose()? else {
            return Ok(());
        };
        match line.trim() {
            "" => {}
            "/quit" => return Ok(()),
            command if command.starts_with("/image") => match Image::open(command["/image".len()..].trim()) {
                Ok(image) => images.push(image),
                Err(error) => tell(&Failure::from(error), json),
            },
            question => {
                let asked = images.iter().cloned().fold(chat.clone().user(question), Chat::image);
                match stream(model, asked.clone(), json).await {
                    Ok(answer) => {
                        chat = asked.assistant(answer);
                        images.clear();
                    }
                    Err(failure) => tell(&failure, json),
                }
            }
        }
    }
}

fn tell(failure: &Failure, json: bool) {
    if json {
        println!("{}", json!({"type": "error", "error": failure.error, "hint": failure.hint}));
    } else {
        eprintln!("{failure}");
    }
}

/// Prints a reply as it comes; gives its text.
async fn stream(model: &ModelHandle, chat: Chat, json: bool) -> Result<String, Failure> {
    let mut reply = model.chat(chat).await?;
    let mut whole = String::new();
    while let Some(event) = reply.next().await {
        let event = event?;
        if json {
            writeln!(stdout(), "{}", as_json(&event))?;
        } else {
            write!(stdout(), "{}", event.text())?;
            stdout().flush()?;
        }
        if let ChatEvent::Done { text, .. } = event {
            whole = text;
        }
    }
    if !json {
        writeln!(stdout())?;
    }
    Ok(whole)
}

fn as_json(event: &ChatEvent) -> Value {
    match event {
        ChatEvent::Text(text) => json!({"type": "token", "text": text}),
        ChatEvent::Prompt(scores) => {
            json!({"type": "prompt", "tokens": scores.iter().map(score_json).collect::<Vec<_>>()})
        }
        ChatEvent::Token(score) => json!({"type": "score", "token": score_json(&Some(score.clone()))}),
        ChatEvent::Done { text, finish_reason, usage } => json!({
            "type": "done",
            "text": text,
            "finish_reason": finish_reason.label(),
            "usage": usage_json(usage),
        }),
        _ => json!({"type": "other"}),
    }
}

fn score_json(score: &Option<TokenScore>) -> Value {
    let token = |token: &ScoredToken| json!({"id": token.id, "text": token.text, "logprob": token.log_probability});
    match score {
        None => Value::Null,
        Some(score) => {
            let mut scored = token(&score.token);
            scored["top"] = score.top.iter().map(token).collect();
            scored
        }
    }
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "picture_tokens": usage.picture_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
