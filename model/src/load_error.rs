//! A checkpoint that did not become a model: why, and what to change.

use bursar_budgets::Hint;
use bursar_kernels::KernelError;
use thiserror::Error;

use crate::{
    blocks::ConfigError, checkpoint::QuantizationError, error::CheckpointError, registry::UnknownArchitecture,
    weights::WeightError,
};

/// A checkpoint that did not become a model.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No family serves it.
    #[error(transparent)]
    Architecture(#[from] UnknownArchitecture),
    /// No model can be built from its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// How its weights are quantised is not served.
    #[error(transparent)]
    Quantization(#[from] QuantizationError),
    /// A tensor is missing or not what the configuration asks for.
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
                "use fewer ranks, or a checkpoint that is not quantised".to_owned()
            }
            LoadError::Weights(WeightError::Unserved { .. }) => {
                "leave quantization out if it is set, load another checkpoint of the model, or load it on a CPU"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Format { .. } | WeightError::PartlyQuantized { .. }) => {
                "check quantization_config and its list of plain modules against the checkpoint's release".to_owned()
            }
            LoadError::Weights(WeightError::ScaledFp8 { .. } | WeightError::AlwaysPlain { .. }) => {
                "load a release in which it is plain, or one in bf16 with quantization set to fp8".to_owned()
            }
            LoadError::Weights(WeightError::ScaleShape { .. }) => {
                "quantization_config says how many numbers share a scale: check it against the checkpoint's release"
                    .to_owned()
            }
            LoadError::Weights(WeightError::AttentionScale { .. }) => {
                "load a release that has scales of keys and values alone, or remove those of queries and probabilities \
                 from the file: the weights do not need them"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Scale { .. }) => {
                "the file is damaged, or what has quantised it failed; download it again".to_owned()
            }
            LoadError::Weights(WeightError::Extra { .. }) => {
                "check config.json against the checkpoint's release; elsewhere a tensor that no layer reads may be \
                 ignored, but here it is an error"
                    .to_owned()
            }
            LoadError::Weights(WeightError::Untied { name, .. }) => {
                format!("set `tie_word_embeddings` to false if {name} is the model's own, or remove it from the file")
            }
            LoadError::Weights(_) => "the folder mixes files of different checkpoints; download it again".to_owned(),
            LoadError::Stopped => "load it again".to_owned(),
            LoadError::Kernel(_) => "the device refused the copy; see its message".to_owned(),
        }
    }
}

impl From<CheckpointError> for LoadError {
    fn from(error: CheckpointError) -> Self {
        LoadError::Weights(error.into())
    }
}
