//! Arithmetic on slices in forms that the compiler vectorizes, and matrix multiplication. The
//! functions are always inlined, so that they use the caller's vector instructions (see
//! `Threads::share`).

use gemm::{Parallelism, gemm};

/// A matrix in memory: its first element, and the strides between rows and
/// between columns, in elements.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) start: *const f32,
    pub(super) strides: [usize; 2],
}

/// Computes `out = left @ right` (`[rows, columns]` from `[rows, inner]` and `[inner, columns]`) on
/// the calling thread, or adds the product to `out` if `add` is set. Each row of `out` is
/// contiguous, and the next row starts `pitch` elements later.
///
/// # Safety
/// All three matrices are in readable memory. `out` is also writable and overlaps neither operand.
pub(super) unsafe fn multiply(
    [rows, inner, columns]: [usize; 3],
    (out, pitch): (*mut f32, usize),
    add: bool,
    left: Matrix,
    right: Matrix,
) {
    let [left_row, left_column] = left.strides.map(|stride| stride as isize);
    let [right_row, right_column] = right.strides.map(|stride| stride as isize);
    let factor_of_out = if add { 1.0 } else { 0.0 };
    // SAFETY: the caller guarantees that all three matrices are in valid memory and that
    // `out` overlaps neither operand.
    unsafe {
        gemm(
            rows,
            columns,
            inner,
            out,
            1,
            pitch as isize,
            add,
            left.start,
            left_column,
            left_row,
            right.start,
            right_column,
            right_row,
            factor_of_out,
            1.0f32,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// The dot product of two slices of the same length, in partial sums that fill registers.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    assert_eq!(a.len(), b.len(), "both vectors of an inner product have the same length");
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// The sum, in partial sums that fill registers.
#[inline(always)]
pub(super) fn sum(numbers: &[f32]) -> f32 {
    let (chunks, rest) = numbers.as_chunks::<16>();
    let mut sums = [0.0f32; 16];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, number)| *sum += number);
    }
    sums.iter().sum::<f32>() + rest.iter().sum::<f32>()
}

/// The largest element that is not NaN, or minus infinity if there is no such element.
#[inline(always)]
pub(super) fn largest(numbers: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = numbers.as_chunks::<16>();
    let mut lanes = [f32::NEG_INFINITY; 16];
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, number)| *lane = larger(*lane, *number));
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// The logistic function of `x`, also called sigmoid.
#[inline(always)]
pub(super) fn logistic(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x` multiplied by its logistic function, as one division, which rounds once less than the
/// product.
#[inline(always)]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `e^x` to within two units in the last place, with `x` clamped to -87..88 so that
/// the result is never 0 or infinite. For NaN, the result is NaN. The constants are
/// from Cephes' `expf` (Moshier).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // 1.5 * 2^23. Adding it puts the nearest integer into the lowest bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits());
    let whole = shifted - ROUND;
    let rest = x - whole * LN_2_HIGH - whole * LN_2_LOW;
    let mut sum = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        sum = sum * rest + coefficient;
    }
    (sum * rest * rest + rest + 1.0) * f32::from_bits(power.wrapping_add(127) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        assert_eq!(exp(0.0), 1.0);
        for step in -870_000..=880_000 {
            let x = step as f32 * 1e-4;
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found - expected).abs() <= 2.4e-7 * expected, "exp({x}) = {found}, expected {expected}");
        }
    }

    #[test]
    fn exp_of_nan_is_nan_and_infinite_inputs_are_clamped() {
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), exp(-87.0));
        assert_eq!(exp(f32::INFINITY), exp(88.0));
    }
}
