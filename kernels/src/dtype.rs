//! Element types.

use std::fmt;

use bursar_budgets::Bytes;
use serde::{Deserialize, Serialize};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DType {
    /// IEEE single precision, 32 bits.
    F32,
    /// IEEE half precision, 16 bits.
    F16,
    /// bfloat16, the upper half of an `f32`.
    BF16,
    /// 32-bit words: indices such as token ids, positions, slots and block tables, counters, and
    /// the packed options of sampling.
    U32,
    /// Bytes: channel values of pixels, zero points of 4-bit integers, weights in blocks, and
    /// memory of no particular type.
    U8,
    /// FP8, four bits of exponent and three of mantissa ([`E4m3`](crate::E4m3)). The numbers have a
    /// meaning only together with their scales.
    F8E4M3,
    /// Unsigned integers of 4 bits ([`int4`](crate::int4)). They have a meaning only together with
    /// their scales and zero points. Two integers share a byte, so a view begins at an even
    /// element.
    U4,
}

impl DType {
    /// Returns the bits per element.
    pub const fn bits(self) -> usize {
        match self {
            DType::F32 | DType::U32 => 32,
            DType::F16 | DType::BF16 => 16,
            DType::U8 | DType::F8E4M3 => 8,
            DType::U4 => 4,
        }
    }

    /// Returns the bytes per element. Panics for elements of less than a byte.
    pub const fn size(self) -> usize {
        assert!(self.bits() >= 8, "elements of less than a byte have no size");
        self.bits() / 8
    }

    /// Returns the bytes of `elements` elements of this type.
    pub fn bytes(self, elements: usize) -> Bytes {
        Bytes((elements * self.bits()).div_ceil(8) as u64)
    }

    /// Returns the number of whole elements of this type that fit into `bytes`.
    pub fn elements(self, bytes: Bytes) -> usize {
        bytes.as_usize() * 8 / self.bits()
    }

    /// Returns the name in tables and metrics, such as `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U32 => "u32",
            DType::U8 => "u8",
            DType::F8E4M3 => "f8e4m3",
            DType::U4 => "u4",
        }
    }

    /// Returns `true` for the floating-point types whose numbers need no scales.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::U32 | DType::U8) && !self.needs_scales()
    }

    /// Returns the number of this type that is nearest to `value`.
    ///
    /// # Panics
    /// If the type is not a floating-point type.
    pub fn round(self, value: f32) -> f32 {
        match self {
            DType::F32 => value,
            DType::F16 => half::f16::from_f32(value).to_f32(),
            DType::BF16 => half::bf16::from_f32(value).to_f32(),
            DType::U32 | DType::U8 | DType::F8E4M3 | DType::U4 => panic!("{self} has no rounding without a scale"),
        }
    }

    /// Returns `true` if numbers of this type are quantized, so that they have a meaning only
    /// together with their scales.
    pub const fn needs_scales(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::U4)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u32 {}
    impl Sealed for u8 {}
    impl Sealed for crate::E4m3 {}
}

/// A Rust type that can be a tensor's element: plain data without padding, for which every
/// bit pattern is valid.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
impl Element for crate::E4m3 {
    const DTYPE: DType = DType::F8E4M3;
}
