//! What a caller receives for a chat.

use std::sync::Arc;

use super::{StopReason, ToolCall, ToolCallEvent};
use crate::finish_reason::FinishReason;

/// One event of a reply. `Done` is the last.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChatEvent {
    /// The prompt's token ids, once, before everything else. For chats with [`token_ids`](super::Chat::token_ids).
    PromptIds(Arc<[u32]>),
    /// The id of the reply's next token, for the same chats. What it completes follows, as after `Token`.
    TokenId(u32),
    /// The scored prompt tokens, if asked for. None for the first token, which follows nothing, and for tokens whose
    /// logits were not numbers.
    Prompt(Vec<Option<TokenScore>>),
    /// The reply's next token, if asked for. What it completes follows: text, reasoning, events of a
    /// call, or nothing, since part of a character, a tag and what may become a stop string are held back.
    Token(TokenScore),
    /// More reasoning, in whole characters, without its tags. Of models that write it, and before any text.
    Reasoning(String),
    /// More text, in whole characters.
    Text(String),
    /// A call of a tool begins, goes on or ends. Only for chats with [`tools`](super::Chat::tools).
    ToolCall(ToolCallEvent),
    /// The end of the reply.
    #[non_exhaustive]
    Done {
        /// All text of the reply, without reasoning and calls.
        text: String,
        /// All reasoning.
        reasoning: String,
        /// The calls of tools, in order.
        tool_calls: Vec<ToolCall>,
        /// Why the reply ended.
        finish_reason: FinishReason,
        /// The chat's own rule that ended it: one of [`stop`](super::Chat::stop) or
        /// [`stop_token`](super::Chat::stop_token). None if an end token of the model, a limit, or a whole call did.
        stop_reason: Option<StopReason>,
        /// The token that ended it, the chat's or the model's own, which is no part of the reply.
        end_token: Option<u32>,
        /// The tokens that it used.
        usage: Usage,
    },
}

impl ChatEvent {
    /// An end without reasoning and calls, for tests of what reads replies. Other fields can be set afterwards, through
    /// `if let ChatEvent::Done { stop_reason, .. } = &mut done`.
    pub fn done(text: impl Into<String>, finish_reason: FinishReason, usage: Usage) -> Self {
        ChatEvent::Done {
            text: text.into(),
            reasoning: String::new(),
            tool_calls: Vec::new(),
            finish_reason,
            stop_reason: None,
            end_token: None,
            usage,
        }
    }

    /// The text that this event adds to the reply; empty except for `Text`.
    pub fn text(&self) -> &str {
        match self {
            ChatEvent::Text(text) => text,
            _ => "",
        }
    }
}

/// A token of the prompt or reply, with its probability and those of its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    /// The token.
    pub token: ScoredToken,
    /// The likeliest tokens at its place, the likeliest first, as many as asked for.
    pub top: Vec<ScoredToken>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The id in the vocabulary.
    pub id: u32,
    /// The token's text. Bytes that are no whole character show as U+FFFD.
    pub text: String,
    /// The token's bytes, which may be a part of a character.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability in the model's own distribution; -infinity for an impossible token.
    pub log_probability: f32,
}

/// The tokens that a reply used. Outside of this crate, make one by `Usage::default()` and set its fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt, including those of pictures and videos.
    pub prompt_tokens: usize,
    /// Prompt tokens that stand for pictures and videos.
    pub picture_tokens: usize,
    /// Prompt tokens that were not computed, because another request began alike.
    pub cached_tokens: usize,
    /// Tokens of the reply, without the stop token that ended it.
    pub completion_tokens: usize,
    /// Tokens of the reply that are reasoning: those between its tags.
    pub reasoning_tokens: usize,
}
