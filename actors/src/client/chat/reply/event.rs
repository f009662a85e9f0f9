//! Events that a caller receives for a chat.

use std::sync::Arc;

use bursar_model::text::StopReason;

use super::{ToolCall, ToolCallEvent};
use crate::finish_reason::FinishReason;

/// One event of a reply. The last event is `Done`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ChatEvent {
    /// The prompt's token ids, once, before all other events. Only
    /// for chats with [`token_ids`](crate::chat::Chat::token_ids).
    PromptIds(Arc<[u32]>),
    /// The id of the reply's next token, only for chats with
    /// [`token_ids`](crate::chat::Chat::token_ids). As with `Token`, the text that this token
    /// completes follows in later events.
    TokenId(u32),
    /// The prompt tokens with their log-probabilities, if the chat asked for them. An entry
    /// is `None` for the first token, which has no preceding token, and for tokens whose
    /// logits are not numbers.
    Prompt(Vec<Option<TokenScore>>),
    /// The reply's next token with its log-probability, if the chat asked for it. Later events
    /// contain the text, reasoning or part of a call that the token completes. A token may complete
    /// nothing, because an incomplete character, a tag, and the possible beginning of a stop string
    /// are held back.
    Token(TokenScore),
    /// More reasoning, in whole characters, without its tags. Only from models that write
    /// reasoning, and before any text.
    Reasoning(String),
    /// More text, in whole characters.
    Text(String),
    /// A tool call begins, continues or ends. Only for chats with
    /// [`tools`](crate::chat::Chat::tools).
    ToolCall(ToolCallEvent),
    /// The end of the reply.
    #[non_exhaustive]
    Done {
        /// The whole text of the reply, without reasoning and tool calls.
        text: String,
        reasoning: String,
        /// All tool calls, in order.
        tool_calls: Vec<ToolCall>,
        finish_reason: FinishReason,
        /// The chat's stop text or stop token that ended the reply; see
        /// [`stop`](crate::chat::Chat::stop) and [`stop_token`](crate::chat::Chat::stop_token).
        /// `None` if an end token of the model, a limit, or a complete tool call ended the reply.
        stop_reason: Option<StopReason>,
        /// The stop token of the chat, or the end token of the model, that ended the reply. The
        /// token is not part of the reply.
        end_token: Option<u32>,
        usage: Usage,
    },
}

impl ChatEvent {
    /// Creates a `Done` event without reasoning and tool calls, for tests of code that reads
    /// replies. Other fields can be set afterward, through
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

    /// The text that this event adds to the reply. Empty for all events except `Text`.
    pub fn text(&self) -> &str {
        match self {
            ChatEvent::Text(text) => text,
            _ => "",
        }
    }
}

/// A token of the prompt or reply, with its log-probability and the log-probabilities of its
/// alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScore {
    pub token: ScoredToken,
    /// The likeliest tokens at this position, as many as the chat asked for,
    /// with the likeliest first.
    pub top: Vec<ScoredToken>,
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The id in the vocabulary.
    pub id: u32,
    /// The token's text. Bytes that do not form a whole character appear as U+FFFD.
    pub text: String,
    /// The token's bytes, which may be only part of a character.
    pub bytes: Vec<u8>,
    /// The natural logarithm of the token's probability in the model's own distribution, or
    /// -infinity for an impossible token.
    pub log_probability: f32,
}

/// Token counts of a reply. Outside this crate, start from `Usage::default()` and set the fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt, including the placeholders of pictures and videos.
    pub prompt_tokens: usize,
    /// Prompt tokens that are placeholders of pictures and videos.
    pub picture_tokens: usize,
    /// Prompt tokens that were found in the prefix cache and therefore not computed.
    pub cached_tokens: usize,
    /// Tokens of the reply, without the stop token that ended the reply.
    pub completion_tokens: usize,
    /// Tokens of the reply between the reasoning tags.
    pub reasoning_tokens: usize,
}
