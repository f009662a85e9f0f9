//! Pure: the types of the scales of packed weights.

use bursar_kernels::E4m3;
use half::{bf16, f16};

use super::scheme::PackedFormat;
use crate::checkpoint::stored::TensorType;

/// The type of the scales of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleType {
    F16,
    Bf16,
    F32,
    /// FP8. Scales of NVFP4 have no sign.
    E4m3,
    /// Powers of two: the byte `e` is 2^(e - 127), and 255 is NaN (E8M0 of the Open Compute
    /// Project's Microscaling Formats 1.0).
    E8m0,
}

/// The first code of E4M3 that is NaN or has a sign.
const E4M3_END: u8 = 0x7f;
/// NaN in E8M0.
const E8M0_NAN: u8 = 0xff;

impl ScaleType {
    /// The type with this name in safetensors files; `None` if the scales of `format` cannot have
    /// it. compressed-tensors stores E8M0 as U8.
    pub fn of(format: PackedFormat, kind: &str) -> Option<Self> {
        match (format, kind) {
            (PackedFormat::Nvfp4 | PackedFormat::ModelOptNvfp4, "F8_E4M3") => Some(ScaleType::E4m3),
            (PackedFormat::Mxfp4, "U8" | "F8_E8M0") => Some(ScaleType::E8m0),
            (_, "F16") if !format.is_fp4() => Some(ScaleType::F16),
            (_, "BF16") if !format.is_fp4() => Some(ScaleType::Bf16),
            (_, "F32") if !format.is_fp4() => Some(ScaleType::F32),
            _ => None,
        }
    }

    /// The names of the types that the scales of `format` can have, for messages.
    pub fn names(format: PackedFormat) -> &'static str {
        match format {
            PackedFormat::Nvfp4 | PackedFormat::ModelOptNvfp4 => "F8_E4M3",
            PackedFormat::Mxfp4 => "U8",
            _ => "F16, BF16 or F32",
        }
    }

    /// The type in which the elements are read: the type of the scales, or BF16 for FP4 numbers, as
    /// in compressed-tensors.
    pub fn elements(self) -> TensorType {
        match self {
            ScaleType::F16 => TensorType::F16,
            ScaleType::F32 => TensorType::F32,
            ScaleType::Bf16 | ScaleType::E4m3 | ScaleType::E8m0 => TensorType::BF16,
        }
    }

    /// Bytes of a scale.
    pub fn bytes(self) -> usize {
        match self {
            ScaleType::F16 | ScaleType::Bf16 => 2,
            ScaleType::F32 => 4,
            ScaleType::E4m3 | ScaleType::E8m0 => 1,
        }
    }

    /// Scale number `at` of little-endian scales.
    pub fn scale(self, scales: &[u8], at: usize) -> f32 {
        let bytes = &scales[at * self.bytes()..][..self.bytes()];
        match (self, bytes) {
            (ScaleType::E4m3, [code]) => E4m3(*code).to_f32(),
            (ScaleType::E8m0, [exponent]) => power_of_two(*exponent),
            (ScaleType::Bf16, [low, high]) => bf16::from_le_bytes([*low, *high]).to_f32(),
            (_, [low, high]) => f16::from_le_bytes([*low, *high]).to_f32(),
            _ => f32::from_le_bytes(bytes.try_into().expect("a scale in f32 has four bytes")),
        }
    }

    /// The index of the first scale that is not finite or, for FP4 numbers, has a sign.
    pub fn first_bad(self, scales: &[u8]) -> Option<usize> {
        match self {
            // There are many scales, one for 16 elements, so this search compares bytes without
            // decoding them.
            ScaleType::E4m3 => scales.iter().position(|code| *code >= E4M3_END),
            ScaleType::E8m0 => scales.iter().position(|exponent| *exponent == E8M0_NAN),
            _ => (0..scales.len() / self.bytes()).find(|at| !self.scale(scales, *at).is_finite()),
        }
    }
}

/// The value of an E8M0 code.
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        // 2^-127 is below the normal numbers of f32: the first bit of the mantissa is 2^-127.
        0 => f32::from_bits(1 << 22),
        E8M0_NAN => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_of_e8m0_is_a_power_of_two() {
        let codes: Vec<u8> = (0..=255).collect();
        for exponent in 0..255 {
            let found = ScaleType::E8m0.scale(&codes, exponent);
            assert_eq!(f64::from(found), 2f64.powi(exponent as i32 - 127));
        }
        assert!(ScaleType::E8m0.scale(&codes, 255).is_nan());
        assert_eq!(ScaleType::E8m0.first_bad(&codes), Some(255));
    }

    #[test]
    fn bad_scales_of_nvfp4_are_nan_or_have_a_sign() {
        for code in 0..=255u8 {
            let scale = E4m3(code).to_f32();
            let is_bad = scale.is_nan() || scale.is_sign_negative();
            assert_eq!(ScaleType::E4m3.first_bad(&[0x38, code]), is_bad.then_some(1), "{code:#x} is {scale}");
        }
    }
}
