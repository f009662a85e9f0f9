//! The quantization that a user asks for, and the tools that quantize checkpoints.

use std::{fmt, str::FromStr};

use bursar_kernels::{Quantization, QuantizationScheme, ScaledBy, int4};
use serde::{Serialize, Serializer};

/// The quantization that a user asks for: how to quantize an unquantized checkpoint while it loads,
/// or the name of the checkpoint's own format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightQuantization {
    /// The checkpoint's own FP8 format, or FP8 per channel if the checkpoint is not quantized.
    #[default]
    Fp8,
    /// FP8 with one scale per output channel, and one scale per row of activations.
    Fp8PerChannel,
    /// FP8 with one scale per block of 128 x 128 weights, and one scale per 128 columns of a row of
    /// activations.
    Fp8PerBlock,
    /// FP8 with one scale per matrix, and one scale per row of activations.
    Fp8PerTensor,
    /// 4-bit integers with one scale per 128 columns of an output channel, or per 64 or 32 columns
    /// if the columns are not a multiple of 128. Also the checkpoint's own 4-bit format.
    Int4,
    /// The checkpoint's own format, written by AutoAWQ.
    Awq,
    /// The checkpoint's own format, written by AutoGPTQ or GPTQModel.
    Gptq,
    /// The checkpoint's own format, FP8, FP4 or packed integers, written by compressed-tensors.
    CompressedTensors,
    /// The checkpoint's own FP8 or FP4 format, written by ModelOpt.
    ModelOpt,
}

impl WeightQuantization {
    /// The values that quantize weights while they load, in the order of a help text.
    pub const ROUNDING: [WeightQuantization; 5] = [
        WeightQuantization::Fp8,
        WeightQuantization::Fp8PerChannel,
        WeightQuantization::Fp8PerBlock,
        WeightQuantization::Fp8PerTensor,
        WeightQuantization::Int4,
    ];
    /// The values that only name the tool that quantized a checkpoint.
    pub const STORED: [WeightQuantization; 4] = [
        WeightQuantization::Awq,
        WeightQuantization::Gptq,
        WeightQuantization::CompressedTensors,
        WeightQuantization::ModelOpt,
    ];

    /// The name, which is the same as in vLLM.
    pub fn name(self) -> &'static str {
        match self {
            WeightQuantization::Fp8 => "fp8",
            WeightQuantization::Fp8PerChannel => "fp8_per_channel",
            WeightQuantization::Fp8PerBlock => "fp8_per_block",
            WeightQuantization::Fp8PerTensor => "fp8_per_tensor",
            WeightQuantization::Int4 => "int4",
            WeightQuantization::Awq => QuantizationMethod::Awq.name(),
            WeightQuantization::Gptq => QuantizationMethod::Gptq.name(),
            WeightQuantization::CompressedTensors => QuantizationMethod::CompressedTensors.name(),
            WeightQuantization::ModelOpt => QuantizationMethod::ModelOpt.name(),
        }
    }

    /// The scheme in which weights are quantized while they load; `None` for a choice that only
    /// names the checkpoint's format.
    pub(crate) fn scheme(self) -> Option<QuantizationScheme> {
        match self {
            WeightQuantization::Fp8 | WeightQuantization::Fp8PerChannel => Some(QuantizationScheme::ROW),
            WeightQuantization::Fp8PerBlock => Some(QuantizationScheme::BLOCK),
            WeightQuantization::Fp8PerTensor => Some(QuantizationScheme::fp8(ScaledBy::Tensor, Quantization::Rows)),
            WeightQuantization::Int4 => Some(QuantizationScheme::int4(int4::GROUPS[0], false)),
            WeightQuantization::Awq
            | WeightQuantization::Gptq
            | WeightQuantization::CompressedTensors
            | WeightQuantization::ModelOpt => None,
        }
    }

    /// The choice that quantizes weights in `scheme` while they load.
    pub(super) fn of(scheme: QuantizationScheme) -> Option<Self> {
        // The first entry is skipped because it is another name of the second.
        Self::ROUNDING[1..].iter().copied().find(|one| one.scheme() == Some(scheme))
    }

    /// Whether this choice agrees with the format that a checkpoint has. `scheme` is `None` for
    /// packed weights, and `is_int4` is `true` if these are 4-bit integers.
    pub(super) fn names(self, method: QuantizationMethod, scheme: Option<QuantizationScheme>, is_int4: bool) -> bool {
        match self {
            WeightQuantization::Fp8 => scheme.is_some(),
            WeightQuantization::Awq => method == QuantizationMethod::Awq,
            WeightQuantization::Gptq => method == QuantizationMethod::Gptq,
            WeightQuantization::CompressedTensors => method == QuantizationMethod::CompressedTensors,
            WeightQuantization::ModelOpt => method == QuantizationMethod::ModelOpt,
            WeightQuantization::Int4 => is_int4,
            _ => scheme.is_some() && self.scheme() == scheme,
        }
    }
}

impl FromStr for WeightQuantization {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        // vLLM has another name for ModelOpt's FP4.
        let name = if name.trim() == "modelopt_fp4" { "modelopt" } else { name.trim() };
        Self::ROUNDING.into_iter().chain(Self::STORED).find(|one| one.name() == name).ok_or(())
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

/// The tool that quantized a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizationMethod {
    /// The FP8 format of transformers, as in releases of Qwen and DeepSeek.
    Fp8,
    /// llm-compressor and other tools that write compressed-tensors.
    CompressedTensors,
    ModelOpt,
    /// AutoAWQ, and other tools that write its format `gemm`.
    Awq,
    /// AutoGPTQ and GPTQModel, which write the versions `gptq` and `gptq_v2`.
    Gptq,
}

impl QuantizationMethod {
    /// The name of the tool in `quant_method`.
    pub fn name(self) -> &'static str {
        match self {
            QuantizationMethod::Fp8 => "fp8",
            QuantizationMethod::CompressedTensors => "compressed-tensors",
            QuantizationMethod::ModelOpt => "modelopt",
            QuantizationMethod::Awq => "awq",
            QuantizationMethod::Gptq => "gptq",
        }
    }
}
