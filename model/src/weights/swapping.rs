//! Swapping of the axes of matrices while they are read.

use rayon::prelude::*;

use super::{rounding::buffer_for, unpacking::unpacked_parts};
use crate::checkpoint::TensorInfo;

/// Rows and columns that a thread swaps at a time, through a copy that fits into the L1 cache. Rows
/// of a matrix are often 4 KiB apart, and the L1 cache can hold only a few such rows.
const SIDE: usize = 32;

/// Bytes of matrices that are swapped together, so that all threads have work and the copies
/// that follow are long.
const TOGETHER: usize = 64 << 20;

/// Calls `each` with the matrices of `found` `[count, columns, rows]` or `[columns, rows]`, some at
/// a time, as `[rows, columns]` of its `dtype`. `buffer` grows to the size of these matrices. A
/// tensor whose elements cannot be read in place needs additional memory for the whole tensor.
///
/// # Panics
/// If `found` does not have two or three axes. The weight map has already checked this.
pub(super) fn swapped_parts<E>(
    found: &TensorInfo<'_>,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let (&[columns, rows] | &[_, columns, rows]) = found.shape else { panic!("{found:?} has no matrices") };
    let bytes = rows * columns * found.dtype.bytes();
    let mut unpacked = Vec::new();
    let all = if found.is_in_place() {
        found.bytes
    } else {
        let Ok(()) = unpacked_parts(found, &mut Vec::new(), |part| {
            unpacked.extend_from_slice(part);
            Ok::<_, std::convert::Infallible>(())
        });
        &unpacked
    };
    all.chunks(bytes * (TOGETHER / bytes).max(1)).try_for_each(|matrices| {
        let out = buffer_for(buffer, matrices.len());
        out.par_chunks_exact_mut(bytes).zip(matrices.par_chunks_exact(bytes)).for_each(|(out, matrix)| {
            match found.dtype.bytes() {
                1 => swap::<1>(matrix, out, columns),
                2 => swap::<2>(matrix, out, columns),
                4 => swap::<4>(matrix, out, columns),
                size => unreachable!("no data type has {size} bytes"),
            }
        });
        each(out)
    })
}

/// Writes `matrix` `[columns, rows]`, of elements of `SIZE` bytes, as `[rows, columns]`.
fn swap<const SIZE: usize>(matrix: &[u8], out: &mut [u8], columns: usize) {
    let rows = matrix.len() / SIZE / columns;
    let (matrix, _) = matrix.as_chunks::<SIZE>();
    out.par_chunks_mut(SIDE * columns * SIZE).enumerate().for_each(|(block, out)| {
        let (out, _) = out.as_chunks_mut::<SIZE>();
        let first_row = block * SIDE;
        let height = SIDE.min(rows - first_row);
        for first_column in (0..columns).step_by(SIDE) {
            let width = SIDE.min(columns - first_column);
            let mut tile = [[[0; SIZE]; SIDE]; SIDE];
            for (column, line) in tile.iter_mut().enumerate().take(width) {
                let from = (first_column + column) * rows + first_row;
                line[..height].copy_from_slice(&matrix[from..from + height]);
            }
            for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                let line = &mut out[first_column..first_column + width];
                line.iter_mut().zip(&tile).for_each(|(to, from)| *to = from[row]);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_goes_where_its_axes_say() {
        for (rows, columns) in [(1, 1), (3, 5), (SIDE, 7), (2 * SIDE + 1, 3 * SIDE - 1), (2 * SIDE, SIDE)] {
            let matrix: Vec<u8> = (0..columns * rows).flat_map(|at| (at as u16).to_le_bytes()).collect();
            let mut out = vec![0xff; matrix.len()];
            swap::<2>(&matrix, &mut out, columns);
            for (at, element) in out.as_chunks::<2>().0.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                assert_eq!(usize::from(u16::from_le_bytes(*element)), column * rows + row, "[{rows}, {columns}]");
            }
        }
    }
}
