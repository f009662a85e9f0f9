//! Pure: the memory layout of weights of 4-bit integers, with a scale per group of columns.
//!
//! | part | shape | type |
//! |---|---|---|
//! | integers | blocks of [`BLOCK_ROWS`] rows, see below | u4 |
//! | scales | `[rows, columns / group]` | the target's type of weights |
//! | zero points | `[rows, columns / group]`, or absent if all are [`ZERO_POINT`] | u8, 0 to 15 |
//!
//! Each row of a block has 16-byte units of [`STRIP_COLUMNS`] columns. The unit of row `r` at
//! column `32 * s` has the index `16 * s + (r XOR (2 * (s % 4)))` in the block. A GPU therefore
//! reads a block in order, and lanes that read units of adjacent rows and columns from a copy in
//! shared memory access different banks. A unit has four little-endian words of 8 adjacent columns.
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
pub const BLOCK_ROWS: usize = 16;

/// Columns of a unit.
pub const STRIP_COLUMNS: usize = 32;

/// Bytes of a unit.
const UNIT_BYTES: usize = STRIP_COLUMNS / 2;

/// Integers of a word of 32 bits.
pub const WORD_COLUMNS: usize = 8;

/// The column of each integer of a word, from the lowest bits on. The first column of a pair is in
/// the lower half of the word, and the second column is at the same position of the upper half, so
/// a GPU extracts a pair with a shift and one logic instruction (FasterTransformer; Marlin, Frantar
/// et al. 2024, arXiv 2408.11743).
const ORDER: [usize; WORD_COLUMNS] = [0, 2, 4, 6, 1, 3, 5, 7];

/// For each column of a word, the position of the lowest bit of its integer.
pub(crate) const WORD_BITS: [u32; WORD_COLUMNS] = {
    let mut bits = [0; WORD_COLUMNS];
    let mut at = 0;
    while at < WORD_COLUMNS {
        bits[ORDER[at]] = 4 * at as u32;
        at += 1;
    }
    bits
};

/// Returns `true` if a weight `[rows, columns]` consists of whole blocks of rows and of whole
/// groups of `scheme`.
pub fn is_whole(scheme: QuantizationScheme, [rows, columns]: [usize; 2]) -> bool {
    let group = scheme.weights.group_columns(columns);
    rows.is_multiple_of(BLOCK_ROWS) && GROUPS.contains(&group) && columns.is_multiple_of(group)
}

/// Returns the offset in bytes of a unit in a weight whose rows have `columns` columns.
#[inline(always)]
fn unit_at(row: usize, strip: usize, columns: usize) -> usize {
    let within = strip * BLOCK_ROWS + ((row % BLOCK_ROWS) ^ (2 * (strip % 4)));
    row / BLOCK_ROWS * (BLOCK_ROWS * columns / 2) + within * UNIT_BYTES
}

/// Packs integers below 16 into whole blocks. Each row has `columns` columns.
///
/// # Panics
/// If `integers` are not whole blocks, `columns` are not whole units, or `out` does not have half a
/// byte for each integer.
pub fn pack(integers: &[u8], columns: usize, out: &mut [u8]) {
    assert!(
        columns.is_multiple_of(STRIP_COLUMNS) && integers.len().is_multiple_of(BLOCK_ROWS * columns),
        "the integers are whole blocks, and the columns are whole units"
    );
    assert_eq!(out.len() * 2, integers.len(), "the output has half a byte for each integer");
    for (row, integers) in integers.chunks_exact(columns).enumerate() {
        for (strip, integers) in integers.chunks_exact(STRIP_COLUMNS).enumerate() {
            let unit = &mut out[unit_at(row, strip, columns)..][..UNIT_BYTES];
            for (columns, out) in integers.as_chunks::<WORD_COLUMNS>().0.iter().zip(unit.as_chunks_mut::<4>().0) {
                let word = ORDER.iter().enumerate();
                let word = word.fold(0, |word, (at, column)| word | u32::from(columns[*column]) << (4 * at));
                *out = word.to_le_bytes();
            }
        }
    }
}

/// Returns the units of a row of `columns` columns, in the order of their columns. `weight` must
/// consist of whole blocks.
///
/// # Panics
/// If the row is not in `weight`.
#[inline(always)]
pub fn units(weight: &[u8], row: usize, columns: usize) -> impl Iterator<Item = &[u8; UNIT_BYTES]> {
    (0..columns / STRIP_COLUMNS)
        .map(move |strip| weight[unit_at(row, strip, columns)..].first_chunk().expect("the weight has whole blocks"))
}

/// Unpacks a unit into the integers of adjacent columns.
#[inline(always)]
pub fn unpack(unit: &[u8; UNIT_BYTES]) -> [u8; STRIP_COLUMNS] {
    let mut out = [0; STRIP_COLUMNS];
    for (word, out) in unit.as_chunks::<4>().0.iter().zip(out.as_chunks_mut::<WORD_COLUMNS>().0) {
        let word = u32::from_le_bytes(*word);
        for (at, column) in ORDER.iter().enumerate() {
            out[*column] = (word >> (4 * at) & 0xf) as u8;
        }
    }
    out
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
        for columns in [32, 96, 128, 224] {
            let rows = 2 * BLOCK_ROWS;
            let integers: Vec<u8> = (0..rows * columns).map(|at| (at * 7 % 13 + at / columns % 4) as u8).collect();
            let mut weight = vec![0xff; rows * columns / 2];
            pack(&integers, columns, &mut weight);
            for (row, integers) in integers.chunks_exact(columns).enumerate() {
                let found: Vec<u8> = units(&weight, row, columns).flat_map(unpack).collect();
                assert_eq!(found, integers, "row {row} of {columns} columns");
            }
        }
    }

    #[test]
    fn a_block_has_the_units_that_the_kernels_read() {
        let mut integers = vec![0; BLOCK_ROWS * 64];
        integers[3 * 64 + 32..][..8].copy_from_slice(&[0, 1, 2, 3, 4, 5, 6, 7]);
        let mut weight = vec![0xff; integers.len() / 2];
        pack(&integers, 64, &mut weight);
        // The second unit of row 3 is number 16 + (3 ^ 2).
        let at = 17 * UNIT_BYTES;
        assert_eq!(u32::from_le_bytes(weight[at..at + 4].try_into().expect("four bytes")), 0x7531_6420);
        assert!(weight[..at].iter().chain(&weight[at + 4..]).all(|byte| *byte == 0));
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
