//! Pure: admission by predicted peak ("Past-Future", ASPLOS'25, arXiv 2507.10150). The peak is the
//! most tokens that the pool will have to hold if every sequence runs as long as expected.

use std::collections::BTreeMap;

/// The tokens of a sequence, held and expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceForecast {
    /// Tokens that the sequence holds or is about to prefill.
    pub held: usize,
    /// Tokens that the sequence is still expected to produce.
    pub to_come: usize,
    /// The most tokens that the sequence will hold in cache groups with a window, in whole blocks,
    /// summed over these groups.
    pub windowed: usize,
}

/// Returns the most tokens that the sequences will hold at once, by prediction. Each sequence takes
/// whole blocks of `block` tokens in each of `full` cache groups with full attention.
///
/// The pool is fullest at a moment when some sequence ends. The sequences are sorted by their
/// expected tokens, most first. When the `i`-th sequence ends, only the first `i` sequences are
/// left. Each of them has grown by the number of tokens that the `i`-th sequence was expected to
/// produce.
pub fn predicted_peak(forecasts: &mut [SequenceForecast], full: usize, block: usize) -> usize {
    forecasts.sort_by_key(|forecast| std::cmp::Reverse(forecast.to_come));
    let (mut held, mut windowed) = (0, 0);
    let mut peak = 0;
    for (longer, forecast) in forecasts.iter().enumerate() {
        held += forecast.held.next_multiple_of(block);
        windowed += forecast.windowed;
        let grown = held + forecast.to_come.next_multiple_of(block) * (longer + 1);
        peak = peak.max(full * grown + windowed);
    }
    peak
}

/// Lengths of recent replies, grouped by the token limit that their requests set. A client that
/// asks for 20 tokens expects a different kind of reply from a client that asks for 4,000.
#[derive(Clone, Debug, Default)]
pub(super) struct ReplyLengths {
    all: Lengths,
    /// The key is `octave(limit)`, the limit's base-2 logarithm, rounded down.
    by_limit: BTreeMap<u32, Lengths>,
}

/// A histogram of reply lengths. The key of a bin is its `half_octave` index. Each bin has the
/// weighted number of its replies and the weighted sum of their tokens. Newer replies have larger
/// weights.
#[derive(Clone, Debug, Default)]
struct Lengths {
    bins: BTreeMap<u32, (f64, f64)>,
    replies: u32,
}

impl ReplyLengths {
    /// Minimum number of replies with a similar limit before their lengths are used.
    const ENOUGH: u32 = 8;

    pub(super) fn record(&mut self, limit: usize, tokens: usize) {
        self.all.record(tokens);
        self.by_limit.entry(octave(limit)).or_default().record(tokens);
    }

    /// Returns the number of further tokens that a sequence is expected to produce. The sequence
    /// has produced `produced` tokens and may produce `remaining` more. `limit` is the token limit
    /// of its request.
    ///
    /// Normally, the result is the mean length of the replies longer than `produced`, minus
    /// `produced`, and at least a tenth of `produced`. It uses replies with a similar limit, or all
    /// replies if fewer than `ENOUGH` had a similar limit. Without any replies, the result is
    /// `remaining`.
    ///
    /// While the pool is `busy`, the result is the 90th percentile of the lengths of replies longer
    /// than `produced`, minus `produced`. It uses only replies with a similar limit. If there are
    /// too few of them, the result is `remaining`.
    ///
    /// The result is always between 1 and `remaining`.
    pub(super) fn expected(&self, limit: usize, produced: usize, remaining: usize, busy: bool) -> usize {
        let of_limit = self.by_limit.get(&octave(limit)).filter(|lengths| lengths.replies >= Self::ENOUGH);
        if busy {
            let most = of_limit.and_then(|lengths| lengths.most_beyond(produced));
            return most.map_or(remaining, |most| most.saturating_sub(produced).clamp(1, remaining.max(1)));
        }
        if self.all.replies == 0 {
            return remaining;
        }
        let more = of_limit.unwrap_or(&self.all).mean_beyond(produced) - produced as f64;
        (more.max(produced as f64 * 0.1).round() as usize).clamp(1, remaining.max(1))
    }
}

impl Lengths {
    /// Each new reply multiplies the weights of all older replies by this factor.
    const KEPT: f64 = 0.95;

    fn record(&mut self, tokens: usize) {
        self.replies = self.replies.saturating_add(1);
        for (count, sum) in self.bins.values_mut() {
            *count *= Self::KEPT;
            *sum *= Self::KEPT;
        }
        let (count, sum) = self.bins.entry(half_octave(tokens)).or_default();
        (*count, *sum) = (*count + 1.0, *sum + tokens as f64);
    }

    /// If bins have at most this weight in total, all of their replies are too old to count.
    const WEIGHTLESS: f64 = 0.01;

    /// The bins above the bin of `produced`.
    fn beyond(&self, produced: usize) -> impl DoubleEndedIterator<Item = (f64, f64)> {
        let from = if produced == 0 { 0 } else { half_octave(produced) + 1 };
        self.bins.range(from..).map(|(_, bin)| *bin)
    }

    /// Returns the mean of the lengths in the bins above the bin of `produced`. Returns 0 if there
    /// were no such replies recently.
    fn mean_beyond(&self, produced: usize) -> f64 {
        let (count, sum) = self.beyond(produced).fold((0.0, 0.0), |all, bin| (all.0 + bin.0, all.1 + bin.1));
        if count > Self::WEIGHTLESS { sum / count } else { 0.0 }
    }

    /// Returns the mean length in the bin with the 90th percentile of the replies longer than
    /// `produced`. Returns `None` if there were no such replies recently.
    fn most_beyond(&self, produced: usize) -> Option<usize> {
        let all: f64 = self.beyond(produced).map(|(count, _)| count).sum();
        let mut above = 0.0;
        let most = self.beyond(produced).rev().find(|(count, _)| {
            above += count;
            above > 0.1 * all
        });
        most.filter(|_| all > Self::WEIGHTLESS).map(|(count, sum)| (sum / count).ceil() as usize)
    }
}

fn octave(tokens: usize) -> u32 {
    tokens.max(1).ilog2()
}

/// Returns the index of the bin for a length. An octave covers the lengths from one power of two to
/// the next. Its first bin has the lengths below 1.5 times the octave's smallest length, and its
/// second bin has the rest.
fn half_octave(tokens: usize) -> u32 {
    let octave = octave(tokens);
    octave * 2 + u32::from(tokens * 2 >= 3 << octave)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Grows all sequences token by token and returns the maximum.
    fn simulated(forecasts: &[SequenceForecast]) -> usize {
        let last = forecasts.iter().map(|o| o.to_come).max().unwrap_or(0);
        (0..=last)
            .map(|moment| forecasts.iter().filter(|o| o.to_come >= moment).map(|o| o.held + moment).sum())
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn the_predicted_peak_excludes_blocks_of_replies_that_end_earlier() {
        let forecast = |held, to_come| SequenceForecast { held, to_come, windowed: 0 };
        let mut forecasts = [forecast(100, 10), forecast(10, 100)];
        assert_eq!(predicted_peak(&mut forecasts, 1, 1), 130, "the peak is at the tenth token, not 110 + 110");
    }

    #[test]
    fn sliding_windows_bound_the_predicted_blocks_of_a_sequence() {
        let forecast = |held, to_come| SequenceForecast { held, to_come, windowed: 32 };
        let mut forecasts = [forecast(100, 10), forecast(10, 100)];
        assert_eq!(predicted_peak(&mut forecasts, 0, 1), 64, "without full attention, only the windows count");
        assert_eq!(predicted_peak(&mut forecasts, 2, 1), 2 * 130 + 64);
    }

    proptest! {
        #[test]
        fn the_prediction_matches_a_simulation(
            sequences in proptest::collection::vec((1usize..200, 0usize..200), 0..8),
        ) {
            let mut forecasts: Vec<_> = sequences.iter().map(|(held, to_come)| SequenceForecast { held: *held, to_come: *to_come, windowed: 0 }).collect();
            let seen = simulated(&forecasts);
            prop_assert_eq!(predicted_peak(&mut forecasts, 1, 1), seen);
            prop_assert!(predicted_peak(&mut forecasts, 1, 16) >= seen, "rounding up to blocks never lowers the peak");
        }
    }

    #[test]
    fn expected_reply_lengths_follow_earlier_replies_with_the_same_limit() {
        let mut lengths = ReplyLengths::default();
        assert_eq!(lengths.expected(500, 0, 500, false), 500, "no reply length is known yet");
        lengths.record(500, 40);
        lengths.record(500, 40);
        assert_eq!(lengths.expected(500, 0, 500, false), 40);
        assert_eq!(lengths.expected(500, 100, 400, false), 10, "the reply is longer than all known replies");
        assert_eq!(lengths.expected(500, 0, 500, true), 500, "too few reply lengths are known");
        (0..98).for_each(|reply| lengths.record(500, if reply % 5 == 0 { 200 } else { 40 }));
        assert_eq!(lengths.expected(500, 0, 500, true), 200);
        assert_eq!(lengths.expected(500, 0, 150, true), 150, "the expected length is limited to the maximum");
        assert_eq!(lengths.expected(500, 60, 440, true), 140);
        assert_eq!(lengths.expected(500, 300, 200, true), 200, "no known reply was that long");
        assert_eq!(
            lengths.expected(4000, 0, 4000, true),
            4000,
            "replies with other limits are not used for this limit"
        );
    }

    #[test]
    fn a_reply_that_exceeds_short_replies_is_expected_long() {
        let mut lengths = ReplyLengths::default();
        (0..50).for_each(|reply| lengths.record(4000, if reply % 5 == 0 { 900 } else { 20 }));
        let at_first = lengths.expected(4000, 0, 4000, false);
        assert!((100..300).contains(&at_first), "{at_first}");
        assert_eq!(lengths.expected(4000, 100, 3900, false), 800);
    }

    #[test]
    fn replies_of_one_limit_replace_other_replies_when_enough_exist() {
        let mut lengths = ReplyLengths::default();
        (0..20).for_each(|_| lengths.record(4000, 1000));
        assert_eq!(
            lengths.expected(600, 0, 600, false),
            600,
            "without replies of this limit, other replies are used, up to the maximum"
        );
        (0..8).for_each(|_| lengths.record(600, 30));
        assert_eq!(lengths.expected(520, 0, 520, false), 30);
        assert_eq!(
            lengths.expected(4000, 0, 4000, false),
            1000,
            "replies with other limits do not change the prediction"
        );
    }
}
