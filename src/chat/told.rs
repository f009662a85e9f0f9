//! How a reply is told: as text, or as one JSON event a line.

use std::io::{Write, stdout};

use bursar::{Chat, ChatEvent, ModelHandle, Reply, ScoredToken, TokenScore, Usage};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::failure::Failure;

/// Prints a reply as it comes; gives its text.
pub async fn stream(model: &ModelHandle, chat: Chat, json: bool) -> Result<String, Failure> {
    let mut reply = model.chat(chat).await?;
    if json {
        return events(reply, None).await;
    }
    let (mut whole, mut scores) = (String::new(), Vec::new());
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => scores.push(score),
            ChatEvent::Done { text, .. } => whole = text,
            event => {
                write!(stdout(), "{}", event.text())?;
                stdout().flush()?;
            }
        }
    }
    writeln!(stdout())?;
    for score in &scores {
        writeln!(stdout(), "  {}", as_line(score))?;
    }
    Ok(whole)
}

/// Prints several replies to one question: events as they come, texts one after another. The first failure is told.
pub async fn samples(model: &ModelHandle, chat: Chat, samples: usize, json: bool) -> Result<(), Failure> {
    let mut running = JoinSet::new();
    for (sample, reply) in model.samples(chat, samples).await?.into_iter().enumerate() {
        running.spawn(async move {
            let told = if json { events(reply, Some(sample)).await } else { whole(reply).await };
            (sample, told)
        });
    }
    let mut told = running.join_all().await;
    told.sort_by_key(|(sample, _)| *sample);
    for (sample, text) in told {
        let text = text?;
        if !json {
            writeln!(stdout(), "[{sample}] {text}")?;
        }
    }
    Ok(())
}

async fn whole(mut reply: Reply) -> Result<String, Failure> {
    let (mut whole, mut scores) = (String::new(), String::new());
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => scores += &format!("\n  {}", as_line(&score)),
            ChatEvent::Done { text, .. } => whole = text,
            _ => {}
        }
    }
    Ok(whole + &scores)
}

/// Prints a line an event, with the number of its sample where there are several.
async fn events(mut reply: Reply, sample: Option<usize>) -> Result<String, Failure> {
    let mut whole = String::new();
    while let Some(event) = reply.next().await {
        let event = event?;
        let mut line = as_json(&event);
        if let Some(sample) = sample {
            line["sample"] = sample.into();
        }
        writeln!(stdout(), "{line}")?;
        if let ChatEvent::Done { text, .. } = event {
            whole = text;
        }
    }
    Ok(whole)
}

/// A token and others in its place, with their probabilities.
fn as_line(score: &TokenScore) -> String {
    let likely = |token: &ScoredToken| format!("{:?} {:.1} %", token.text, 100.0 * token.log_probability.exp());
    let others = score.top.iter().filter(|top| top.id != score.token.id).map(likely).collect::<Vec<_>>();
    match others.is_empty() {
        true => likely(&score.token),
        false => format!("{}   instead: {}", likely(&score.token), others.join(", ")),
    }
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
