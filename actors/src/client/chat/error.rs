//! Errors of chats.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Hint;
use bursar_model::{
    error::{GrammarError, MediaError, SamplingError, SchemaPlace, TextError},
    flow::LayoutError,
};
use thiserror::Error;

use crate::{deadline::Deadline, engine::StartError, responder::AskError, sleep::SleepError, vision::VisionError};

/// The reason why a chat was not answered, or why its reply ended early. An error of
/// [`ErrorKind::Request`] affects no other chat.
#[derive(Clone, Debug, Error)]
pub enum ChatError {
    #[error("the chat has no turn")]
    Empty,
    /// The chat has a prompt of tokens, but also turns, tools or template settings, all of which
    /// need a chat template.
    #[error("the chat has a prompt of tokens, but also turns, tools or template settings")]
    TokensAndTurns,
    /// The limit of requests that run or wait has been reached.
    #[error("{limit} requests are already running or waiting")]
    Overloaded { limit: usize },
    /// A picture or a video is damaged or outside the limits.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The prompt leaves no tokens for a reply.
    #[error(
        "the prompt has {}{tokens} tokens, but prompt and reply together may have at most {limit}",
        if *.has_more { "more than " } else { "" }
    )]
    TooLong {
        /// Tokens of the prompt, or the number at which counting stopped.
        tokens: usize,
        /// Whether counting stopped, because the prompt is much too long.
        has_more: bool,
        /// The envelope's limit for prompt and reply together.
        limit: usize,
    },
    #[error("`max_tokens` is 0; expected at least 1")]
    NoTokens,
    /// The reply's minimum length exceeds its maximum.
    #[error("`min_tokens` is {tokens_min}, but the reply may have at most {tokens_max} tokens")]
    MinTokens {
        tokens_min: usize,
        /// The maximum length: `max_tokens`, or the tokens that the prompt leaves of the context.
        tokens_max: usize,
    },
    /// The name of the chat's tenant is too long.
    #[error("the name of the tenant has {bytes} bytes; the limit is {limit}")]
    TenantName { bytes: usize, limit: usize },
    /// The number of samples is 0, or above the limit of requests that run or wait.
    #[error("{samples} samples were requested; expected from 1 to {limit}")]
    Samples { samples: usize, limit: usize },
    /// The chat sets `ignore_end` together with an output format or a forced tool call. Such a
    /// reply ends when its format is complete, so it cannot ignore the end token.
    #[error("a reply with a format ends when the format is complete, so it cannot ignore its end token")]
    FormatWithoutEnd,
    /// The output format cannot be compiled.
    #[error(transparent)]
    Format(Arc<GrammarError>),
    /// The tools are invalid, or the model cannot be forced to call one.
    #[error(transparent)]
    Tools(#[from] ToolError),
    /// A deadline was missed, or could no longer be met.
    #[error("{} within its deadline of {} ms; {} ms had passed", .deadline.missing(), .limit.as_millis(), .waited.as_millis())]
    TooLate {
        deadline: Deadline,
        /// The time allowed since the request, as set by the chat or by the model's default.
        limit: Duration,
        /// The time that had passed since the request.
        waited: Duration,
    },
    /// The template or the tokenizer refused the conversation.
    #[error(transparent)]
    Text(Arc<TextError>),
    /// Pictures and placeholders do not match.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A sampling parameter is out of its range.
    #[error(transparent)]
    Sampling(Arc<SamplingError>),
    /// The pictures are intact, but did not get into the vision cache.
    #[error(transparent)]
    Vision(Arc<VisionError>),
    /// The thread that prepared the prompt panicked.
    #[error("the conversation could not be turned into a prompt")]
    PreparationDied,
    /// An actor did not answer in time.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The model did not start, or it was refused memory too often while it served.
    #[error("the model is not ready: {0}")]
    NotStarted(Arc<StartError>),
    /// The model's logits for this request are missing, or contain NaN or +infinity.
    #[error("a logit of the model is NaN or +infinity, or is missing, so no token can be chosen")]
    NonFiniteLogits,
    /// The model was unloaded, shut down, or given up.
    #[error("the model has stopped: {reason}")]
    Stopped { reason: Arc<str> },
    /// The device was lost, with everything computed on it. Another device may have replaced it.
    #[error("{reason}")]
    DeviceLost {
        /// The device's error. It contains the word "lost".
        reason: Arc<str>,
    },
    /// The model was asleep, and did not wake up in time or could not wake up.
    #[error(transparent)]
    Asleep(Arc<SleepError>),
    /// The model is shutting down. It ends when its running requests have ended,
    /// or at its deadline.
    #[error("the model is shutting down and takes no more requests")]
    ShuttingDown,
    /// The model's actors died too often while they served this request.
    #[error("the model's actors died {deaths} times during this request")]
    GivenUp { deaths: u32 },
}

impl ChatError {
    /// More detail for the author of the schema or template: where a schema is wrong, or a
    /// template's own error text. The error's text and logs leave this detail out, because the
    /// detail may quote the schema or the chat.
    pub fn reason(&self) -> Option<&str> {
        match self {
            ChatError::Format(error) => error.reason(),
            ChatError::Tools(error) => error.reason(),
            ChatError::Text(error) => error.reason(),
            ChatError::Sampling(error) => error.reason(),
            _ => None,
        }
    }

    /// The error's text for the author of the schema or template, with [`reason`](Self::reason) and
    /// names from the schema. Never log this text.
    pub fn for_author(&self) -> String {
        const PLACE_CHARS: usize = 200;
        let mut text = self.to_string();
        let place = match self {
            ChatError::Format(error) => error.place(),
            ChatError::Tools(error) => error.place(),
            _ => None,
        };
        if let Some(place) = place {
            let path: String = place.path().chars().take(PLACE_CHARS).collect();
            text = text.replacen(&place.to_string(), &path, 1);
        }
        match self.reason().filter(|reason| !text.contains(reason)) {
            Some(reason) => format!("{text}: {reason}"),
            None => text,
        }
    }
}

impl Hint for ChatError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ChatError::Empty => "add a user turn".to_owned(),
            ChatError::TokensAndTurns => "give all of the prompt as tokens, or all of it as turns".to_owned(),
            ChatError::Overloaded { .. } => "ask again when a reply has ended, or raise `requests`".to_owned(),
            ChatError::Media(error) => error.hint(),
            ChatError::TooLong { .. } => "shorten the conversation, or raise `context_tokens`".to_owned(),
            ChatError::NoTokens => "ask for at least one token".to_owned(),
            ChatError::MinTokens { .. } => "lower `min_tokens`, or raise `max_tokens`".to_owned(),
            ChatError::TenantName { limit, .. } => {
                format!("use a name of at most {limit} bytes, or a hash of the name")
            }
            ChatError::Samples { limit, .. } => format!("ask for 1 to {limit} samples at a time, or raise `requests`"),
            ChatError::FormatWithoutEnd => "leave out `ignore_end`, or the format".to_owned(),
            ChatError::Format(error) => error.hint(),
            ChatError::Tools(error) => error.hint(),
            ChatError::TooLate { deadline: Deadline::Reply, .. } => {
                "allow more time, ask for fewer tokens, or ask again when the model is less busy".to_owned()
            }
            ChatError::TooLate { deadline, .. } => {
                format!(
                    "ask again when the model is less busy, or allow more time; `{}` sets the default",
                    deadline.knob()
                )
            }
            ChatError::Text(error) => error.hint(),
            ChatError::Layout(LayoutError::TextOnly { .. }) => {
                "leave the pictures and videos out, or load a vision model".to_owned()
            }
            ChatError::Layout(LayoutError::NoVideos { .. }) => {
                "show single frames as pictures, or load a model that takes videos".to_owned()
            }
            ChatError::Layout(LayoutError::StepPlaceholders { .. }) => {
                "write `<t seconds>` and one placeholder for each step of the video".to_owned()
            }
            ChatError::Layout(_) => {
                "check the chat template: it does not place pictures as the model's processor does".to_owned()
            }
            ChatError::Sampling(error) => error.hint(),
            ChatError::Vision(error) => error.hint(),
            ChatError::Unanswered(_) => {
                "ask again: the device was too slow for the deadline, or is shutting down".to_owned()
            }
            ChatError::PreparationDied => "this is a bug in Bursar; please report it with the chat template".to_owned(),
            ChatError::NotStarted(error) => error.hint(),
            ChatError::NonFiniteLogits => "check the checkpoint's files; its weights may be damaged".to_owned(),
            ChatError::Stopped { .. } => {
                "load the model again; if its device is lost, start the program again".to_owned()
            }
            ChatError::DeviceLost { .. } => "ask again; if the model has stopped, start the program again".to_owned(),
            ChatError::Asleep(error) => error.hint(),
            ChatError::ShuttingDown => "load the model again once it has stopped, or use another model".to_owned(),
            ChatError::GivenUp { .. } => {
                "look for the reason for the model's restarts: this request may be the cause".to_owned()
            }
        }
    }
}

/// The party at fault, which a server maps to an HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is malformed or outside the limits. It would fail again.
    Request,
    /// The model is busy, asleep or too slow. The same request may succeed later.
    Busy,
    /// The fault is in the model or the runtime, not in the request. If the model has failed or
    /// stopped, no request succeeds until an operator intervenes. After other errors, such as
    /// [`ChatError::NonFiniteLogits`], other requests may succeed.
    Model,
}

impl ChatError {
    pub fn kind(&self) -> ErrorKind {
        match self {
            ChatError::Empty
            | ChatError::TokensAndTurns
            | ChatError::Media(_)
            | ChatError::TooLong { .. }
            | ChatError::NoTokens
            | ChatError::MinTokens { .. }
            | ChatError::TenantName { .. }
            | ChatError::Samples { .. }
            | ChatError::FormatWithoutEnd
            | ChatError::Format(_)
            | ChatError::Tools(_)
            | ChatError::Text(_)
            | ChatError::Layout(_)
            | ChatError::Sampling(_) => ErrorKind::Request,
            ChatError::Vision(error) => match &**error {
                VisionError::Media(_) | VisionError::TooLarge(_) => ErrorKind::Request,
                VisionError::Host(_) => ErrorKind::Busy,
                VisionError::DecoderDied => ErrorKind::Model,
            },
            ChatError::Overloaded { .. }
            | ChatError::TooLate { .. }
            | ChatError::Asleep(_)
            | ChatError::Unanswered(_) => ErrorKind::Busy,
            ChatError::NotStarted(_)
            | ChatError::NonFiniteLogits
            | ChatError::PreparationDied
            | ChatError::DeviceLost { .. }
            | ChatError::ShuttingDown
            | ChatError::Stopped { .. }
            | ChatError::GivenUp { .. } => ErrorKind::Model,
        }
    }

    /// Returns the error for a token that could not be sampled.
    pub(crate) fn broken(error: Arc<SamplingError>) -> Self {
        match &*error {
            SamplingError::NonFiniteLogits | SamplingError::BadLogit { .. } | SamplingError::NoLogits => {
                ChatError::NonFiniteLogits
            }
            _ => ChatError::Sampling(error),
        }
    }
}

/// An invalid set or choice of tools.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ToolError {
    /// A tool must be called, but the chat has no tools.
    #[error("a tool must be called, but the chat has no tools")]
    NoTools,
    /// The chat has no tool with the name that must be called.
    #[error("the tool that must be called is not one of the chat's {tools} tools")]
    UnknownTool {
        /// Number of tools of the chat.
        tools: usize,
    },
    /// A tool that may be called is not a function with a name and a schema.
    #[error("tool {index} is not a function with a name and parameters")]
    Shape {
        /// The tool's index, from 0.
        index: usize,
    },
    /// A call is forced, but the chat also sets an output format.
    #[error("a tool must be called, so the reply cannot have a format")]
    WithFormat,
    /// The format in which this model writes tool calls is unknown.
    #[error("the format of this model's tool calls is unknown, so a call cannot be forced")]
    NoFormat,
    /// No grammar can contain this model's tool calls.
    #[error("this model's tool calls cannot be forced or combined with an output format")]
    ForcingUnsupported,
    /// The schema of a tool's parameters cannot be compiled.
    #[error("tool {index}: {source}")]
    Schema {
        /// The tool's index, from 0.
        index: usize,
        source: Arc<GrammarError>,
    },
}

impl ToolError {
    /// More detail for the author of the schema; see [`GrammarError::reason`].
    pub fn reason(&self) -> Option<&str> {
        match self {
            ToolError::Schema { source, .. } => source.reason(),
            _ => None,
        }
    }

    /// See [`GrammarError::place`].
    fn place(&self) -> Option<&SchemaPlace> {
        match self {
            ToolError::Schema { source, .. } => source.place(),
            _ => None,
        }
    }
}

impl Hint for ToolError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ToolError::NoTools => "add the tools with `tools`".to_owned(),
            ToolError::UnknownTool { .. } => "name one of the chat's tools".to_owned(),
            ToolError::Shape { .. } => {
                "write it as `{\"type\": \"function\", \"function\": {\"name\": .., \"parameters\": {..}}}`".to_owned()
            }
            ToolError::WithFormat => {
                "leave out the format, or leave the choice to the model: then the reply has the format or is a \
                 call"
                    .to_owned()
            }
            ToolError::NoFormat => "set `reply_format` if you know it, or leave the choice to the model".to_owned(),
            ToolError::ForcingUnsupported => {
                "leave the tool choice to the model, and set either tools or an output format".to_owned()
            }
            ToolError::Schema { source, .. } => source.hint(),
        }
    }
}

impl From<TextError> for ChatError {
    fn from(error: TextError) -> Self {
        ChatError::Text(Arc::new(error))
    }
}

impl From<VisionError> for ChatError {
    fn from(error: VisionError) -> Self {
        match error {
            VisionError::Media(error) => ChatError::Media(error),
            error => ChatError::Vision(Arc::new(error)),
        }
    }
}

impl From<SleepError> for ChatError {
    fn from(error: SleepError) -> Self {
        match error {
            SleepError::Stopped { reason } => ChatError::Stopped { reason },
            error => ChatError::Asleep(Arc::new(error)),
        }
    }
}

impl From<SamplingError> for ChatError {
    fn from(error: SamplingError) -> Self {
        ChatError::Sampling(Arc::new(error))
    }
}

impl From<GrammarError> for ChatError {
    fn from(error: GrammarError) -> Self {
        ChatError::Format(Arc::new(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_video_step_mismatch_has_a_hint_with_the_syntax() {
        let hint = ChatError::Layout(LayoutError::StepPlaceholders { placeholders: 1, steps: 3 }).hint();
        assert!(hint.contains("`<t seconds>`") && hint.contains("each step") && !hint.contains("template"), "{hint}");
    }
}
