//! Fills a tensor with random numbers on the device. The operation generates the weights of a model
//! when their values do not matter, without a file or a copy from the host.
//!
//! Every backend draws the same bits from the same seed. In wrapping 64-bit integers, element `i`,
//! counted from 0, is
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
//! A part of a matrix gets the same numbers that it would get if the entire matrix were filled:
//! element `[row, column]` of `out` is number `row * pitch + column`, counted from the part's first
//! element.
//!
//! The first four lines are the `i`-th step of SplitMix64 (Steele, Lea, Flood, "Fast splittable
//! pseudorandom number generators", 2014), so each element can be computed independently. The sum
//! of four uniform numbers has an Irwin-Hall distribution, cut off at 3.46 standard deviations,
//! which is close enough to normal for weights. 37837.227237 is the standard deviation of that sum,
//! the square root of `4 * (65536^2 - 1) / 12`.

use crate::{
    Backend, DType, KernelError, Tensor,
    calls::{self, STEP},
};

use super::check;

/// Standard deviation of the sum of four uniform 16-bit numbers.
const SUM_DEVIATION: f64 = 37_837.227_237;

/// The largest number that can be drawn, in standard deviations.
pub const LARGEST_DEVIATIONS: f32 = (131_070.0 / SUM_DEVIATION) as f32;

/// Fills `out` with numbers of mean zero and standard deviation `deviation`. This function is
/// called outside any pass, to load random weights.
///
/// # Errors
/// `out` has gaps between its rows, or has a type other than these: the type in which the target
/// stores weights, FP8, and f32, the type of some small weights on every target.
pub fn fill_random<B: Backend>(
    backend: &B,
    seed: u64,
    deviation: f32,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    let pitch = out.columns();
    fill_random_part(backend, MatrixSlice { seed, first: 0, pitch }, deviation, out)
}

/// Position of a part in the whole matrix.
#[derive(Clone, Copy, Debug)]
pub struct MatrixSlice {
    /// Seed of the whole matrix.
    pub seed: u64,
    /// Index of the part's first element in the whole matrix.
    pub first: u64,
    /// Elements from the start of a row of the whole matrix to the start of the next.
    pub pitch: usize,
}

/// Like [`fill_random`], but `out` is a part of a matrix.
///
/// # Errors
/// The errors of [`fill_random`].
pub fn fill_random_part<B: Backend>(
    backend: &B,
    part: MatrixSlice,
    deviation: f32,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    const OP: &str = "fill_random";
    check::writable(OP, "out", out);
    if out.dtype() != DType::F8E4M3 && out.dtype() != DType::F32 {
        check::weight(OP, "out", out, backend.target())?;
    }
    check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
    let factor = (f64::from(deviation) / SUM_DEVIATION) as f32;
    // This is equivalent to starting the generator `part.first` steps later.
    let seed = part.seed.wrapping_add(part.first.wrapping_mul(STEP));
    backend.fill_random(calls::FillRandom { seed, pitch: part.pitch, factor, out: out.view() })
}
