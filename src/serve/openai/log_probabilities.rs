//! Log-probabilities, as chat and completion replies tell them.

use schemars::JsonSchema;
use serde::Serialize;

use crate::{ScoredToken, TokenScore};

/// Where a probability is 0: JSON has no infinity. OpenAI's and vLLM's number.
const IMPOSSIBLE: f32 = -9999.0;

/// A logarithm that JSON can carry.
pub(super) fn told(log_probability: f32) -> f32 {
    log_probability.max(IMPOSSIBLE)
}

/// `logprobs` of a chat's choice.
#[derive(Serialize, JsonSchema)]
pub(in crate::serve) struct ChatLogProbabilities {
    content: Vec<TokenTold>,
    refusal: Option<()>,
}

#[derive(Serialize, JsonSchema)]
struct TokenTold {
    #[serde(flatten)]
    token: AlternativeTold,
    top_logprobs: Vec<AlternativeTold>,
}

#[derive(Serialize, JsonSchema)]
struct AlternativeTold {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl From<ScoredToken> for AlternativeTold {
    fn from(token: ScoredToken) -> Self {
        AlternativeTold { token: token.text, logprob: told(token.log_probability), bytes: token.bytes }
    }
}

impl ChatLogProbabilities {
    /// None without any score.
    pub(super) fn of(scores: Vec<TokenScore>) -> Option<Self> {
        let content: Vec<_> = scores
            .into_iter()
            .map(|score| TokenTold {
                token: score.token.into(),
                top_logprobs: score.top.into_iter().map(AlternativeTold::from).collect(),
            })
            .collect();
        (!content.is_empty()).then_some(ChatLogProbabilities { content, refusal: None })
    }
}
