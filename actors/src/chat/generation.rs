//! How a reply is generated: what a chat may set. The checkpoint's `generation_config.json` gives the defaults.

use std::collections::BTreeMap;

use bursar_model::sampling::{OutputFormat, SamplingParams};

use super::Chat;

/// A chat's settings for its reply.
#[derive(Clone, Default)]
pub(super) struct Generation {
    pub(super) tokens_max: Option<usize>,
    pub(super) tokens_min: usize,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) top_k: Option<usize>,
    pub(super) min_p: Option<f64>,
    pub(super) repetition_penalty: Option<f64>,
    pub(super) presence_penalty: Option<f64>,
    pub(super) frequency_penalty: Option<f64>,
    pub(super) logit_bias: BTreeMap<u32, f64>,
    pub(super) seed: Option<u64>,
    pub(super) stop: Vec<String>,
    pub(super) stop_tokens: Vec<u32>,
    pub(super) ignores_end: bool,
    pub(super) log_probabilities: Option<usize>,
    pub(super) prompt_log_probabilities: Option<usize>,
    pub(super) token_ids: bool,
    pub(super) format: Option<OutputFormat>,
    pub(super) cache_salt: Option<String>,
}

impl Generation {
    /// The sampling parameters of the reply, with `defaults` for those not set.
    pub(super) fn sampling(&self, defaults: &SamplingParams, seed: u64) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            logit_bias: self.logit_bias.clone(),
            seed,
        }
    }
}

/// Settings of the reply. Where a setting takes an `Option`, `None` changes nothing.
impl Chat {
    /// The most tokens of the reply. Default: as many as the context holds.
    pub fn max_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.generation.tokens_max = tokens.into().or(self.generation.tokens_max);
        self
    }

    /// The fewest tokens of the reply. Until then neither the model nor a stop string ends it. A chat that sets this
    /// may have 1,024 stop tokens, including those of the checkpoint.
    pub fn min_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.generation.tokens_min = tokens.into().unwrap_or(self.generation.tokens_min);
        self
    }

    /// From 0, which takes the likeliest token, to 100. Logits are divided by it, so higher values make unlikely tokens
    /// likelier.
    pub fn temperature(mut self, temperature: impl Into<Option<f64>>) -> Self {
        self.generation.temperature = temperature.into().or(self.generation.temperature);
        self
    }

    /// Samples only from the likeliest tokens that together reach this probability: above 0, and up to 1, which is no
    /// limit.
    pub fn top_p(mut self, top_p: impl Into<Option<f64>>) -> Self {
        self.generation.top_p = top_p.into().or(self.generation.top_p);
        self
    }

    /// Samples only from this many of the likeliest tokens; 0 is no limit.
    pub fn top_k(mut self, top_k: impl Into<Option<usize>>) -> Self {
        self.generation.top_k = top_k.into().or(self.generation.top_k);
        self
    }

    /// Samples only tokens at least this many times as likely as the likeliest: from 0, which is no limit, to 1.
    pub fn min_p(mut self, min_p: impl Into<Option<f64>>) -> Self {
        self.generation.min_p = min_p.into().or(self.generation.min_p);
        self
    }

    /// Makes tokens that are already in the prompt or reply less likely (above 1) or more likely (below 1): positive
    /// logits are divided by it, negative ones multiplied. From 0.01 to 100.
    pub fn repetition_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.repetition_penalty = penalty.into().or(self.generation.repetition_penalty);
        self
    }

    /// Subtracted once from the logit of each token already in the reply; from -2 to 2.
    pub fn presence_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.presence_penalty = penalty.into().or(self.generation.presence_penalty);
        self
    }

    /// Subtracted from the logit of each token once per occurrence in the reply; from -2 to 2.
    pub fn frequency_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.frequency_penalty = penalty.into().or(self.generation.frequency_penalty);
        self
    }

    /// Added to the logit of this token id: from -100, which all but forbids it, to 100, which all but forces it. A
    /// chat may name 1,024 tokens.
    pub fn logit_bias(mut self, token: u32, bias: f64) -> Self {
        self.generation.logit_bias.insert(token, bias);
        self
    }

    /// Equal seeds give equal replies, even under other load. Without a seed, sampled replies differ.
    pub fn seed(mut self, seed: impl Into<Option<u64>>) -> Self {
        self.generation.seed = seed.into().or(self.generation.seed);
        self
    }

    /// The reply ends before this text, of at most 1,024 bytes, also within reasoning or a call. A chat may have 16 of
    /// them.
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.generation.stop.push(text.into());
        self
    }

    /// The reply ends before this token, as it does before the checkpoint's own stop tokens.
    pub fn stop_token(mut self, token: u32) -> Self {
        self.generation.stop_tokens.push(token);
        self
    }

    /// Ignores the tokens with which the model would end its reply, which then goes on to `max_tokens`.
    pub fn ignore_end(mut self) -> Self {
        self.generation.ignores_end = true;
        self
    }

    /// Sends the log-probabilities of the reply's tokens as events, each with this many of the likeliest tokens: at
    /// most 20. They are the model's own, before temperature and penalties.
    pub fn log_probabilities(mut self, top: impl Into<Option<usize>>) -> Self {
        self.generation.log_probabilities = top.into().or(self.generation.log_probabilities);
        self
    }

    /// Sends the prompt's token ids as the first event, and the reply's as they are made. For callers that train on
    /// replies, or keep conversations as tokens.
    pub fn token_ids(mut self) -> Self {
        self.generation.token_ids = true;
        self
    }

    /// Sends the log-probabilities of the prompt's tokens before all of the reply, in the same way.
    pub fn prompt_log_probabilities(mut self, top: impl Into<Option<usize>>) -> Self {
        self.generation.prompt_log_probabilities = top.into().or(self.generation.prompt_log_probabilities);
        self
    }

    /// Gives the reply a form: a JSON schema, a regular expression, and so on. A model that reasons does so first, and a
    /// chat with tools lets the model call one instead.
    pub fn format(mut self, format: impl Into<Option<OutputFormat>>) -> Self {
        self.generation.format = format.into().or(self.generation.format);
        self
    }

    /// Shares the prefix cache and the encoder cache only with chats of the same salt. Without a salt, the time to the
    /// first token reveals whether another caller has sent an equal prompt or picture.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Self {
        self.generation.cache_salt = Some(salt.into());
        self
    }
}
