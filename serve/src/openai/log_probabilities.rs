//! Log-probabilities in chat and completion responses.

use schemars::JsonSchema;
use serde::Serialize;

use bursar::{ScoredToken, TokenScore};

/// Value for a probability of 0, because JSON has no infinity. OpenAI and vLLM
/// send the same number.
const IMPOSSIBLE: f32 = -9999.0;

/// Replaces minus infinity, which JSON cannot represent.
pub(super) fn finite(log_probability: f32) -> f32 {
    log_probability.max(IMPOSSIBLE)
}

/// `logprobs` of a chat choice.
#[derive(Serialize, JsonSchema)]
pub(crate) struct ChatLogProbabilities {
    content: Vec<TokenTold>,
    refusal: Option<()>,
}

#[derive(Serialize, JsonSchema)]
struct TokenTold {
    #[serde(flatten)]
    token: AlternativeBody,
    top_logprobs: Vec<AlternativeBody>,
}

#[derive(Serialize, JsonSchema)]
struct AlternativeBody {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl From<ScoredToken> for AlternativeBody {
    fn from(token: ScoredToken) -> Self {
        AlternativeBody { token: token.text, logprob: finite(token.log_probability), bytes: token.bytes }
    }
}

impl ChatLogProbabilities {
    /// Returns `None` if there are no scores.
    pub(super) fn of(scores: Vec<TokenScore>) -> Option<Self> {
        let content: Vec<_> = scores
            .into_iter()
            .map(|score| TokenTold {
                token: score.token.into(),
                top_logprobs: score.top.into_iter().map(AlternativeBody::from).collect(),
            })
            .collect();
        (!content.is_empty()).then_some(ChatLogProbabilities { content, refusal: None })
    }
}
