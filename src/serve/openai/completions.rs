//! `POST /v1/completions`.

use std::{collections::BTreeMap, mem, sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use futures_util::{Stream, StreamExt, future::try_join_all, stream};
use schemars::JsonSchema;
use serde::Serialize;

use super::{
    chat::{self, Head},
    completion_request::{CompletionFields, CompletionRequest, Prompt},
    log_probabilities::told,
    sampling::{Sampling, StreamOptions},
    stop_reason::StopTold,
    usage::UsageTold,
};
use crate::{
    Chat, ChatError, ChatEvent, ModelHandle, Reply, ReplyFormat, TokenScore, Usage,
    serve::{
        body::JsonBody,
        error::{ApiError, Shape},
        guard::{Client, Held},
        service::Shared,
        sse,
    },
};

/// OpenAI's default for completions.
const TOKENS_USUAL: usize = 16;

pub(in crate::serve) async fn complete(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<CompletionRequest>,
) -> Result<Response, ApiError> {
    let JsonBody { value: CompletionRequest { mut fields, sampling }, room } = body;
    let (own, model) = shared.models.ready(fields.model.as_deref())?;
    let head = Head::new("cmpl-", fields.model.take().filter(|name| !name.is_empty()).unwrap_or(own.to_string()));
    let (is_streamed, options) = (sampling.stream.unwrap_or_default(), sampling.stream_options.unwrap_or_default());
    let prompts = Prompt::all(fields.prompt.take())?;
    let (count, limit) = (sampling.n.unwrap_or(1), model.requests().1);
    let replies = prompts.len().saturating_mul(count);
    if replies > limit {
        let told = format!(
            "{} prompts with {count} replies each are more than the {limit} that may run or wait",
            prompts.len()
        );
        return Err(ApiError::invalid("prompt", told).hint("send them in several requests"));
    }
    let held = client.hold(replies, room)?;
    let samples = ask(&model, prompts, fields, &sampling).await?;
    let echoes = samples.iter().map(|(echo, _)| echo.clone()).collect();
    let telling = Telling::new(head, options, echoes, count.max(1), held);
    let replies = samples.into_iter().map(|(_, reply)| reply);
    match is_streamed {
        true => Ok(streamed(telling, replies, shared.options.keep_alive)),
        false => whole(telling, replies).await,
    }
}

/// What a choice begins with, before the reply.
#[derive(Clone, Default)]
struct Echo {
    text: Option<String>,
    /// The prompt's scores are told too.
    has_scores: bool,
    /// The reply was only asked for to score the prompt.
    is_all: bool,
    has_ids: bool,
}

/// Asks for all samples of all prompts, in the order of their choices.
async fn ask(
    model: &ModelHandle,
    prompts: Vec<Prompt>,
    fields: CompletionFields,
    sampling: &Sampling,
) -> Result<Vec<(Echo, Reply)>, ApiError> {
    if fields.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::invalid("suffix", "`suffix` is not served").hint("give all of it as `prompt`"));
    }
    let count = sampling.n.unwrap_or(1);
    if fields.best_of.is_some_and(|best| best != count) {
        return Err(ApiError::invalid("best_of", "`best_of` is not served").hint("ask for `n` and choose"));
    }
    let (is_echoed, limit) = (fields.echo.unwrap_or_default(), fields.max_tokens.unwrap_or(TOKENS_USUAL));
    let format = fields.response_format.map(chat::format).transpose()?.flatten();
    let mut asked = Vec::new();
    for prompt in prompts {
        let tokens = match &prompt {
            Prompt::Text(text) => model.tokenize(text.clone(), fields.add_special_tokens.unwrap_or(true)).await?,
            Prompt::Tokens(tokens) => tokens.clone(),
        };
        let echo = Echo {
            text: match (is_echoed, prompt) {
                (false, _) => None,
                (true, Prompt::Text(text)) => Some(text),
                (true, Prompt::Tokens(tokens)) => Some(model.detokenize(tokens).await?),
            },
            has_scores: is_echoed && fields.logprobs.is_some(),
            is_all: is_echoed && limit == 0,
            has_ids: fields.return_token_ids.unwrap_or_default(),
        };
        let mut chat = Chat::from_tokens(tokens).reply_format(ReplyFormat::default());
        chat = chat.max_tokens(if echo.is_all { 1 } else { limit });
        if let Some(top) = fields.logprobs {
            chat = chat.log_probabilities(top);
            chat = if echo.has_scores { chat.prompt_log_probabilities(top) } else { chat };
        }
        chat = if echo.has_ids { chat.token_ids() } else { chat };
        chat = format.iter().cloned().fold(sampling.apply(chat)?, Chat::format);
        let replies = model.samples(chat, count).await?;
        asked.extend(replies.into_iter().map(|reply| (echo.clone(), reply)));
    }
    Ok(asked)
}

/// `text_completion`, whole or a chunk.
#[derive(Serialize, JsonSchema)]
pub(in crate::serve) struct Completion<'a> {
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
    text: String,
    logprobs: Option<LogProbabilities>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopTold>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The columns of OpenAI's `logprobs` for completions.
#[derive(Default, Serialize, JsonSchema)]
struct LogProbabilities {
    /// Where each token begins, in characters of the choice's text.
    text_offset: Vec<usize>,
    tokens: Vec<String>,
    /// None for the first token of all, which follows nothing.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
}

impl LogProbabilities {
    fn push(&mut self, score: Option<TokenScore>, offset: &mut usize) {
        self.text_offset.push(*offset);
        let Some(score) = score else {
            self.tokens.push(String::new());
            self.token_logprobs.push(None);
            self.top_logprobs.push(None);
            return;
        };
        *offset += score.token.text.chars().count();
        let mut top: BTreeMap<_, _> =
            score.top.into_iter().map(|token| (token.text, told(token.log_probability))).collect();
        top.insert(score.token.text.clone(), told(score.token.log_probability));
        self.token_logprobs.push(Some(told(score.token.log_probability)));
        self.tokens.push(score.token.text);
        self.top_logprobs.push(Some(top));
    }
}

struct Telling {
    head: Head,
    options: StreamOptions,
    samples: Vec<Sample>,
    /// Of each prompt.
    count: usize,
    open: usize,
    held: Held,
}

#[derive(Default)]
struct Sample {
    echo: Echo,
    scores: Option<LogProbabilities>,
    /// Characters that scored tokens have covered.
    offset: usize,
    prompt_ids: Option<Vec<u32>>,
    ids: Option<Vec<u32>>,
    usage: Usage,
}

impl Sample {
    /// Begins behind what is echoed.
    fn new(echo: Echo) -> Self {
        let offset = echo.text.as_ref().map_or(0, |text| text.chars().count());
        Sample { echo, offset, ..Sample::default() }
    }

    /// What has come since the last choice, with this text.
    fn choice(&mut self, index: usize, text: String) -> Choice {
        let (prompt_token_ids, token_ids) = (self.prompt_ids.take(), self.ids.take());
        let logprobs = self.scores.take();
        Choice { index, text, logprobs, prompt_token_ids, token_ids, ..Choice::default() }
    }

    fn heard(&mut self, index: usize, event: ChatEvent) -> Option<Choice> {
        match event {
            ChatEvent::Prompt(scores) => {
                let rest: usize = scores.iter().flatten().map(|score| score.token.text.chars().count()).sum();
                // The first token follows nothing, so it has no score; its text is what the others leave of the echo.
                let first = self.offset.saturating_sub(rest);
                let told = self.scores.get_or_insert_default();
                let mut offset = 0;
                for (at, score) in scores.into_iter().enumerate() {
                    told.push(score, &mut offset);
                    offset = if at == 0 { first } else { offset };
                }
                if let (Some(text), Some(token)) = (&self.echo.text, told.tokens.first_mut()) {
                    *token = text.chars().take(first).collect();
                }
                None
            }
            ChatEvent::PromptIds(ids) => {
                self.prompt_ids = Some(ids.to_vec());
                None
            }
            ChatEvent::Token(score) if !self.echo.is_all => {
                self.scores.get_or_insert_default().push(Some(score), &mut self.offset);
                None
            }
            ChatEvent::TokenId(id) if !self.echo.is_all => {
                self.ids.get_or_insert_default().push(id);
                None
            }
            ChatEvent::Text(text) if !self.echo.is_all => Some(self.choice(index, text)),
            ChatEvent::Done { finish_reason, stop_reason, usage, .. } => {
                self.usage = usage;
                let reason = if self.echo.is_all { "length" } else { finish_reason.label() };
                let choice = self.choice(index, String::new());
                Some(Choice { finish_reason: Some(reason), stop_reason: stop_reason.map(StopTold::from), ..choice })
            }
            _ => None,
        }
    }
}

impl Telling {
    fn new(head: Head, options: StreamOptions, echoes: Vec<Echo>, count: usize, held: Held) -> Self {
        let samples: Vec<_> = echoes.into_iter().map(Sample::new).collect();
        Telling { head, options, open: samples.len(), samples, count, held }
    }

    fn usage(&self) -> UsageTold {
        let prompts = self.samples.chunks(self.count);
        prompts.map(|samples| UsageTold::of(samples.iter().map(|sample| sample.usage))).sum()
    }

    fn event(&self, choices: Vec<Choice>, usage: Option<Option<UsageTold>>) -> Event {
        sse::json(&self.completion(choices, usage))
    }

    fn completion(&self, choices: Vec<Choice>, usage: Option<Option<UsageTold>>) -> Completion<'_> {
        let Head { id, created, model } = &self.head;
        Completion { id, object: "text_completion", created: *created, model, choices, usage }
    }

    fn told(&mut self, index: usize, event: ChatEvent) -> Vec<Event> {
        let is_end = matches!(event, ChatEvent::Done { .. });
        let has_usage = self.options.include_usage.unwrap_or_default();
        let choice = self.samples[index].heard(index, event);
        let mut told: Vec<_> =
            choice.map(|choice| self.event(vec![choice], has_usage.then_some(None))).into_iter().collect();
        self.open -= usize::from(is_end);
        if self.open == 0 {
            if has_usage {
                told.push(self.event(Vec::new(), Some(Some(self.usage()))));
            }
            told.push(sse::done());
            self.held = Held::default();
        }
        told
    }
}

fn streamed(telling: Telling, replies: impl Iterator<Item = Reply>, keep_alive: Duration) -> Response {
    let has_usage = telling.options.include_usage.unwrap_or_default();
    let echoes: Vec<_> = telling.samples.iter().map(|sample| sample.echo.text.clone()).enumerate().collect();
    let echoed = echoes.into_iter().filter_map(|(index, text)| {
        Some(telling.event(vec![Choice { index, text: text?, ..Choice::default() }], has_usage.then_some(None)))
    });
    let echoed: Vec<Event> = echoed.collect();
    let events = replies.enumerate().map(|(index, reply)| reply.map(move |event| (index, event)));
    let told = tell(stream::select_all(events), telling);
    sse::response(stream::iter(echoed).chain(told), keep_alive)
}

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

async fn whole(mut telling: Telling, replies: impl Iterator<Item = Reply>) -> Result<Response, ApiError> {
    let samples = mem::take(&mut telling.samples).into_iter().zip(replies).enumerate();
    // All at once: a reply that nobody reads stops.
    let ended = try_join_all(samples.map(|(index, (sample, reply))| end(index, sample, reply))).await?;
    let choices;
    (telling.samples, choices) = ended.into_iter().unzip();
    telling.held = Held::default();
    let usage = telling.usage();
    Ok(Json(telling.completion(choices, Some(Some(usage)))).into_response())
}

async fn end(index: usize, mut sample: Sample, mut reply: Reply) -> Result<(Sample, Choice), ChatError> {
    let mut choice = Choice { index, text: sample.echo.text.clone().unwrap_or_default(), ..Choice::default() };
    while let Some(event) = reply.next().await {
        if let Some(more) = sample.heard(index, event?) {
            choice.add(more);
        }
    }
    Ok((sample, choice))
}

impl Choice {
    fn add(&mut self, more: Choice) {
        self.text += &more.text;
        self.finish_reason = more.finish_reason.or(self.finish_reason);
        self.stop_reason = more.stop_reason.or(self.stop_reason.take());
        self.prompt_token_ids = self.prompt_token_ids.take().or(more.prompt_token_ids);
        extend(&mut self.token_ids, more.token_ids);
        if let Some(more) = more.logprobs {
            let told = self.logprobs.get_or_insert_default();
            told.text_offset.extend(more.text_offset);
            told.tokens.extend(more.tokens);
            told.token_logprobs.extend(more.token_logprobs);
            told.top_logprobs.extend(more.top_logprobs);
        }
    }
}

fn extend(ids: &mut Option<Vec<u32>>, more: Option<Vec<u32>>) {
    if let Some(more) = more {
        ids.get_or_insert_default().extend(more);
    }
}
