//! Which weights of a checkpoint are FP8, and how: as its configuration says, or as a user asks for.

mod config;
mod modules;

use std::{fmt, str::FromStr};

use bursar_budgets::Hint;
use serde::{Serialize, Serializer};
use thiserror::Error;

pub(super) use config::{MODELOPT, SETTINGS, stored_formats};
pub use modules::Modules;
pub(crate) use modules::OUTER;

/// How a user wants the weights of a plain checkpoint rounded while they load, or has named a checkpoint's own format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightQuantization {
    /// The checkpoint's own FP8, or else by channel.
    #[default]
    Fp8,
    /// FP8 with a scale for each output, and for each row of activations.
    Fp8PerChannel,
    /// FP8 with a scale for each block of 128 x 128, and for each 128 columns of a row of activations.
    Fp8PerBlock,
    /// FP8 with a scale for each matrix, and for each row of activations.
    Fp8PerTensor,
    /// The checkpoint's own FP8, which compressed-tensors has written.
    CompressedTensors,
    /// The checkpoint's own FP8, which ModelOpt has written.
    ModelOpt,
}

impl WeightQuantization {
    /// Those that round plain weights, in the order of a help text.
    pub const ROUNDING: [WeightQuantization; 4] = [
        WeightQuantization::Fp8,
        WeightQuantization::Fp8PerChannel,
        WeightQuantization::Fp8PerBlock,
        WeightQuantization::Fp8PerTensor,
    ];
    /// Those that only name what has quantised a checkpoint.
    pub const STORED: [WeightQuantization; 2] = [WeightQuantization::CompressedTensors, WeightQuantization::ModelOpt];

    /// Its name, which is vLLM's.
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

    /// What weights that are rounded while they load become; `None` if it rounds none.
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

    /// Whether it names what a checkpoint has.
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

/// Its name.
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

/// What has a scale of its own in a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaledBy {
    /// Each block of 128 x 128.
    Block,
    /// Each output.
    Row,
    /// Each matrix.
    Tensor,
}

/// What has a scale of its own in activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundedBy {
    /// Each 128 columns of a row, by their largest number.
    Group,
    /// Each row, by its largest number.
    Row,
    /// All activations of a product: the checkpoint has the scale.
    Fixed,
}

/// How an FP8 weight and its activations are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fp8Scheme {
    /// What has a scale in the weight.
    pub weights: ScaledBy,
    /// What has one in activations.
    pub activations: RoundedBy,
}

impl Fp8Scheme {
    /// Qwen's and DeepSeek's releases.
    pub const BLOCK: Fp8Scheme = Fp8Scheme { weights: ScaledBy::Block, activations: RoundedBy::Group };
    /// `FP8-dynamic` of compressed-tensors.
    pub const CHANNEL: Fp8Scheme = Fp8Scheme { weights: ScaledBy::Row, activations: RoundedBy::Row };
}

/// What has quantised a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizationMethod {
    /// transformers' own FP8, as Qwen and DeepSeek release it.
    Fp8,
    /// llm-compressor and others that write compressed-tensors.
    CompressedTensors,
    /// NVIDIA's ModelOpt.
    ModelOpt,
}

impl QuantizationMethod {
    /// Its name in `quant_method`.
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

/// FP8 weights that a checkpoint has.
#[derive(Clone, Debug)]
pub struct StoredFp8 {
    /// What has written them.
    pub method: QuantizationMethod,
    /// How they are scaled.
    pub scheme: Fp8Scheme,
    /// The end of the names of their scales: `weight_scale_inv` or `weight_scale`.
    pub scale: &'static str,
    /// The modules that are plain.
    pub plain: Modules,
}

/// The formats of a model's weights.
#[derive(Clone, Debug)]
pub enum WeightFormats {
    /// All are plain.
    Plain,
    /// Some are FP8 in the checkpoint.
    Stored(StoredFp8),
    /// The decoder's projections are rounded while they load.
    Made(Fp8Scheme),
}

impl WeightFormats {
    /// The name of what rounds weights while they load, or has rounded the checkpoint; `None` if all are plain.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            WeightFormats::Plain => None,
            WeightFormats::Stored(stored) => Some(stored.method.name()),
            WeightFormats::Made(scheme) => {
                // The first is another name of the second.
                WeightQuantization::ROUNDING[1..].iter().find(|one| one.scheme() == Some(*scheme)).map(|one| one.name())
            }
        }
    }

    /// What a checkpoint has, and what a user asks for.
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

/// A checkpoint whose quantisation is not served.
#[derive(Debug, Error)]
pub enum QuantizationError {
    /// A setting is missing, or has a value that is not supported.
    #[error("{file}: {field} is {value}; supported: {supported}")]
    Setting {
        /// The file's name.
        file: &'static str,
        /// The setting's name, with its place in the file.
        field: String,
        /// Its value, cut short.
        value: String,
        /// The values that are supported.
        supported: &'static str,
    },
    /// A setting that this crate does not know.
    #[error("{file}: {field} is {value}; this setting is unknown and may change what the model computes")]
    Unknown {
        /// The file's name.
        file: &'static str,
        /// The setting's name, with its place in the file.
        field: String,
        /// Its value, cut short.
        value: String,
    },
    /// A pattern of modules is no regular expression.
    #[error("{file}: the module pattern {pattern:?} is not valid: {reason}")]
    Pattern {
        /// The file's name.
        file: &'static str,
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The file of settings is no JSON object.
    #[error("{file} is not a JSON object: {reason}")]
    Malformed {
        /// The file's name.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The checkpoint is quantised in another way already.
    #[error("quantization is {asked}, but the checkpoint is already quantized in another way")]
    Twice {
        /// What was asked for.
        asked: WeightQuantization,
    },
    /// What should have quantised the checkpoint has not.
    #[error("quantization is {asked}, but the checkpoint's weights are not quantized")]
    Plain {
        /// What was asked for.
        asked: WeightQuantization,
    },
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
