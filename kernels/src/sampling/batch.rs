//! A batch: what is asked of all rows of a step, in one piece for one upload.

use std::{fmt, ops::Range};

use super::row::{NO_REPORT, ROW_WORDS, SampleRow, TOP_MAX, Wishes};

/// No mask.
const NO_MASK: u32 = u32::MAX;

/// Where a ragged list lies among a batch's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// `[rows + 1]`: where each row's tokens begin among all.
    pub starts: Range<usize>,
    /// The tokens of all rows, one row after another.
    pub tokens: Range<usize>,
}

/// Where everything lies among a batch's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplePlaces {
    /// How many rows there are. The words begin with [`ROW_WORDS`] for each.
    pub rows: usize,
    /// Tokens of a row of logits.
    pub vocabulary: usize,
    /// `[masks, vocabulary / 32, rounded up]`.
    pub masks: Range<usize>,
    /// Tokens that may not follow.
    pub forbidden: List,
    /// Tokens with a bias.
    pub biased: List,
    /// f32, beside the tokens of `biased`.
    pub biases: Range<usize>,
    /// Prompts.
    pub prompt: List,
    /// What was produced.
    pub produced: List,
    /// How many of the likeliest tokens are reported at most.
    pub top: usize,
    /// Words in all.
    pub words: usize,
}

/// Rows in the order of their logits, to be put together.
#[derive(Clone, Default)]
pub struct SampleBatch {
    vocabulary: usize,
    rows: Vec<[u32; ROW_WORDS]>,
    top: usize,
    masks: Vec<u32>,
    forbidden: Ragged,
    biased: Ragged,
    biases: Vec<u32>,
    prompt: Ragged,
    produced: Ragged,
}

#[derive(Clone, Default)]
struct Ragged {
    ends: Vec<u32>,
    tokens: Vec<u32>,
}

impl Ragged {
    fn push(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        self.ends.push(u32::try_from(self.tokens.len()).expect("a step's tokens are counted in 32 bits"));
    }

    fn pack(&self, words: &mut Vec<u32>) -> List {
        let starts = words.len()..words.len() + self.ends.len() + 1;
        words.push(0);
        words.extend_from_slice(&self.ends);
        List { starts, tokens: packed(&self.tokens, words) }
    }
}

fn packed(what: &[u32], words: &mut Vec<u32>) -> Range<usize> {
    let start = words.len();
    words.extend_from_slice(what);
    start..words.len()
}

impl SampleBatch {
    /// No rows yet, of logits for `vocabulary` tokens.
    pub fn new(vocabulary: usize) -> Self {
        SampleBatch { vocabulary, ..SampleBatch::default() }
    }

    /// Adds the next row. A mask of another vocabulary, a bias too few or too many of the likeliest are our own bugs.
    ///
    /// Lists that its penalties do not read are left out. A produced token of
    /// [`PREVIOUS`](crate::ops::embed::PREVIOUS)` | row` is one that the host has not seen.
    pub fn push(&mut self, row: &SampleRow, wishes: &Wishes<'_>) {
        let words_of_mask = self.vocabulary.div_ceil(32);
        let mask = wishes.allowed.map_or(NO_MASK, |allowed| {
            assert!(allowed.len() >= words_of_mask, "a mask of {} words for {}", allowed.len(), self.vocabulary);
            let place = self.masks.len() / words_of_mask.max(1);
            self.masks.extend_from_slice(&allowed[..words_of_mask]);
            place as u32
        });
        assert_eq!(wishes.biased.len(), wishes.biases.len(), "a bias for each token");
        assert!(row.top == NO_REPORT || row.top as usize <= TOP_MAX, "{} of the likeliest", row.top);
        self.top = self.top.max(if row.top == NO_REPORT { 0 } else { row.top as usize });
        self.rows.push(row.to_words(mask));
        self.forbidden.push(wishes.forbidden);
        self.biased.push(wishes.biased);
        self.biases.extend(wishes.biases.iter().map(|bias| bias.to_bits()));
        self.prompt.push(if row.repetition != 1.0 { wishes.prompt } else { &[] });
        self.produced.push(if row.penalises() { wishes.produced } else { &[] });
    }

    /// All of it as words, and where what lies. Rows come first: they want to be aligned to 8 bytes.
    pub fn pack(&self) -> (Vec<u32>, SamplePlaces) {
        let mut words = self.rows.as_flattened().to_vec();
        let mut places = SamplePlaces {
            rows: self.rows.len(),
            vocabulary: self.vocabulary,
            masks: packed(&self.masks, &mut words),
            forbidden: self.forbidden.pack(&mut words),
            biased: self.biased.pack(&mut words),
            biases: packed(&self.biases, &mut words),
            prompt: self.prompt.pack(&mut words),
            produced: self.produced.pack(&mut words),
            top: self.top,
            words: 0,
        };
        places.words = words.len();
        (words, places)
    }
}

/// Counts, never the tokens: they are the user's text.
impl fmt::Debug for SampleBatch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SampleBatch({} rows of {} tokens)", self.rows.len(), self.vocabulary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_says_where_everything_lies() {
        let mut batch = SampleBatch::new(40);
        let row = SampleRow { presence: 1.0, top: 3, ..SampleRow::default() };
        let mask = [7, 8];
        batch.push(&row, &Wishes { allowed: Some(&mask), produced: &[4, 5], prompt: &[1], ..Wishes::default() });
        batch
            .push(&SampleRow::default(), &Wishes { biased: &[9], biases: &[0.5], produced: &[6], ..Wishes::default() });
        let (words, places) = batch.pack();
        assert_eq!((places.rows, places.top, places.words), (2, 3, words.len()));
        assert_eq!(words[places.masks], mask);
        assert_eq!([words[17], words[ROW_WORDS + 17]], [0, NO_MASK]);
        assert_eq!(words[places.produced.starts], [0, 2, 2], "the second row reads no past");
        assert_eq!(words[places.produced.tokens], [4, 5]);
        assert_eq!(words[places.prompt.starts], [0, 0, 0], "presence does not count the prompt");
        assert_eq!((&words[places.biased.starts], &words[places.biased.tokens]), (&[0, 0, 1][..], &[9][..]));
        assert_eq!(words[places.biases], [0.5f32.to_bits()]);
    }
}
