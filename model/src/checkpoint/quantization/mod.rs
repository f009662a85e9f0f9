//! The FP8 weights of a checkpoint and their format, from its configuration or
//! from the user's choice.

mod config;
mod modules;

use std::{fmt, str::FromStr};

use bursar_budgets::Hint;
use serde::{Serialize, Serializer};
use thiserror::Error;

pub(super) use config::{MODELOPT, SETTINGS, stored_formats};
pub use modules::Modules;
pub(crate) use modules::OUTER;

/// The quantization that a user asks for: how to quantize an unquantized checkpoint while it loads,
/// or the name of the checkpoint's own format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightQuantization {
    /// The checkpoint's own FP8 format, or FP8 per channel if the checkpoint is not quantized.
    #[default]
    Fp8,
    /// FP8 with one scale per output channel, and one per row of activations.
    Fp8PerChannel,
    /// FP8 with one scale per block of 128 x 128, and one per 128 columns of a row of activations.
    Fp8PerBlock,
    /// FP8 with one scale per matrix, and one per row of activations.
    Fp8PerTensor,
    /// The checkpoint's own FP8 format, written by compressed-tensors.
    CompressedTensors,
    /// The checkpoint's own FP8 format, written by ModelOpt.
    ModelOpt,
}

impl WeightQuantization {
    /// The values that quantize weights while they load, in the order of a help text.
    pub const ROUNDING: [WeightQuantization; 4] = [
        WeightQuantization::Fp8,
        WeightQuantization::Fp8PerChannel,
        WeightQuantization::Fp8PerBlock,
        WeightQuantization::Fp8PerTensor,
    ];
    /// The values that only name the tool that quantized a checkpoint.
    pub const STORED: [WeightQuantization; 2] = [WeightQuantization::CompressedTensors, WeightQuantization::ModelOpt];

    /// The name, which is the same as in vLLM.
    pub fn name(self) -> &'static str {
        match self {
            WeightQuantization::Fp8 => "fp8",
            WeightQuantization::Fp8PerChannel => "fp8_per_channel",
            WeightQuantization::Fp8PerBlock => "fp8_per_block",
            WeightQuantization::Fp8PerTensor => "fp8_per_tensor",
            WeightQuantization::CompressedTensors => QuantizationMethod::CompressedTensors.name(),
            WeightQuantization::ModelOpt => QuantizationMethod::ModelOpt.name(),
        }
    }

    /// The scheme in which weights are quantized while they load; `None` for a choice that only
    /// names the checkpoint's format.
    fn scheme(self) -> Option<Fp8Scheme> {
        match self {
            WeightQuantization::Fp8 | WeightQuantization::Fp8PerChannel => Some(Fp8Scheme::CHANNEL),
            WeightQuantization::Fp8PerBlock => Some(Fp8Scheme::BLOCK),
            WeightQuantization::Fp8PerTensor => {
                Some(Fp8Scheme { weights: ScaledBy::Tensor, activations: RoundedBy::Row })
            }
            WeightQuantization::CompressedTensors | WeightQuantization::ModelOpt => None,
        }
    }

    /// Whether this choice agrees with the format that a checkpoint has.
    fn names(self, stored: &StoredFp8) -> bool {
        match self {
            WeightQuantization::Fp8 => true,
            WeightQuantization::CompressedTensors => stored.method == QuantizationMethod::CompressedTensors,
            WeightQuantization::ModelOpt => stored.method == QuantizationMethod::ModelOpt,
            _ => self.scheme() == Some(stored.scheme),
        }
    }
}

impl FromStr for WeightQuantization {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let mut all = Self::ROUNDING.into_iter().chain(Self::STORED);
        all.find(|one| one.name() == name.trim()).ok_or(())
    }
}

impl Serialize for WeightQuantization {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl fmt::Display for WeightQuantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The parts of a weight that have separate scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledBy {
    /// Each block of 128 x 128.
    Block,
    /// Each output channel, which is a row.
    Row,
    Tensor,
}

/// The parts of activations that have separate scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundedBy {
    /// Each group of 128 columns of a row. The scale follows from the largest magnitude.
    Group,
    /// Each row. The scale follows from the largest magnitude.
    Row,
    /// All activations of a GEMM. The scale comes from the checkpoint.
    Fixed,
}

/// How an FP8 weight and its activations are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Scheme {
    pub weights: ScaledBy,
    pub activations: RoundedBy,
}

impl Fp8Scheme {
    /// The scheme of Qwen's and DeepSeek's releases.
    pub const BLOCK: Fp8Scheme = Fp8Scheme { weights: ScaledBy::Block, activations: RoundedBy::Group };
    /// The scheme `FP8-dynamic` of compressed-tensors.
    pub const CHANNEL: Fp8Scheme = Fp8Scheme { weights: ScaledBy::Row, activations: RoundedBy::Row };
}

/// The tool that quantized a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizationMethod {
    /// The FP8 format of transformers, as in releases of Qwen and DeepSeek.
    Fp8,
    /// llm-compressor and other tools that write compressed-tensors.
    CompressedTensors,
    ModelOpt,
}

impl QuantizationMethod {
    /// The name of the tool in `quant_method`.
    pub fn name(self) -> &'static str {
        match self {
            QuantizationMethod::Fp8 => "fp8",
            QuantizationMethod::CompressedTensors => "compressed-tensors",
            QuantizationMethod::ModelOpt => "modelopt",
        }
    }
}

impl fmt::Display for Fp8Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.weights {
            ScaledBy::Block => "FP8 with a scale for each block of 128 x 128",
            ScaledBy::Row => "FP8 with a scale for each output",
            ScaledBy::Tensor => "FP8 with a scale for each matrix",
        })
    }
}

/// The format of FP8 weights in a checkpoint.
#[derive(Clone, Debug)]
pub struct StoredFp8 {
    pub method: QuantizationMethod,
    pub scheme: Fp8Scheme,
    /// Suffix of the names of the scales: `weight_scale_inv` or `weight_scale`.
    pub scale: &'static str,
    /// The modules that are not quantized.
    pub plain: Modules,
}

/// The formats of a model's weights.
#[derive(Clone, Debug)]
pub enum WeightFormats {
    /// No weights are quantized.
    Plain,
    /// Some weights are FP8 in the checkpoint.
    Stored(StoredFp8),
    /// The decoder's projections are quantized while they load.
    Made(Fp8Scheme),
}

impl WeightFormats {
    /// The name of the quantization that is applied while loading or was applied to the checkpoint;
    /// `None` if no weights are quantized.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            WeightFormats::Plain => None,
            WeightFormats::Stored(stored) => Some(stored.method.name()),
            WeightFormats::Made(scheme) => {
                // The first entry is skipped because it is another name of the second.
                WeightQuantization::ROUNDING[1..].iter().find(|one| one.scheme() == Some(*scheme)).map(|one| one.name())
            }
        }
    }

    /// Combines the format that a checkpoint has with the user's choice.
    ///
    /// # Errors
    /// [`QuantizationError::Twice`] and [`QuantizationError::Plain`].
    pub(super) fn of(stored: Option<StoredFp8>, asked: Option<WeightQuantization>) -> Result<Self, QuantizationError> {
        match (stored, asked) {
            (None, None) => Ok(WeightFormats::Plain),
            (None, Some(asked)) => asked.scheme().map(WeightFormats::Made).ok_or(QuantizationError::Plain { asked }),
            (Some(stored), None) => Ok(WeightFormats::Stored(stored)),
            (Some(stored), Some(asked)) if asked.names(&stored) => Ok(WeightFormats::Stored(stored)),
            (Some(_), Some(asked)) => Err(QuantizationError::Twice { asked }),
        }
    }
}

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
    #[error("quantization is {asked}, but the checkpoint is already quantized in another way")]
    Twice { asked: WeightQuantization },
    /// The user names the tool that quantized the checkpoint, but the checkpoint is not quantized.
    #[error("quantization is {asked}, but the checkpoint's weights are not quantized")]
    Plain { asked: WeightQuantization },
}

impl Hint for QuantizationError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            QuantizationError::Twice { .. } => "leave quantization out to use the checkpoint's own".to_owned(),
            QuantizationError::Plain { .. } => {
                "leave quantization out, or set it to fp8 to round weights while they load".to_owned()
            }
            QuantizationError::Malformed { .. } => {
                "download the file again: it says how the weights are scaled".to_owned()
            }
            _ => "load the model's release in bf16 (with quantization set to fp8, its weights are rounded while they \
                  load), or one in FP8 by blocks of 128 x 128, by channel or by tensor"
                .to_owned(),
        }
    }
}
