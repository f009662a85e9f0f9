//! A random number generator that produces the same numbers for the same seed on every machine.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        ((u128::from(self.next()) * u128::from(end)) >> 64) as u32
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
        bytes
    }

    /// Returns a number above 0 and at most 1.
    pub fn share(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns an integer whose logarithm has a normal distribution with standard deviation
    /// `spread`. The median is `middle`, and all values are clamped to `least..=most`.
    pub fn lognormal(&mut self, middle: f64, spread: f64, least: usize, most: usize) -> usize {
        // Box and Muller 1958.
        let normal = (-2.0 * self.share().ln()).sqrt() * (std::f64::consts::TAU * self.share()).cos();
        ((middle * (spread * normal).exp()) as usize).clamp(least, most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_drawn_lengths_are_below_the_median() {
        let mut draw = Rng::new(7);
        let lengths: Vec<usize> = (0..4000).map(|_| draw.lognormal(600.0, 0.9, 50, 6000)).collect();
        let below = lengths.iter().filter(|length| **length < 600).count();
        assert!((1900..2100).contains(&below), "{below} of 4000");
        assert!(lengths.iter().all(|length| (50..=6000).contains(length)));
        assert!(lengths.iter().any(|length| *length > 3000), "the lengths have a long tail");
    }

    #[test]
    fn drawn_shares_are_above_zero_and_uniform() {
        let mut draw = Rng::new(1);
        let shares: Vec<f64> = (0..4000).map(|_| draw.share()).collect();
        assert!(shares.iter().all(|share| *share > 0.0 && *share <= 1.0));
        let mean = shares.iter().sum::<f64>() / 4000.0;
        assert!((0.48..0.52).contains(&mean), "{mean}");
    }
}
