//! The formats of a model's weights: unquantized, quantized in the checkpoint, or quantized while
//! they load.

use bursar_kernels::QuantizationScheme;

use super::choice::{QuantizationMethod, WeightQuantization};
use super::error::QuantizationError;
use super::modules::Modules;
use crate::checkpoint::packed::{PackedFormat, PackedScheme};

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

/// Packed integers or FP4 numbers in a checkpoint. Integers of 4 bits stay packed where the target
/// has kernels for them. Other elements are dequantized while they load.
#[derive(Clone, Debug)]
pub struct PackedQuantization {
    pub method: QuantizationMethod,
    /// The scheme of modules that no rule names.
    pub scheme: PackedScheme,
    /// Modules and their schemes; `None` for modules that are not quantized. The first rule that
    /// names a module decides.
    pub rules: Vec<(Modules, Option<PackedScheme>)>,
}

impl PackedQuantization {
    /// The scheme of a module; `None` if the module is not quantized.
    pub fn scheme_of(&self, module: &str) -> Option<PackedScheme> {
        self.rules.iter().find(|(modules, _)| modules.has(module)).map_or(Some(self.scheme), |(_, scheme)| *scheme)
    }

    /// The file format, which is the same for all modules.
    pub fn format(&self) -> PackedFormat {
        self.scheme.format
    }
}

/// The quantization of a checkpoint.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) enum StoredFormat {
    Scaled(StoredQuantization),
    Packed(PackedQuantization),
}

/// The formats of a model's weights.
#[derive(Clone, Debug)]
pub enum WeightFormats {
    /// No weights are quantized.
    Unquantized,
    /// Some weights are packed in the checkpoint.
    Packed(PackedQuantization),
    /// Some weights are quantized in the checkpoint.
    Stored(StoredQuantization),
    /// The decoder's projections are quantized while they load.
    Requested(QuantizationScheme),
}

impl WeightFormats {
    /// The name of the quantization that is applied while loading or was applied to the checkpoint;
    /// `None` if no weights are quantized.
    pub fn name(&self) -> Option<&'static str> {
        match self {
            WeightFormats::Unquantized => None,
            WeightFormats::Packed(packed) => Some(packed.method.name()),
            WeightFormats::Stored(stored) => Some(stored.method.name()),
            WeightFormats::Requested(scheme) => WeightQuantization::of(*scheme).map(WeightQuantization::name),
        }
    }

    /// Combines the format that a checkpoint has with the user's choice.
    ///
    /// # Errors
    /// [`QuantizationError::AlreadyQuantized`] and [`QuantizationError::Plain`].
    pub(in crate::checkpoint) fn of(
        stored: Option<StoredFormat>,
        asked: Option<WeightQuantization>,
    ) -> Result<Self, QuantizationError> {
        let is_int4 = matches!(&stored, Some(StoredFormat::Packed(packed)) if packed.scheme.is_int4());
        let (method, scheme, formats) = match (stored, asked) {
            (None, None) => return Ok(WeightFormats::Unquantized),
            (None, Some(asked)) => {
                return asked.scheme().map(WeightFormats::Requested).ok_or(QuantizationError::Plain { asked });
            }
            (Some(StoredFormat::Scaled(stored)), _) => {
                (stored.method, Some(stored.scheme), WeightFormats::Stored(stored))
            }
            (Some(StoredFormat::Packed(packed)), _) => (packed.method, None, WeightFormats::Packed(packed)),
        };
        match asked.filter(|asked| !asked.names(method, scheme, is_int4)) {
            Some(asked) => Err(QuantizationError::AlreadyQuantized { asked, found: method.name() }),
            None => Ok(formats),
        }
    }
}
