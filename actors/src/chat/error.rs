//! Why a chat was not answered.

use std::sync::Arc;

use bursar_model::{
    error::{ImageError, SamplingError, TextError},
    flow::LayoutError,
};
use thiserror::Error;

use crate::{engine::StartError, reply::AskError, vision::VisionError};

/// Why a chat was not answered, or ended early. It failed alone.
#[derive(Clone, Debug, Error)]
pub enum ChatError {
    /// Nothing was said.
    #[error("the chat has no turn")]
    Empty,
    /// As many requests are under way as may be.
    #[error("{limit} requests are under way or wait already")]
    Overloaded {
        /// How many may.
        limit: usize,
    },
    /// A picture is broken or outside the limits.
    #[error("picture {index}: {source}")]
    Picture {
        /// Which picture of the chat, from 0.
        index: usize,
        /// What is wrong with it.
        source: Arc<ImageError>,
    },
    /// A picture is larger than the envelope even after resizing, because it is so thin.
    #[error("picture {index} takes {patches} patches after resizing, at most {limit} are allowed")]
    PictureTooLarge {
        /// Which picture of the chat, from 0.
        index: usize,
        /// It would have.
        patches: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// More pictures than a request may have.
    #[error("the chat has {pictures} pictures, at most {limit} are allowed")]
    TooManyPictures {
        /// Of the chat.
        pictures: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// The prompt leaves no room for an answer.
    #[error("the prompt has {tokens} tokens, and {limit} are the most that prompt and answer may have together")]
    TooLong {
        /// Of the prompt.
        tokens: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// `max_tokens` is zero.
    #[error("max_tokens is 0")]
    NoTokens,
    /// The template or the tokenizer refused the conversation.
    #[error(transparent)]
    Text(Arc<TextError>),
    /// Pictures and placeholders do not match.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A sampling parameter is out of its range.
    #[error(transparent)]
    Sampling(Arc<SamplingError>),
    /// The pictures did not get into the cache.
    #[error(transparent)]
    Vision(Arc<VisionError>),
    /// The thread that made the prompt panicked.
    #[error("the conversation could not be turned into a prompt")]
    PreparationDied,
    /// An actor did not answer in time.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The model did not start.
    #[error("the model did not start: {0}")]
    NotStarted(Arc<StartError>),
    /// The model's arithmetic broke down under this request.
    #[error("the model's logits are not numbers, so no token can be chosen")]
    NotNumbers,
    /// The model is gone.
    #[error("the model has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: Arc<str>,
    },
    /// The model takes no more requests: it ends when those under way have ended, or at its deadline.
    #[error("the model is shutting down and takes no more requests")]
    ShuttingDown,
    /// The request was begun again as often as is reasonable.
    #[error("the model's actors died {deaths} times under this request")]
    GivenUp {
        /// How often.
        deaths: u32,
    },
}

impl ChatError {
    /// What to change.
    pub fn hint(&self) -> String {
        match self {
            ChatError::Empty => "add a user turn".to_owned(),
            ChatError::Overloaded { .. } => "ask again when a reply has ended, or raise `requests`".to_owned(),
            ChatError::Picture { source, .. } => source.hint(),
            ChatError::PictureTooLarge { .. } => {
                "cut the picture so that it is less thin, or raise `picture_patches`".to_owned()
            }
            ChatError::TooManyPictures { limit, .. } => format!("send at most {limit} pictures, or raise `pictures`"),
            ChatError::TooLong { .. } => "shorten the conversation, or raise `context_tokens`".to_owned(),
            ChatError::NoTokens => "ask for at least one token".to_owned(),
            ChatError::Text(error) => error.hint(),
            ChatError::Layout(LayoutError::TextOnly { .. }) => {
                "leave the pictures out, or load a vision model".to_owned()
            }
            ChatError::Layout(_) => {
                "the chat template does not place pictures as the model's processor does".to_owned()
            }
            ChatError::Sampling(error) => error.hint(),
            ChatError::Vision(error) => error.hint(),
            ChatError::Unanswered(_) => {
                "the device is too slow for the deadline, or shutting down; ask again".to_owned()
            }
            ChatError::PreparationDied => "this is a bug in Bursar; please report it with the chat template".to_owned(),
            ChatError::NotStarted(error) => error.hint(),
            ChatError::NotNumbers => "check the checkpoint's files; its weights may be damaged".to_owned(),
            ChatError::Stopped { .. } => "load the model again".to_owned(),
            ChatError::ShuttingDown => "load the model again when it has ended, or ask another".to_owned(),
            ChatError::GivenUp { .. } => "look at the model's restarts; this request may be what kills it".to_owned(),
        }
    }
}

impl From<TextError> for ChatError {
    fn from(error: TextError) -> Self {
        ChatError::Text(Arc::new(error))
    }
}

impl From<SamplingError> for ChatError {
    fn from(error: SamplingError) -> Self {
        ChatError::Sampling(Arc::new(error))
    }
}
