//! Reading of a tensor's elements from any storage: quantized blocks, other types, rows
//! in a different order.

use rayon::prelude::*;

use super::{
    blocks::widen_blocks_to_bytes,
    rounding::{buffer_for, widen_to_bytes},
};
use crate::checkpoint::{Stored, TensorInfo};

/// Elements that are unpacked at a time: 32 MiB of f32.
const UNPACKED_AT_ONCE: usize = 1 << 23;

/// Minimum number of elements that one thread unpacks.
const BY_A_THREAD: usize = 1 << 14;

/// Calls `each` with the elements of `found` as its `dtype`, in order, in whole rows. If the file
/// has the elements in this form, `each` receives the bytes of the file in one call. Otherwise the
/// elements are unpacked in `buffer`, which grows to 32 MiB, or to one row if a row is larger.
pub(super) fn unpacked_parts<E>(
    found: &TensorInfo<'_>,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    if found.is_in_place() {
        return each(found.bytes);
    }
    let (rows, columns) = found.rows();
    let wide = columns * found.dtype.bytes();
    let at_once = (UNPACKED_AT_ONCE / columns).max(1);
    for first in (0..rows).step_by(at_once) {
        let count = at_once.min(rows - first);
        let out = buffer_for(buffer, count * wide);
        let places = out.par_chunks_exact_mut(wide).enumerate().with_min_len(BY_A_THREAD.div_ceil(columns));
        places.for_each(|(at, out)| {
            unpack(found.row_bytes(first + at), found, out);
        });
        each(out)?;
    }
    Ok(())
}

fn unpack(row: &[u8], found: &TensorInfo<'_>, out: &mut [u8]) {
    match found.stored {
        Stored::Plain(plain) if plain == found.dtype => out.copy_from_slice(row),
        Stored::Plain(plain) => widen_to_bytes(row, plain.into(), out),
        Stored::Blocks(kind) => widen_blocks_to_bytes(kind, row, out),
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::checkpoint::BlockType;

    /// `tests/golden/recording/gguf_files.py` generates the blocks.
    #[test]
    fn blocks_of_every_type_have_the_recorded_values_to_the_bit() {
        let path = bursar_golden::path("gguf/blocks.safetensors");
        let content = std::fs::read(path).expect("the recorded blocks");
        let recorded = SafeTensors::deserialize(&content).expect("safetensors");
        let kinds = [
            BlockType::Q4_0,
            BlockType::Q4_1,
            BlockType::Q5_0,
            BlockType::Q5_1,
            BlockType::Q8_0,
            BlockType::Q4_K,
            BlockType::Q5_K,
            BlockType::Q6_K,
        ];
        assert_eq!(recorded.len(), 2 * kinds.len());
        for kind in kinds {
            let [blocks, values] = ["blocks", "values"]
                .map(|part| recorded.tensor(&format!("{kind:?}.{part}")).expect("the recorded tensor exists"));
            assert_eq!((blocks.shape()[1], values.shape()[1]), (kind.bytes(), kind.elements()), "{kind:?}");
            let mut wide = vec![0xff; values.data().len()];
            widen_blocks_to_bytes(kind, blocks.data(), &mut wide);
            assert_eq!(wide, values.data(), "{kind:?}");
        }
    }
}
