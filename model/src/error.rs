//! Errors about pictures, text, sampling and checkpoints. Each error reports what happened, the
//! limit, the value, and what to change.
//!
//! No variant contains prompt text, picture bytes or generated text. Names of files, settings
//! and tensors are allowed.

use bursar_budgets::Hint;
use thiserror::Error;

pub use crate::checkpoint::error::CheckpointError;
pub use crate::flow::ImageError;
pub use crate::processor::error::{MediaError, ProcessorError, VideoError};
pub use crate::sampling::error::SamplingError;
pub use crate::sampling::grammar::{GrammarError, ReplyFormError, SchemaPlace};
pub use crate::text::error::{PrivateText, TextError};

/// Any error that concerns pictures, text, sampling or checkpoints.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A picture is unreadable, damaged or not supported, or exceeds a limit.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A request's pictures or videos were refused or broken.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// The image processor's settings are invalid or not supported.
    #[error(transparent)]
    Processor(#[from] ProcessorError),
    /// The tokenizer or the chat template failed.
    #[error(transparent)]
    Text(#[from] TextError),
    /// Sampling parameters or logits were refused.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A checkpoint's files were refused or could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl Hint for ModelError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ModelError::Image(error) => error.hint(),
            ModelError::Media(error) => error.hint(),
            ModelError::Processor(error) => error.hint(),
            ModelError::Text(error) => error.hint(),
            ModelError::Sampling(error) => error.hint(),
            ModelError::Checkpoint(error) => error.hint(),
        }
    }
}
