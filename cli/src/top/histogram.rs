//! Quantiles from buckets, as Prometheus computes them (`histogram_quantile`
//! of promql/quantile.go, classic buckets).

/// Cumulative counts of observations by upper bound. Without an infinite last bound, the histogram
/// counts as empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Bounds and counts, in ascending order.
    buckets: Vec<(f64, f64)>,
}

impl Histogram {
    /// Builds a histogram from bounds and the number of observations up to each bound.
    pub fn new(buckets: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let usable = |(bound, count): &(f64, f64)| (bound.is_finite() || *bound == f64::INFINITY) && count.is_finite();
        let mut buckets: Vec<_> = buckets.into_iter().filter(usable).collect();
        buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        // Merge series with the same bound.
        buckets.dedup_by(|next, kept| {
            let is_same = next.0 == kept.0;
            if is_same {
                kept.1 += next.1;
            }
            is_same
        });
        Histogram { buckets }
    }

    /// Returns the observations since `before`. If a count fell, the process restarted, and all
    /// observations are returned.
    pub fn since(&self, before: &Histogram) -> Histogram {
        let has_restarted = self.buckets.iter().any(|(bound, count)| *count < before.up_to(*bound));
        let since =
            |&(bound, count): &(f64, f64)| (bound, if has_restarted { count } else { count - before.up_to(bound) });
        Histogram { buckets: self.buckets.iter().map(since).collect() }
    }

    /// Returns the number of observations. 0 without an infinite bound.
    pub fn count(&self) -> f64 {
        self.buckets.last().filter(|(bound, _)| *bound == f64::INFINITY).map_or(0.0, |(_, count)| *count)
    }

    /// Returns the value that this share of all observations does not exceed. `None` without
    /// observations or without a finite bound.
    ///
    /// Observations are assumed to be spread evenly within a bucket. For a value above the last
    /// finite bound, returns that bound.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let all = self.count();
        if all <= 0.0 || self.buckets.len() < 2 {
            return None;
        }
        let rank = share.clamp(0.0, 1.0) * all;
        // A bucket that is read while the process updates it may have a lower count than the
        // preceding bucket. In that case, use the preceding bucket's count.
        let mut below = 0.0_f64;
        let mut lower = 0.0_f64;
        for (at, &(bound, count)) in self.buckets.iter().enumerate() {
            let count = count.max(below);
            if count >= rank && count > below {
                return Some(match bound {
                    f64::INFINITY => lower,
                    // The first bucket begins at 0, unless its bound is negative.
                    bound if at == 0 && bound <= 0.0 => bound,
                    bound => {
                        let part = (rank - below) / (count - below);
                        (lower * (1.0 - part) + bound * part).clamp(lower, bound)
                    }
                });
            }
            (below, lower) = (count, bound);
        }
        None
    }

    fn up_to(&self, bound: f64) -> f64 {
        self.buckets.iter().find(|(known, _)| *known == bound).map_or(0.0, |(_, count)| *count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_quantile_is_interpolated_in_its_bucket_as_in_prometheus() {
        let histogram = Histogram::new([(0.5, 30.0), (0.1, 10.0), (1.0, 40.0), (f64::INFINITY, 50.0)]);
        assert_eq!(histogram.count(), 50.0);
        // Values of Prometheus' histogram_quantile for the same buckets.
        for (share, value) in [(0.1, 0.05), (0.2, 0.1), (0.5, 0.4), (0.8, 1.0), (0.99, 1.0)] {
            let found = histogram.quantile(share).expect("there are observations");
            assert!((found - value).abs() < 1e-12, "{share}: {found}, expected {value}");
        }
        assert_eq!(histogram.quantile(0.7), Some(0.75));
    }

    #[test]
    fn a_histogram_without_observations_has_no_quantile() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        assert_eq!(Histogram::new([(1.0, 0.0), (f64::INFINITY, 0.0)]).quantile(0.5), None);
        assert_eq!(Histogram::new([(1.0, 3.0)]).quantile(0.5), None, "there is no bucket for all observations");
        assert_eq!(Histogram::new([(f64::INFINITY, 3.0)]).quantile(0.5), None, "there is no finite bound");
    }

    #[test]
    fn an_interval_is_a_difference_unless_the_process_restarted() {
        let before = Histogram::new([(1.0, 3.0), (f64::INFINITY, 4.0)]);
        let now = Histogram::new([(1.0, 5.0), (f64::INFINITY, 9.0)]);
        assert_eq!(now.since(&before), Histogram::new([(1.0, 2.0), (f64::INFINITY, 5.0)]));
        assert_eq!(before.since(&now), before);
    }

    proptest! {
        #[test]
        fn a_quantile_is_absent_or_within_its_buckets_bounds(
            buckets in prop::collection::vec((prop::num::f64::ANY, prop::num::f64::ANY), 0..6),
            share in 0.0..1.0,
        ) {
            let histogram = Histogram::new(buckets.into_iter().chain([(f64::INFINITY, 5.0)]));
            if let Some(found) = histogram.quantile(share) {
                let finite = histogram.buckets.iter().map(|(bound, _)| *bound).filter(|bound| bound.is_finite());
                let (least, most) = finite.fold((0.0_f64, 0.0_f64), |(least, most), at| (least.min(at), most.max(at)));
                prop_assert!((least..=most).contains(&found), "{found}");
            }
        }
    }
}
