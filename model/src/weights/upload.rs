//! Upload of weights: each copy of a weight map is read from the checkpoint, converted and
//! written to the device.

use std::{cmp::Reverse, ops::ControlFlow};

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{
    Backend, DType, Tensor, int4,
    ops::{
        fill_random::{MatrixSlice, fill_random_part},
        transfer,
    },
};
use half::bf16;
use rayon::prelude::*;

use super::{
    ComputedScales, Cut, Int4Copy, NormScaling, RoutingSkew, WeightCopy, WeightError, WeightMap, WeightSource,
    int4::Int4Rows,
    quantized_numbers::{quantized_parts, random_deviation},
    rounding::{buffer_for, rounded_parts, widen_all},
    scaling::{scaled_parts, spread},
    swapping::swapped_parts,
    unpacking::unpacked_parts,
};
use crate::{
    checkpoint::{Checkpoint, ElementOrder, RandomTensor, TensorInfo, random_tensor::DEVIATION},
    load_error::LoadError,
};

/// Makes all copies of `map`. `progress` is called after each copy with the bytes copied so far and
/// the total, and decides whether to continue.
///
/// # Errors
/// A tensor cannot be read; [`LoadError::Kernel`] if a copy fails; [`LoadError::Stopped`] if
/// `progress` breaks.
///
/// # Panics
/// If `map` only measures, because such a map has no memory to copy to.
pub(crate) fn upload<B: Backend>(
    checkpoint: &Checkpoint,
    backend: &B,
    map: &WeightMap<'_>,
    mut progress: impl FnMut(Bytes, Bytes) -> ControlFlow<()>,
) -> Result<(), LoadError> {
    assert!(!map.is_dry(), "a map that only measures has no memory");
    // If loading ends early, this guard waits for the copies in flight before
    // the segment is dropped.
    let _settled = Settled(backend);
    // The largest copies run first, so that the threads that a backend starts for them are
    // available for all other copies as well.
    let mut copies: Vec<_> = map.copies().iter().collect();
    copies.sort_by_key(|copy| Reverse(copy.bytes));
    let (mut buffers, mut done) = (HostBuffers::default(), Bytes(0));
    for copy in copies {
        upload_copy(checkpoint, backend, copy, &mut buffers)?;
        done += copy.bytes;
        if progress(done, map.used()).is_break() {
            return Err(LoadError::Stopped);
        }
    }
    Ok(())
}

/// A guard that waits for the backend when it is dropped.
struct Settled<'b, B: Backend>(&'b B);

impl<B: Backend> Drop for Settled<'_, B> {
    fn drop(&mut self) {
        // An error is ignored here: a lost device runs nothing any more, and the next call to the
        // device reports the loss.
        drop(transfer::settle(self.0));
    }
}

/// Host buffers for unpacking, padding and rounding. They are reused for each tensor because
/// writing to memory that was used before is much faster than writing to fresh memory.
#[derive(Default)]
struct HostBuffers {
    unpacked: Vec<u8>,
    padded: Vec<u8>,
    rounded: Vec<u8>,
}

fn upload_copy<B: Backend>(
    checkpoint: &Checkpoint,
    backend: &B,
    copy: &WeightCopy,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let made: Vec<u8> = match &copy.source {
        WeightSource::Tensor(name) => {
            let found = part(checkpoint, name, copy)?;
            if copy.blocks.is_some() {
                return upload_blocks(backend, &found, copy, &mut buffers.unpacked);
            }
            if let Some(scale) = &copy.scale {
                let scale = checkpoint.tensor(scale).map_err(WeightError::from)?;
                return upload_scaled(backend, (&found, &scale), copy, buffers);
            }
            if let Some(scaling) = copy.norm {
                return upload_norm(backend, &found, copy, scaling, buffers);
            }
            if let Some(int4) = copy.int4 {
                return upload_int4(backend, &found, copy, int4, &mut buffers.unpacked);
            }
            if let Some(made) = copy.quantized {
                return upload_quantized(backend, &found, copy, made, buffers);
            }
            return if copy.swapped {
                upload_swapped(backend, &found, copy, buffers)
            } else {
                upload_tensor(backend, &found, copy, buffers)
            };
        }
        WeightSource::Random(_, constant @ (RandomTensor::Ones | RandomTensor::Bound { .. })) => {
            let found = DType::BF16;
            let element = match constant {
                RandomTensor::Bound { is_upper: true } => bf16::MAX,
                RandomTensor::Bound { is_upper: false } => bf16::MIN,
                _ => bf16::ONE,
            };
            let elements = element.to_ne_bytes().repeat(copy.kept.elements(copy.bytes));
            if copy.kept != found {
                return upload_rounded(backend, &elements, found, (copy.to, copy.kept), &mut buffers.rounded);
            }
            elements
        }
        WeightSource::Random(_, RandomTensor::Drawn { seed }) => {
            return match copy.int4 {
                Some(int4) => draw_int4(backend, copy, int4, *seed),
                None => draw(backend, copy, *seed),
            };
        }
        WeightSource::SkewedRouter(_, seed, skew) => return draw_router(backend, copy, *seed, *skew),
        WeightSource::Constant(numbers) => numbers.iter().flat_map(|number| number.to_ne_bytes()).collect(),
        WeightSource::Ids(ids) => ids.iter().flat_map(|id| id.to_ne_bytes()).collect(),
        WeightSource::Zeros => vec![0; copy.bytes.as_usize()],
        WeightSource::WeightScales(name, how) => {
            let found = part(checkpoint, name, copy)?;
            spread(&found, *how).into_iter().flat_map(f32::to_ne_bytes).collect()
        }
        WeightSource::Same(number) => number.to_ne_bytes().repeat(DType::F32.elements(copy.bytes)),
        WeightSource::Made => return Ok(()),
    };
    fill(backend, &made, copy.to)
}

/// Draws the elements of a copy at random on the device.
fn draw<B: Backend>(backend: &B, copy: &WeightCopy, seed: u64) -> Result<(), LoadError> {
    let (columns, zeros) = copy.row;
    let (first, pitch) = copy.cut.as_ref().map_or((0, columns), Cut::place);
    let columns = columns + zeros;
    let rows = copy.kept.elements(copy.bytes) / columns;
    // SAFETY: the map laid this copy out inside its segment, and the caller of `WeightMap::at`
    // guarantees that the segment is backed.
    let mut out = unsafe { Tensor::persistent(copy.to, [rows, columns], copy.kept) };
    let slice = MatrixSlice { seed, first, pitch };
    Ok(fill_random_part(backend, slice, random_deviation(copy.kept), &mut out)?)
}

/// Draws the weights of a router at random on the device, so that the router prefers some experts,
/// as `skew` prescribes.
fn draw_router<B: Backend>(backend: &B, copy: &WeightCopy, seed: u64, skew: RoutingSkew) -> Result<(), LoadError> {
    let columns = copy.row.0;
    let experts = copy.kept.elements(copy.bytes) / columns;
    // SAFETY: the map laid this copy out inside its segment, and the caller of `WeightMap::at`
    // guarantees that the segment is backed.
    let mut out = unsafe { Tensor::persistent(copy.to, [experts, columns], copy.kept) };
    for (expert, deviation) in skew.deviations(experts, seed).into_iter().enumerate() {
        let (part, mut row) = (
            MatrixSlice { seed, first: (expert * columns) as u64, pitch: columns },
            out.row_range_mut(expert..expert + 1),
        );
        fill_random_part(backend, part, DEVIATION * deviation, &mut row)?;
    }
    Ok(())
}

/// The part of the checkpoint's tensor `name` that `copy` reads.
fn part<'c>(checkpoint: &'c Checkpoint, name: &str, copy: &'c WeightCopy) -> Result<TensorInfo<'c>, WeightError> {
    let found = checkpoint.tensor(name)?;
    Ok(copy.cut.as_ref().map_or(found, |cut| cut.take(&found)))
}

/// Copies a tensor of the checkpoint, part by part if it must be unpacked.
fn upload_tensor<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let (mut to, kept, dtype) = (copy.to, copy.kept, DType::from(found.dtype));
    unpacked_parts(found, &mut buffers.unpacked, |part| {
        let (padded, place) = (padded(part, dtype, copy.row, &mut buffers.padded), to);
        to = to.offset(kept.bytes(padded.len() / dtype.size()));
        if dtype == kept {
            fill(backend, padded, place)
        } else {
            upload_rounded(backend, padded, dtype, (place, kept), &mut buffers.rounded)
        }
    })
}

/// Copies the blocks of a tensor of the checkpoint, in the model's order of rows.
fn upload_blocks<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    buffer: &mut Vec<u8>,
) -> Result<(), LoadError> {
    if found.order() == ElementOrder::Model && found.bytes.len() == copy.bytes.as_usize() {
        return fill(backend, found.bytes, copy.to);
    }
    let (rows, mut to) = (found.rows().0, copy.to);
    if rows == 0 {
        return Ok(());
    }
    let row_bytes = copy.bytes.as_usize() / rows;
    let at_once = (BLOCK_BYTES_AT_ONCE / row_bytes).max(1);
    for first in (0..rows).step_by(at_once) {
        let gathered = buffer_for(buffer, at_once.min(rows - first) * row_bytes);
        let places = gathered.par_chunks_exact_mut(row_bytes).enumerate().with_min_len(PADDED_BY_A_THREAD);
        places.for_each(|(at, place)| place.copy_from_slice(found.row_bytes(first + at)));
        fill(backend, gathered, to)?;
        to = to.offset(Bytes(gathered.len() as u64));
    }
    Ok(())
}

/// Copies a tensor of the checkpoint and multiplies its rows by scales, part by part.
fn upload_scaled<B: Backend>(
    backend: &B,
    (found, scale): (&TensorInfo<'_>, &TensorInfo<'_>),
    copy: &WeightCopy,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let mut to = copy.to;
    scaled_parts(found, scale, &mut buffers.unpacked, |part| {
        let place = to;
        to = to.offset(copy.kept.bytes(part.len() / DType::F32.size()));
        upload_rounded(backend, part, DType::F32, (place, copy.kept), &mut buffers.rounded)
    })
}

/// Copies the weight of a norm. `scaling` is applied in f32.
fn upload_norm<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    scaling: NormScaling,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let mut bytes = Vec::new();
    unpacked_parts(found, &mut buffers.unpacked, |part| {
        bytes.extend_from_slice(part);
        Ok::<_, LoadError>(())
    })?;
    let dtype = DType::from(found.dtype);
    let mut weight = vec![0.0; bytes.len() / dtype.size()];
    widen_all(&bytes, dtype, &mut weight);
    scaling.apply(&mut weight);
    let changed: Vec<u8> = weight.into_iter().flat_map(f32::to_ne_bytes).collect();
    if copy.kept == DType::F32 {
        return fill(backend, &changed, copy.to);
    }
    upload_rounded(backend, &changed, DType::F32, (copy.to, copy.kept), &mut buffers.rounded)
}

/// Copies a tensor of the checkpoint and swaps the axes of its matrices, some matrices at a time.
fn upload_swapped<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let (mut to, dtype) = (copy.to, DType::from(found.dtype));
    let elements: usize = found.shape.iter().product();
    let rows = copy.row_matrix.map(|[columns, rows]| [elements / (columns * rows), columns, rows]);
    let found = found.reshaped(rows.as_ref().map_or(found.shape, |shape| shape));
    swapped_parts(&found, &mut buffers.unpacked, |part| {
        let place = to;
        to = to.offset(copy.kept.bytes(part.len() / dtype.size()));
        if dtype == copy.kept {
            fill(backend, part, place)
        } else {
            upload_rounded(backend, part, dtype, (place, copy.kept), &mut buffers.rounded)
        }
    })
}

/// Quantizes a tensor of the checkpoint, and copies the result and its scales.
fn upload_quantized<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    made: ComputedScales,
    buffers: &mut HostBuffers,
) -> Result<(), LoadError> {
    let (mut to, mut scales_to, dtype) = (copy.to, made.to, DType::from(found.dtype));
    let HostBuffers { unpacked, padded: zeros, rounded } = buffers;
    let each = |rows: &[u8]| {
        let columns = copy.row.0 + copy.row.1;
        let rows = padded(rows, dtype, copy.row, zeros);
        quantized_parts(rows, (dtype, columns), made, rounded, |codes, scales| {
            let bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_ne_bytes()).collect();
            fill(backend, codes, to)?;
            fill(backend, &bytes, scales_to)?;
            to = to.offset(Bytes(codes.len() as u64));
            scales_to = scales_to.offset(Bytes(bytes.len() as u64));
            Ok(())
        })
    };
    if copy.swapped {
        return swapped_parts(found, unpacked, each);
    }
    with_whole_tensor(found, unpacked, each)
}

/// Calls `each` with all bytes of a tensor, because scale blocks, blocks of rows and matrices may
/// extend across the ends of unpacked parts.
fn with_whole_tensor(
    found: &TensorInfo<'_>,
    unpacked: &mut Vec<u8>,
    each: impl FnOnce(&[u8]) -> Result<(), LoadError>,
) -> Result<(), LoadError> {
    if found.is_in_place() {
        return each(found.bytes);
    }
    let mut all = Vec::new();
    unpacked_parts(found, unpacked, |part| {
        all.extend_from_slice(part);
        Ok::<_, LoadError>(())
    })?;
    each(&all)
}

/// Columns of a row at the destination, and the number of rows that are packed at a time.
fn packed_rows(copy: &WeightCopy) -> (usize, usize) {
    let columns = copy.row.0 + copy.row.1;
    let blocks = (PACKED_AT_ONCE / columns / int4::BLOCK_ROWS).max(1);
    (columns, blocks * int4::BLOCK_ROWS)
}

/// Copies a tensor of the checkpoint as 4-bit integers, with its scales and zero points. A tensor
/// that is not packed is rounded.
fn upload_int4<B: Backend>(
    backend: &B,
    found: &TensorInfo<'_>,
    copy: &WeightCopy,
    mut places: Int4Copy,
    buffer: &mut Vec<u8>,
) -> Result<(), LoadError> {
    let ((columns, at_once), read, mut to) = (packed_rows(copy), copy.row.0, copy.to);
    if let Some(packed) = &found.packed {
        let (rows, first) = (found.rows().0, found.first_column());
        for row in (0..rows).step_by(at_once) {
            let end = rows.min(row + at_once);
            let stored = found.stored_row(row)..found.stored_row(row) + end - row;
            let packed = Int4Rows::of_packed(packed, stored, first..first + read, columns, &places);
            fill_int4(backend, &packed, &mut to, &mut places)?;
        }
        return Ok(());
    }
    let dtype = DType::from(found.dtype);
    let each = |part: &[u8]| {
        part.chunks(at_once * read * dtype.size()).try_for_each(|rows| {
            let packed = Int4Rows::quantized(rows, (dtype, read), columns, &places);
            fill_int4(backend, &packed, &mut to, &mut places)
        })
    };
    with_whole_tensor(found, buffer, each)
}

/// Fills a copy with random 4-bit integers, drawn on the host. Any bits are valid integers.
fn draw_int4<B: Backend>(backend: &B, copy: &WeightCopy, mut places: Int4Copy, seed: u64) -> Result<(), LoadError> {
    let ((columns, at_once), mut to) = (packed_rows(copy), copy.to);
    let (first, pitch) = copy.cut.as_ref().map_or((0, copy.row.0), Cut::place);
    let rows = copy.kept.elements(copy.bytes) / columns;
    for row in (0..rows).step_by(at_once) {
        let start = (first + (row * pitch) as u64, pitch);
        let packed = Int4Rows::random(seed, start, at_once.min(rows - row), columns, &places);
        fill_int4(backend, &packed, &mut to, &mut places)?;
    }
    Ok(())
}

/// Copies rows of 4-bit integers, and moves the addresses to the next rows.
fn fill_int4<B: Backend>(
    backend: &B,
    rows: &Int4Rows,
    to: &mut Address,
    places: &mut Int4Copy,
) -> Result<(), LoadError> {
    let scales = (&rows.scales, Some(&mut places.scales));
    for (bytes, to) in [(&rows.words, Some(to)), scales, (&rows.zero_points, places.zero_points.as_mut())] {
        if let Some(to) = to {
            fill(backend, bytes, *to)?;
            *to = to.offset(Bytes(bytes.len() as u64));
        }
    }
    Ok(())
}

/// Elements that are packed at a time.
const PACKED_AT_ONCE: usize = 1 << 25;

/// Copies `source` to the address `to`.
fn fill<B: Backend>(backend: &B, source: &[u8], to: Address) -> Result<(), LoadError> {
    // The tensor can have the type U8, because the copy ignores the element type.
    // SAFETY: `to` and the bytes after it belong to the destination of one copy in the map's
    // segment, and the caller of `WeightMap::at` guarantees that this segment is backed.
    let mut out = unsafe { Tensor::persistent(to, [source.len()], DType::U8) };
    Ok(transfer::fill(backend, source, &mut out)?)
}

/// Maximum bytes of rows that are gathered at a time. Each row consists of whole blocks. A larger
/// row is gathered alone.
const BLOCK_BYTES_AT_ONCE: usize = 32 << 20;

/// Minimum number of rows that one thread pads or gathers.
const PADDED_BY_A_THREAD: usize = 64;

/// Returns the rows of a file's tensor, each followed by `zeros` zero elements. The result is in
/// `buffer`, or is `bytes` itself if `zeros` is 0.
fn padded<'s>(bytes: &'s [u8], dtype: DType, (columns, zeros): (usize, usize), buffer: &'s mut Vec<u8>) -> &'s [u8] {
    if zeros == 0 {
        return bytes;
    }
    let (row, longer) = (columns * dtype.size(), (columns + zeros) * dtype.size());
    let padded = buffer_for(buffer, bytes.len() / row * longer);
    let rows = padded.par_chunks_exact_mut(longer).zip(bytes.par_chunks_exact(row));
    rows.with_min_len(PADDED_BY_A_THREAD).for_each(|(longer, row)| {
        let (place, behind) = longer.split_at_mut(row.len());
        place.copy_from_slice(row);
        behind.fill(0);
    });
    padded
}

/// Elements that the host rounds at a time: 64 MiB of 16-bit elements. The GPU backend uses several
/// threads for a copy that is larger than its page-locked buffers of 32 MiB.
const ROUNDED_AT_ONCE: usize = 1 << 25;

/// Rounds elements of type `found` to the nearest values of type `kept`, and copies them to `to`.
fn upload_rounded<B: Backend>(
    backend: &B,
    source: &[u8],
    found: DType,
    (mut to, kept): (Address, DType),
    buffer: &mut Vec<u8>,
) -> Result<(), LoadError> {
    rounded_parts(source, (found, kept), ROUNDED_AT_ONCE, buffer, |rounded| {
        let place = to;
        to = to.offset(Bytes(rounded.len() as u64));
        fill(backend, rounded, place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_its_zeros_behind_it_to_the_last() {
        let rows = 3 * PADDED_BY_A_THREAD + 1;
        let bytes: Vec<u8> = (0..rows * 10).map(|at| (at % 251) as u8 + 1).collect();
        let expected: Vec<u8> = bytes.chunks_exact(10).flat_map(|row| [row, &[0; 6]].concat()).collect();
        // Leftovers of another tensor, longer and shorter than this tensor.
        for mut buffer in [vec![0xff; 2 * expected.len()], vec![0xff; 7]] {
            assert_eq!(padded(&bytes, DType::BF16, (5, 3), &mut buffer), expected);
            assert_eq!(
                padded(&bytes, DType::BF16, (5, 0), &mut buffer).as_ptr(),
                bytes.as_ptr(),
                "no bytes are copied"
            );
        }
    }
}
