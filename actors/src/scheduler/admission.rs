//! Admission by predicted peak ("Past-Future", ASPLOS'25, arXiv 2507.10150): the most tokens that the pool will have to
//! hold, if every sequence runs as long as expected.

/// A sequence's tokens, held and expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceForecast {
    /// Tokens that it holds or is about to prefill.
    pub held: usize,
    /// Tokens still expected.
    pub to_come: usize,
}

/// The most tokens held at once in the future, in whole blocks of `block` tokens per sequence.
///
/// The pool is fullest when some sequence ends. Sort the sequences by their expected tokens, most first. When the
/// `i`-th ends, the `i` longest are left, and each has grown by what the `i`-th still expected.
pub fn predicted_peak(forecasts: &mut [SequenceForecast], block: usize) -> usize {
    forecasts.sort_by_key(|forecast| std::cmp::Reverse(forecast.to_come));
    let mut held = 0;
    let mut peak = 0;
    for (longer, forecast) in forecasts.iter().enumerate() {
        held += forecast.held.next_multiple_of(block);
        peak = peak.max(held + forecast.to_come.next_multiple_of(block) * (longer + 1));
    }
    peak
}

/// The moving average of the number of tokens per answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AnswerLength {
    average: f64,
    answers: u32,
}

impl AnswerLength {
    /// The weight of the newest answer, once there are enough answers.
    const NEWEST: f64 = 0.1;

    pub(super) fn record(&mut self, tokens: usize) {
        self.answers += 1;
        let weight = Self::NEWEST.max(1.0 / f64::from(self.answers));
        self.average += (tokens as f64 - self.average) * weight;
    }

    /// Tokens expected of a sequence that has produced `produced` and may produce `remaining` more. While the pool is
    /// busy or no answer is known, that is `remaining`. Otherwise it is the average less `produced`, and at least a
    /// tenth of `produced`.
    pub(super) fn expected(&self, produced: usize, remaining: usize, busy: bool) -> usize {
        if busy || self.answers == 0 {
            return remaining;
        }
        let expected = (self.average - produced as f64).max(produced as f64 * 0.1).ceil() as usize;
        expected.clamp(1, remaining.max(1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Grows all sequences token by token and takes the maximum.
    fn simulated(forecasts: &[SequenceForecast]) -> usize {
        let last = forecasts.iter().map(|o| o.to_come).max().unwrap_or(0);
        (0..=last)
            .map(|moment| forecasts.iter().filter(|o| o.to_come >= moment).map(|o| o.held + moment).sum())
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn a_short_answer_makes_room_for_a_long_one() {
        let mut forecasts = [SequenceForecast { held: 100, to_come: 10 }, SequenceForecast { held: 10, to_come: 100 }];
        assert_eq!(predicted_peak(&mut forecasts, 1), 130, "at the tenth token, not 110 + 110");
    }

    proptest! {
        #[test]
        fn the_prediction_matches_a_simulation(
            sequences in proptest::collection::vec((1usize..200, 0usize..200), 0..8),
        ) {
            let mut forecasts: Vec<_> = sequences.iter().map(|(held, to_come)| SequenceForecast { held: *held, to_come: *to_come }).collect();
            let seen = simulated(&forecasts);
            prop_assert_eq!(predicted_peak(&mut forecasts, 1), seen);
            prop_assert!(predicted_peak(&mut forecasts, 16) >= seen, "whole blocks are never less");
        }
    }

    #[test]
    fn the_average_is_ignored_while_the_pool_is_busy() {
        let mut lengths = AnswerLength::default();
        assert_eq!(lengths.expected(0, 500, false), 500, "nothing is known yet");
        lengths.record(40);
        lengths.record(60);
        assert_eq!(lengths.expected(0, 500, false), 50);
        assert_eq!(lengths.expected(100, 400, false), 10, "it has outgrown the average");
        assert_eq!(lengths.expected(0, 500, true), 500);
    }
}
