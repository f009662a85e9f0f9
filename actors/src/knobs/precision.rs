//! The element type of activations, by the names that vLLM, SGLang and LightLLM use.

use std::{fmt, str::FromStr};

use bursar_budgets::Hint;
use bursar_kernels::{CudaTarget, DType, Target};
use serde::{Serialize, Serializer};
use thiserror::Error;

/// The element type of weights, activations and, unless `kv_cache_dtype` is set, the KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// The checkpoint's own type if the device computes in it. Otherwise the device's type: bf16 on
    /// a GPU that supports it, f16 on other GPUs, f32 on the host.
    #[default]
    Auto,
    /// bf16, on GPUs of compute capability 8.0 and above.
    BFloat16,
    /// f16, on GPUs.
    Float16,
    /// f32, on the host.
    Float32,
}

/// The device does not compute in the requested type.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("dtype is {asked}, but {device} computes in {taken}")]
pub struct PrecisionError {
    pub asked: Precision,
    /// The device's kind, such as `cuda sm_90`.
    pub device: &'static str,
    /// The types that the device computes in, as a user writes them.
    pub taken: &'static str,
}

impl Hint for PrecisionError {
    type Text = String;

    fn hint(&self) -> String {
        format!("leave dtype out, or set it to auto or {}", self.taken)
    }
}

impl Precision {
    /// Returns `target` with this type. `stored` is the type of the checkpoint's weights.
    ///
    /// # Errors
    /// The device does not compute in this type.
    pub fn on(self, target: Target, stored: Option<DType>) -> Result<Target, PrecisionError> {
        let (types, taken) = types_of(&target);
        let asked = match self {
            Precision::Auto => stored.filter(|stored| types.contains(stored)),
            Precision::BFloat16 => Some(DType::BF16),
            Precision::Float16 => Some(DType::F16),
            Precision::Float32 => Some(DType::F32),
        };
        match (asked, target) {
            (Some(asked), _) if !types.contains(&asked) => {
                Err(PrecisionError { asked: self, device: device_of(&target), taken })
            }
            (Some(activation), Target::Cuda(cuda)) => Ok(Target::Cuda(CudaTarget { activation, ..cuda })),
            _ => Ok(target),
        }
    }
}

/// Returns the types that a device computes in, and the names that a user writes for them.
fn types_of(target: &Target) -> (&'static [DType], &'static str) {
    match target {
        Target::Cpu { .. } => (&[DType::F32], "float32"),
        Target::Cuda(cuda) if cuda.capability >= (8, 0) => (&[DType::BF16, DType::F16], "bfloat16 or float16"),
        Target::Cuda(_) => (&[DType::F16], "float16"),
    }
}

fn device_of(target: &Target) -> &'static str {
    match target {
        Target::Cpu { .. } => "a host device",
        target => target.name(),
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Auto => "auto",
            Precision::BFloat16 => "bfloat16",
            Precision::Float16 => "float16",
            Precision::Float32 => "float32",
        })
    }
}

impl Serialize for Precision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// No type has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("expected auto, bfloat16, float16 (or half) or float32")]
pub struct UnknownPrecision;

impl FromStr for Precision {
    type Err = UnknownPrecision;

    fn from_str(typed: &str) -> Result<Self, UnknownPrecision> {
        match typed {
            "auto" => Ok(Precision::Auto),
            "bfloat16" | "bf16" => Ok(Precision::BFloat16),
            "float16" | "half" | "fp16" => Ok(Precision::Float16),
            "float32" | "float" | "fp32" => Ok(Precision::Float32),
            _ => Err(UnknownPrecision),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Target = Target::Cpu { threads: 1 };

    fn gpu(capability: (u32, u32), activation: DType) -> Target {
        Target::Cuda(CudaTarget { capability, sms: 58, activation })
    }

    #[test]
    fn auto_is_the_checkpoints_type_if_the_device_supports_it() {
        let (ada, turing) = (gpu((8, 9), DType::BF16), gpu((7, 5), DType::F16));
        let auto = |target, stored| Precision::Auto.on(target, stored).expect("auto is never refused").activation();
        assert_eq!(auto(ada, Some(DType::F16)), DType::F16);
        for stored in [Some(DType::BF16), Some(DType::F32), None] {
            assert_eq!((auto(ada, stored), auto(turing, stored)), (DType::BF16, DType::F16), "{stored:?}");
            assert_eq!(auto(HOST, stored), DType::F32);
        }
    }

    #[test]
    fn an_unsupported_type_is_refused_with_the_supported_ones() {
        let (ada, turing) = (gpu((8, 9), DType::BF16), gpu((7, 5), DType::F16));
        for (name, target, activation) in [
            ("half", ada, DType::F16),
            ("bfloat16", ada, DType::BF16),
            ("fp16", turing, DType::F16),
            ("float", HOST, DType::F32),
        ] {
            let target = name
                .parse::<Precision>()
                .expect("the name is valid")
                .on(target, Some(DType::BF16))
                .expect("the target has the precision");
            assert_eq!(target.activation(), activation, "{name}");
        }
        for (name, target, taken) in
            [("float32", ada, "bfloat16 or float16"), ("bfloat16", turing, "float16"), ("half", HOST, "float32")]
        {
            let refused = name
                .parse::<Precision>()
                .expect("the name is valid")
                .on(target, None)
                .expect_err("the target lacks the precision");
            assert!(refused.to_string().ends_with(taken) && refused.hint().ends_with(taken), "{refused}");
        }
        assert!("int8".parse::<Precision>().is_err());
    }
}
