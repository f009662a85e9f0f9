//! Random routers that prefer some experts by Zipf's law, as the routers of trained
//! mixtures do for text.

/// The skew of a random router, which does not choose all experts equally often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingSkew {
    /// Number of experts that each row chooses.
    pub top: usize,
    /// The expert of rank `r` is chosen by rows in proportion to `r^-exponent`. With 0, all experts
    /// are chosen equally often.
    pub exponent: f32,
}

/// The largest fraction of rows that can choose one expert. A logit that is above its mean in half
/// of all rows exceeds a higher threshold in less than half of the rows, however large the logit's
/// deviation is.
const LARGEST_SHARE: f64 = 0.45;

impl RoutingSkew {
    /// The standard deviation of each expert's logits, for a router of `experts` experts. Each
    /// expert's popularity rank is drawn from `seed`.
    ///
    /// A row chooses the experts whose logits exceed a threshold. The threshold is similar for all
    /// rows, because the same number of logits exceeds it in each row. For a logit with mean zero,
    /// the deviation determines how often the logit exceeds the threshold.
    pub fn deviations(&self, experts: usize, seed: u64) -> Vec<f32> {
        let shares = self.shares(experts);
        let mut ranked: Vec<usize> = (0..experts).collect();
        ranked.sort_by_key(|expert| *blake3::hash(&[seed.to_le_bytes(), expert.to_le_bytes()].concat()).as_bytes());
        let mut deviations = vec![0.0; experts];
        for (expert, share) in ranked.into_iter().zip(shares) {
            deviations[expert] = (1.0 / deviations_above(share)) as f32;
        }
        deviations
    }

    /// The intended share of rows for the expert of each popularity rank. The shares add up to
    /// `top`, as far as [`LARGEST_SHARE`] allows.
    fn shares(&self, experts: usize) -> Vec<f64> {
        let of_scale = |scale: f64| {
            let share = move |rank: usize| (scale * (rank as f64).powf(-f64::from(self.exponent))).min(LARGEST_SHARE);
            (1..=experts).map(share)
        };
        let (mut low, mut high) = (0.0, self.top as f64 * (experts as f64).powf(f64::from(self.exponent)));
        for _ in 0..64 {
            let middle = (low + high) / 2.0;
            if of_scale(middle).sum::<f64>() < self.top as f64 { low = middle } else { high = middle }
        }
        of_scale(low).collect()
    }
}

/// The number of standard deviations above the mean that a normally distributed number exceeds with
/// probability `share`. The error is less than 0.01 (Tukey's lambda distribution, which is nearly
/// normal for the shape 0.14).
fn deviations_above(share: f64) -> f64 {
    4.91 * ((1.0 - share).powf(0.14) - share.powf(0.14))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_fall_by_zipfs_law_and_are_as_many_as_a_row_takes() {
        let shares = RoutingSkew { top: 8, exponent: 1.0 }.shares(128);
        assert!((shares.iter().sum::<f64>() - 8.0).abs() < 1e-9);
        let largest = shares.iter().filter(|share| **share == LARGEST_SHARE).count();
        assert!((1..=8).contains(&largest), "the largest share occurs {largest} times; expected 1 to 8");
        assert!((shares[63] / shares[127] - 2.0).abs() < 1e-9, "an expert of twice the rank has half the share");
        let even = RoutingSkew { top: 8, exponent: 0.0 }.shares(128);
        assert!(even.iter().all(|share| (share - 1.0 / 16.0).abs() < 1e-9));
    }

    #[test]
    fn a_share_is_that_of_a_normal_distribution() {
        for (share, expected) in [(0.45, 0.1257), (0.1, 1.2816), (0.0228, 2.0), (0.005, 2.5758)] {
            assert!((deviations_above(share) - expected).abs() < 0.01, "{share}: {}", deviations_above(share));
        }
    }

    /// An approximately normally distributed number, derived from `number`.
    fn drawn(number: u64) -> f64 {
        let hash = blake3::hash(&number.to_le_bytes());
        hash.as_bytes()[..12].iter().map(|byte| f64::from(*byte) / 255.0).sum::<f64>() - 6.0
    }

    #[test]
    fn rows_that_share_nothing_choose_experts_by_zipfs_law() {
        let (experts, columns, rows, skew) = (64, 48, 1500, RoutingSkew { top: 8, exponent: 1.0 });
        let deviations = skew.deviations(experts, 5);
        let router: Vec<f64> =
            (0..experts * columns).map(|at| drawn(at as u64) * f64::from(deviations[at / columns])).collect();
        let mut chosen = vec![0.0; experts];
        for row in 0..rows {
            let x: Vec<f64> = (0..columns).map(|column| drawn((1 << 40) + (row * columns + column) as u64)).collect();
            let logit =
                |expert: usize| router[expert * columns..][..columns].iter().zip(&x).map(|(a, b)| a * b).sum::<f64>();
            let logits: Vec<f64> = (0..experts).map(logit).collect();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|one, other| logits[*other].total_cmp(&logits[*one]));
            order[..8].iter().for_each(|expert| chosen[*expert] += 1.0 / rows as f64);
        }
        // Experts in the order of their ranks: the largest deviation first.
        let mut ranked: Vec<usize> = (0..experts).collect();
        ranked.sort_by(|one, other| deviations[*other].total_cmp(&deviations[*one]));
        let shares = skew.shares(experts);
        for quarter in 0..4 {
            let of = |rank: usize| quarter * 16 + rank;
            let found: f64 = (0..16).map(|rank| chosen[ranked[of(rank)]]).sum();
            let expected: f64 = (0..16).map(|rank| shares[of(rank)]).sum();
            assert!(
                (found / expected - 1.0).abs() < 0.25,
                "ranks from {}: share ratio {found}; expected {expected}",
                of(0)
            );
        }
    }

    #[test]
    fn seeds_give_experts_other_ranks() {
        let skew = RoutingSkew { top: 2, exponent: 1.0 };
        let [one, other] = [1, 2].map(|seed| skew.deviations(16, seed));
        assert_eq!(one, skew.deviations(16, 1));
        assert_ne!(one, other);
        let sorted = |mut deviations: Vec<f32>| {
            deviations.sort_by(f32::total_cmp);
            deviations
        };
        assert_eq!(sorted(one), sorted(other));
    }
}
