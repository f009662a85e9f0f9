//! Layouts of a packed batch and of its report, in words.

use std::ops::Range;

use super::row::{ROW_WORDS, TOP_MAX};

/// Maximum number of tokens in a row's list of biases, or of forbidden tokens.
pub const LISTED_MAX: usize = 1024;

/// The kinds of lists that belong to rows, in the order of the device code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleList {
    /// Tokens that must not be chosen.
    Forbidden,
    /// Tokens with a bias, each once.
    Biased,
    /// The bias of each biased token, f32.
    Biases,
    Prompt,
    /// The tokens produced so far.
    Produced,
}

impl SampleList {
    /// All kinds, in the order in which their starts are laid out.
    pub const ALL: [SampleList; 5] =
        [SampleList::Forbidden, SampleList::Biased, SampleList::Biases, SampleList::Prompt, SampleList::Produced];
}

/// Positions of the parts of a batch, in words:
///
/// 1. [`ROW_WORDS`] for each row;
/// 2. for each [kind of lists](SampleList) `[rows + 1]`: the first word of each row's list, and the
///    end of the last list;
/// 3. the lists and the masks, in any order. A row refers to its mask by the position of the mask's
///    first word.
///
/// The positions of parts 1 and 2 depend only on the number of rows. A captured step therefore
/// finds these parts of each later batch at the same positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLayout {
    pub rows: usize,
    /// Tokens per row of logits.
    pub vocabulary: usize,
}

impl SampleLayout {
    /// Returns the range of words that contain the starts of the rows' lists of one kind, and the
    /// end of the last list.
    pub fn starts(&self, list: SampleList) -> Range<usize> {
        let first = self.rows * ROW_WORDS + list as usize * (self.rows + 1);
        first..first + self.rows + 1
    }

    /// Returns the first word of the lists.
    pub fn lists(&self) -> usize {
        self.starts(SampleList::Produced).end
    }

    pub fn mask_words(&self) -> usize {
        self.vocabulary.div_ceil(u32::BITS as usize)
    }

    /// Returns the maximum number of words of a batch. Every row may use every option, and may have
    /// up to `past_tokens` tokens of prompt and reply together.
    pub fn words_max(&self, past_tokens: usize) -> usize {
        self.lists() + self.rows * (3 * LISTED_MAX + past_tokens + self.mask_words())
    }

    /// Returns the number of words of a report: [faults](super::Fault) `[rows]`,
    /// log-probabilities of the chosen tokens `[rows]` f32, the likeliest tokens
    /// `[rows, TOP_MAX]` and their log-probabilities `[rows, TOP_MAX]` f32. If no row requests
    /// the likeliest tokens, the words [before them](Self::report_words_without_top) suffice.
    pub fn report_words(&self) -> usize {
        self.rows * (2 + 2 * TOP_MAX)
    }

    /// Returns the number of words of a report before the likeliest tokens.
    pub fn report_words_without_top(&self) -> usize {
        2 * self.rows
    }

    /// Returns the first word of each part of a report, in order.
    pub(crate) fn report_parts(&self) -> [usize; 4] {
        let rows = self.rows;
        [0, rows, 2 * rows, (2 + TOP_MAX) * rows]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_starts_are_consecutive_and_precede_the_lists() {
        let layout = SampleLayout { rows: 3, vocabulary: 40 };
        let starts = SampleList::ALL.map(|list| layout.starts(list));
        assert_eq!(starts, [60..64, 64..68, 68..72, 72..76, 76..80]);
        assert_eq!((layout.lists(), layout.mask_words()), (80, 2));
        assert_eq!(layout.words_max(7), 80 + 3 * (3 * LISTED_MAX + 7 + 2));
        assert_eq!((layout.report_words_without_top(), layout.report_words()), (6, 6 + 3 * 40));
    }
}
