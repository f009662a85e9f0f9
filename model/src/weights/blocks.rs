//! Conversion of ggml's blocks of quantized elements to f32. Operations and their order are the
//! same as in Python's `gguf` package (0.19, `quants.py`, `dequantize_blocks`), so that each
//! element has the same bits.

use half::f16;

use crate::checkpoint::BlockType;

/// Elements of the longest block.
const LONGEST: usize = 256;

/// Widens whole blocks. `out` has as many elements as the blocks.
pub(super) fn widen_blocks(kind: BlockType, blocks: &[u8], out: &mut [f32]) {
    let widen = match kind {
        BlockType::Q4_0 => q4_0,
        BlockType::Q4_1 => q4_1,
        BlockType::Q5_0 => q5_0,
        BlockType::Q5_1 => q5_1,
        BlockType::Q8_0 => q8_0,
        BlockType::Q4_K => q4_k,
        BlockType::Q5_K => q5_k,
        BlockType::Q6_K => q6_k,
    };
    let places = out.chunks_exact_mut(kind.elements());
    blocks.chunks_exact(kind.bytes()).zip(places).for_each(|(block, out)| widen(block, out));
}

/// Like [`widen_blocks`], but `out` has the bytes of the f32 numbers.
pub(super) fn widen_blocks_to_bytes(kind: BlockType, blocks: &[u8], out: &mut [u8]) {
    let mut wide = [0.0; LONGEST];
    let wide = &mut wide[..kind.elements()];
    for (block, out) in blocks.chunks_exact(kind.bytes()).zip(out.chunks_exact_mut(size_of_val(wide))) {
        widen_blocks(kind, block, wide);
        out.as_chunks_mut().0.iter_mut().zip(&*wide).for_each(|(place, number)| *place = number.to_ne_bytes());
    }
}

/// The f16 at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Element `at` of 32 elements in 16 bytes: first the low nibbles of all bytes,
/// then the high nibbles.
fn nibble(bytes: &[u8], at: usize) -> u8 {
    bytes[at % 16] >> (at / 16 * 4) & 0xf
}

/// Element `at` with five bits. Its fifth bit is one of the 32 bits at byte `bits`, and its nibble
/// is in the bytes after them.
fn five_bits(block: &[u8], bits: usize, at: usize) -> u8 {
    nibble(&block[bits + 4..], at) | (block[bits + at / 8] >> (at % 8) & 1) << 4
}

fn each(out: &mut [f32], value: impl Fn(usize) -> f32) {
    out.iter_mut().enumerate().for_each(|(at, place)| *place = value(at));
}

/// Block format: scale, 32 nibbles.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    each(out, |at| scale * (f32::from(nibble(&block[2..], at)) - 8.0));
}

/// Block format: scale, minimum, 32 nibbles.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, least) = (half(block, 0), half(block, 2));
    each(out, |at| scale * f32::from(nibble(&block[4..], at)) + least);
}

/// Block format: scale, 32 fifth bits, 32 nibbles.
fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    each(out, |at| scale * (f32::from(five_bits(block, 2, at)) - 16.0));
}

/// Block format: scale, minimum, 32 fifth bits, 32 nibbles.
fn q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, least) = (half(block, 0), half(block, 2));
    each(out, |at| scale * f32::from(five_bits(block, 4, at)) + least);
}

/// Block format: scale, 32 bytes.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    each(out, |at| f32::from(block[2 + at].cast_signed()) * scale);
}

/// The scale and the subtrahend of each of eight groups. Both are stored as six bits, in the twelve
/// bytes from byte 4 on. The group's scale is multiplied by the block's scale at byte 0, and the
/// group's subtrahend by the block's subtrahend at byte 2.
fn group_scales(block: &[u8]) -> [(f32, f32); 8] {
    let (scale, least, six) = (half(block, 0), half(block, 2), &block[4..16]);
    std::array::from_fn(|group| {
        let (of_scale, of_least) = match group {
            0..4 => (six[group] & 0x3f, six[group + 4] & 0x3f),
            _ => (six[group + 4] & 0xf | six[group - 4] >> 2 & 0x30, six[group + 4] >> 4 | six[group] >> 2 & 0x30),
        };
        (scale * f32::from(of_scale), least * f32::from(of_least))
    })
}

/// Block format: scale, subtrahend, six bits for the scale and for the subtrahend of each of eight
/// groups of 32 elements, then 64 elements in each 32 bytes.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (groups, bytes) = (group_scales(block), &block[16..]);
    each(out, |at| {
        let (group, (scale, least)) = (at / 32, groups[at / 32]);
        let nibble = bytes[group / 2 * 32 + at % 32] >> (group % 2 * 4) & 0xf;
        scale * f32::from(nibble) - least
    });
}

/// Like [`q4_k`], with 256 fifth bits in 32 bytes before the nibbles. Each group uses one bit
/// position of these bytes.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (groups, bits, bytes) = (group_scales(block), &block[16..48], &block[48..]);
    each(out, |at| {
        let (group, (scale, least)) = (at / 32, groups[at / 32]);
        let nibble = bytes[group / 2 * 32 + at % 32] >> (group % 2 * 4) & 0xf;
        let five = nibble | (bits[at % 32] >> group & 1) << 4;
        scale * f32::from(five) - least
    });
}

/// Block format: 256 nibbles, 256 pairs of bits, a one-byte scale for each 16 elements, the
/// scale of the block.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (nibbles, pairs, scales, scale) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
    each(out, |at| {
        let (half, group) = (at / 128, at % 128 / 32);
        let nibble = nibbles[half * 64 + at % 64] >> (group / 2 * 4) & 0xf;
        let pair = pairs[half * 32 + at % 32] >> (group * 2) & 3;
        let six = f32::from(nibble | pair << 4) - 32.0;
        scale * f32::from(scales[at / 16].cast_signed()) * six
    });
}
