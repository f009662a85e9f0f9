//! What a caller hears of a chat.

use crate::finish_reason::FinishReason;

/// One event of a reply. `Done` is the last.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChatEvent {
    /// The prompt's tokens, if asked for. The first one follows nothing and has no probability; nor has one whose logits
    /// were not numbers.
    Prompt(Vec<Option<TokenScore>>),
    /// The reply's next token, if asked for. The text that it completes comes after it.
    Token(TokenScore),
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
    /// The text that this event adds to the reply; nothing for all but `Text`.
    pub fn text(&self) -> &str {
        match self {
            ChatEvent::Text(text) => text,
            ChatEvent::Prompt(_) | ChatEvent::Token(_) | ChatEvent::Done { .. } => "",
        }
    }
}

/// A token of the prompt or the reply with how likely the model held it and others.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// The token.
    pub token: ScoredToken,
    /// The likeliest tokens in its place, likeliest first, as many as were asked for.
    pub top: Vec<ScoredToken>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The vocabulary's id.
    pub id: u32,
    /// Its text. What is not a whole character by itself shows as U+FFFD.
    pub text: String,
    /// Natural logarithm of its probability by the model's own distribution; -infinity for an impossible token.
    pub log_probability: f32,
}

/// What a reply took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, those of pictures and videos included.
    pub prompt_tokens: usize,
    /// Of those, tokens that stand for pictures and videos.
    pub picture_tokens: usize,
    /// Of those, tokens that were not computed, as another request had begun alike.
    pub cached_tokens: usize,
    /// Tokens of the reply; a stop token that ended it is not counted.
    pub completion_tokens: usize,
}
