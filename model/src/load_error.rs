//! Reasons why a checkpoint cannot be loaded, with hints on what to change.

use bursar_budgets::Hint;
use bursar_kernels::KernelError;
use thiserror::Error;

use crate::{blocks::ConfigError, checkpoint::QuantizationError, error::CheckpointError, weights::WeightError};

/// No family supports the checkpoint's architecture.
#[derive(Debug, Error)]
#[error("the architecture {found:?} is not supported; expected one of {known}")]
pub struct UnknownArchitecture {
    /// `architectures` of the checkpoint.
    pub found: Vec<String>,
    /// All supported architectures, grouped by suffix.
    pub known: String,
}

/// A checkpoint could not be loaded as a model.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No model family supports the checkpoint's architecture.
    #[error(transparent)]
    Architecture(#[from] UnknownArchitecture),
    /// No model can be built from the checkpoint's configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The quantization of the weights is not supported.
    #[error(transparent)]
    Quantization(#[from] QuantizationError),
    /// A tensor is missing, or does not match the configuration.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The copy to the device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The `progress` callback asked to stop.
    #[error("loading was stopped")]
    Stopped,
}

impl Hint for LoadError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            LoadError::Architecture(error) => format!("use a checkpoint of one of: {}", error.known),
            LoadError::Config(ConfigError::NoDraftHead) => "set draft_method to ngram or none".to_owned(),
            LoadError::Config(ConfigError::DraftModel(_)) => {
                "set draft_model to an EAGLE-3 head that was trained for this model, or draft_method to ngram or none"
                    .to_owned()
            }
            LoadError::Config(_) => "check config.json against the checkpoint's release".to_owned(),
            LoadError::Quantization(error) => error.hint(),
            LoadError::Weights(error) => error.hint(),
            LoadError::Stopped => "load the model again".to_owned(),
            LoadError::Kernel(_) => "the device refused the copy; see its message".to_owned(),
        }
    }
}

impl From<CheckpointError> for LoadError {
    fn from(error: CheckpointError) -> Self {
        LoadError::Weights(error.into())
    }
}
