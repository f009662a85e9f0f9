//! What a caller hears of a chat.

/// One event of a reply. `Done` is the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatEvent {
    /// More text, whole characters only.
    Text(String),
    /// The end.
    Done {
        /// All text of the reply.
        text: String,
        /// Why it ended.
        finish_reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
}

impl ChatEvent {
    /// The text that this event adds; nothing for `Done`.
    pub fn text(&self) -> &str {
        match self {
            ChatEvent::Text(text) => text,
            ChatEvent::Done { .. } => "",
        }
    }
}

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

/// What a reply took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, those of pictures and videos included.
    pub prompt_tokens: usize,
    /// Of those, tokens that stand for pictures and videos.
    pub picture_tokens: usize,
    /// Tokens of the reply; a stop token that ended it is not counted.
    pub completion_tokens: usize,
}
