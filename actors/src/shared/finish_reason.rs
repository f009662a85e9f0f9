//! The reasons why a reply ends, as callers and metrics see them.

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// An end token, a stop token or a stop string ended the reply.
    Stop,
    /// The reply reached its maximum number of tokens.
    Length,
    /// The reply has a complete tool call, and ended before its maximum number of tokens: the model
    /// ended it, a stop string occurred, or the chat allows no further call.
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
