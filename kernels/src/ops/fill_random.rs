//! Random numbers in place: weights for a model whose values do not matter, without a file or a host copy.
//!
//! Every backend draws the same bits from the same seed. In wrapping 64-bit integers, element `i`, counted from 0, is
//!
//! ```text
//! z = seed + (i + 1) * 0x9E3779B97F4A7C15
//! z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
//! z = (z ^ (z >> 27)) * 0x94D049BB133111EB
//! z =  z ^ (z >> 31)
//! sum   = the four 16-bit quarters of z, added, less 131070         (a whole number of at most 18 bits)
//! value = round(float(sum) * float(deviation / 37837.227237))        (one product in f32, then to the type, ties to even)
//! ```
//!
//! Part of a matrix is drawn with the numbers that it has in the whole: element `[row, column]` of `out` is number
//! `row * pitch + column`, counted from the first.
//!
//! The first four lines are the `i`-th step of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
//! generators", 2014), so each element can be computed on its own. The sum of four uniform numbers has an Irwin-Hall
//! distribution, cut off at 3.46 standard deviations: close enough to normal for weights. 37837.227237 is the standard
//! deviation of that sum, the square root of `4 * (65536^2 - 1) / 12`.

use crate::{Backend, DType, KernelError, Tensor};

use super::check;

/// Standard deviation of the sum of four uniform 16-bit numbers.
const SUM_DEVIATION: f64 = 37_837.227_237;

/// The largest number that is drawn, in standard deviations.
pub const LARGEST_DEVIATIONS: f32 = (131_070.0 / SUM_DEVIATION) as f32;

/// Draws `out` as the module describes.
#[non_exhaustive]
pub struct Call<'a> {
    /// Equal seeds give equal numbers.
    pub seed: u64,
    /// Numbers from the first of a row to the first of the next one.
    pub pitch: usize,
    /// Factor on each element's integer sum: the requested standard deviation divided by that of the sum.
    pub factor: f32,
    /// Contiguous, floating point.
    pub out: Tensor<'a>,
}

/// Fills `out` with numbers of mean zero and standard deviation `deviation`. This loads random weights, outside any
/// pass.
///
/// # Errors
/// `out` does not have the type the target stores weights as, or has gaps between its rows.
pub fn fill_random<B: Backend>(
    backend: &B,
    seed: u64,
    deviation: f32,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    let pitch = out.columns();
    fill_random_part(backend, Part { seed, first: 0, pitch }, deviation, out)
}

/// Where a part begins in the matrix that it is of.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Of the whole matrix.
    pub seed: u64,
    /// The number of its first element.
    pub first: u64,
    /// Numbers from the first of a row to the first of the next one.
    pub pitch: usize,
}

/// What one step of SplitMix64 adds to its state.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// As [`fill_random`], where `out` is part of a matrix.
///
/// # Errors
/// As [`fill_random`].
pub fn fill_random_part<B: Backend>(
    backend: &B,
    part: Part,
    deviation: f32,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    const OP: &str = "fill_random";
    check::writable(OP, "out", out);
    if out.dtype() != DType::F8E4M3 {
        check::weight(OP, "out", out, backend.target())?;
    }
    check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
    let factor = (f64::from(deviation) / SUM_DEVIATION) as f32;
    // The same as to begin so many steps later.
    let seed = part.seed.wrapping_add(part.first.wrapping_mul(STEP));
    backend.fill_random(Call { seed, pitch: part.pitch, factor, out: out.view() })
}
