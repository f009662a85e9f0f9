//! Why a reply ended, as callers and metrics see it.

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// The model ended the reply, or it contains a stop string.
    Stop,
    /// The reply has reached its limit of tokens.
    Length,
    /// The model ended the reply, and it has a whole call of a tool.
    ToolCalls,
}

impl FinishReason {
    /// The name in OpenAI's API.
    pub fn label(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
        }
    }
}
