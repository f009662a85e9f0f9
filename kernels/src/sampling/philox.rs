//! Philox4x32-10: random numbers as a function of a key and a counter.
//!
//! Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11.
//! There is no state to share or save: the number for a position does not depend on the
//! batch or on earlier requests.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns one block of four random words.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
        }
        let (high0, low0) = wide_product(MULTIPLIERS[0], counter[0]);
        let (high1, low1) = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// Returns a double in [0, 1) with 53 random bits, for the token at `position` of a
/// sequence with this `seed`.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [a, b, ..] = philox4x32([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn wide_product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        // Random123 1.14, tests/kat_vectors, "philox4x32 10".
        let zero = philox4x32([0; 4], [0; 2]);
        assert_eq!([0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8], zero);
        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!([0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd], ones);
        let pi = philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]);
        assert_eq!([0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1], pi);
    }

    #[test]
    fn uniform_numbers_fill_the_unit_interval_evenly() {
        let mut counts = [0u32; 16];
        for position in 0..16_000 {
            counts[(uniform(7, position) * 16.0) as usize] += 1;
        }
        // Expected 1,000 each; six standard deviations are 184.
        assert!(counts.iter().all(|&count| count.abs_diff(1000) < 184), "{counts:?}");
    }
}
