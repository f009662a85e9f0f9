//! Scores: log-probabilities of given tokens, such as the tokens of a prompt. The device computes
//! the scores, and the host downloads a few words per score.

use std::slice::Chunks;

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{sample::outcomes, transfer::Later},
    sampling::{SampleBatch, SampleLayout, TOP_MAX},
};

use super::log_probabilities::reported;
use crate::flow::{LogProbabilities, SCORE_ROWS};

/// A token to be scored.
#[derive(Clone, Copy, Debug)]
pub struct Score {
    pub token: u32,
    /// The number of likeliest tokens to report in addition to `token`.
    pub top: usize,
}

/// The scores of a step, computed a few rows of logits at a time.
pub struct Scores<'a> {
    vocabulary: usize,
    /// The remaining scores, in chunks of [`SCORE_ROWS`], the number of rows of logits that the
    /// decoder passes at a time.
    left: Chunks<'a, Score>,
    /// Offset of the next rows' results, in words.
    first: usize,
    results: Tensor<'a>, // [words] u32
    question: Vec<u32>,
}

/// Scores that are being downloaded.
pub struct Scored {
    vocabulary: usize,
    results: Later<u32>,
}

/// The layout of `rows` rows, and the size of their results in words: tokens, then the report.
fn results_of(rows: usize, vocabulary: usize) -> (SampleLayout, usize) {
    let layout = SampleLayout { rows, vocabulary };
    (layout, rows + layout.report_words())
}

impl<'a> Scores<'a> {
    /// Allocates the results for `wanted`, which has one entry per scored row of a step. The
    /// logits have `vocabulary` columns.
    ///
    /// # Errors
    /// [`KernelError`] if the workspace is full.
    pub fn begin<B: Backend>(
        scope: &'a Scope<'_, B>,
        wanted: &'a [Score],
        vocabulary: usize,
    ) -> Result<Self, KernelError> {
        let words = wanted.chunks(SCORE_ROWS).map(|some| results_of(some.len(), vocabulary).1).sum();
        let results = scope.empty_u32([words])?;
        Ok(Scores { vocabulary, left: wanted.chunks(SCORE_ROWS), first: 0, results, question: Vec::new() })
    }

    /// Scores the next rows from their `logits` `[rows, vocabulary]` f32. A row that
    /// [`log_probabilities()`](super::log_probabilities()) would refuse gets no score.
    ///
    /// # Errors
    /// Same as [`sample_into`](Scope::sample_into).
    ///
    /// # Panics
    /// If `logits` and the next chunk of `wanted` differ in length, which is a bug in the caller.
    pub fn score<B: Backend>(&mut self, scope: &Scope<'_, B>, logits: &Tensor<'_>) -> Result<(), KernelError> {
        let wanted = self.left.next().unwrap_or_default();
        assert_eq!(wanted.len(), logits.rows(), "each row has a score");
        let mut batch = SampleBatch::new(self.vocabulary);
        for &Score { token, top } in wanted {
            if (token as usize) < self.vocabulary && top <= TOP_MAX {
                batch.push_given(token, top)
            } else {
                batch.push_ignored()
            }
        }
        batch.pack(wanted.len(), &mut self.question);
        let question = scope.upload([self.question.len()], &self.question)?;
        let (layout, words) = results_of(wanted.len(), self.vocabulary);
        let mut results = self.results.row_range_mut(self.first..self.first + words);
        let (mut chosen, mut report) = results.split_rows_mut(wanted.len());
        self.first += words;
        scope.sample_into(logits, &question, layout, &mut chosen, &mut report)
    }

    /// Begins the download. Returns `None` if `wanted` was empty.
    ///
    /// # Errors
    /// [`KernelError`] if the download fails.
    ///
    /// # Panics
    /// If some rows are not scored yet, which is a bug in the caller.
    pub fn download<B: Backend>(&self, scope: &Scope<'_, B>) -> Result<Option<Scored>, KernelError> {
        assert!(self.left.len() == 0, "every row was returned");
        if self.first == 0 {
            return Ok(None);
        }
        Ok(Some(Scored { vocabulary: self.vocabulary, results: scope.download_later(&self.results)? }))
    }
}

impl Scored {
    /// Whether [`finish`](Scored::finish) would return without waiting.
    pub fn is_ready(&self) -> bool {
        self.results.is_ready()
    }

    /// Waits for the scores of `wanted`, as given to [`begin`](Scores::begin). A score is `None` if
    /// its logits are not numbers, or if its token or its `top` is out of range.
    ///
    /// # Errors
    /// [`KernelError`] if the device fails.
    pub fn finish(self, wanted: &[Score]) -> Result<Vec<Option<LogProbabilities>>, KernelError> {
        let words = self.results.wait()?;
        let (mut left, mut scores) = (&words[..], Vec::with_capacity(wanted.len()));
        for some in wanted.chunks(SCORE_ROWS) {
            let (layout, count) = results_of(some.len(), self.vocabulary);
            let (results, others) = left.split_at(count);
            let (tokens, report) = results.split_at(some.len());
            scores.extend(outcomes(tokens, report, layout).iter().map(reported));
            left = others;
        }
        Ok(scores)
    }
}
