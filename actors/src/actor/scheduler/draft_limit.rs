//! Pure: how many tokens are drafted for each sequence, by the tokens that steps have produced in
//! their time. This is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066), but measured and
//! not modelled: it includes acceptance, the costs of larger steps, and the wait for the host.

use std::collections::BTreeMap;

use bursar_model::DRAFTS_OF_STEP;

/// Decoding steps for which one limit is measured.
const WINDOW: u32 = 16;

/// A limit with this share of the best goodput counts as equally good. Larger limits are preferred,
/// because drafts that do not exist cost nothing.
const AS_GOOD: f64 = 0.98;

/// Windows until a limit that has lost is tried again. The number doubles with each loss in a row.
const RETRY: u64 = 4;

/// Most doublings of [`RETRY`].
const DOUBLINGS_MAX: u32 = 6;

/// The limit of drafts for each sequence, for batches of each size.
#[derive(Clone, Debug)]
pub(super) struct DraftLimit {
    most: usize,
    /// By the logarithm of the number of decoding sequences.
    batches: BTreeMap<u32, Batches>,
}

/// Measurements for batches of about the same size.
#[derive(Clone, Debug)]
struct Batches {
    /// The most drafts, and then smaller numbers down to 0.
    choices: Vec<LimitChoice>,
    /// The index of the limit that is used now.
    current: usize,
    /// Steps left in the current window.
    steps_left: u32,
    /// Tokens of a sequence in the current window, and its time in µs.
    tokens: f64,
    micros: f64,
    /// The number of windows that have ended.
    windows: u64,
}

#[derive(Clone, Copy, Debug)]
struct LimitChoice {
    drafts: usize,
    /// Tokens of a sequence per µs, if measured.
    goodput: Option<f64>,
    /// The window from which on the limit is tried again.
    retry_at: u64,
    losses: u32,
}

impl DraftLimit {
    /// Limits of at most `most` drafts.
    pub fn new(most: usize) -> Self {
        DraftLimit { most, batches: BTreeMap::new() }
    }

    /// The most drafts for each of `decoding` sequences.
    pub fn of(&self, decoding: usize) -> usize {
        let batches = decoding.checked_ilog2().and_then(|size| self.batches.get(&size));
        batches.map_or(self.most, |batches| batches.choices[batches.current].drafts)
    }

    /// Learns from a step that only decoded. The step was planned for a number of decoding sequences
    /// with a limit. Each sequence got `tokens` tokens on average in the `micros` µs since the step
    /// before.
    pub fn learn(&mut self, (decoding, limit): (usize, usize), tokens: f64, micros: u64) {
        let Some(size) = decoding.checked_ilog2().filter(|_| self.most > 0 && micros > 0) else { return };
        // In larger batches, all sequences together have so few drafts that larger limits are equal.
        let most = self.most.min(DRAFTS_OF_STEP >> size).max(1);
        let batches = self.batches.entry(size).or_insert_with(|| Batches::new(most));
        let current = batches.choices[batches.current].drafts;
        if limit.min(most) != current {
            // The step was planned before the limit changed.
            return;
        }
        batches.tokens += tokens;
        batches.micros += micros as f64;
        batches.steps_left -= 1;
        if batches.steps_left == 0 {
            batches.end_window();
        }
    }
}

impl Batches {
    fn new(most: usize) -> Self {
        let smaller = (0..most.ilog2() + 1).rev().map(|power| 1 << power).filter(|drafts| *drafts < most);
        let choice = |drafts| LimitChoice { drafts, goodput: None, retry_at: 0, losses: 0 };
        let choices = std::iter::once(most).chain(smaller).chain([0]).map(choice).collect();
        Batches { choices, current: 0, steps_left: WINDOW, tokens: 0.0, micros: 0.0, windows: 0 }
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
        if goodput(current) < best * AS_GOOD {
            current.retry_at = self.windows + (RETRY << current.losses.min(DOUBLINGS_MAX));
            current.losses += 1;
        } else {
            current.losses = 0;
        }
        let is_due = |choice: &LimitChoice| {
            choice.goodput.is_none() || goodput(choice) < best * AS_GOOD && choice.retry_at <= self.windows
        };
        let due = self.choices.iter().position(is_due);
        let as_good = || self.choices.iter().position(|choice| goodput(choice) >= best * AS_GOOD);
        self.current = due.or_else(as_good).unwrap_or(0);
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
            let drafts = limit.of(decoding);
            *counts.entry(drafts).or_default() += 1;
            let (tokens, micros) = step(drafts);
            limit.learn((decoding, drafts), tokens as f64, micros);
        }
        counts
    }

    #[test]
    fn the_number_of_drafts_with_the_most_tokens_in_a_time_is_used() {
        // A step takes 1 ms and 0.1 ms for each draft. The first drafts are accepted.
        for (accepted, best) in [(0, 0), (1, 1), (2, 2), (4, 4)] {
            let mut limit = DraftLimit::new(4);
            let counts = run(&mut limit, 8, 10_000, |drafts| (1 + drafts.min(accepted), 1000 + 100 * drafts as u64));
            assert_eq!(counts.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 4], "each is tried");
            assert!(counts[&best] > 9000, "{accepted} accepted drafts: {counts:?}");
        }
    }

    #[test]
    fn a_number_that_begins_to_pay_is_found_and_batches_of_other_sizes_are_separate() {
        let mut limit = DraftLimit::new(2);
        run(&mut limit, 4, 2000, |drafts| (1, 1000 + 100 * drafts as u64));
        assert_eq!((limit.of(4), limit.of(7), limit.of(8)), (0, 0, 2));
        let counts = run(&mut limit, 4, 6000, |drafts| (1 + drafts, 1000 + 100 * drafts as u64));
        assert!(counts[&2] > 4000 && limit.of(4) == 2, "{counts:?}");
        assert_eq!(limit.of(0), 2, "nothing decodes yet");
    }

    #[test]
    fn equal_numbers_of_tokens_leave_the_largest_limit() {
        // Prompt lookup that finds nothing.
        let mut limit = DraftLimit::new(4);
        let counts = run(&mut limit, 1, 1000, |_| (1, 1000));
        assert!(counts[&4] > 900, "{counts:?}");
        assert_eq!(DraftLimit::new(0).of(3), 0);
    }
}
