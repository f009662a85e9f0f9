//! Pure: the scheme of a weight of packed integers.

use std::fmt;

/// Bits of a word of packed integers.
const WORD_BITS: usize = 32;

/// A file format of packed weights: the order of integers in a word, and the layout of scales and
/// zero points.
///
/// A word has `32 / bits` integers. `K` is the number of columns (input features), `N` is the number
/// of rows (output features) and `G` is the number of groups of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackedFormat {
    /// AutoAWQ, version `gemm`: words `[K, N / 8]`, zero points `[G, N / 8]`, scales `[G, N]`. A
    /// word has the rows 0, 2, 4, 6, 1, 3, 5 and 7 of 8 rows, from its lowest bits on.
    Awq,
    /// AutoGPTQ: words `[K / 8, N]` along the columns, zero points minus one `[G, N / 8]` along the
    /// rows, scales `[G, N]`.
    Gptq,
    /// GPTQModel's `gptq_v2`: like [`Gptq`](Self::Gptq), but zero points are stored as they are.
    GptqV2,
    /// The format `pack-quantized` of compressed-tensors: words `[N, K / 8]` along the columns, zero
    /// points `[N / 8, G]` along the rows, scales `[N, G]`. Integers and zero points are signed, and
    /// both are stored with the same offset.
    CompressedTensors,
}

/// The scheme of a weight of packed integers: element = (integer - zero point) * scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedScheme {
    pub format: PackedFormat,
    /// Bits of an integer: 4 or 8.
    pub bits: usize,
    /// Number of columns that share a scale; `None` if all columns of a row do.
    pub group: Option<usize>,
    /// Whether the file has zero points. Without them, the zero point is half of the range.
    pub has_zero_points: bool,
    /// Whether columns of a group need not be adjacent, so that the file must have the group of
    /// each column.
    pub is_reordered: bool,
}

impl PackedScheme {
    /// Integers of a word.
    pub fn per_word(&self) -> usize {
        WORD_BITS / self.bits
    }

    /// Number of groups of a row of this many columns. The last group may be shorter.
    pub fn groups(&self, columns: usize) -> usize {
        self.group.map_or(1, |group| columns.div_ceil(group))
    }

    /// The zero point of a file without zero points.
    pub fn default_zero_point(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Bits from the start of a word to its integer number `at`.
    pub(super) fn shift(&self, at: usize) -> usize {
        const AWQ: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        self.bits * if self.format == PackedFormat::Awq { AWQ[at] } else { at }
    }

    /// The largest integer, which is also the mask of an integer.
    pub(super) fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }
}

impl fmt::Display for PackedScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            Some(group) => write!(f, "{}-bit integers, one scale per {group} input features", self.bits),
            None => write!(f, "{}-bit integers, one scale per output feature", self.bits),
        }
    }
}
