//! Pure: weights in blocks of quantized elements, in the formats of ggml and GGUF files. Contains
//! the block sizes of each format, the rows of a weight, and the unpacking of a block's numbers.
//!
//! Operations and their order are the same as in Python's `gguf` package (0.19, `quants.py`,
//! `dequantize_blocks`), so that each widened element has the same bits.

use std::{fmt, ops::Range, sync::Arc};

use bursar_budgets::Bytes;
/// Elements of the longest block.
const LONGEST: usize = 256;

/// Elements that share a scale in all formats except Q6_K, which has a scale for each half.
pub(crate) const BLOCK_GROUP: usize = 32;

/// A block of quantized elements: ggml-org/ggml, `src/ggml-common.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(non_camel_case_types, reason = "the names are ggml's")]
pub enum BlockType {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl BlockType {
    /// Elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            BlockType::Q4_0 | BlockType::Q4_1 | BlockType::Q5_0 | BlockType::Q5_1 | BlockType::Q8_0 => 32,
            BlockType::Q4_K | BlockType::Q5_K | BlockType::Q6_K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            BlockType::Q4_0 => 18,
            BlockType::Q4_1 => 20,
            BlockType::Q5_0 => 22,
            BlockType::Q5_1 => 24,
            BlockType::Q8_0 => 34,
            BlockType::Q4_K => 144,
            BlockType::Q5_K => 176,
            BlockType::Q6_K => 210,
        }
    }

    /// Bytes of `elements` elements, which are whole blocks.
    pub const fn bytes_of(self, elements: usize) -> usize {
        elements / self.elements() * self.bytes()
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// The rows of a weight in blocks. Ranges of rows may have different formats, as in a projection
/// that is fused from several tensors of a file. Rows are contiguous and without padding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRows {
    rows: usize,
    columns: usize,
    bytes: usize,
    /// Ranges of rows of one format, in ascending order.
    runs: Arc<[Run]>,
}

/// Adjacent rows of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    kind: BlockType,
    /// The first row and its first byte.
    row: usize,
    byte: usize,
}

impl BlockRows {
    /// Describes rows of `columns` elements: for each part, its format and its number of rows.
    ///
    /// # Panics
    /// If a row does not consist of whole blocks.
    pub fn new(columns: usize, parts: impl IntoIterator<Item = (BlockType, usize)>) -> Self {
        let (mut rows, mut bytes, mut runs) = (0, 0, Vec::<Run>::new());
        for (kind, count) in parts {
            assert!(
                columns.is_multiple_of(kind.elements()),
                "rows of {columns} elements are not whole blocks of {kind}"
            );
            if runs.last().is_none_or(|last| last.kind != kind) {
                runs.push(Run { kind, row: rows, byte: bytes });
            }
            rows += count;
            bytes += count * kind.bytes_of(columns);
        }
        BlockRows { rows, columns, bytes, runs: runs.into() }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.bytes as u64)
    }

    /// Cuts `rows` into ranges of one format. Each item has the format, the rows and their bytes.
    ///
    /// # Panics
    /// If `rows` are out of bounds.
    pub(crate) fn runs(&self, rows: Range<usize>) -> impl Iterator<Item = (BlockType, Range<usize>, Range<usize>)> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let first = self.runs.partition_point(|run| run.row <= rows.start).saturating_sub(1);
        let ends = self.runs.iter().skip(first + 1).map(|run| run.row).chain([self.rows]);
        self.runs[first..].iter().zip(ends).take_while(move |(run, _)| run.row < rows.end).map(move |(run, end)| {
            let within = rows.start.max(run.row)..rows.end.min(end);
            let byte = |row: usize| run.byte + (row - run.row) * run.kind.bytes_of(self.columns);
            (run.kind, within.clone(), byte(within.start)..byte(within.end))
        })
    }
}

/// A row of activations.
#[derive(Clone, Copy)]
pub(crate) struct GroupedRow<'a> {
    pub groups: &'a [[f32; BLOCK_GROUP]],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// The elements of one block, as integers. Element `i` is the integer `i` times the scale of its
/// [`Block::GROUP`], plus the offset of its [`BLOCK_GROUP`].
pub(crate) struct Unpacked {
    /// Eight integers in each word. The first is in the lowest byte.
    pub words: [u64; LONGEST / 8],
    pub scales: [f32; LONGEST / 16],
    pub offsets: [f32; LONGEST / BLOCK_GROUP],
}

impl Unpacked {
    pub const ZEROS: Unpacked =
        Unpacked { words: [0; LONGEST / 8], scales: [0.0; LONGEST / 16], offsets: [0.0; LONGEST / BLOCK_GROUP] };
}

/// The integers in a word of [`Unpacked`], as f32.
#[inline(always)]
pub(crate) fn converted(word: u64) -> [f32; 8] {
    let (bytes, mut out) = (word.to_le_bytes(), [0.0; 8]);
    for (out, byte) in out.iter_mut().zip(bytes) {
        *out = f32::from(byte.cast_signed());
    }
    out
}

/// A conversion of the bits of an f16.
pub(crate) trait HalfToF32 {
    fn widen(bits: u16) -> f32;
}

/// A conversion without the branches and calls of [`half::f16::to_f32`].
pub(crate) struct PortableHalf;

impl HalfToF32 for PortableHalf {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        let magnitude = u32::from(bits & 0x7fff) << 13;
        let subnormal = f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23);
        let exponent = if magnitude >= 0x7c00 << 13 { 224 << 23 } else { 112 << 23 };
        let number = if magnitude < 0x400 << 13 { subnormal } else { f32::from_bits(magnitude + exponent) };
        f32::from_bits(number.to_bits() | u32::from(bits & 0x8000) << 16)
    }
}

/// A format of blocks. Functions are always inlined, so that they use the caller's vector
/// instructions.
pub(crate) trait Block {
    const TYPE: BlockType;
    /// Elements that share a scale.
    const GROUP: usize = BLOCK_GROUP;
    /// `false` if all offsets are 0. Then [`unpack`](Block::unpack) does not write them.
    const HAS_OFFSETS: bool;

    /// Unpacks the bytes of a block.
    fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked);

    /// Widens the bytes of whole blocks. `out` has as many elements as the blocks.
    #[inline(always)]
    fn widen<H: HalfToF32>(blocks: &[u8], out: &mut [f32]) {
        let (kind, mut unpacked) = (Self::TYPE, Unpacked::ZEROS);
        for (block, out) in blocks.chunks_exact(kind.bytes()).zip(out.chunks_exact_mut(kind.elements())) {
            Self::unpack::<H>(block, &mut unpacked);
            for (at, (out, word)) in out.as_chunks_mut::<8>().0.iter_mut().zip(unpacked.words).enumerate() {
                let (scale, offset) = (unpacked.scales[at * 8 / Self::GROUP], unpacked.offsets[at * 8 / BLOCK_GROUP]);
                for (out, integer) in out.iter_mut().zip(converted(word)) {
                    let scaled = scale * integer;
                    // Adding an offset of 0 would turn -0 into 0.
                    *out = if Self::HAS_OFFSETS { scaled + offset } else { scaled };
                }
            }
        }
    }
}

/// Evaluates an expression with `$block` as the type that implements [`Block`] for a [`BlockType`].
macro_rules! for_block_type {
    ($kind:expr, $block:ident => $value:expr) => {
        for_block_type!(@ $kind, $block => $value; Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K)
    };
    (@ $kind:expr, $block:ident => $value:expr; $($name:ident)*) => {
        match $kind {
            $($crate::BlockType::$name => { type $block = $crate::blocks::formats::$name; $value })*
        }
    };
}
pub(crate) use for_block_type;

/// Widens the bytes of whole blocks. `out` has as many elements as the blocks.
#[inline(always)]
pub fn widen_blocks(kind: BlockType, blocks: &[u8], out: &mut [f32]) {
    for_block_type!(kind, Format => Format::widen::<PortableHalf>(blocks, out));
}

/// The f16 at byte `at`.
#[inline(always)]
fn half<H: HalfToF32>(block: &[u8], at: usize) -> f32 {
    H::widen(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// `byte` in each of the eight bytes of a word.
const fn repeated(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Eight bytes of a block from `at` on. Elements are unpacked eight at a time in such words,
/// because the compiler does not reliably vectorize loops over bytes.
#[inline(always)]
fn word(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes(block, at))
}

/// Subtracts `zero` from each byte of a word. `zero` is at most 128, and the bytes are at most 127.
#[inline(always)]
fn minus(word: u64, zero: u8) -> u64 {
    // The highest bit of each byte keeps the subtraction from borrowing from the next byte.
    ((word | repeated(0x80)) - repeated(zero)) ^ repeated(0x80)
}

/// Splits the 16 bytes from `at` on into 32 elements: the low nibbles of all bytes, then the high
/// nibbles. `high(first)` returns the bits above the nibbles, for the eight elements from index
/// `first` on. `zero` is subtracted from each element.
#[inline(always)]
fn nibbles(block: &[u8], at: usize, high: impl Fn(usize) -> u64, zero: u8, out: &mut Unpacked) {
    for half in 0..2 {
        let both = word(block, at + half * 8);
        out.words[half] = minus(both & repeated(0xf) | high(half * 8), zero);
        out.words[half + 2] = minus(both >> 4 & repeated(0xf) | high(half * 8 + 16), zero);
    }
}

/// The fifth bits of the eight elements from `first` on. Bit `i` of `fifth` belongs to element `i`.
#[inline(always)]
fn fifth_bits(fifth: u32, first: usize) -> u64 {
    let eight = u64::from(fifth >> first & 0xff) * repeated(1);
    // In byte `i`, only bit `i` is kept. The addition carries this bit to the byte's highest bit.
    let own = eight & 0x8040_2010_0804_0201;
    (own + repeated(0x7f)) >> 3 & repeated(0x10)
}

/// The bytes of a block from `at` on.
#[inline(always)]
fn bytes<const COUNT: usize>(block: &[u8], at: usize) -> &[u8; COUNT] {
    block[at..].first_chunk().expect("the caller passes a whole block")
}

/// The scale and the offset of each of eight groups. Both are stored as six bits, in the twelve
/// bytes from byte 4 on. The group's scale is multiplied by the block's scale at byte 0. The
/// group's offset is multiplied by the block's factor at byte 2, and the product is subtracted.
#[inline(always)]
fn group_scales<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
    let (scale, least) = (half::<H>(block, 0), half::<H>(block, 2));
    // The first word has the first four scales, and the second word the first four offsets, each in
    // the low six bits of a byte. The high bits of these bytes belong to the last four scales and
    // offsets, whose low bits are in the last word.
    let [scales, offsets, last] = [4, 8, 12].map(|at| u32::from_le_bytes(*bytes(block, at)));
    let high = |word: u32| word >> 2 & 0x3030_3030;
    let scales = [scales & 0x3f3f_3f3f, last & 0x0f0f_0f0f | high(scales)].map(u32::to_le_bytes);
    let offsets = [offsets & 0x3f3f_3f3f, last >> 4 & 0x0f0f_0f0f | high(offsets)].map(u32::to_le_bytes);
    for (group, (of_scale, of_offset)) in scales.as_flattened().iter().zip(offsets.as_flattened()).enumerate() {
        out.scales[group] = scale * f32::from(*of_scale);
        out.offsets[group] = -(least * f32::from(*of_offset));
    }
}

pub(crate) mod formats {
    #![expect(non_camel_case_types, reason = "the names are ggml's")]

    use super::{
        Block, BlockType, HalfToF32, Unpacked, bytes, fifth_bits, group_scales, half, minus, nibbles, repeated, word,
    };

    /// Scale, 32 nibbles.
    pub struct Q4_0;
    /// Scale, offset, 32 nibbles.
    pub struct Q4_1;
    /// Scale, 32 fifth bits, 32 nibbles.
    pub struct Q5_0;
    /// Scale, offset, 32 fifth bits, 32 nibbles.
    pub struct Q5_1;
    /// Scale, 32 bytes.
    pub struct Q8_0;
    /// Scale, factor of the offsets, six bits for the scale and for the offset of each of eight
    /// groups of 32 elements, then 64 elements in each 32 bytes.
    pub struct Q4_K;
    /// Like [`Q4_K`], with 256 fifth bits in 32 bytes before the nibbles. Each group uses one bit
    /// position of these bytes.
    pub struct Q5_K;
    /// 256 nibbles, 256 pairs of bits, a one-byte scale for each 16 elements, the scale of the
    /// block.
    pub struct Q6_K;

    impl Block for Q4_0 {
        const TYPE: BlockType = BlockType::Q4_0;
        const HAS_OFFSETS: bool = false;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            out.scales[0] = half::<H>(block, 0);
            nibbles(block, 2, |_| 0, 8, out);
        }
    }

    impl Block for Q4_1 {
        const TYPE: BlockType = BlockType::Q4_1;
        const HAS_OFFSETS: bool = true;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            (out.scales[0], out.offsets[0]) = (half::<H>(block, 0), half::<H>(block, 2));
            nibbles(block, 4, |_| 0, 0, out);
        }
    }

    impl Block for Q5_0 {
        const TYPE: BlockType = BlockType::Q5_0;
        const HAS_OFFSETS: bool = false;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            let fifth = u32::from_le_bytes(*bytes(block, 2));
            out.scales[0] = half::<H>(block, 0);
            nibbles(block, 6, |first| fifth_bits(fifth, first), 16, out);
        }
    }

    impl Block for Q5_1 {
        const TYPE: BlockType = BlockType::Q5_1;
        const HAS_OFFSETS: bool = true;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            let fifth = u32::from_le_bytes(*bytes(block, 4));
            (out.scales[0], out.offsets[0]) = (half::<H>(block, 0), half::<H>(block, 2));
            nibbles(block, 8, |first| fifth_bits(fifth, first), 0, out);
        }
    }

    impl Block for Q8_0 {
        const TYPE: BlockType = BlockType::Q8_0;
        const HAS_OFFSETS: bool = false;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            out.scales[0] = half::<H>(block, 0);
            for at in 0..4 {
                out.words[at] = word(block, 2 + at * 8);
            }
        }
    }

    impl Block for Q4_K {
        const TYPE: BlockType = BlockType::Q4_K;
        const HAS_OFFSETS: bool = true;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            group_scales::<H>(block, out);
            for pair in 0..4 {
                for at in 0..4 {
                    let (both, first) = (word(block, 16 + pair * 32 + at * 8), pair * 8 + at);
                    out.words[first] = both & repeated(0xf);
                    out.words[first + 4] = both >> 4 & repeated(0xf);
                }
            }
        }
    }

    impl Block for Q5_K {
        const TYPE: BlockType = BlockType::Q5_K;
        const HAS_OFFSETS: bool = true;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            group_scales::<H>(block, out);
            for pair in 0..4 {
                for at in 0..4 {
                    let (both, first) = (word(block, 48 + pair * 32 + at * 8), pair * 8 + at);
                    let fifth = word(block, 16 + at * 8) >> (2 * pair);
                    out.words[first] = both & repeated(0xf) | (fifth & repeated(1)) << 4;
                    out.words[first + 4] = both >> 4 & repeated(0xf) | (fifth & repeated(2)) << 3;
                }
            }
        }
    }

    impl Block for Q6_K {
        const TYPE: BlockType = BlockType::Q6_K;
        const GROUP: usize = 16;
        const HAS_OFFSETS: bool = false;

        #[inline(always)]
        fn unpack<H: HalfToF32>(block: &[u8], out: &mut Unpacked) {
            for part in 0..2 {
                for at in 0..4 {
                    let (low, next) = (word(block, part * 64 + at * 8), word(block, part * 64 + at * 8 + 32));
                    let (high, first) = (word(block, 128 + part * 32 + at * 8), part * 16 + at);
                    for (quarter, nibbles) in [low, next, low >> 4, next >> 4].into_iter().enumerate() {
                        let pair = high >> (2 * quarter) & repeated(3);
                        out.words[first + quarter * 4] = minus(nibbles & repeated(0xf) | pair << 4, 32);
                    }
                }
            }
            let scale = half::<H>(block, 208);
            for (out, byte) in out.scales.iter_mut().zip(bytes::<16>(block, 192)) {
                *out = scale * f32::from(byte.cast_signed());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_half_precision_number_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (PortableHalf::widen(bits), half::f16::from_bits(bits).to_f32());
            assert!(found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(), "{bits:#x}: {found}");
        }
    }

    #[test]
    fn block_rows_are_split_where_the_format_changes() {
        let rows = BlockRows::new(512, [(BlockType::Q4_K, 3), (BlockType::Q4_K, 2), (BlockType::Q6_K, 4)]);
        assert_eq!((rows.rows(), rows.bytes()), (9, Bytes(2 * (5 * 144 + 4 * 210))));
        let runs = |range| rows.runs(range).collect::<Vec<_>>();
        let six = |rows: Range<usize>| {
            let byte = |row: usize| 1440 + (row - 5) * 420;
            (BlockType::Q6_K, rows.clone(), byte(rows.start)..byte(rows.end))
        };
        assert_eq!(runs(1..9), [(BlockType::Q4_K, 1..5, 288..1440), six(5..9)]);
        assert_eq!(runs(5..6), [six(5..6)]);
        assert_eq!(runs(0..5), [(BlockType::Q4_K, 0..5, 0..1440)]);
    }

    #[test]
    fn blocks_with_a_negative_zero_scale_widen_to_negative_zeros() {
        let mut out = [1.0; 32];
        widen_blocks(BlockType::Q4_0, &[&[0, 0x80][..], &[0x88; 16]].concat(), &mut out);
        assert!(out.iter().all(|zero| *zero == 0.0 && zero.is_sign_negative()));
    }
}
