//! Conversion of ggml's blocks of quantized elements to bytes of f32.

use bursar_kernels::widen_blocks;

use crate::checkpoint::BlockType;

/// Elements of the longest block.
const LONGEST: usize = 256;

/// Like [`widen_blocks`], but `out` has the bytes of the f32 numbers.
pub(super) fn widen_blocks_to_bytes(kind: BlockType, blocks: &[u8], out: &mut [u8]) {
    let mut wide = [0.0; LONGEST];
    let wide = &mut wide[..kind.elements()];
    for (block, out) in blocks.chunks_exact(kind.bytes()).zip(out.chunks_exact_mut(size_of_val(wide))) {
        widen_blocks(kind, block, wide);
        out.as_chunks_mut().0.iter_mut().zip(&*wide).for_each(|(place, number)| *place = number.to_ne_bytes());
    }
}
