//! The chunks of a streamed chat.

use std::{mem, sync::Arc, time::Duration};

use axum::response::{Response, sse::Event};
use futures_util::{Stream, StreamExt, stream};
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    chat::Head, log_probabilities::ChatLogProbabilities, sampling::StreamOptions, stop_reason::StopTold,
    usage::UsageTold,
};
use crate::{
    ChatError, ChatEvent, Reply, TokenScore, ToolCallEvent, Usage,
    serve::{
        error::{ApiError, Shape},
        guard::Held,
        sse,
    },
};

/// `chat.completion.chunk`.
#[derive(Serialize, JsonSchema)]
pub(in crate::serve) struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageTold>>,
}

#[derive(Default, Serialize, JsonSchema)]
struct Choice {
    index: usize,
    delta: Delta,
    logprobs: Option<ChatLogProbabilities>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopTold>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Arc<[u32]>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// What a chunk adds.
#[derive(Default, Serialize, JsonSchema)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

#[derive(Default, Serialize, JsonSchema)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Default, Serialize, JsonSchema)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// A stream of chunks, the usage if asked for, and `[DONE]`. An error in the middle is a chunk of its own, the last but one.
pub(in crate::serve) fn stream(
    head: Head,
    replies: Vec<Reply>,
    options: StreamOptions,
    held: Held,
    keep_alive: Duration,
) -> Response {
    let open = replies.len();
    let samples = (0..open).map(|_| Sample::default()).collect();
    let telling = Telling { head, options, samples, open, _held: held };
    let greetings: Vec<Event> = (0..open).map(|index| telling.greeting(index)).collect();
    let events = stream::select_all(
        replies.into_iter().enumerate().map(|(index, reply)| reply.map(move |event| (index, event))),
    );
    sse::response(stream::iter(greetings).chain(tell(events, telling)), keep_alive)
}

/// All that a client hears after the greetings.
fn tell(
    events: impl Stream<Item = (usize, Result<ChatEvent, ChatError>)> + Send + Unpin,
    telling: Telling,
) -> impl Stream<Item = Event> + Send {
    sse::told(events, telling, |telling, (index, event)| match event {
        Ok(event) => {
            let told = telling.told(index, event);
            (told, telling.open == 0)
        }
        Err(error) => (vec![sse::json(&ApiError::from(error).body(Shape::OpenAi)), sse::done()], true),
    })
}

struct Telling {
    head: Head,
    options: StreamOptions,
    samples: Vec<Sample>,
    /// Samples that have not ended.
    open: usize,
    _held: Held,
}

/// One of the replies.
#[derive(Default)]
struct Sample {
    /// Scores of tokens whose text has not come yet.
    scores: Vec<TokenScore>,
    /// Likewise, if asked for.
    ids: Option<Vec<u32>>,
    prompt_ids: Option<Arc<[u32]>>,
    usage: Usage,
}

impl Telling {
    fn greeting(&self, index: usize) -> Event {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
        self.chunk(Choice { index, delta, ..Choice::default() })
    }

    /// The chunks of one event of a reply.
    fn told(&mut self, index: usize, event: ChatEvent) -> Vec<Event> {
        let delta = match event {
            ChatEvent::Token(score) => {
                self.samples[index].scores.push(score);
                return Vec::new();
            }
            ChatEvent::TokenId(id) => {
                self.samples[index].ids.get_or_insert_default().push(id);
                return Vec::new();
            }
            ChatEvent::PromptIds(ids) => {
                self.samples[index].prompt_ids = Some(ids);
                return Vec::new();
            }
            ChatEvent::Text(text) => Delta { content: Some(text), ..Delta::default() },
            ChatEvent::Reasoning(text) => {
                Delta { reasoning_content: Some(text.clone()), reasoning: Some(text), ..Delta::default() }
            }
            ChatEvent::ToolCall(ToolCallEvent::Begin { index, id, name }) => called(CallDelta {
                index,
                id: Some(id),
                kind: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: String::new() },
            }),
            ChatEvent::ToolCall(ToolCallEvent::Arguments { index, json }) => {
                let function = FunctionDelta { name: None, arguments: json };
                called(CallDelta { index, function, ..CallDelta::default() })
            }
            ChatEvent::Done { finish_reason, stop_reason, usage, .. } => {
                self.samples[index].usage = usage;
                let last = self.choice(index, Delta::default());
                let stop_reason = stop_reason.map(StopTold::from);
                return self.end(Choice { finish_reason: Some(finish_reason.label()), stop_reason, ..last });
            }
            _ => return Vec::new(),
        };
        let choice = self.choice(index, delta);
        vec![self.chunk(choice)]
    }

    fn end(&mut self, last: Choice) -> Vec<Event> {
        self.open -= 1;
        let mut told = vec![self.chunk(last)];
        if self.open == 0 {
            if self.options.include_usage.unwrap_or_default() {
                let usage = UsageTold::of(self.samples.iter().map(|sample| sample.usage));
                told.push(self.event(Vec::new(), Some(Some(usage))));
            }
            told.push(sse::done());
        }
        told
    }

    /// What a delta adds, with the scores and ids of its tokens.
    fn choice(&mut self, index: usize, delta: Delta) -> Choice {
        let sample = &mut self.samples[index];
        let logprobs = ChatLogProbabilities::of(mem::take(&mut sample.scores));
        let (prompt_token_ids, token_ids) = (sample.prompt_ids.take(), sample.ids.take());
        Choice { index, delta, logprobs, prompt_token_ids, token_ids, ..Choice::default() }
    }

    fn chunk(&self, choice: Choice) -> Event {
        // OpenAI's chunks have a null where the last one has the usage.
        let usage = self.options.include_usage.unwrap_or_default().then_some(None);
        self.event(vec![choice], usage)
    }

    fn event(&self, choices: Vec<Choice>, usage: Option<Option<UsageTold>>) -> Event {
        let Head { id, created, model } = &self.head;
        sse::json(&Chunk { id, object: "chat.completion.chunk", created: *created, model, choices, usage })
    }
}

fn called(call: CallDelta) -> Delta {
    Delta { tool_calls: Some([call]), ..Delta::default() }
}
