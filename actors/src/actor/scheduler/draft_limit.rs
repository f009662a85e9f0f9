//! Pure: the number of drafts per sequence, chosen by measured goodput (tokens per second).
//! SmartSpec (Liu et al. 2024, arXiv 2406.14066) models goodput. This module measures goodput, so
//! the result includes the acceptance rate, the cost of larger steps, and the wait for the host.

use std::collections::BTreeMap;

use bursar_model::DRAFTS_OF_STEP;

/// Decoding steps for which one limit is measured.
const WINDOW: u32 = 16;

/// Limits with at least this share of the best goodput are treated as equal, and the largest of
/// them is used: if prompt lookup finds nothing, a high limit costs nothing.
const EQUAL_GOODPUT: f64 = 0.98;

/// Windows before a slower limit is measured again. The number doubles each time that the limit is
/// slower again, at most [`DOUBLINGS_MAX`] times.
const RETRY: u64 = 4;

/// Maximum number of times that [`RETRY`] doubles.
const DOUBLINGS_MAX: u32 = 6;

/// The limit of drafts for each sequence, for batches of each size.
#[derive(Clone, Debug)]
pub(super) struct DraftLimit {
    drafts_max: usize,
    /// Keyed by floor(log2(decoding sequences)).
    sizes: BTreeMap<u32, SizeMeasurements>,
}

/// Measurements for batches of about the same size.
#[derive(Clone, Debug)]
struct SizeMeasurements {
    /// The limits that are compared, from the maximum down to 0.
    choices: Vec<LimitChoice>,
    /// The index of the limit that is used now.
    current: usize,
    /// Steps left in the current window.
    steps_left: u32,
    /// Sums over the current window: average tokens per sequence, and durations of steps in µs.
    tokens: f64,
    micros: f64,
    /// The number of windows that have ended.
    windows: u64,
}

#[derive(Clone, Copy, Debug)]
struct LimitChoice {
    drafts: usize,
    /// Average tokens per sequence and per µs, if measured.
    goodput: Option<f64>,
    /// The first window in which the limit may be measured again.
    retry_at: u64,
    losses: u32,
}

impl DraftLimit {
    /// Limits of at most `drafts_max` drafts.
    pub fn new(drafts_max: usize) -> Self {
        DraftLimit { drafts_max, sizes: BTreeMap::new() }
    }

    /// Maximum number of drafts for each of `decoding` sequences.
    pub fn drafts_for(&self, decoding: usize) -> usize {
        let measured = decoding.checked_ilog2().and_then(|size| self.sizes.get(&size));
        measured.map_or(self.drafts_max, |measured| measured.choices[measured.current].drafts)
    }

    /// Learns from a step that only decoded. The step was planned for `decoding` sequences with up
    /// to `limit` drafts each. Each sequence got `tokens` tokens on average in the `micros` µs
    /// since the step before.
    pub fn learn(&mut self, (decoding, limit): (usize, usize), tokens: f64, micros: u64) {
        let Some(size) = decoding.checked_ilog2().filter(|_| self.drafts_max > 0 && micros > 0) else { return };
        // The drafts of a step are divided among its sequences. Limits above the share of one
        // sequence are equal.
        let drafts_max = self.drafts_max.min(DRAFTS_OF_STEP >> size).max(1);
        let measured = self.sizes.entry(size).or_insert_with(|| SizeMeasurements::new(drafts_max));
        let current = measured.choices[measured.current].drafts;
        if limit.min(drafts_max) != current {
            // The step was planned before the limit changed.
            return;
        }
        measured.tokens += tokens;
        measured.micros += micros as f64;
        measured.steps_left -= 1;
        if measured.steps_left == 0 {
            measured.end_window();
        }
    }
}

impl SizeMeasurements {
    fn new(drafts_max: usize) -> Self {
        let smaller = (0..drafts_max.ilog2() + 1).rev().map(|power| 1 << power).filter(|drafts| *drafts < drafts_max);
        let choice = |drafts| LimitChoice { drafts, goodput: None, retry_at: 0, losses: 0 };
        let choices = std::iter::once(drafts_max).chain(smaller).chain([0]).map(choice).collect();
        SizeMeasurements { choices, current: 0, steps_left: WINDOW, tokens: 0.0, micros: 0.0, windows: 0 }
    }

    /// Records the goodput of the current limit and chooses the limit of the next window.
    fn end_window(&mut self) {
        self.windows += 1;
        let seen = self.tokens / self.micros;
        let current = &mut self.choices[self.current];
        current.goodput = Some(current.goodput.map_or(seen, |before| f64::midpoint(before, seen)));
        let goodput = |choice: &LimitChoice| choice.goodput.unwrap_or(0.0);
        let best = self.choices.iter().map(goodput).fold(0.0, f64::max);
        let current = &mut self.choices[self.current];
        if goodput(current) < best * EQUAL_GOODPUT {
            current.retry_at = self.windows + (RETRY << current.losses.min(DOUBLINGS_MAX));
            current.losses += 1;
        } else {
            current.losses = 0;
        }
        let is_due = |choice: &LimitChoice| {
            choice.goodput.is_none() || goodput(choice) < best * EQUAL_GOODPUT && choice.retry_at <= self.windows
        };
        let due = self.choices.iter().position(is_due);
        let equal = || self.choices.iter().position(|choice| goodput(choice) >= best * EQUAL_GOODPUT);
        self.current = due.or_else(equal).unwrap_or(0);
        (self.steps_left, self.tokens, self.micros) = (WINDOW, 0.0, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `steps` steps of `decoding` sequences. `step` gives the tokens of a sequence and the µs
    /// for a number of drafts. Returns the number of steps with each number of drafts.
    fn run(
        limit: &mut DraftLimit,
        decoding: usize,
        steps: usize,
        step: impl Fn(usize) -> (usize, u64),
    ) -> BTreeMap<usize, usize> {
        let mut counts = BTreeMap::new();
        for _ in 0..steps {
            let drafts = limit.drafts_for(decoding);
            *counts.entry(drafts).or_default() += 1;
            let (tokens, micros) = step(drafts);
            limit.learn((decoding, drafts), tokens as f64, micros);
        }
        counts
    }

    #[test]
    fn the_draft_count_with_the_best_goodput_is_used() {
        // A step takes 1 ms and 0.1 ms for each draft. The first drafts are accepted.
        for (accepted, best) in [(0, 0), (1, 1), (2, 2), (4, 4)] {
            let mut limit = DraftLimit::new(4);
            let counts = run(&mut limit, 8, 10_000, |drafts| (1 + drafts.min(accepted), 1000 + 100 * drafts as u64));
            assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 4], "each draft count is measured");
            assert!(counts[&best] > 9000, "{accepted} accepted drafts: {counts:?}");
        }
    }

    #[test]
    fn the_draft_limit_adapts_separately_for_each_batch_size() {
        let mut limit = DraftLimit::new(2);
        run(&mut limit, 4, 2000, |drafts| (1, 1000 + 100 * drafts as u64));
        assert_eq!((limit.drafts_for(4), limit.drafts_for(7), limit.drafts_for(8)), (0, 0, 2));
        let counts = run(&mut limit, 4, 6000, |drafts| (1 + drafts, 1000 + 100 * drafts as u64));
        assert!(counts[&2] > 4000 && limit.drafts_for(4) == 2, "{counts:?}");
        assert_eq!(limit.drafts_for(0), 2, "no sequence decodes yet");
    }

    #[test]
    fn equal_goodput_keeps_the_largest_limit() {
        // As with prompt lookup that finds nothing, the limit changes neither tokens nor time.
        let mut limit = DraftLimit::new(4);
        let counts = run(&mut limit, 1, 1000, |_| (1, 1000));
        assert!(counts[&4] > 900, "{counts:?}");
        assert_eq!(DraftLimit::new(0).drafts_for(3), 0);
    }
}
