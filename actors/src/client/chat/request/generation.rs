//! Settings of a chat for generating its reply. Defaults come
//! from the checkpoint's `generation_config.json`.

use bursar_model::sampling::OutputFormat;

use super::Chat;

/// Settings of the reply. Passing `None` to a setting that takes an `Option` changes nothing.
impl Chat {
    /// Maximum tokens of the reply. Default: all tokens that the prompt leaves of the context. A
    /// larger value is lowered to this number.
    pub fn max_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.generation.tokens_max = tokens.into().or(self.generation.tokens_max);
        self
    }

    /// Minimum tokens of the reply. Until the reply has this length, no end token of the model,
    /// stop token or stop text ends it. A chat that sets a minimum may have up to 1,024 stop
    /// tokens, including the end tokens of the checkpoint.
    pub fn min_tokens(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.generation.tokens_min = tokens.into().unwrap_or(self.generation.tokens_min);
        self
    }

    /// The sampling temperature, from 0 (always takes the likeliest token) to 100. Logits are
    /// divided by the temperature, so higher values make unlikely tokens more likely.
    pub fn temperature(mut self, temperature: impl Into<Option<f64>>) -> Self {
        self.generation.temperature = temperature.into().or(self.generation.temperature);
        self
    }

    /// Samples only from the likeliest tokens whose probabilities together reach `top_p`. The value
    /// is above 0 and at most 1; 1 means no limit.
    pub fn top_p(mut self, top_p: impl Into<Option<f64>>) -> Self {
        self.generation.top_p = top_p.into().or(self.generation.top_p);
        self
    }

    /// Samples only from the `top_k` likeliest tokens. 0 means no limit.
    pub fn top_k(mut self, top_k: impl Into<Option<usize>>) -> Self {
        self.generation.top_k = top_k.into().or(self.generation.top_k);
        self
    }

    /// Samples only tokens whose probability is at least `min_p` times the probability of the
    /// likeliest token. The value is from 0 to 1; 0 means no limit.
    pub fn min_p(mut self, min_p: impl Into<Option<f64>>) -> Self {
        self.generation.min_p = min_p.into().or(self.generation.min_p);
        self
    }

    /// Makes tokens that are already in the prompt or reply less likely (above 1) or more likely
    /// (below 1). Positive logits are divided by the penalty, negative logits are multiplied by it.
    /// The penalty is from 0.01 to 100.
    pub fn repetition_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.repetition_penalty = penalty.into().or(self.generation.repetition_penalty);
        self
    }

    /// Subtracts `penalty` once from the logit of each token that is already in the reply. The
    /// penalty is from -2 to 2.
    pub fn presence_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.presence_penalty = penalty.into().or(self.generation.presence_penalty);
        self
    }

    /// Subtracts `penalty` from the logit of each token once per occurrence in the reply. The
    /// penalty is from -2 to 2.
    pub fn frequency_penalty(mut self, penalty: impl Into<Option<f64>>) -> Self {
        self.generation.frequency_penalty = penalty.into().or(self.generation.frequency_penalty);
        self
    }

    /// Adds `bias` to the logit of this token id: from -100, which practically forbids the token,
    /// to 100, which practically forces it. A chat may set a bias for up to 1,024 tokens.
    pub fn logit_bias(mut self, token: u32, bias: f64) -> Self {
        self.generation.logit_bias.insert(token, bias);
        self
    }

    /// Equal seeds give equal replies, even under a different load. On a GPU, however, rounding may
    /// change with the batch, so a near-tie may resolve differently. Without a seed, sampled
    /// replies differ.
    pub fn seed(mut self, seed: impl Into<Option<u64>>) -> Self {
        self.generation.seed = seed.into().or(self.generation.seed);
        self
    }

    /// Ends the reply before this text, even within reasoning or a tool call. The text has at most
    /// 1,024 bytes, and a chat may have up to 16 stop texts.
    pub fn stop(mut self, text: impl Into<String>) -> Self {
        self.generation.stop.push(text.into());
        self
    }

    /// Ends the reply before this token, in addition to the checkpoint's own stop tokens.
    pub fn stop_token(mut self, token: u32) -> Self {
        self.generation.stop_tokens.push(token);
        self
    }

    /// Ignores the model's end tokens, so that the reply continues up to `max_tokens`, unless a
    /// stop text, a stop token or the last allowed tool call ends it.
    pub fn ignore_end(mut self) -> Self {
        self.generation.ignores_end = true;
        self
    }

    /// Sends the log-probabilities of the reply's tokens as events, each with the `top` likeliest
    /// tokens (at most 20). The values are the model's own log-probabilities, before temperature
    /// and penalties.
    pub fn log_probabilities(mut self, top: impl Into<Option<usize>>) -> Self {
        self.generation.log_probabilities = top.into().or(self.generation.log_probabilities);
        self
    }

    /// Sends the prompt's token ids as the first event, and the reply's token ids as they are
    /// generated. Useful for callers that train on replies or store conversations as tokens.
    pub fn token_ids(mut self) -> Self {
        self.generation.token_ids = true;
        self
    }

    /// Sends the log-probabilities of the prompt's tokens before the reply. `top` has the same
    /// meaning as for [`log_probabilities`](Chat::log_probabilities).
    pub fn prompt_log_probabilities(mut self, top: impl Into<Option<usize>>) -> Self {
        self.generation.prompt_log_probabilities = top.into().or(self.generation.prompt_log_probabilities);
        self
    }

    /// Constrains the reply to an output format, such as a JSON schema or a regular expression. A
    /// reasoning model writes its reasoning first. If the chat has tools and the model's format of
    /// tool calls is known, the model may call a tool instead.
    pub fn format(mut self, format: impl Into<Option<OutputFormat>>) -> Self {
        self.generation.format = format.into().or(self.generation.format);
        self
    }

    /// Shares the prefix cache and the encoder cache only with chats of the same salt.
    /// Without a salt, the time to the first token reveals whether another caller has sent an
    /// equal prompt or picture.
    pub fn cache_salt(mut self, salt: impl Into<String>) -> Self {
        self.generation.cache_salt = Some(salt.into());
        self
    }
}
