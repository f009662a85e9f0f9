//! The layout of a batch: what is asked of all rows of a step as one piece of words, and what is reported of them.

use std::ops::Range;

use super::row::{ROW_WORDS, TOP_MAX};

/// Tokens of a row's list of biases, or of the list of those that may not follow, at most.
pub const LISTED_MAX: usize = 1024;

/// A kind of lists that go with rows. The device code has the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleList {
    /// Tokens that may not follow.
    Forbidden,
    /// Tokens with a bias, each once.
    Biased,
    /// f32, as many as the row's biased tokens.
    Biases,
    /// The prompt.
    Prompt,
    /// What was produced.
    Produced,
}

impl SampleList {
    /// In the order in which it is laid out where they begin.
    pub const ALL: [SampleList; 5] =
        [SampleList::Forbidden, SampleList::Biased, SampleList::Biases, SampleList::Prompt, SampleList::Produced];
}

/// Where everything lies among a batch's words:
///
/// 1. [`ROW_WORDS`] for each row;
/// 2. for each [kind of lists](SampleList) `[rows + 1]`: where each row's begins among all words, and where the last ends;
/// 3. the lists, and the masks that rows name by their first word, in any order.
///
/// It depends on the sizes alone, so that a captured step finds the next one's where this one's were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLayout {
    /// How many rows there are.
    pub rows: usize,
    /// Tokens of a row of logits.
    pub vocabulary: usize,
}

impl SampleLayout {
    /// Where it stands where the rows' lists of a kind begin and end.
    pub fn starts(&self, list: SampleList) -> Range<usize> {
        let first = self.rows * ROW_WORDS + list as usize * (self.rows + 1);
        first..first + self.rows + 1
    }

    /// The first word of the lists.
    pub fn lists(&self) -> usize {
        self.starts(SampleList::Produced).end
    }

    /// Words of a mask.
    pub fn mask_words(&self) -> usize {
        self.vocabulary.div_ceil(u32::BITS as usize)
    }

    /// Words of a batch whose every row asks for all there is, with prompts and what was produced of `past_tokens` together.
    pub fn words_max(&self, past_tokens: usize) -> usize {
        self.lists() + self.rows * (3 * LISTED_MAX + past_tokens + self.mask_words())
    }

    /// Words of a report: [faults](super::Fault) `[rows]`, log-probabilities of what was chosen `[rows]` f32, the likeliest
    /// `[rows, TOP_MAX]`, their log-probabilities `[rows, TOP_MAX]` f32. Where nobody asks for the likeliest, the words
    /// [before them](Self::report_words_without_top) say all.
    pub fn report_words(&self) -> usize {
        self.rows * (2 + 2 * TOP_MAX)
    }

    /// Words of a report up to the likeliest.
    pub fn report_words_without_top(&self) -> usize {
        2 * self.rows
    }

    /// Where the parts of a report begin, in their order.
    pub(crate) fn report_parts(&self) -> [usize; 4] {
        let rows = self.rows;
        [0, rows, 2 * rows, (2 + TOP_MAX) * rows]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_of_each_kind_lie_behind_each_other_and_before_all_lists() {
        let layout = SampleLayout { rows: 3, vocabulary: 40 };
        let starts = SampleList::ALL.map(|list| layout.starts(list));
        assert_eq!(starts, [60..64, 64..68, 68..72, 72..76, 76..80]);
        assert_eq!((layout.lists(), layout.mask_words()), (80, 2));
        assert_eq!(layout.words_max(7), 80 + 3 * (3 * LISTED_MAX + 7 + 2));
        assert_eq!((layout.report_words_without_top(), layout.report_words()), (6, 6 + 3 * 40));
    }
}
