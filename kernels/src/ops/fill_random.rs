//! Random numbers in place: weights of a model whose values do not matter, without a file and without a copy of them.
//!
//! Every backend draws the same bits from the same seed. In 64-bit whole numbers that wrap, element `i` from 0 is
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
//! The first four lines are SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) at
//! its `i`-th step, so that an element needs no other. Four uniform numbers added have the bell shape of Irwin and Hall,
//! cut off at 3.46 deviations: that of a normal distribution as far as a weight is concerned. 37837.227237 is the
//! deviation of their sum, the root of `4 * (65536^2 - 1) / 12`.

use crate::{Backend, KernelError, Tensor};

use super::check;

/// The deviation of the sum of four numbers that are uniform over 16 bits.
const SUM_DEVIATION: f64 = 37_837.227_237;

/// What a backend is asked to draw.
#[non_exhaustive]
pub struct Call<'a> {
    /// Equal seeds give equal numbers.
    pub seed: u64,
    /// What the whole number of each element is multiplied by: the wanted deviation over that of the sum.
    pub factor: f32,
    /// Contiguous, floating point.
    pub out: Tensor<'a>,
}

/// Fills `out` with numbers around zero whose standard deviation is `deviation`: how random weights get to their place,
/// outside any pass.
///
/// # Errors
/// `out` is not of a type that the target keeps weights as, or has gaps between its rows.
pub fn fill_random<B: Backend>(
    backend: &B,
    seed: u64,
    deviation: f32,
    out: &mut Tensor<'_>,
) -> Result<(), KernelError> {
    const OP: &str = "fill_random";
    check::writable(OP, "out", out);
    check::weight(OP, "out", out, backend.target())?;
    check::holds(out.is_contiguous(), OP, "out", out, "contiguous rows")?;
    let factor = (f64::from(deviation) / SUM_DEVIATION) as f32;
    backend.fill_random(Call { seed, factor, out: out.view() })
}
