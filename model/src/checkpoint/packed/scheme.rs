//! Pure: the scheme of a weight of packed integers or FP4 numbers.

use std::fmt;

/// Bits of a word of packed elements.
const WORD_BITS: usize = 32;

/// The values of the FP4 codes, which have one sign bit, two bits of exponent and one of mantissa
/// (E2M1 of the Open Compute Project's Microscaling Formats 1.0). `zero` is the value of code 8.
const fn e2m1(zero: f32) -> [f32; 16] {
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, zero, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
}

/// A file format of packed weights: the kind of elements, their order in a word, and the layout of
/// scales and zero points.
///
/// A word has `32 / bits` elements. The shapes below are those of 4-bit elements. `K` is the number
/// of columns (input features), `N` is the number of rows (output features) and `G` is the number
/// of groups of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// AutoAWQ, version `gemm`: words `[K, N / 8]`, zero points `[G, N / 8]`, scales `[G, N]`. A
    /// word has the rows 0, 2, 4, 6, 1, 3, 5 and 7 of 8 rows, lowest bits first.
    Awq,
    /// AutoGPTQ: words `[K / 8, N]` along the columns, zero points minus one `[G, N / 8]` along the
    /// rows, scales `[G, N]`.
    Gptq,
    /// GPTQModel's `gptq_v2`: like [`Gptq`](Self::Gptq), but zero points are stored without
    /// subtracting one.
    GptqV2,
    /// The format `pack-quantized` of compressed-tensors: words `[N, K / 8]` along the columns,
    /// zero points `[N / 8, G]` along the rows, scales `[N, G]`. Integers and zero points are
    /// signed, and both are stored with the same offset.
    CompressedTensors,
    /// The format `nvfp4-pack-quantized` of compressed-tensors: FP4 numbers as bytes `[N, K / 2]`
    /// along the columns, scales `[N, G]` in E4M3, and one f32 that divides the scales.
    Nvfp4,
    /// ModelOpt's `NVFP4`: like [`Nvfp4`](Self::Nvfp4), but the f32 multiplies the scales.
    ModelOptNvfp4,
    /// The format `mxfp4-pack-quantized` of compressed-tensors: FP4 numbers as bytes `[N, K / 2]`
    /// along the columns, and scales `[N, G]` that are powers of two (E8M0).
    Mxfp4,
}

impl PackedFormat {
    /// Number of adjacent FP4 numbers that share a scale; `None` if the elements are integers.
    pub fn fp4_group(self) -> Option<usize> {
        match self {
            PackedFormat::Nvfp4 | PackedFormat::ModelOptNvfp4 => Some(16),
            PackedFormat::Mxfp4 => Some(32),
            _ => None,
        }
    }

    /// The value of each code; `None` if the elements are integers.
    pub fn fp4_numbers(self) -> Option<&'static [f32; 16]> {
        const NUMBERS: [f32; 16] = e2m1(-0.0);
        // ModelOpt reads code 8 as 0 without a sign (`e2m1_values` in its `nvfp4_tensor.py`).
        const OF_MODELOPT: [f32; 16] = e2m1(0.0);
        match self {
            PackedFormat::Nvfp4 | PackedFormat::Mxfp4 => Some(&NUMBERS),
            PackedFormat::ModelOptNvfp4 => Some(&OF_MODELOPT),
            _ => None,
        }
    }

    /// Whether elements are FP4 numbers instead of integers.
    pub fn is_fp4(self) -> bool {
        self.fp4_group().is_some()
    }

    /// Whether the words and the scales of a row are adjacent.
    pub(super) fn is_by_row(self) -> bool {
        self == PackedFormat::CompressedTensors || self.is_fp4()
    }
}

/// The scheme of a packed weight: element = (integer - zero point) * scale, or FP4 number * scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedScheme {
    pub format: PackedFormat,
    /// Bits of an element: 4 or 8.
    pub bits: usize,
    /// Number of columns that share a scale; `None` if all columns of a row do.
    pub group: Option<usize>,
    /// Whether the file has zero points. Without them, the zero point is half of the range.
    pub has_zero_points: bool,
    /// Whether the columns of a group need not be adjacent. If so, the file must have the group of
    /// each column.
    pub is_reordered: bool,
}

impl PackedScheme {
    /// The scheme of a format of FP4 numbers, which has no other settings.
    pub fn fp4(format: PackedFormat) -> Self {
        PackedScheme { format, bits: 4, group: format.fp4_group(), has_zero_points: false, is_reordered: false }
    }

    /// Whether elements are integers of 4 bits.
    pub fn is_int4(&self) -> bool {
        self.bits == 4 && !self.format.is_fp4()
    }

    /// Elements of a word.
    pub fn per_word(&self) -> usize {
        WORD_BITS / self.bits
    }

    /// Number of groups of a row of this many columns. The last group may be shorter.
    pub fn groups(&self, columns: usize) -> usize {
        self.group.map_or(1, |group| columns.div_ceil(group))
    }

    /// The zero point of a file without zero points. For FP4 numbers, which have no zero point, the
    /// result is not used.
    pub fn default_zero_point(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Bits from the start of a word to its element number `at`.
    pub(super) fn shift(&self, at: usize) -> usize {
        const AWQ: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        self.bits * if self.format == PackedFormat::Awq { AWQ[at] } else { at }
    }

    /// The largest integer, which is also the mask of an element.
    pub(super) fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }
}

impl fmt::Display for PackedScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.format.is_fp4() {
            f.write_str("FP4")?;
        } else {
            write!(f, "{}-bit integers", self.bits)?;
        }
        match self.group {
            Some(group) => write!(f, ", one scale per {group} input features"),
            None => f.write_str(", one scale per output feature"),
        }
    }
}
