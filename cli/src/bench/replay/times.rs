//! Pure: the times of a request, and their mean and quantiles.

use std::time::Duration;

use serde::Serialize;

/// The times of an answered request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Time to the first token.
    pub first: Duration,
    /// Times from each token to the next, as they reached the caller.
    pub intervals: Vec<Duration>,
    /// Time to the last token.
    pub whole: Duration,
}

/// Mean, median and 99th percentile, in milliseconds. `None` if there are no times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeSummary {
    pub count: usize,
    pub mean: Option<f64>,
    pub p50: Option<f64>,
    pub p99: Option<f64>,
}

impl TimeSummary {
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let at = |share| of_sorted(&times, share).map(milliseconds);
        let count = times.len();
        let mean = (count > 0).then(|| milliseconds(times.iter().sum()) / count as f64);
        TimeSummary { count, mean, p50: at(0.5), p99: at(0.99) }
    }
}

/// Returns the quantile for `share`, by the nearest rank.
pub fn quantile(times: &[Duration], share: f64) -> Option<Duration> {
    let mut times = times.to_vec();
    times.sort_unstable();
    of_sorted(&times, share)
}

fn of_sorted(times: &[Duration], share: f64) -> Option<Duration> {
    let last = times.len().checked_sub(1)?;
    Some(times[(last as f64 * share).round() as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_use_the_nearest_rank() {
        let times: Vec<Duration> = (1..=101).map(Duration::from_millis).collect();
        assert_eq!(quantile(&times, 0.99), Some(Duration::from_millis(100)));
        assert_eq!(quantile(&times, 0.5), Some(Duration::from_millis(51)));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
