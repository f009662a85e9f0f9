//! `POST /v1/completions`.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::State,
    response::{IntoResponse, Response, sse::Event},
};
use bursar::{Chat, ChatError, ChatEvent, ModelHandle, Reply, ReplyFormat};
use futures_util::future::try_join_all;

use super::{
    chat_request::ResponseFormat,
    chunks::{self, Chunks},
    completion_choice::{Choice, Echo, Sample},
    completion_request::{CompletionFields, CompletionRequest, Prompt},
    head::Head,
    sampling::Sampling,
    usage::UsageBody,
};
use crate::{
    body::JsonBody,
    error::ApiError,
    guard::{Client, Held},
    sse,
    state::Shared,
};

/// Fields of a chat that errors name, with their names in a completion request.
const NAMES: [(&str, &str); 1] = [("messages", "prompt")];

/// OpenAI's default `max_tokens` for completions.
const TOKENS_USUAL: usize = 16;

pub(crate) async fn complete(
    State(shared): State<Arc<Shared>>,
    Extension(client): Extension<Client>,
    body: JsonBody<CompletionRequest>,
) -> Result<Response, ApiError> {
    let JsonBody { value: CompletionRequest { mut fields, sampling }, permit } = body;
    let (name, model) = shared.models.ready(fields.model.as_deref())?;
    let head = Head::new("cmpl-", "text_completion", name);
    let (is_streamed, options) = (sampling.stream.unwrap_or_default(), sampling.stream_options.unwrap_or_default());
    let prompts = std::mem::take(&mut fields.prompt.0);
    let (count, limit) = (sampling.n.unwrap_or(1), model.requests().1);
    let replies = prompts.len().saturating_mul(count);
    if replies > limit {
        let message = format!(
            "{} prompts with {count} replies each are too many; at most {limit} may run or wait",
            prompts.len()
        );
        return Err(ApiError::invalid("prompt", message).hint("split the prompts into several requests"));
    }
    let held = client.hold(replies, permit)?;
    let asked = ask(&model, (&shared, &client), prompts, fields, &sampling).await;
    let (samples, replies): (_, Vec<_>) = asked.map_err(|error| error.renamed(&NAMES))?.into_iter().unzip();
    let samples = Samples { of: samples, count: count.max(1) };
    if is_streamed {
        Ok(streamed(Chunks::new(head, options, replies.len(), held), samples, replies, shared.options.keep_alive))
    } else {
        let answered = whole(&head, samples, replies, held).await;
        answered.map_err(|error| ApiError::from(error).renamed(&NAMES))
    }
}

/// Requests all samples of all prompts, in the order of their choices.
async fn ask(
    model: &ModelHandle,
    (shared, client): (&Shared, &Client),
    prompts: Vec<Prompt>,
    fields: CompletionFields,
    sampling: &Sampling,
) -> Result<Vec<(Sample, Reply)>, ApiError> {
    if fields.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::invalid("suffix", "`suffix` is not supported").hint("put all of the text into `prompt`"));
    }
    let count = sampling.n.unwrap_or(1);
    if fields.best_of.is_some_and(|best| best != count) {
        return Err(
            ApiError::invalid("best_of", "`best_of` is not supported").hint("request `n` replies and choose one")
        );
    }
    let (is_echoed, limit) = (fields.echo.unwrap_or_default(), fields.max_tokens.unwrap_or(TOKENS_USUAL));
    let format = fields.response_format.map(ResponseFormat::form).transpose()?.flatten();
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
        chat = chat.log_probabilities(fields.logprobs);
        chat = chat.prompt_log_probabilities(fields.logprobs.filter(|_| echo.has_scores));
        chat = if echo.has_ids { chat.token_ids() } else { chat };
        chat = client.header_params().apply(sampling.apply(chat)?);
        chat = chat.format(format.clone());
        let replies = model.samples(chat, count).await?;
        asked.extend(replies.into_iter().map(|reply| (Sample::new(echo.clone()), shared.served(reply))));
    }
    Ok(asked)
}

/// The replies to all prompts.
struct Samples {
    of: Vec<Sample>,
    /// Number of replies to each prompt.
    count: usize,
}

impl Samples {
    fn usage(&self) -> UsageBody {
        let prompts = self.of.chunks(self.count);
        prompts.map(|samples| UsageBody::of(samples.iter().map(|sample| sample.usage))).sum()
    }
}

struct CompletionEncoder {
    chunks: Chunks,
    samples: Samples,
}

impl chunks::ChunkEncoder for CompletionEncoder {
    fn encode(&mut self, index: usize, event: ChatEvent) -> Vec<Event> {
        let is_end = matches!(event, ChatEvent::Done { .. });
        let choice = self.samples.of[index].read(index, event);
        let mut events: Vec<_> = choice.map(|choice| sse::json(&self.chunks.chunk(choice))).into_iter().collect();
        if is_end {
            events.extend(self.chunks.end::<Choice>(|| self.samples.usage()));
        }
        events
    }

    fn failed(&self, error: ChatError) -> ApiError {
        ApiError::from(error).renamed(&NAMES)
    }

    fn has_ended(&self) -> bool {
        self.chunks.has_ended()
    }
}

fn streamed(chunks: Chunks, samples: Samples, replies: Vec<Reply>, keep_alive: Duration) -> Response {
    let echoes = samples.of.iter().map(Sample::echoed).enumerate();
    let echoes = echoes.filter_map(|(index, text)| Some(Choice::new(index, text?)));
    let first = echoes.map(|choice| sse::json(&chunks.chunk(choice))).collect();
    chunks::stream(first, replies, CompletionEncoder { chunks, samples }, keep_alive)
}

async fn whole(head: &Head, mut samples: Samples, replies: Vec<Reply>, held: Held) -> Result<Response, ChatError> {
    let asked = samples.of.into_iter().zip(replies).enumerate();
    // Read all replies concurrently: a reply that is not read stalls.
    let ended = try_join_all(asked.map(|(index, (sample, reply))| end(index, sample, reply))).await?;
    let choices;
    (samples.of, choices) = ended.into_iter().unzip();
    let usage = samples.usage();
    held.used(usage);
    drop(held);
    Ok(Json(head.answer::<Choice>(choices, Some(Some(usage)))).into_response())
}

async fn end(index: usize, mut sample: Sample, mut reply: Reply) -> Result<(Sample, Choice), ChatError> {
    let mut choice = Choice::new(index, sample.echoed().unwrap_or_default());
    while let Some(event) = reply.next().await {
        if let Some(more) = sample.read(index, event?) {
            choice.add(more);
        }
    }
    Ok((sample, choice))
}
