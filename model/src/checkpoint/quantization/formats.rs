//! The formats of a model's weights: unquantized, quantized in the checkpoint, or quantized while
//! they load.

use bursar_kernels::QuantizationScheme;

use super::choice::{QuantizationMethod, WeightQuantization};
use super::error::QuantizationError;
use super::modules::Modules;

/// The format of quantized weights in a checkpoint.
#[derive(Clone, Debug)]
pub struct StoredQuantization {
    pub method: QuantizationMethod,
    pub scheme: QuantizationScheme,
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
    /// Some weights are quantized in the checkpoint.
    Stored(StoredQuantization),
    /// The decoder's projections are quantized while they load.
    Made(QuantizationScheme),
}

impl WeightFormats {
    /// The name of the quantization that is applied while loading or was applied to the checkpoint;
    /// `None` if no weights are quantized.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            WeightFormats::Plain => None,
            WeightFormats::Stored(stored) => Some(stored.method.name()),
            WeightFormats::Made(scheme) => WeightQuantization::of(*scheme).map(WeightQuantization::name),
        }
    }

    /// Combines the format that a checkpoint has with the user's choice.
    ///
    /// # Errors
    /// [`QuantizationError::Twice`] and [`QuantizationError::Plain`].
    pub(in crate::checkpoint) fn of(
        stored: Option<StoredQuantization>,
        asked: Option<WeightQuantization>,
    ) -> Result<Self, QuantizationError> {
        match (stored, asked) {
            (None, None) => Ok(WeightFormats::Plain),
            (None, Some(asked)) => asked.scheme().map(WeightFormats::Made).ok_or(QuantizationError::Plain { asked }),
            (Some(stored), None) => Ok(WeightFormats::Stored(stored)),
            (Some(stored), Some(asked)) if asked.names(stored.method, stored.scheme) => {
                Ok(WeightFormats::Stored(stored))
            }
            (Some(_), Some(asked)) => Err(QuantizationError::Twice { asked }),
        }
    }
}
