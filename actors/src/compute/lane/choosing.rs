//! Token choice of a step: the parameters sent to the device and the decoding of its answer.

use std::collections::BTreeMap;

use bursar_kernels::{
    Backend, KernelError, Scope,
    ops::{argmax::NO_CHOICE, sample::outcomes, transfer::Later},
    sampling::{SampleBatch, SampleLayout},
};
use bursar_model::{
    error::SamplingError,
    flow::{LogitsOf, Token},
    sampling::SamplingBuffers,
};

use super::job::Choice;

/// How a step's rows choose their tokens.
pub(super) enum TokenChoice {
    /// Every row takes its likeliest token and reports nothing else, so an argmax is enough.
    Greedy { rows: usize },
    /// At least one row needs sampling parameters or a report.
    Asked(Box<Asked>),
}

pub(super) struct Asked {
    pub(super) batch: SampleBatch,
    /// Rows whose parameters could not be encoded, with the reason. Only the sequences
    /// of these rows fail.
    refused: BTreeMap<usize, SamplingError>,
}

/// Returns which logits a step needs for `choices`. All ranks get the same choices, so they take
/// part in the same collectives.
pub(super) fn logits_of(choices: &[Choice]) -> LogitsOf {
    if choices.iter().all(|choice| choice.sampler.is_plain_argmax()) { LogitsOf::OwnRank } else { LogitsOf::AllRanks }
}

impl TokenChoice {
    /// Encodes `choices`, for a model with `vocabulary` logits.
    pub(super) fn of(choices: &[Choice], vocabulary: usize) -> Self {
        if logits_of(choices) == LogitsOf::OwnRank {
            return TokenChoice::Greedy { rows: choices.iter().map(Choice::rows).sum() };
        }
        let (mut batch, mut refused) = (SampleBatch::new(vocabulary), BTreeMap::new());
        let rows = choices.iter().flat_map(|choice| choice.pasts().map(move |past| (choice, past)));
        for (row, (choice, past)) in rows.enumerate() {
            let asked = choice.sampler.ask(past, &mut batch);
            refused.extend(asked.err().map(|error| (row, error)));
        }
        TokenChoice::Asked(Box::new(Asked { batch, refused }))
    }

    /// Starts the download of the chosen tokens of `rows` rows from `buffers`. Kernels that were
    /// launched earlier write the tokens there.
    pub(super) fn download<B: Backend>(
        self,
        scope: &Scope<'_, B>,
        buffers: &SamplingBuffers<'_>,
        rows: usize,
    ) -> Result<Choosing, KernelError> {
        let asked = match self {
            TokenChoice::Greedy { rows } => {
                let results = scope.download_later(&buffers.chosen().row_range(0..rows))?;
                return Ok(Choosing { results, report: None });
            }
            TokenChoice::Asked(asked) => asked,
        };
        let layout = buffers.shape().layout(rows);
        let report_words =
            if asked.batch.wants_top() { layout.report_words() } else { layout.report_words_without_top() };
        let results = scope.download_later(&buffers.results(report_words))?;
        Ok(Choosing { results, report: Some(Report { layout, report_words, refused: asked.refused }) })
    }
}

/// A download of a step's chosen tokens that is still running. The next step reads the tokens from
/// the sampling buffers on the device.
pub(super) struct Choosing {
    /// The tokens of all rows, followed by the report if one was requested.
    results: Later<u32>,
    report: Option<Report>,
}

/// The tokens of each choice, up to and including the first token that differs from its draft. A
/// row that allows no token has an error instead.
pub(super) type ChosenTokens = Vec<Vec<Result<Token, SamplingError>>>;

/// The chosen tokens of a step, or the running download.
pub(super) enum Chosen {
    Downloading(Choosing),
    Known(ChosenTokens),
}

impl Chosen {
    /// Whether [`finish`](Chosen::finish) would return without waiting.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            Chosen::Downloading(choosing) => choosing.is_ready(),
            Chosen::Known(_) => true,
        }
    }

    /// Returns the tokens. Waits if the download is still running.
    pub(super) fn finish(self, choices: &[Choice]) -> Result<ChosenTokens, KernelError> {
        match self {
            Chosen::Downloading(choosing) => choosing.finish(choices),
            Chosen::Known(tokens) => Ok(tokens),
        }
    }
}

struct Report {
    layout: SampleLayout,
    report_words: usize,
    refused: BTreeMap<usize, SamplingError>,
}

impl Choosing {
    /// Whether [`finish`](Choosing::finish) would return without waiting.
    pub(super) fn is_ready(&self) -> bool {
        self.results.is_ready()
    }

    /// Waits for the download and returns the tokens.
    pub(super) fn finish(self, choices: &[Choice]) -> Result<ChosenTokens, KernelError> {
        let words = self.results.wait()?;
        let mut first_row = 0;
        let mut rows = |choice: &Choice| {
            first_row += choice.rows();
            (choice.position..).zip(first_row - choice.rows()..first_row)
        };
        let Some(Report { layout, report_words, mut refused }) = self.report else {
            let token = |(position, row)| match words[row] {
                NO_CHOICE => Err(SamplingError::NonFiniteLogits),
                id => Ok(Token { id, position, log_probabilities: None }),
            };
            return Ok(choices.iter().map(|choice| choice.accepted(rows(choice).map(token))).collect());
        };
        let (ids, report) = words.split_at(words.len() - report_words);
        let answers = outcomes(ids, report, layout);
        let chosen = choices.iter().map(|choice| {
            choice.accepted(rows(choice).map(|(position, row)| match refused.remove(&row) {
                Some(error) => Err(error),
                None => choice.sampler.answer(&answers[row], position),
            }))
        });
        Ok(chosen.collect())
    }
}
