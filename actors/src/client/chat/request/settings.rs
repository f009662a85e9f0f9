//! Settings of a chat for generating its reply, choosing tools and scheduling.

use std::collections::BTreeMap;

use bursar_model::sampling::{OutputFormat, SamplingParams};

use crate::{chat::ChatError, deadline::Deadlines, tenant::Tenant};

/// A chat's settings for its reply.
#[derive(Clone, Default)]
pub(crate) struct Generation {
    pub(crate) tokens_max: Option<usize>,
    pub(crate) tokens_min: usize,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<usize>,
    pub(crate) min_p: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) logit_bias: BTreeMap<u32, f64>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) ignores_end: bool,
    pub(crate) log_probabilities: Option<usize>,
    pub(crate) prompt_log_probabilities: Option<usize>,
    pub(crate) token_ids: bool,
    pub(crate) format: Option<OutputFormat>,
    pub(crate) cache_salt: Option<String>,
}

impl Generation {
    /// The sampling parameters of the reply. `defaults` applies where the chat sets nothing.
    pub(crate) fn sampling(&self, defaults: &SamplingParams, seed: u64) -> SamplingParams {
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

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides whether to call tools, and which.
    #[default]
    Auto,
    /// The model calls no tools. The tools are not shown to the model, and nothing in its reply is
    /// parsed as a call.
    None,
    /// The model calls at least one tool. After its reasoning, if it reasons, the reply consists
    /// only of calls, with arguments that follow the tool's schema. Objects may have only the
    /// properties that their schema names, unless the schema sets `additionalProperties`. Combining
    /// a forced call with [`Chat::format`](super::Chat::format) is refused.
    Required,
    /// The model calls the tool of this name, once, under the rules of `Required`.
    Named(String),
}

/// A chat's settings for its scheduling.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChatScheduling {
    pub(crate) priority: i32,
    pub(crate) tenant: Tenant,
    pub(crate) deadlines: Deadlines,
}

impl ChatScheduling {
    /// Checks the length of the tenant's name.
    ///
    /// # Errors
    /// [`ChatError::TenantName`].
    pub(crate) fn check(&self) -> Result<(), ChatError> {
        match self.tenant.as_str().len() {
            0..=Tenant::BYTES_MAX => Ok(()),
            bytes => Err(ChatError::TenantName { bytes, limit: Tenant::BYTES_MAX }),
        }
    }
}
