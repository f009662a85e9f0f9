//! The options of one row: numbers that the device reads, and the lists that belong to the row.

use std::fmt;

use crate::UnseenToken;

/// Maximum number of likeliest tokens that a row may request, which is the limit of OpenAI's API
/// and the default limit of vLLM.
pub const TOP_MAX: usize = 20;

/// Value of [`SampleRow::top`] that requests no log-probabilities.
pub const NO_REPORT: u32 = u32::MAX;

/// Word that marks a row without a given token.
pub(crate) const NONE_GIVEN: u32 = u32::MAX;

/// 32-bit words of a [`SampleRow`] on the device.
pub const ROW_WORDS: usize = 20;

/// Options for the choice of one row's token. The caller must have checked that each value is in
/// the range that its field documents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    /// Temperature, finite and at least 0, by which logits are divided. 0
    /// chooses the likeliest token.
    pub temperature: f64,
    /// Top-p: the likeliest tokens that together reach this probability are kept. Above 0.
    /// 1 means no limit.
    pub top_p: f64,
    /// Min-p: natural logarithm of the minimum probability, relative to the likeliest token. At
    /// most 0. -infinity means no limit.
    pub min_p_logarithm: f64,
    /// Presence penalty, subtracted once from the logit of each token produced so far.
    pub presence: f64,
    /// Frequency penalty, subtracted from a token's logit once for each time that
    /// the token was produced.
    pub frequency: f64,
    /// Seed, which together with `position` determines the random choice.
    pub seed: u64,
    /// Number of tokens produced so far.
    pub position: u64,
    /// Repetition penalty, above 0. For tokens of the prompt and the reply, positive logits are
    /// divided by it and negative logits are multiplied by it. 1 changes nothing.
    pub repetition: f32,
    /// Top-k: this many of the likeliest tokens are kept. 0 means no limit.
    pub top_k: u32,
    /// Number of likeliest tokens to report in addition to the chosen token's log-probability, at
    /// most [`TOP_MAX`]. [`NO_REPORT`] requests no report at all.
    pub top: u32,
    /// `true` for a padding row of a captured batch, from which no token is chosen.
    pub ignored: bool,
    /// The token that follows, if it is already known. This token is returned regardless of the
    /// other options, and only the row's report is computed.
    pub given: Option<u32>,
}

/// A greedy choice without limits, penalties or a report.
impl Default for SampleRow {
    fn default() -> Self {
        SampleRow {
            temperature: 0.0,
            top_p: 1.0,
            min_p_logarithm: f64::NEG_INFINITY,
            presence: 0.0,
            frequency: 0.0,
            seed: 0,
            position: 0,
            repetition: 1.0,
            top_k: 0,
            top: NO_REPORT,
            ignored: false,
            given: None,
        }
    }
}

impl SampleRow {
    /// Returns `true` if the likeliest token is chosen without a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Returns `true` if any penalty reads the produced tokens.
    pub fn penalizes(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    /// Returns the row in the layout of `SampleRow` in `kernels/cuda/include/sampling/request.cuh`.
    /// `mask` is the first word of the row's mask.
    pub(super) fn to_words(self, mask: u32) -> [u32; ROW_WORDS] {
        let doubles = [self.temperature, self.top_p, self.min_p_logarithm, self.presence, self.frequency];
        let halves = |long: u64| [long as u32, (long >> 32) as u32];
        let longs = doubles.map(f64::to_bits).into_iter().chain([self.seed, self.position]);
        let (ignored, given) = (u32::from(self.ignored), self.given.unwrap_or(NONE_GIVEN));
        let single = [self.repetition.to_bits(), self.top_k, self.top, mask, ignored, given];
        let mut words = longs.flat_map(halves).chain(single);
        std::array::from_fn(|_| words.next().expect("the buffer holds all words of a row"))
    }

    /// Returns the row and the first word of its mask. This is the inverse of `to_words`.
    pub(crate) fn from_words(words: &[u32; ROW_WORDS]) -> (Self, u32) {
        let long = |at: usize| u64::from(words[2 * at]) | u64::from(words[2 * at + 1]) << 32;
        let double = |at| f64::from_bits(long(at));
        let row = SampleRow {
            temperature: double(0),
            top_p: double(1),
            min_p_logarithm: double(2),
            presence: double(3),
            frequency: double(4),
            seed: long(5),
            position: long(6),
            repetition: f32::from_bits(words[14]),
            top_k: words[15],
            top: words[16],
            ignored: words[18] != 0,
            given: Some(words[19]).filter(|token| *token != NONE_GIVEN),
        };
        (row, words[17])
    }
}

/// The lists that belong to a row. Ids beyond the vocabulary are skipped, because the lists may
/// contain placeholders of pictures.
#[derive(Clone, Copy, Default)]
pub struct RowLists<'a> {
    /// One bit per token, in words of 32 bits: 1 if the token may be chosen. `None` allows all
    /// tokens.
    pub allowed: Option<&'a [u32]>,
    /// Tokens that must not be chosen.
    pub forbidden: &'a [u32],
    /// Tokens with a bias, each once.
    pub biased: &'a [u32],
    /// Biases of the tokens in `biased`, in the same order.
    pub biases: &'a [f32],
    /// The prompt's tokens, read only for a repetition penalty.
    pub prompt: &'a [u32],
    /// The tokens produced so far that the host has seen. This list is read only for penalties.
    pub produced: &'a [u32],
    /// A further produced token, which the previous step chooses and whose id the host has not
    /// seen.
    pub unseen: Option<UnseenToken>,
}

impl RowLists<'_> {
    /// Returns `true` if the token is chosen from changed logits instead of
    /// the row's original logits.
    pub fn changes(&self, row: &SampleRow) -> bool {
        self.allowed.is_some() || !self.forbidden.is_empty() || !self.biased.is_empty() || row.penalizes()
    }
}

/// Prints counts and never the tokens, which are the user's text.
impl fmt::Debug for RowLists<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowLists { allowed, forbidden, biased, prompt, produced, .. } = self;
        let masked = if allowed.is_some() { ", masked" } else { "" };
        let counts = [forbidden, biased, prompt, produced].map(|list| list.len());
        write!(formatter, "RowLists({counts:?} forbidden, biased, of the prompt and produced{masked})")
    }
}

/// Reason why no token was chosen from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// A logit is NaN or +infinity.
    NonFiniteLogits = 1,
    /// Every logit is -infinity, or every token is forbidden.
    NothingAllowed = 2,
    /// The row is padding of the batch.
    Ignored = 3,
}

impl Fault {
    /// Returns the fault that the device wrote, or `None` for 0.
    pub fn from_word(word: u32) -> Option<Self> {
        [Fault::NonFiniteLogits, Fault::NothingAllowed, Fault::Ignored].into_iter().find(|fault| *fault as u32 == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_row_round_trips_through_its_words() {
        let row = SampleRow {
            temperature: 0.7,
            top_p: 0.9,
            min_p_logarithm: -3.5,
            presence: 0.25,
            frequency: -1.5,
            seed: 0x0123_4567_89ab_cdef,
            position: 1 << 40,
            repetition: 1.1,
            top_k: 50,
            top: 5,
            ignored: true,
            given: Some(9),
        };
        assert_eq!((row, 7), SampleRow::from_words(&row.to_words(7)));
        let chosen = SampleRow { given: None, ..row };
        assert_eq!((chosen, 8), SampleRow::from_words(&chosen.to_words(8)));
        // The layout that the device code asserts: doubles, then 64-bit integers, then words.
        let words = row.to_words(7);
        assert_eq!(words[10..14], [0x89ab_cdef, 0x0123_4567, 0, 1 << 8]);
        assert_eq!(words[14..], [1.1f32.to_bits(), 50, 5, 7, 1, 9]);
    }
}
