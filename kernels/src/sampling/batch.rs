//! A batch: the options of all rows of a step, packed for one upload.

use std::fmt;

use crate::UnseenToken;

use super::{
    layout::{LISTED_MAX, SampleLayout, SampleList},
    row::{NO_REPORT, RowLists, SampleRow, TOP_MAX},
};

/// Mask position of a row without a mask.
pub(crate) const NO_MASK: u32 = u32::MAX;

/// Rows in the order of their logits, ready to pack.
#[derive(Clone, Default)]
pub struct SampleBatch {
    vocabulary: usize,
    /// Each row with the index of its mask, if it has a mask.
    rows: Vec<(SampleRow, Option<usize>)>,
    masks: Vec<u32>,
    lists: [Ragged; SampleList::ALL.len()],
}

#[derive(Clone, Default)]
struct Ragged {
    ends: Vec<usize>,
    words: Vec<u32>,
}

impl Ragged {
    fn push(&mut self, words: impl IntoIterator<Item = u32>) {
        self.words.extend(words);
        self.ends.push(self.words.len());
    }
}

impl SampleBatch {
    /// Creates an empty batch for logits of `vocabulary` tokens.
    pub fn new(vocabulary: usize) -> Self {
        SampleBatch { vocabulary, ..SampleBatch::default() }
    }

    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns `true` if any row requests the likeliest tokens.
    pub fn wants_top(&self) -> bool {
        self.rows.iter().any(|(row, _)| row.top != NO_REPORT && row.top > 0)
    }

    /// Adds the next row. Lists that the row's penalties do not read are left out.
    ///
    /// # Panics
    /// If the mask is too short for the vocabulary, the numbers of biases and biased tokens differ,
    /// the list of biased or of forbidden tokens is longer than [`LISTED_MAX`], more than
    /// [`TOP_MAX`] likeliest tokens are requested, or the given token is outside the vocabulary.
    pub fn push(&mut self, row: &SampleRow, row_lists: &RowLists<'_>) {
        let words_of_mask = self.vocabulary.div_ceil(u32::BITS as usize);
        let mask = row_lists.allowed.map(|allowed| {
            assert!(
                allowed.len() >= words_of_mask,
                "a mask of {} words is too short for {} tokens",
                allowed.len(),
                self.vocabulary
            );
            self.masks.extend_from_slice(&allowed[..words_of_mask]);
            self.masks.len() / words_of_mask.max(1) - 1
        });
        assert_eq!(row_lists.biased.len(), row_lists.biases.len(), "each biased token has a bias");
        assert!(
            row_lists.biased.len().max(row_lists.forbidden.len()) <= LISTED_MAX,
            "{row_lists:?} lists more than {LISTED_MAX} tokens"
        );
        assert!(
            row.given.is_none_or(|token| (token as usize) < self.vocabulary),
            "the given token is in the vocabulary"
        );
        assert!(
            row.top == NO_REPORT || row.top as usize <= TOP_MAX,
            "{} likeliest tokens are requested; the limit is {TOP_MAX}",
            row.top
        );
        self.rows.push((*row, mask));
        let [forbidden, biased, biases, prompt, produced] = &mut self.lists;
        forbidden.push(row_lists.forbidden.iter().copied());
        biased.push(row_lists.biased.iter().copied());
        biases.push(row_lists.biases.iter().map(|bias| bias.to_bits()));
        prompt.push(row_lists.prompt.iter().copied().filter(|_| row.repetition != 1.0));
        let unseen = row_lists.unseen.map(UnseenToken::code);
        produced.push(row_lists.produced.iter().copied().chain(unseen).filter(|_| row.penalizes()));
    }

    /// Adds a row that reports the probability of `token` and the `top` likeliest tokens.
    pub fn push_given(&mut self, token: u32, top: usize) {
        let row = SampleRow { given: Some(token), top: top as u32, ..SampleRow::default() };
        self.push(&row, &RowLists::default());
    }

    /// Adds a padding row, from which no token is chosen.
    pub fn push_ignored(&mut self) {
        self.push(&SampleRow { ignored: true, ..SampleRow::default() }, &RowLists::default());
    }

    /// Packs the batch into `words`, replacing their contents, for a launch over `rows` rows. The
    /// rows after the batch's own rows are padding. Rows come first in `words` because they need an
    /// alignment of 8 bytes. Panics if the batch has more than `rows` rows.
    pub fn pack(&self, rows: usize, words: &mut Vec<u32>) -> SampleLayout {
        let layout = SampleLayout { rows, vocabulary: self.vocabulary };
        let own = self.rows.len();
        assert!(own <= rows, "a batch of {own} rows does not fit into {rows} rows");
        let ragged: usize = self.lists.iter().map(|list| list.words.len()).sum();
        let masks = layout.lists() + ragged;
        let place = |word: usize| u32::try_from(word).expect("the words of a batch are counted in 32 bits");
        words.clear();
        for (row, mask) in &self.rows {
            let mask = mask.map_or(NO_MASK, |mask| place(masks + mask * layout.mask_words()));
            words.extend(row.to_words(mask));
        }
        let padding = SampleRow { ignored: true, ..SampleRow::default() }.to_words(NO_MASK);
        words.extend(std::iter::repeat_n(padding, rows - own).flatten());
        let mut first = layout.lists();
        for list in &self.lists {
            words.push(place(first));
            words.extend(list.ends.iter().map(|end| place(first + end)));
            first += list.words.len();
            words.extend(std::iter::repeat_n(place(first), rows - own));
        }
        self.lists.iter().for_each(|list| words.extend_from_slice(&list.words));
        words.extend_from_slice(&self.masks);
        layout
    }
}

/// Prints counts and never the tokens, which are the user's text.
impl fmt::Debug for SampleBatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SampleBatch({} rows of {} tokens)", self.rows.len(), self.vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::ROW_WORDS;

    /// Three rows, of which the last is ignored, packed for a launch over five rows.
    fn packed() -> (Vec<u32>, SampleLayout) {
        let mut batch = SampleBatch::new(40);
        let row = SampleRow { presence: 1.0, top: 3, ..SampleRow::default() };
        batch.push(&row, &RowLists { allowed: Some(&[7, 8]), produced: &[4, 5], prompt: &[1], ..RowLists::default() });
        batch.push(
            &SampleRow::default(),
            &RowLists { biased: &[9], biases: &[0.5], produced: &[6], ..RowLists::default() },
        );
        batch.push_ignored();
        assert!(batch.wants_top());
        let mut words = vec![u32::MAX; 2];
        let layout = batch.pack(5, &mut words);
        assert_eq!(layout, SampleLayout { rows: 5, vocabulary: 40 });
        (words, layout)
    }

    #[test]
    fn packed_lists_begin_at_the_offsets_in_the_layout() {
        let (words, layout) = packed();
        let listed = |list: SampleList, row: usize| {
            let starts = &words[layout.starts(list)];
            &words[starts[row] as usize..starts[row + 1] as usize]
        };
        assert_eq!([0, 1, 2, 3, 4].map(|row| listed(SampleList::Produced, row).len()), [2, 0, 0, 0, 0]);
        assert_eq!(listed(SampleList::Produced, 0), [4, 5], "the second row has no list of past tokens");
        assert_eq!(listed(SampleList::Prompt, 0), [0; 0], "the presence penalty does not count the prompt");
        assert_eq!([0, 1].map(|row| listed(SampleList::Biased, row).len()), [0, 1]);
        assert_eq!((listed(SampleList::Biased, 1), listed(SampleList::Biases, 1)), (&[9][..], &[0.5f32.to_bits()][..]));
        let mask = words[17] as usize;
        assert_eq!(words[mask..], [7, 8], "the mask is the last array");
    }

    #[test]
    fn padding_rows_of_a_sample_batch_are_ignored() {
        let (words, _) = packed();
        let rows: Vec<_> =
            (0..5).map(|row| SampleRow::from_words(words[row * ROW_WORDS..].first_chunk().unwrap())).collect();
        assert_eq!(rows.iter().map(|(row, _)| row.ignored).collect::<Vec<_>>(), [false, false, true, true, true]);
        assert!(rows[1..].iter().all(|(_, mask)| *mask == NO_MASK));
    }

    #[test]
    fn no_sample_batch_exceeds_its_layouts_word_limit() {
        let many: Vec<u32> = (0..LISTED_MAX as u32).collect();
        let biases = vec![1.0; LISTED_MAX];
        let mut batch = SampleBatch::new(77);
        let row = SampleRow { repetition: 2.0, ..SampleRow::default() };
        for _ in 0..3 {
            let (allowed, prompt, produced) = (Some(&[u32::MAX; 3][..]), &many[..30], &many[..12]);
            batch.push(
                &row,
                &RowLists { allowed, forbidden: &many, biased: &many, biases: &biases, prompt, produced, unseen: None },
            );
        }
        let mut words = Vec::new();
        let layout = batch.pack(3, &mut words);
        assert_eq!(words.len(), layout.words_max(42));
    }
}
