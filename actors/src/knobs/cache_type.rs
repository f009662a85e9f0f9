//! The element type of the KV cache, by the names that vLLM and SGLang use.

use std::{fmt, str::FromStr};

use bursar_budgets::Hint;
use bursar_kernels::{DType, Target};
use bursar_model::flow::CacheFormat;
use serde::{Serialize, Serializer};
use thiserror::Error;

/// The element type of the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvCacheType {
    /// The type of activations.
    #[default]
    Auto,
    /// bf16. Requires activations in bf16.
    BFloat16,
    /// f16. Requires activations in f16.
    Float16,
    /// f32. Requires activations in f32.
    Float32,
    /// FP8 (E4M3), with the checkpoint's scales, or a scale of 1 if the checkpoint has no scales.
    Fp8,
}

/// The device does not support the requested type.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvCacheTypeError {
    /// The type is not FP8 and differs from the type of activations.
    #[error("kv_cache_dtype is {asked}, but activations on this device are {activation}")]
    Other {
        asked: KvCacheType,
        /// The type of activations.
        activation: DType,
    },
    /// The device has no kernels for the type.
    #[error("kv_cache_dtype is {asked}, but {device} has no kernels for a KV cache of this type")]
    Unserved {
        asked: KvCacheType,
        /// The device's kind, such as `cuda sm_90`.
        device: &'static str,
    },
}

impl Hint for KvCacheTypeError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            KvCacheTypeError::Other { .. } => {
                "leave kv_cache_dtype out, or set it to auto or fp8; dtype sets the type of activations".to_owned()
            }
            KvCacheTypeError::Unserved { .. } => {
                "leave kv_cache_dtype out, or use a Hopper GPU or a CPU; `bursar plan` shows what fp8 would save"
                    .to_owned()
            }
        }
    }
}

impl KvCacheType {
    /// Returns the format of the cache on `target`, even if `target` has no kernels for it.
    ///
    /// # Errors
    /// [`KvCacheTypeError::Other`].
    pub fn on(self, target: &Target) -> Result<CacheFormat, KvCacheTypeError> {
        let asked = match self {
            KvCacheType::Auto => return Ok(CacheFormat::Plain),
            KvCacheType::Fp8 => return Ok(CacheFormat::Fp8),
            KvCacheType::BFloat16 => DType::BF16,
            KvCacheType::Float16 => DType::F16,
            KvCacheType::Float32 => DType::F32,
        };
        match target.activation() {
            activation if activation == asked => Ok(CacheFormat::Plain),
            activation => Err(KvCacheTypeError::Other { asked: self, activation }),
        }
    }

    /// Refuses a type that `target` has no kernels for.
    ///
    /// # Errors
    /// [`KvCacheTypeError::Unserved`].
    pub fn check_served(self, target: &Target) -> Result<(), KvCacheTypeError> {
        match self {
            KvCacheType::Fp8 if !target.has_quantized_cache() => {
                Err(KvCacheTypeError::Unserved { asked: self, device: target.name() })
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for KvCacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvCacheType::Auto => "auto",
            KvCacheType::BFloat16 => "bfloat16",
            KvCacheType::Float16 => "float16",
            KvCacheType::Float32 => "float32",
            KvCacheType::Fp8 => "fp8",
        })
    }
}

impl Serialize for KvCacheType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for KvCacheType {
    type Err = ();

    fn from_str(typed: &str) -> Result<Self, ()> {
        match typed {
            "auto" => Ok(KvCacheType::Auto),
            "bfloat16" | "bf16" => Ok(KvCacheType::BFloat16),
            "float16" | "half" | "fp16" => Ok(KvCacheType::Float16),
            "float32" | "float" | "fp32" => Ok(KvCacheType::Float32),
            "fp8" | "fp8_e4m3" => Ok(KvCacheType::Fp8),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::CudaTarget;

    use super::*;

    const HOST: Target = Target::Cpu { threads: 1 };
    const GPU: Target = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });

    const OLDER: Target = Target::Cuda(CudaTarget { capability: (8, 9), sms: 142, activation: DType::BF16 });

    fn named(name: &str) -> KvCacheType {
        name.parse().expect("a name")
    }

    #[test]
    fn a_plain_cache_type_must_equal_the_activation_type() {
        for (name, target) in [("auto", HOST), ("auto", GPU), ("bf16", GPU), ("float32", HOST)] {
            assert_eq!(named(name).on(&target), Ok(CacheFormat::Plain), "{name}");
        }
        for (name, target, activation) in [("half", GPU, "bf16"), ("bfloat16", HOST, "f32"), ("float", GPU, "bf16")] {
            let error = named(name).on(&target).expect_err("the target has another activation type");
            assert!(error.to_string().ends_with(activation) && error.hint().contains("fp8"), "{error}");
        }
        assert!(["fp8_e5m2", "int8", ""].iter().all(|name| name.parse::<KvCacheType>().is_err()));
    }

    #[test]
    fn an_fp8_cache_is_served_only_where_kernels_exist() {
        for name in ["fp8", "fp8_e4m3"] {
            assert_eq!(
                [&HOST, &GPU].map(|target| named(name).on(target)),
                [Ok(CacheFormat::Fp8), Ok(CacheFormat::Fp8)]
            );
        }
        assert_eq!([&HOST, &GPU].map(|target| named("fp8").check_served(target)), [Ok(()), Ok(())]);
        assert_eq!(named("auto").check_served(&OLDER), Ok(()));
        let error = named("fp8").check_served(&OLDER).expect_err("the target has no kernels for the type");
        let described = "kv_cache_dtype is fp8, but cuda sm_89 has no kernels for a KV cache of this type";
        assert_eq!(error.to_string(), described);
    }
}
