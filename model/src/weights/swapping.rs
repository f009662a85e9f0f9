//! Matrices whose axes are swapped while they are read.

use rayon::prelude::*;

use super::{rounding::room_for, unpacking::unpacked_parts};
use crate::checkpoint::TensorInfo;

/// Rows of the result that one thread writes at a time, so that what it reads of each row of the file is a whole line
/// of the processor's cache.
const ROWS: usize = 32;

/// Gives `each` the matrices of `found` `[count, columns, rows]` one after the other as `[rows, columns]` of its
/// `dtype`. `room` grows to one matrix; what is not stored in place takes all of the tensor once more.
///
/// # Panics
/// Unless `found` has three axes: the map has checked it.
pub(crate) fn swapped_parts<E>(
    found: &TensorInfo<'_>,
    room: &mut Vec<u8>,
    mut each: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let &[_, columns, rows] = found.shape else { panic!("{found:?} has no matrices") };
    let bytes = rows * columns * found.dtype.bytes();
    let mut unpacked = Vec::new();
    let all = match found.is_in_place() {
        true => found.bytes,
        false => {
            let Ok(()) = unpacked_parts(found, &mut Vec::new(), |part| {
                unpacked.extend_from_slice(part);
                Ok::<_, std::convert::Infallible>(())
            });
            &unpacked
        }
    };
    all.chunks_exact(bytes).try_for_each(|matrix| {
        let out = room_for(room, bytes);
        match found.dtype.bytes() {
            1 => swap::<1>(matrix, out, columns),
            2 => swap::<2>(matrix, out, columns),
            4 => swap::<4>(matrix, out, columns),
            size => unreachable!("no type of a tensor has {size} bytes"),
        }
        each(out)
    })
}

/// Writes `matrix` `[columns, rows]`, of elements of `SIZE` bytes, as `[rows, columns]`.
fn swap<const SIZE: usize>(matrix: &[u8], out: &mut [u8], columns: usize) {
    let rows = matrix.len() / SIZE / columns;
    let (matrix, _) = matrix.as_chunks::<SIZE>();
    out.par_chunks_mut(ROWS * columns * SIZE).enumerate().for_each(|(block, out)| {
        let (out, _) = out.as_chunks_mut::<SIZE>();
        for (column, from) in matrix.chunks_exact(rows).enumerate() {
            for (at, element) in from[block * ROWS..rows.min((block + 1) * ROWS)].iter().enumerate() {
                out[at * columns + column] = *element;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_goes_where_its_axes_say() {
        for (rows, columns) in [(1, 1), (3, 5), (ROWS, 7), (2 * ROWS + 1, 3)] {
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
