//! Quantized numbers of weights, in E4M3: quantization while weights are read, valid
//! scales, and random weights.

use bursar_kernels::{DType, E4m3, ScaledBy, e4m3_scale, largest_magnitude, ops::fill_random::LARGEST_DEVIATIONS};
use rayon::prelude::*;

use super::{
    ComputedScales, WeightError,
    rounding::{buffer_for, widen_all},
};
use crate::checkpoint::random_tensor::DEVIATION;

/// Number of elements that are quantized at a time, as far as the size of blocks allows.
const AT_ONCE: usize = 1 << 22;

/// Number of elements that are widened at a time, few enough to fit into the cache of a CPU core.
const WIDENED: usize = 1 << 10;

/// Quantizes rows of `columns` numbers of type `found`. In each row, block or matrix, the largest
/// magnitude becomes 448. `each` receives the E4M3 numbers and the scales, some rows at a time.
/// `rows` must begin at the start of a block or a matrix.
pub(super) fn quantized_parts<E>(
    rows: &[u8],
    (found, columns): (DType, usize),
    made: ComputedScales,
    buffer: &mut Vec<u8>,
    mut each: impl FnMut(&[u8], &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let row = columns * found.size();
    let unit = match made.by {
        ScaledBy::Row => 1,
        ScaledBy::Block { .. } | ScaledBy::Tensor => made.height,
    };
    let units = match made.by {
        ScaledBy::Tensor => 1,
        ScaledBy::Row | ScaledBy::Block { .. } => (AT_ONCE / columns / unit).max(1),
    };
    rows.chunks(units * unit * row).try_for_each(|rows| {
        let codes = buffer_for(buffer, rows.len() / found.size());
        let scales = match made.by {
            ScaledBy::Tensor => {
                let scale = e4m3_scale(largest(rows, found, row));
                let places = codes.par_chunks_mut(columns).zip(rows.par_chunks(row));
                places.for_each(|(codes, row)| encode(row, found, scale, codes));
                vec![scale; rows.len() / row]
            }
            ScaledBy::Row | ScaledBy::Block { .. } => {
                let width = made.by.group_columns(columns);
                let mut scales = vec![0.0; rows.len().div_ceil(unit * row) * columns.div_ceil(width)];
                let places = codes.par_chunks_mut(unit * columns).zip(rows.par_chunks(unit * row));
                let scales_of = scales.par_chunks_mut(columns.div_ceil(width));
                places.zip(scales_of).for_each(|((codes, rows), scales)| {
                    round_unit(rows, (found, columns), width, codes, scales);
                });
                scales
            }
        };
        each(codes, &scales)
    })
}

/// Quantizes rows with one scale for each `width` columns.
fn round_unit(rows: &[u8], (found, columns): (DType, usize), width: usize, codes: &mut [u8], scales: &mut [f32]) {
    for (first, place) in (0..columns).step_by(width).zip(scales) {
        let part = first..columns.min(first + width);
        let of =
            |row: usize| &rows[(row * columns + part.start) * found.size()..(row * columns + part.end) * found.size()];
        let count = codes.len() / columns;
        let largest = (0..count).map(|row| largest_of_row(of(row), found)).fold(0.0, f32::max);
        *place = e4m3_scale(largest);
        for row in 0..count {
            encode(of(row), found, *place, &mut codes[row * columns..][part.clone()]);
        }
    }
}

fn largest(rows: &[u8], found: DType, row: usize) -> f32 {
    rows.par_chunks(row).map(|row| largest_of_row(row, found)).reduce(|| 0.0, f32::max)
}

fn largest_of_row(row: &[u8], found: DType) -> f32 {
    let mut wide = [0.0; WIDENED];
    let parts = row.chunks(WIDENED * found.size()).map(|part| {
        let wide = &mut wide[..part.len() / found.size()];
        widen_all(part, found, wide);
        largest_magnitude(wide)
    });
    parts.fold(0.0, f32::max)
}

fn encode(row: &[u8], found: DType, scale: f32, codes: &mut [u8]) {
    let mut wide = [0.0; WIDENED];
    for (part, codes) in row.chunks(WIDENED * found.size()).zip(codes.chunks_mut(WIDENED)) {
        let wide = &mut wide[..codes.len()];
        widen_all(part, found, wide);
        codes.iter_mut().zip(&*wide).for_each(|(code, number)| *code = E4m3::from_f32(number / scale).0);
    }
}

/// The kind of numbers that a scale belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleOf {
    /// Blocks or output channels of weights. The scale of a block or channel of zeros may be 0.
    Parts,
    Matrix,
    /// Activations, keys or values, which are divided by the scale.
    Activations,
}

/// Refuses a number that is not a valid scale. The largest E4M3 number times a scale must be finite
/// in f32. A scale that activations are divided by must be a normal number, because the quotients
/// could otherwise become infinite.
pub(super) fn check_scale(name: &str, value: f32, of: ScaleOf) -> Result<(), WeightError> {
    let is_scale = value.is_finite() && (value > 0.0 || value == 0.0 && of == ScaleOf::Parts);
    let expected = match of {
        ScaleOf::Parts if !is_scale => "a number of at least 0",
        _ if !is_scale => "a number above 0",
        _ if !(value * E4m3::MAX).is_finite() => "a number that fits f32 when multiplied by 448",
        ScaleOf::Activations if value < f32::MIN_POSITIVE => "at least 1.18e-38, the smallest normal number",
        _ => return Ok(()),
    };
    Err(WeightError::Scale { name: name.to_owned(), value, expected })
}

/// Standard deviation of random elements of type `kept`. E4M3 numbers are drawn over the full range
/// of the type, and [`RANDOM_SCALE`] brings the weights to the deviation of unquantized weights.
pub(super) fn random_deviation(kept: DType) -> f32 {
    if kept.needs_scales() { E4m3::MAX / LARGEST_DEVIATIONS } else { DEVIATION }
}

/// The scale of random E4M3 weights.
pub(super) const RANDOM_SCALE: f32 = DEVIATION * LARGEST_DEVIATIONS / E4m3::MAX;

#[cfg(test)]
mod tests {
    use bursar_budgets::Address;
    use bursar_kernels::QuantizationScheme;

    use super::*;

    /// Quantizes numbers and multiplies them by their scales again.
    fn there_and_back(numbers: &[f32], columns: usize, by: ScaledBy, height: usize) -> (Vec<f32>, Vec<f32>) {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let made = ComputedScales { to: Address(0), by, height };
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        quantized_parts(&bytes, (DType::F32, columns), made, &mut vec![0xff; 3], |some, of_some| {
            codes.extend_from_slice(some);
            scales.extend_from_slice(of_some);
            Ok::<_, ()>(())
        })
        .expect("rounding reports no error");
        let scale = |at: usize| match by {
            ScaledBy::Block { columns: width, .. } => {
                scales[at / columns / height * columns.div_ceil(width) + at % columns / width]
            }
            ScaledBy::Row | ScaledBy::Tensor => scales[at / columns],
        };
        (codes.iter().enumerate().map(|(at, code)| E4m3(*code).to_f32() * scale(at)).collect(), scales)
    }

    #[test]
    fn numbers_come_back_within_half_a_step_of_the_largest_beside_them() {
        // Rows of very different magnitudes, a row of zeros, and single zeros.
        let (rows, columns) = (300, 2500);
        let number = |at: usize| {
            let (row, column) = (at / columns, at % columns);
            let size = if row == 7 { 0.0 } else { 2f32.powi(row as i32 % 11 - 5) };
            ((at * 7919 % 4001) as f32 / 2000.0 - 1.0) * size * if column < 128 { 100.0 } else { 1.0 }
        };
        let numbers: Vec<f32> = (0..rows * columns).map(number).collect();
        let block = QuantizationScheme::BLOCK.weights;
        for (by, height, count) in [(ScaledBy::Row, 1, rows), (ScaledBy::Tensor, 150, rows), (block, 128, 60)] {
            let (back, scales) = there_and_back(&numbers, columns, by, height);
            assert_eq!((back.len(), scales.len()), (numbers.len(), count), "{by:?}");
            for (at, (back, number)) in back.iter().zip(&numbers).enumerate() {
                let scale = match by {
                    ScaledBy::Block { .. } => scales[at / columns / 128 * 20 + at % columns / 128],
                    _ => scales[at / columns],
                };
                let allowed = (number.abs() / 16.0).max(scale / 1024.0) * 1.001;
                assert!((back - number).abs() <= allowed, "{by:?}: {back} for {number} at {at}");
                assert!(number.abs() <= scale * 448.0 * 1.001, "{by:?}: no number is clipped");
            }
            if by == ScaledBy::Tensor {
                assert!(
                    scales[..150].iter().all(|scale| *scale == scales[0])
                        && scales[150..].iter().all(|s| *s == scales[299])
                );
            }
        }
    }
}
