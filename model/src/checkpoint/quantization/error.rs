//! Errors of a checkpoint's quantization.

use bursar_budgets::Hint;
use thiserror::Error;

use super::choice::WeightQuantization;
use super::unsupported::SUPPORTED;

/// The quantization of a checkpoint is not supported.
#[derive(Debug, Error)]
pub enum QuantizationError {
    /// A setting is missing, or has a value that is not supported.
    #[error("{file}: {field} is {value}; supported: {supported}")]
    Setting {
        file: &'static str,
        /// The setting's path in the file.
        field: String,
        /// The value, truncated to 60 characters.
        value: String,
        supported: &'static str,
    },
    /// A setting that this crate does not know.
    #[error("{file}: {field} is {value}; this setting is unknown and may change what the model computes")]
    Unknown {
        file: &'static str,
        /// The setting's path in the file.
        field: String,
        /// The value, truncated to 60 characters.
        value: String,
    },
    /// A pattern of modules is not a valid regular expression.
    #[error("{file}: the module pattern {pattern:?} is not valid: {reason}")]
    Pattern { file: &'static str, pattern: String, reason: String },
    /// The settings file is not a JSON object.
    #[error("{file} is not a JSON object: {reason}")]
    Malformed { file: &'static str, reason: String },
    /// The checkpoint is already quantized in another way.
    #[error("quantization is {asked}, but the checkpoint is already quantized in another way ({found})")]
    AlreadyQuantized {
        asked: WeightQuantization,
        /// The name of the tool that quantized the checkpoint.
        found: &'static str,
    },
    /// The user names the tool that quantized the checkpoint, but the checkpoint is not quantized.
    #[error("quantization is {asked}, but the checkpoint's weights are not quantized")]
    Plain { asked: WeightQuantization },
}

impl Hint for QuantizationError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            QuantizationError::AlreadyQuantized { .. } => {
                "leave quantization out to use the checkpoint's own format".to_owned()
            }
            QuantizationError::Plain { .. } => {
                let default = WeightQuantization::default();
                format!("leave quantization out, or set it to {default} to round weights while they load")
            }
            QuantizationError::Malformed { .. } => {
                "download the file again: it says how the weights are scaled".to_owned()
            }
            _ => format!(
                "load the model's release in bf16 (with quantization set to {}, its weights are rounded while they \
                 load), or one in {}",
                WeightQuantization::default(),
                SUPPORTED
            ),
        }
    }
}
