//! The element type of recurrent states, by the names that vLLM and SGLang use.

use std::{fmt, str::FromStr};

use bursar_kernels::StateDtype;
use serde::{Serialize, Serializer};

/// The element type in which the states of gated delta nets are stored. Arithmetic is f32 for each
/// type. Models without such states ignore this setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StateType {
    /// f32, as released models are configured.
    #[default]
    Float32,
    /// bf16. States take half the memory and are rounded at the end of each step.
    BFloat16,
}

impl StateType {
    pub(crate) fn dtype(self) -> StateDtype {
        match self {
            StateType::Float32 => StateDtype::F32,
            StateType::BFloat16 => StateDtype::Bf16,
        }
    }
}

impl fmt::Display for StateType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StateType::Float32 => "float32",
            StateType::BFloat16 => "bfloat16",
        })
    }
}

impl Serialize for StateType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for StateType {
    type Err = ();

    fn from_str(typed: &str) -> Result<Self, ()> {
        match typed {
            "auto" | "float32" | "float" | "fp32" => Ok(StateType::Float32),
            "bfloat16" | "bf16" => Ok(StateType::BFloat16),
            _ => Err(()),
        }
    }
}
