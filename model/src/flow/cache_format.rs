//! How keys and values are kept between steps.

use bursar_kernels::{DType, Target};

/// The format of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheFormat {
    /// As activations.
    #[default]
    Plain,
    /// In E4M3, with a scale for the keys and for the values of each head: the
    /// checkpoint's, or else 1.
    Fp8,
}

impl CacheFormat {
    /// The type of elements on `target`.
    pub fn dtype(self, target: &Target) -> DType {
        match self {
            CacheFormat::Plain => target.activation(),
            CacheFormat::Fp8 => DType::F8E4M3,
        }
    }

    /// The name of that type: that of the activations', or `fp8`.
    pub fn type_name(self, target: &Target) -> &'static str {
        match self {
            CacheFormat::Plain => target.activation().name(),
            CacheFormat::Fp8 => "fp8",
        }
    }

    /// Its name in fingerprints.
    pub fn name(self) -> &'static str {
        match self {
            CacheFormat::Plain => "plain",
            CacheFormat::Fp8 => "fp8",
        }
    }
}
