//! Choices of a completion, whole or streamed.

use std::collections::BTreeMap;

use bursar::{ChatEvent, TokenScore, Usage};
use schemars::JsonSchema;
use serde::Serialize;

use super::{log_probabilities::finite, stop_reason::StopReasonBody};

/// The echoed prompt at the beginning of a choice.
#[derive(Clone, Default)]
pub(super) struct Echo {
    pub(super) text: Option<String>,
    /// `true` if log-probabilities of the prompt are included.
    pub(super) has_scores: bool,
    /// `true` if `max_tokens` is 0. One token is then generated to score the prompt, but
    /// is not returned.
    pub(super) is_all: bool,
    pub(super) has_ids: bool,
}

/// A choice of a `text_completion`, or the part of it that a chunk adds.
#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "CompletionChoice")]
pub(crate) struct Choice {
    index: usize,
    text: String,
    logprobs: Option<LogProbabilities>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReasonBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The columns of OpenAI's `logprobs` for completions.
#[derive(Default, Serialize, JsonSchema)]
struct LogProbabilities {
    /// Offset of each token, in characters of `text`.
    text_offset: Vec<usize>,
    tokens: Vec<String>,
    /// Null for the very first token, because it has no predecessor.
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
            score.top.into_iter().map(|token| (token.text, finite(token.log_probability))).collect();
        top.insert(score.token.text.clone(), finite(score.token.log_probability));
        self.token_logprobs.push(Some(finite(score.token.log_probability)));
        self.tokens.push(score.token.text);
        self.top_logprobs.push(Some(top));
    }
}

impl Choice {
    pub(super) fn new(index: usize, text: &str) -> Self {
        Choice { index, text: text.to_owned(), ..Choice::default() }
    }

    pub(super) fn add(&mut self, more: Choice) {
        self.text += &more.text;
        self.finish_reason = more.finish_reason.or(self.finish_reason);
        self.stop_reason = more.stop_reason.or(self.stop_reason.take());
        self.prompt_token_ids = self.prompt_token_ids.take().or(more.prompt_token_ids);
        extend(&mut self.token_ids, more.token_ids);
        if let Some(more) = more.logprobs {
            let all = self.logprobs.get_or_insert_default();
            all.text_offset.extend(more.text_offset);
            all.tokens.extend(more.tokens);
            all.token_logprobs.extend(more.token_logprobs);
            all.top_logprobs.extend(more.top_logprobs);
        }
    }
}

#[derive(Default)]
pub(super) struct Sample {
    echo: Echo,
    scores: Option<LogProbabilities>,
    /// Offset of the next scored token, in characters.
    offset: usize,
    prompt_ids: Option<Vec<u32>>,
    ids: Option<Vec<u32>>,
    pub(super) usage: Usage,
}

impl Sample {
    /// Creates a sample. The offsets of the reply's tokens start after the echoed text.
    pub(super) fn new(echo: Echo) -> Self {
        let offset = echo.text.as_ref().map_or(0, |text| text.chars().count());
        Sample { echo, offset, ..Sample::default() }
    }

    /// Echoed prompt, if requested.
    pub(super) fn echoed(&self) -> Option<&str> {
        self.echo.text.as_deref()
    }

    /// Returns a choice with this text, and with the scores and ids since the previous choice.
    fn choice(&mut self, index: usize, text: String) -> Choice {
        let (prompt_token_ids, token_ids) = (self.prompt_ids.take(), self.ids.take());
        let logprobs = self.scores.take();
        Choice { index, text, logprobs, prompt_token_ids, token_ids, ..Choice::default() }
    }

    pub(super) fn read(&mut self, index: usize, event: ChatEvent) -> Option<Choice> {
        match event {
            ChatEvent::Prompt(scores) => {
                let rest: usize = scores.iter().flatten().map(|score| score.token.text.chars().count()).sum();
                // The first token has no predecessor, so it has no score. Its text is the part of
                // the echo that the other tokens do not cover.
                let first = self.offset.saturating_sub(rest);
                let all = self.scores.get_or_insert_default();
                let mut offset = 0;
                for (at, score) in scores.into_iter().enumerate() {
                    all.push(score, &mut offset);
                    offset = if at == 0 { first } else { offset };
                }
                if let (Some(text), Some(token)) = (&self.echo.text, all.tokens.first_mut()) {
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
                let choice = self.choice(index, String::new());
                if self.echo.is_all {
                    // The model has to generate one token to score the prompt. The token is not
                    // returned, so it is not counted.
                    self.usage.completion_tokens = 0;
                    return Some(Choice { finish_reason: Some("length"), ..choice });
                }
                let stop_reason = stop_reason.map(StopReasonBody::from);
                Some(Choice { finish_reason: Some(finish_reason.label()), stop_reason, ..choice })
            }
            _ => None,
        }
    }
}

fn extend(ids: &mut Option<Vec<u32>>, more: Option<Vec<u32>>) {
    if let Some(more) = more {
        ids.get_or_insert_default().extend(more);
    }
}
