//! Random numbers in place; see [`crate::ops::fill_random`] for their definition.

use std::slice;

use half::{bf16, f16};

use super::{memory::start_of, threads::Threads};
use crate::{
    DType, E4m3, Element,
    calls::{FillRandom, STEP},
};

/// Elements that a thread draws at a time.
const PIECE: usize = 1 << 14;

pub(super) fn fill_random(threads: &Threads, call: FillRandom<'_>) {
    match call.out.dtype() {
        DType::F32 => draw::<f32>(threads, &call, |number| number),
        DType::F16 => draw(threads, &call, f16::from_f32),
        DType::BF16 => draw(threads, &call, bf16::from_f32),
        DType::F8E4M3 => draw(threads, &call, E4m3::from_f32),
        DType::U32 | DType::U8 | DType::U4 => unreachable!("the type was checked to be floating-point"),
    }
}

fn draw<E: Element>(threads: &Threads, call: &FillRandom<'_>, narrow: impl Fn(f32) -> E + Sync) {
    let (start, count) = (start_of::<E>(&call.out) as usize, call.out.shape().elements());
    let columns = call.out.columns();
    threads.share(count.div_ceil(PIECE), count, |_, piece| {
        let first = piece * PIECE;
        let length = PIECE.min(count - first);
        // SAFETY: the op layer borrows `out` exclusively, and `out` is contiguous. Each piece is
        // one item, so no two threads write the same element.
        let out = unsafe { slice::from_raw_parts_mut((start as *mut E).add(first), length) };
        for (index, out) in out.iter_mut().enumerate() {
            let at = first + index;
            // Avoids the divisions where possible, because they take longer than everything else.
            let place = if columns == call.pitch { at } else { at / columns * call.pitch + at % columns };
            *out = narrow(sum(call.seed, place as u64) as f32 * call.factor);
        }
    });
}

/// The integer sum for element `index`, from -131070 to 131070.
fn sum(seed: u64, index: u64) -> i32 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(STEP));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let quarter = |place: u32| (z >> (16 * place)) as i32 & 0xffff;
    quarter(0) + quarter(1) + quarter(2) + quarter(3) - 131_070
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of SplitMix64 with the seed 1234567, as printed by its authors' C code.
    const KNOWN: [u64; 3] = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];

    #[test]
    fn random_integers_match_splitmix() {
        for (index, known) in KNOWN.into_iter().enumerate() {
            let quarters: i64 = (0..4).map(|place| (known >> (16 * place)) as i64 & 0xffff).sum();
            assert_eq!(i64::from(sum(1_234_567, index as u64)), quarters - 131_070);
        }
    }
}
