//! Pure: the memory layout of 4-bit integer weights, with a scale per group of columns.
//!
//! | part | shape | type |
//! |---|---|---|
//! | integers | `[rows / 8, strips, 8, 4, words]`, see below | words of 32 bits |
//! | scales | `[rows / 8, groups, 8]` | the target's type of weights |
//! | zero points | `[rows / 8, groups, 8]`, or absent if all are [`ZERO_POINT`] | u8, 0 to 15 |
//!
//! A block has [`BLOCK_ROWS`] rows, and a strip has [`STRIP_COLUMNS`] columns; the last strip may
//! have fewer, a multiple of 32. In a strip, each row has four units, and a unit has a
//! little-endian word for each 32 columns. Word `w` of unit `u` holds four pairs of adjacent
//! columns. Pair `p` is columns `c = 32 * w + 8 * p + 2 * u` and `c + 1`. Column `c` is in bits
//! `4 * p` to `4 * p + 3`, and column `c + 1` is 16 bits higher. These are the columns that a
//! thread has in the operand `A` of NVIDIA's tensor core instructions, so a GPU thread reads its
//! operands of 128 columns as 16 bytes, and extracts a pair of columns with a shift and one logic
//! instruction (FasterTransformer; Marlin, Frantar et al. 2024, arXiv 2408.11743).
//!
//! An element is `(integer - zero point) * scale`, rounded once to the type of the scale. AutoAWQ,
//! AutoGPTQ and compressed-tensors compute the same.

use half::{bf16, f16};

use crate::{DType, QuantizationScheme};

/// Supported numbers of columns that share a scale, in order of preference.
pub const GROUPS: [usize; 3] = [128, 64, 32];

/// The zero point of all elements if a weight stores no zero points.
pub const ZERO_POINT: u8 = 8;

/// Rows of a block. A weight has whole blocks.
pub const BLOCK_ROWS: usize = 8;

/// Columns of a strip. The last strip of a row may have fewer.
pub const STRIP_COLUMNS: usize = 128;

/// Units of a row in a strip.
pub const UNITS: usize = 4;

/// Columns of a span: the columns whose integers are in word `w` of the four units, for one `w`.
pub const SPAN_COLUMNS: usize = 32;

/// Integers of a word of 32 bits.
pub const WORD_COLUMNS: usize = 8;

/// Returns `true` if a weight `[rows, columns]` consists of whole blocks of rows and of whole
/// groups of `scheme`.
pub fn is_whole(scheme: QuantizationScheme, [rows, columns]: [usize; 2]) -> bool {
    let group = scheme.weights.group_columns(columns);
    rows.is_multiple_of(BLOCK_ROWS) && GROUPS.contains(&group) && columns.is_multiple_of(group)
}

/// Returns the index of the scale of a row and group, in a weight with `groups` groups per row.
/// Zero points have the same index.
#[inline(always)]
pub fn scale_index(row: usize, group: usize, groups: usize) -> usize {
    (row / BLOCK_ROWS * groups + group) * BLOCK_ROWS + row % BLOCK_ROWS
}

/// Returns the byte offsets of the words that contain columns `32 * span` to `32 * span + 31` of a
/// row, one word per unit.
#[inline(always)]
fn words_at(row: usize, span: usize, columns: usize) -> [usize; UNITS] {
    const SPANS: usize = STRIP_COLUMNS / SPAN_COLUMNS;
    let strip = span / SPANS;
    let unit_bytes = 4 * (columns / SPAN_COLUMNS - strip * SPANS).min(SPANS);
    let of_strip = row / BLOCK_ROWS * (BLOCK_ROWS * columns / 2) + strip * (BLOCK_ROWS * STRIP_COLUMNS / 2);
    std::array::from_fn(|unit| of_strip + (row % BLOCK_ROWS * UNITS + unit) * unit_bytes + span % SPANS * 4)
}

/// Packs integers below 16 into whole blocks. Each row has `columns` columns.
///
/// # Panics
/// If `integers` are not whole blocks, `columns` is not a multiple of 32, or `out` does not have
/// half a byte for each integer.
pub fn pack(integers: &[u8], columns: usize, out: &mut [u8]) {
    assert!(
        columns.is_multiple_of(SPAN_COLUMNS) && integers.len().is_multiple_of(BLOCK_ROWS * columns),
        "the integers are whole blocks, and the number of columns is a multiple of 32"
    );
    assert_eq!(out.len() * 2, integers.len(), "the output has half a byte for each integer");
    for (row, integers) in integers.chunks_exact(columns).enumerate() {
        for (span, integers) in integers.as_chunks::<SPAN_COLUMNS>().0.iter().enumerate() {
            for (unit, at) in words_at(row, span, columns).into_iter().enumerate() {
                let pair = |pair: usize| {
                    let column = 8 * pair + 2 * unit;
                    u32::from(integers[column]) << (4 * pair) | u32::from(integers[column + 1]) << (16 + 4 * pair)
                };
                let word = pair(0) | pair(1) | pair(2) | pair(3);
                out[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

/// Returns the words of a row of `columns` columns, span by span: one word of each unit. `weight`
/// must consist of whole blocks.
///
/// # Panics
/// If the row is not in `weight`.
#[inline(always)]
pub fn words(weight: &[u8], row: usize, columns: usize) -> impl Iterator<Item = [u32; UNITS]> {
    (0..columns / SPAN_COLUMNS).map(move |span| {
        words_at(row, span, columns)
            .map(|at| u32::from_le_bytes(*weight[at..].first_chunk().expect("the weight has whole blocks")))
    })
}

/// Unpacks the words of 32 columns into their integers.
#[inline(always)]
pub fn unpack(words: [u32; UNITS]) -> [u8; SPAN_COLUMNS] {
    std::array::from_fn(|column| {
        let bits = 4 * (column / 8) + 16 * (column % 2);
        (words[column % 8 / 2] >> bits & 0xf) as u8
    })
}

/// Returns the elements that the 16 possible integers represent, rounded to the floating-point type
/// `kept`. `scale` must be representable in `kept`.
pub fn elements(scale: f32, zero_point: u8, kept: DType) -> [f32; 16] {
    // The product is exact in f32 if the scale has 16 bits.
    let exact = |integer: usize| (integer as i32 - i32::from(zero_point)) as f32 * scale;
    std::array::from_fn(|integer| match kept {
        DType::F16 => f16::from_f32(exact(integer)).to_f32(),
        DType::BF16 => bf16::from_f32(exact(integer)).to_f32(),
        _ => exact(integer),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_integers_come_back_in_their_order() {
        for columns in [32, 96, 128, 224, 384] {
            let rows = 3 * BLOCK_ROWS;
            let integers: Vec<u8> = (0..rows * columns).map(|at| (at * 7 % 13 + at / columns % 4) as u8).collect();
            let mut weight = vec![0xff; rows * columns / 2];
            pack(&integers, columns, &mut weight);
            for (row, integers) in integers.chunks_exact(columns).enumerate() {
                let found: Vec<u8> = words(&weight, row, columns).flat_map(unpack).collect();
                assert_eq!(found, integers, "row {row} of {columns} columns");
            }
        }
    }

    #[test]
    fn integers_have_the_places_that_the_kernels_read() {
        let columns = STRIP_COLUMNS + 64;
        let word_of = |row: usize, column: usize| {
            let mut integers = vec![0; 2 * BLOCK_ROWS * columns];
            integers[row * columns + column] = 15;
            let mut weight = vec![0xff; integers.len() / 2];
            pack(&integers, columns, &mut weight);
            let words: Vec<u32> = weight.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            let found = words.iter().position(|word| *word != 0).expect("an integer");
            (found, words[found].trailing_zeros())
        };
        // In each strip, a block has 8 x 4 units. A unit has four words, or two in the last strip.
        assert_eq!(word_of(0, 0), (0, 0));
        assert_eq!(word_of(3, 32 + 8 + 2), ((3 * 4 + 1) * 4 + 1, 4));
        assert_eq!(word_of(3, 96 + 24 + 7), ((3 * 4 + 3) * 4 + 3, 16 + 12));
        assert_eq!(word_of(5, 128 + 32 + 16 + 4), (128 + (5 * 4 + 2) * 2 + 1, 8));
        assert_eq!(word_of(8, 1), (192, 16));
        assert_eq!([scale_index(3, 0, 5), scale_index(3, 2, 5), scale_index(17, 4, 5)], [3, 19, 113]);
    }

    #[test]
    fn elements_are_rounded_once_to_the_type_of_the_scale() {
        let scale = bf16::from_f32(0.013).to_f32();
        let found = elements(scale, 3, DType::BF16);
        for (integer, found) in found.into_iter().enumerate() {
            let exact = (integer as f64 - 3.0) * f64::from(scale);
            assert_eq!(found, bf16::from_f64(exact).to_f32());
        }
        assert_eq!(elements(0.1, 8, DType::F32)[0], -0.8);
        assert_eq!(elements(5000.0, 0, DType::F16)[15], f32::INFINITY, "the type of the scale bounds the elements");
    }
}
