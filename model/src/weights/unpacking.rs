//! Reading of a tensor's elements from any storage: quantized blocks, packed elements, other types,
//! rows in a different order.

use bursar_kernels::widen_blocks;
use rayon::prelude::*;

use super::{
    dequantizing::dequantize,
    rounding::{buffer_for, widen_to_bytes},
};
use crate::checkpoint::{BlockType, Change, ElementOrder, Stored, TensorInfo};

/// Elements that are unpacked at a time: 32 MiB of f32.
const UNPACKED_AT_ONCE: usize = 1 << 23;

/// Minimum number of elements that one thread unpacks.
const BY_A_THREAD: usize = 1 << 14;

/// Rows that one thread dequantizes at a time. Large enough to use at least half of each cache
/// line: adjacent words of a GPTQ file belong to adjacent rows (16 per line), and a line of an AWQ
/// file has 128 rows.
const PACKED_ROWS: usize = 64;

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
        if let Some(packed) = &found.packed {
            let (row, column) = (found.stored_row(first), found.first_column());
            out.par_chunks_mut(PACKED_ROWS * wide).enumerate().for_each(|(at, out)| {
                let row = row + at * PACKED_ROWS;
                dequantize(packed, row..row + out.len() / wide, column..column + columns, out);
            });
        } else {
            let places = out.par_chunks_exact_mut(wide).enumerate().with_min_len(BY_A_THREAD.div_ceil(columns));
            places.for_each(|(at, out)| unpack(found, first + at, out));
        }
        each(out)?;
    }
    Ok(())
}

/// Writes the model's row `row` of `found` to `out`.
fn unpack(found: &TensorInfo<'_>, row: usize, out: &mut [u8]) {
    let (stored, size) = (found.row_bytes(row), found.dtype.bytes());
    match found.order() {
        ElementOrder::Model | ElementOrder::PairedRows(_) | ElementOrder::TiledRows(_) => {
            let elements = found.stored.elements_in(stored.len());
            if elements * size == out.len() {
                widen(stored, found, out);
            } else {
                let whole = widened(stored, found, elements);
                out.copy_from_slice(&whole[found.skipped_columns() * size..][..out.len()]);
            }
        }
        ElementOrder::TiledColumns(tiling) => {
            // The stored row is widened first, because a block may have columns of several heads.
            let whole = widened(stored, found, tiling.end());
            let first = found.first_column();
            for (at, element) in out.chunks_exact_mut(size).enumerate() {
                element.copy_from_slice(&whole[tiling.stored(first + at) * size..][..size]);
            }
        }
        ElementOrder::Interleaved(elements) => {
            let second = found.second_row_bytes(row);
            let count = out.len() / (2 * elements * size);
            let pieces = [stored, second].map(|row| row.chunks_exact(row.len() / count));
            let [first, second] = pieces;
            for (both, out) in first.zip(second).zip(out.chunks_exact_mut(2 * elements * size)) {
                let (one, other) = out.split_at_mut(elements * size);
                widen(both.0, found, one);
                widen(both.1, found, other);
            }
        }
    }
    change(found.change(), out);
}

/// Applies a change to `elements`. Only f32 elements are changed.
fn change(change: Change, elements: &mut [u8]) {
    let changed: fn(f32) -> f32 = match change {
        Change::Unchanged => return,
        Change::MinusOne => |x| x - 1.0,
        Change::LogOfNegative => |x| (-x).ln(),
    };
    for bytes in elements.as_chunks_mut().0 {
        *bytes = changed(f32::from_ne_bytes(*bytes)).to_ne_bytes();
    }
}

/// The bytes of `elements` stored elements as the tensor's `dtype`.
fn widened(stored: &[u8], found: &TensorInfo<'_>, elements: usize) -> Vec<u8> {
    let mut whole = vec![0; elements * found.dtype.bytes()];
    widen(stored, found, &mut whole);
    whole
}

fn widen(row: &[u8], found: &TensorInfo<'_>, out: &mut [u8]) {
    match found.stored {
        Stored::Plain(plain) if plain == found.dtype => out.copy_from_slice(row),
        Stored::Plain(plain) => widen_to_bytes(row, plain.into(), out),
        Stored::Blocks(kind) => widen_blocks_to_bytes(kind, row, out),
        Stored::Packed(_) => unreachable!("packed elements are dequantized for several rows at a time"),
    }
}

/// Like [`widen_blocks`], but `out` has the bytes of the f32 numbers.
fn widen_blocks_to_bytes(kind: BlockType, blocks: &[u8], out: &mut [u8]) {
    /// Elements of the longest block.
    const LONGEST: usize = 256;
    let mut wide = [0.0; LONGEST];
    let wide = &mut wide[..kind.elements()];
    for (block, out) in blocks.chunks_exact(kind.bytes()).zip(out.chunks_exact_mut(size_of_val(wide))) {
        widen_blocks(kind, block, wide);
        out.as_chunks_mut().0.iter_mut().zip(&*wide).for_each(|(place, number)| *place = number.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::RankShard;
    use safetensors::SafeTensors;

    use super::*;
    use crate::checkpoint::{BlockType, TensorIndex, TensorType};

    /// The elements of a tensor as bytes.
    fn unpacked(found: &TensorInfo<'_>) -> Vec<u8> {
        let mut all = Vec::new();
        let Ok(()) = unpacked_parts(found, &mut Vec::new(), |part| {
            all.extend_from_slice(part);
            Ok::<_, std::convert::Infallible>(())
        });
        all
    }

    /// `tests/golden/recording/packed_weights.py` generates the weights and their values. Parts of
    /// a weight begin and end within words and groups.
    #[test]
    fn packed_weights_dequantize_bit_exactly() {
        let mut count = 0;
        let folders = ["awq", "gptq", "gptq_v2", "compressed_tensors", "experts", "nvfp4", "mxfp4", "modelopt"];
        for folder in folders {
            let index = TensorIndex::recorded(&format!("packed/{folder}"));
            let content = TensorIndex::recorded_values(&format!("packed/{folder}"));
            let recorded = SafeTensors::deserialize(&content).expect("safetensors");
            assert!(index.names().eq(recorded.names().into_iter().collect::<std::collections::BTreeSet<_>>()));
            for name in index.names() {
                let (found, recorded) =
                    (index.tensor(name).expect("the weight"), recorded.tensor(name).expect("values"));
                assert_eq!(
                    (found.shape, format!("{:?}", found.dtype)),
                    (recorded.shape(), recorded.dtype().to_string())
                );
                assert!(unpacked(&found) == recorded.data(), "{folder}: {name} differs");
                let size = found.dtype.bytes();
                count += 1;
                if let &[experts, rows, columns] = found.shape {
                    let others = RankShard { first: 1, count: experts - 1, whole: experts };
                    let shape = [others.count, rows, columns];
                    let part = found.part(others, (rows * columns).into(), &shape);
                    assert!(unpacked(&part) == recorded.data()[rows * columns * size..], "{folder}: {name} {shape:?}");
                    continue;
                }
                let &[rows, columns] = found.shape else { panic!("a matrix") };
                for (first_row, first_column) in [(0, 13), (5, 0), (3, columns - 9), (rows - 1, columns / 2 + 1)] {
                    let share =
                        |first: usize, whole: usize| RankShard { first, count: (whole - first).div_ceil(2), whole };
                    let (of_rows, of_columns) = (share(first_row, rows), share(first_column, columns));
                    let expected: Vec<u8> = of_rows
                        .range()
                        .flat_map(|row| {
                            &recorded.data()[(row * columns + first_column) * size..][..of_columns.count * size]
                        })
                        .copied()
                        .collect();
                    let shape = [of_rows.count, of_columns.count];
                    assert!(
                        unpacked(&found.part(of_rows, of_columns, &shape)) == expected,
                        "{folder}: {name} {shape:?}"
                    );
                }
            }
        }
        assert_eq!(count, 34);
    }

    /// Recorded blocks as rows of 4 blocks with 256 elements, and the elements of each row.
    fn rows_of_blocks(recorded: &SafeTensors<'_>) -> (Vec<u8>, Vec<Vec<f32>>) {
        let part = |part: &str| recorded.tensor(&format!("Q4_K.{part}")).expect("the recorded tensor exists");
        let values: Vec<f32> =
            part("values").data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        // The file has 6 blocks. The first row has the first four, the second row the last four.
        let (block, blocks) = (BlockType::Q4_K.bytes(), part("blocks").data().to_vec());
        let rows = [0..4, 2..6];
        let bytes = rows.clone().map(|row| blocks[row.start * block..row.end * block].to_vec()).concat();
        (bytes, rows.map(|row| values[row.start * 256..row.end * 256].to_vec()).to_vec())
    }

    #[test]
    fn tiled_columns_are_ordered_within_and_across_blocks() {
        let content = std::fs::read(bursar_golden::path("gguf/blocks.safetensors")).expect("the recorded blocks");
        let (bytes, rows) = rows_of_blocks(&SafeTensors::deserialize(&content).expect("safetensors"));
        // 8 heads of 128 columns: 2 key heads with 4 values each. A block has two heads.
        let stored_head = |head: usize| head % 4 * 2 + head / 4;
        let whole = TensorInfo::tiled_columns(BlockType::Q4_K, &[2, 1024], &bytes, (2, 4, 128));
        // A rank has the values of one key head.
        let columns = RankShard { first: 512, count: 512, whole: 1024 };
        let shape = [2, 512];
        for (found, heads) in [(whole, 0..8), (whole.part(2.into(), columns, &shape), 4..8)] {
            let expected: Vec<f32> = rows
                .iter()
                .flat_map(|row| heads.clone().flat_map(move |head| &row[stored_head(head) * 128..][..128]))
                .copied()
                .collect();
            let mut all = Vec::new();
            let Ok(()) = unpacked_parts(&found, &mut Vec::new(), |part| {
                all.extend(part.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
                Ok::<_, std::convert::Infallible>(())
            });
            assert_eq!((all, found.dtype), (expected, TensorType::F32));
        }
    }

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
