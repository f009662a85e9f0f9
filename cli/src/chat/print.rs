//! Printing of replies, as text or as one JSON event per line.

use std::io::IsTerminal;

use bursar::{
    Chat, ChatError, ChatEvent, FinishReason, ModelHandle, Reply, ScoredToken, TokenScore, ToolCallEvent, Usage,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{input::Interrupts, options::Options};
use crate::{
    failure::{self, Failure},
    logging, output,
};

/// Terminal escape that dims the reasoning.
const DIM: &str = "\x1b[2m";
/// Terminal escape that ends the dimming.
const PLAIN: &str = "\x1b[22m";

/// How the command ended.
pub enum Outcome {
    /// Every question was answered.
    Answered,
    /// Something failed and was reported.
    Failed,
    /// The user pressed Ctrl-C.
    Interrupted,
}

/// How a successful reply ended.
pub enum Ended {
    /// The reply is complete.
    Done { text: String },
    /// The user pressed Ctrl-C. `text` is the reply so far.
    Interrupted { text: String },
    /// Standard output was closed.
    OutputClosed,
}

/// Prints a reply as it arrives.
pub async fn stream(
    model: &ModelHandle,
    chat: Chat,
    options: &Options,
    interrupts: &mut Interrupts,
) -> Result<Ended, ChatError> {
    let mut body = String::new();
    let ended = tokio::select! {
        biased;
        () = interrupts.next() => None,
        ended = async {
            let reply = model.chat(chat).await?;
            if options.json { events(reply, None, &mut body).await } else { text(reply, options, &mut body).await }
        } => Some(ended),
    };
    if !options.json && !matches!(ended, Some(Ok(_))) && !body.is_empty() {
        // End the reply's line before anything else is printed.
        println!();
    }
    match ended {
        Some(Ok(true)) => Ok(Ended::Done { text: body }),
        Some(Ok(false)) => Ok(Ended::OutputClosed),
        Some(Err(error)) => Err(error),
        None => {
            if options.json {
                println!("{}", json!({ "type": "interrupted", "text": body }));
            }
            Ok(Ended::Interrupted { text: body })
        }
    }
}

/// Prints several replies to one question: JSON events as they arrive, or texts one after another.
/// Each failure is reported.
pub async fn samples(model: &ModelHandle, chat: Chat, options: &Options) -> Result<Outcome, Failure> {
    let mut running = JoinSet::new();
    for (sample, reply) in model.samples(chat, options.n).await?.into_iter().enumerate() {
        let is_json = options.json;
        running.spawn(async move {
            let outcome = if is_json {
                events(reply, Some(sample), &mut String::new()).await.map(|_| CompleteReply::default())
            } else {
                whole(reply).await
            };
            (sample, outcome)
        });
    }
    let mut printed = running.join_all().await;
    printed.sort_by_key(|(sample, _)| *sample);
    let mut over = Outcome::Answered;
    for (sample, printed) in printed {
        match printed {
            Ok(_) if options.json => {}
            Ok(CompleteReply { text, scores, cut }) => {
                println!("[{sample}] {text}{}", scores.iter().map(line_of).collect::<String>());
                if let Some(usage) = cut {
                    note_cut(&usage, options);
                }
            }
            Err(error) => {
                over = Outcome::Failed;
                let failure = Failure::from(error);
                if options.json {
                    println!("{}", of_sample(crate::shared_output::failure(&failure), Some(sample)))
                } else {
                    failure::print(&Failure { error: format!("[{sample}] {}", failure.error), ..failure })
                }
            }
        }
    }
    Ok(over)
}

pub fn failure(failure: &Failure, is_json: bool) {
    if is_json { println!("{}", crate::shared_output::failure(failure)) } else { failure::print(failure) }
}

/// Reports a failure that affects all requested replies. As JSON, each of several replies
/// gets its own event.
pub fn failure_of_all(failed: &Failure, options: &Options) {
    if options.json && options.n > 1 {
        (0..options.n).for_each(|sample| {
            println!("{}", of_sample(crate::shared_output::failure(failed), Some(sample)));
        })
    } else {
        failure(failed, options.json)
    }
}

/// Prints text as it arrives and appends it to `printed`. On a terminal, the reasoning is printed
/// before the text, dimmed. Output to a file or a pipe has no reasoning. Returns `false` once
/// standard output is closed.
async fn text(mut reply: Reply, options: &Options, printed: &mut String) -> Result<bool, ChatError> {
    let (mut scores, mut cut) = (Vec::new(), None);
    let (shows_reasoning, mut has_reasoned) = (std::io::stdout().is_terminal(), false);
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => scores.push(score),
            ChatEvent::Done { finish_reason, usage, .. } => {
                cut = (finish_reason == FinishReason::Length).then_some(usage);
            }
            ChatEvent::Reasoning(piece) if shows_reasoning => {
                has_reasoned = true;
                if !output::out(format_args!("{DIM}{piece}{PLAIN}")) {
                    return Ok(false);
                }
            }
            event => {
                let parted = has_reasoned && !event.text().is_empty() && printed.is_empty();
                *printed += event.text();
                if !output::out(format_args!("{}{}", if parted { "\n\n" } else { "" }, event.text())) {
                    return Ok(false);
                }
            }
        }
    }
    println!("{}", scores.iter().map(line_of).collect::<String>());
    if let Some(usage) = cut {
        note_cut(&usage, options);
    }
    Ok(true)
}

/// A reply that is printed when it is complete.
#[derive(Default)]
struct CompleteReply {
    text: String,
    scores: Vec<TokenScore>,
    /// Token usage, if the length limit cut the reply off.
    cut: Option<Usage>,
}

async fn whole(mut reply: Reply) -> Result<CompleteReply, ChatError> {
    let mut whole = CompleteReply::default();
    while let Some(event) = reply.next().await {
        match event? {
            ChatEvent::Token(score) => whole.scores.push(score),
            ChatEvent::Done { text, finish_reason, usage, .. } => {
                whole.text = text;
                whole.cut = (finish_reason == FinishReason::Length).then_some(usage);
            }
            _ => {}
        }
    }
    Ok(whole)
}

/// Prints one line per event, with the sample's number if there are several, and appends the text
/// to `printed`. Returns `false` once standard output is closed.
async fn events(mut reply: Reply, sample: Option<usize>, printed: &mut String) -> Result<bool, ChatError> {
    while let Some(event) = reply.next().await {
        let event = event?;
        *printed += event.text();
        if !output::out(format_args!("{}\n", of_sample(as_json(&event), sample))) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn of_sample(mut event: Value, sample: Option<usize>) -> Value {
    if let Some(sample) = sample {
        event["sample"] = sample.into();
    }
    event
}

/// Reports that a reply is incomplete, and why.
fn note_cut(usage: &Usage, options: &Options) {
    let (tokens, plural) = (usage.completion_tokens, if usage.completion_tokens == 1 { "" } else { "s" });
    if options.max_tokens == Some(tokens) {
        logging::note(format_args!("(cut after {tokens} token{plural}, as many as --max-tokens allows)"))
    } else {
        logging::note(format_args!(
            "(cut after {tokens} token{plural}: the context is full; --context-tokens makes it larger)"
        ))
    }
}

/// Formats a token and its alternatives as one line, with their probabilities.
fn line_of(score: &TokenScore) -> String {
    let likely = |token: &ScoredToken| format!("{:?} {:.1} %", token.text, 100.0 * token.log_probability.exp());
    let others = score.top.iter().filter(|top| top.id != score.token.id).map(likely).collect::<Vec<_>>();
    if others.is_empty() {
        format!("\n  {}", likely(&score.token))
    } else {
        format!("\n  {}   instead: {}", likely(&score.token), others.join(", "))
    }
}

fn as_json(event: &ChatEvent) -> Value {
    match event {
        ChatEvent::Text(text) => json!({"type": "token", "text": text}),
        ChatEvent::Prompt(scores) => {
            json!({"type": "prompt", "tokens": scores.iter().map(score_json).collect::<Vec<_>>()})
        }
        ChatEvent::Token(score) => json!({"type": "score", "token": score_json(&Some(score.clone()))}),
        ChatEvent::Reasoning(text) => json!({"type": "reasoning", "text": text}),
        ChatEvent::ToolCall(call) => call_json(call),
        ChatEvent::Done { text, reasoning, tool_calls, finish_reason, usage, .. } => json!({
            "type": "done",
            "text": text,
            "reasoning": reasoning,
            "tool_calls": tool_calls.iter().cloned().map(Value::from).collect::<Vec<_>>(),
            "finish_reason": finish_reason.label(),
            "usage": usage_json(usage),
        }),
        _ => json!({"type": "other"}),
    }
}

fn call_json(call: &ToolCallEvent) -> Value {
    match call {
        ToolCallEvent::Begin { index, id, name } => {
            json!({"type": "tool_call", "index": index, "id": id, "name": name})
        }
        ToolCallEvent::Arguments { index, json } => json!({"type": "tool_call", "index": index, "arguments": json}),
        ToolCallEvent::End { index, is_whole } => json!({"type": "tool_call", "index": index, "whole": is_whole}),
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
        "reasoning_tokens": usage.reasoning_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
