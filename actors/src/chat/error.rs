//! Why a chat was not answered.

use std::{sync::Arc, time::Duration};

use bursar_model::{
    error::{GrammarError, ImageError, SamplingError, TextError, VideoError, VisualError},
    flow::{FileName, LayoutError},
};
use thiserror::Error;

use crate::{engine::StartError, responder::AskError, vision::VisionError};

/// Why a chat was not answered, or ended early. It failed alone.
#[derive(Clone, Debug, Error)]
pub enum ChatError {
    /// Nothing was said.
    #[error("the chat has no turn")]
    Empty,
    /// Both tokens and something that only a template could turn into tokens.
    #[error("the chat is given as tokens, and has turns of text or tools besides")]
    TokensAndTurns,
    /// As many requests are under way as may be.
    #[error("{limit} requests are under way or wait already")]
    Overloaded {
        /// How many may.
        limit: usize,
    },
    /// A picture is broken or outside the limits.
    #[error("picture {index}{file}: {source}")]
    Picture {
        /// Which picture of the chat, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// What is wrong with it.
        source: Arc<ImageError>,
    },
    /// A picture is larger than the envelope even after resizing, because it is so thin.
    #[error("picture {index}{file} takes {patches} patches after resizing, at most {limit} are allowed")]
    PictureTooLarge {
        /// Which picture of the chat, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// It would have.
        patches: usize,
        /// Of the envelope.
        limit: usize,
    },
    /// A video is broken or outside the limits.
    #[error("video {index}: {source}")]
    Video {
        /// Which video of the chat, from 0.
        index: usize,
        /// What is wrong with it.
        source: Arc<VideoError>,
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
    #[error("`max_tokens` is 0")]
    NoTokens,
    /// The reply would have to be longer than it may.
    #[error("`min_tokens` is {tokens_min}, but the reply may have {tokens_max} tokens at most")]
    MinTokens {
        /// `min_tokens`.
        tokens_min: usize,
        /// `max_tokens`, or what the context leaves.
        tokens_max: usize,
    },
    /// No samples, or more than requests may be under way.
    #[error("{samples} samples were asked for, from 1 to {limit} are possible")]
    Samples {
        /// Asked for.
        samples: usize,
        /// Possible.
        limit: usize,
    },
    /// What ends a formatted reply is its form.
    #[error("a reply of a given form ends when the form is complete; it cannot ignore its end")]
    FormatWithoutEnd,
    /// The form cannot be compiled.
    #[error(transparent)]
    Format(Arc<GrammarError>),
    /// The reply was not complete in time.
    #[error("the reply was not complete within its deadline of {} ms", .deadline.as_millis())]
    TooLate {
        /// The chat's deadline.
        deadline: Duration,
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
    /// The pictures did not get into the cache.
    #[error(transparent)]
    Vision(Arc<VisionError>),
    /// The thread that made the prompt panicked.
    #[error("the conversation could not be turned into a prompt")]
    PreparationDied,
    /// An actor did not answer in time.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The model did not start, or was refused memory too often while it served.
    #[error("the model does not serve: {0}")]
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
    /// The device that computed it is gone, and with it what was computed. Another may have taken its place.
    #[error("{reason}")]
    DeviceLost {
        /// What was said of it; it has the word "lost".
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
    /// What is said besides by what was refused: where in a schema its fault is, a template's own words. No error and no
    /// log shows it, as it may quote the schema or the chat: it is for whoever wrote them.
    pub fn reason(&self) -> Option<&str> {
        match self {
            ChatError::Format(error) => error.reason(),
            ChatError::Text(error) => error.reason(),
            ChatError::Sampling(error) => error.reason(),
            _ => None,
        }
    }

    /// What to change.
    pub fn hint(&self) -> String {
        match self {
            ChatError::Empty => "add a user turn".to_owned(),
            ChatError::TokensAndTurns => "give all of the prompt as tokens, or all of it as turns".to_owned(),
            ChatError::Overloaded { .. } => "ask again when a reply has ended, or raise `requests`".to_owned(),
            ChatError::Picture { source, .. } => source.hint(),
            ChatError::Video { source, .. } => source.hint(),
            ChatError::PictureTooLarge { .. } => {
                "cut the picture so that it is less thin, or raise `picture_patches`".to_owned()
            }
            ChatError::TooManyPictures { limit, .. } => format!("send at most {limit} pictures, or raise `pictures`"),
            ChatError::TooLong { .. } => "shorten the conversation, or raise `context_tokens`".to_owned(),
            ChatError::NoTokens => "ask for at least one token".to_owned(),
            ChatError::MinTokens { .. } => "lower `min_tokens`, or raise `max_tokens`".to_owned(),
            ChatError::Samples { limit, .. } => format!("ask for 1 to {limit} samples at a time, or raise `requests`"),
            ChatError::FormatWithoutEnd => "leave out `ignore_end`, or the format".to_owned(),
            ChatError::Format(error) => error.hint(),
            ChatError::TooLate { .. } => {
                "allow more time, ask for fewer tokens, or ask when less is going on".to_owned()
            }
            ChatError::Text(error) => error.hint(),
            ChatError::Layout(LayoutError::TextOnly { .. }) => {
                "leave the pictures and videos out, or load a vision model".to_owned()
            }
            ChatError::Layout(LayoutError::NoVideos { .. }) => {
                "show single frames as pictures, or load a model that takes videos".to_owned()
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
            ChatError::Stopped { .. } => {
                "load the model again; if its device is lost, start the program again".to_owned()
            }
            ChatError::DeviceLost { .. } => "ask again; if the model has stopped, start the program again".to_owned(),
            ChatError::ShuttingDown => "load the model again when it has ended, or ask another".to_owned(),
            ChatError::GivenUp { .. } => "look at the model's restarts; this request may be what kills it".to_owned(),
        }
    }
}

/// Who can do something about an error: what a server makes a status of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is malformed or outside the limits. Asked again it fails again.
    Request,
    /// Too much is going on. The same request may be answered later.
    Busy,
    /// The model or the runtime has failed. No request will be answered until somebody looks after them.
    Model,
}

impl ChatError {
    /// Who can do something about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ChatError::Empty
            | ChatError::TokensAndTurns
            | ChatError::Picture { .. }
            | ChatError::PictureTooLarge { .. }
            | ChatError::Video { .. }
            | ChatError::TooManyPictures { .. }
            | ChatError::TooLong { .. }
            | ChatError::NoTokens
            | ChatError::MinTokens { .. }
            | ChatError::Samples { .. }
            | ChatError::FormatWithoutEnd
            | ChatError::Format(_)
            | ChatError::Text(_)
            | ChatError::Layout(_)
            | ChatError::Sampling(_) => ErrorKind::Request,
            ChatError::Vision(error) => match &**error {
                VisionError::Visual(_) | VisionError::TooLarge { .. } => ErrorKind::Request,
                VisionError::Host(_) => ErrorKind::Busy,
                VisionError::DecoderDied => ErrorKind::Model,
            },
            ChatError::Overloaded { .. } | ChatError::TooLate { .. } | ChatError::Unanswered(_) => ErrorKind::Busy,
            ChatError::NotStarted(_)
            | ChatError::NotNumbers
            | ChatError::PreparationDied
            | ChatError::DeviceLost { .. }
            | ChatError::ShuttingDown
            | ChatError::Stopped { .. }
            | ChatError::GivenUp { .. } => ErrorKind::Model,
        }
    }

    /// Why no token could be chosen.
    pub(super) fn broken(error: Arc<SamplingError>) -> Self {
        match &*error {
            SamplingError::NotNumbers | SamplingError::BadLogit { .. } | SamplingError::NoLogits => {
                ChatError::NotNumbers
            }
            _ => ChatError::Sampling(error),
        }
    }
}

impl From<TextError> for ChatError {
    fn from(error: TextError) -> Self {
        ChatError::Text(Arc::new(error))
    }
}

impl From<VisualError> for ChatError {
    fn from(error: VisualError) -> Self {
        match error {
            VisualError::TooManyPictures { pictures, limit } => ChatError::TooManyPictures { pictures, limit },
            VisualError::Picture { index, file, source } => {
                ChatError::Picture { index, file, source: Arc::new(source) }
            }
            VisualError::PictureTooLarge { index, file, patches, limit } => {
                ChatError::PictureTooLarge { index, file, patches, limit }
            }
            VisualError::Video { index, source } => ChatError::Video { index, source: Arc::new(source) },
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
