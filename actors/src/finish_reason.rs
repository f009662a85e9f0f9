//! Why a reply ended, as callers and metrics see it.

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended the reply, or it contains a stop string.
    Stop,
    /// The reply has reached its limit of tokens.
    Length,
}

impl FinishReason {
    /// The name in OpenAI's API.
    pub fn label(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}
