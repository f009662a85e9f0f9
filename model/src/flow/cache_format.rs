//! The format in which the KV cache stores keys and values.

use bursar_kernels::{DType, Target};

/// The format of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheFormat {
    /// The same type as activations.
    #[default]
    Plain,
    /// E4M3, with one scale for the keys and one for the values of each head. The scales come from
    /// the checkpoint. If a layer has no scales, they are 1.
    Fp8,
}

impl CacheFormat {
    /// Whether keys and values are quantized, so that they have scales.
    pub fn is_quantized(self) -> bool {
        self != CacheFormat::Plain
    }

    /// Name of this format in an error message if `target` has no kernels for the format, otherwise
    /// `None`.
    pub(crate) fn unsupported(self, target: &Target) -> Option<&'static str> {
        (self.is_quantized() && !target.has_quantized_cache()).then_some("FP8 keys and values")
    }

    /// The element type on `target`.
    pub fn dtype(self, target: &Target) -> DType {
        match self {
            CacheFormat::Plain => target.activation(),
            CacheFormat::Fp8 => DType::F8E4M3,
        }
    }

    /// The name of the element type on `target`: the name of the activation type, or `fp8`.
    pub fn type_name(self, target: &Target) -> &'static str {
        match self {
            CacheFormat::Plain => target.activation().name(),
            CacheFormat::Fp8 => "fp8",
        }
    }

    /// The format's name in fingerprints.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::Plain => "plain",
            CacheFormat::Fp8 => "fp8",
        }
    }
}
