//! Why a reply ended, as callers and metrics are told.

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it, or a stop string came.
    Stop,
    /// It has as many tokens as it may.
    Length,
}

impl FinishReason {
    /// As OpenAI's API names it.
    pub fn label(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}
