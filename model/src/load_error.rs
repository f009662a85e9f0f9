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
    /// All supported architectures, separated by commas.
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
            LoadError::Config(_) => "check config.json against the checkpoint's release".to_owned(),
            LoadError::Quantization(error) => error.hint(),
            LoadError::Weights(WeightError::Checkpoint(error)) => error.hint(),
            LoadError::Weights(WeightError::Ranks(error)) => {
                let possible: Vec<_> = error.possible.iter().map(ToString::to_string).collect();
                format!("use a number of ranks that divides all of it: {}", possible.join(", "))
            }
            LoadError::Weights(WeightError::Cut { .. }) => {
                "use fewer ranks, or a checkpoint that is not quantized".to_owned()
            }
            LoadError::Weights(WeightError::Unserved { .. }) => {
                "leave quantization out if it is set, load another checkpoint of the model, or load it on a CPU"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Format { .. } | WeightError::PartlyQuantized { .. }) => {
                "check quantization_config and its list of modules that are not quantized against the checkpoint's \
                 release"
                    .to_owned()
            }
            LoadError::Weights(WeightError::ScaledFp8 { .. } | WeightError::AlwaysPlain { .. }) => {
                "load a release in which it is not quantized, or one in bf16 with quantization set to fp8".to_owned()
            }
            LoadError::Weights(WeightError::ScaleShape { .. }) => {
                "check quantization_config, which says how many numbers share a scale, against the checkpoint's release"
                    .to_owned()
            }
            LoadError::Weights(WeightError::AttentionScale { .. }) => {
                "load a release that has scales only of keys and values, or remove the scales of queries and \
                 probabilities from the file: the weights do not need them"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Scale { .. }) => {
                "download the file again; it is damaged or was quantized wrongly".to_owned()
            }
            LoadError::Weights(WeightError::Extra { .. }) => {
                "check config.json against the checkpoint's release; a tensor that no layer reads is an error here, \
                 though other runtimes may ignore it"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Untied { name, .. }) => {
                format!("set `tie_word_embeddings` to false if {name} is the model's own, or remove it from the file")
            }
            LoadError::Weights(_) => "download the checkpoint again; the folder mixes files of different \
                                      checkpoints"
                .to_owned(),
            LoadError::Stopped => "load the model again".to_owned(),
            LoadError::Kernel(_) => "see the device's message: it refused the copy".to_owned(),
        }
    }
}

impl From<CheckpointError> for LoadError {
    fn from(error: CheckpointError) -> Self {
        LoadError::Weights(error.into())
    }
}
