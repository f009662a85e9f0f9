//! The sampler, which chooses the next token from one row of logits and a sequence's past.
//!
//! This module turns a request's parameters into a row of numbers and lists.
//! [`bursar_kernels::sampling`] defines the arithmetic and its order. A served model samples on the
//! device with [`sample_into`](bursar_kernels::Scope::sample_into): [`Sampler::ask`] prepares the
//! request, and [`Sampler::answer`] reads the result. [`Sampler::sample`] does the same on the
//! host, as the reference for the device.

use std::{collections::BTreeSet, sync::Arc};

use bursar_kernels::{
    ops::sample::Outcome,
    sampling::{Candidate, ChoiceScratch, Fault, NO_REPORT, RowLists, SampleBatch, SampleRow, choose},
};

use super::error::SamplingError;
use super::grammar::Grammar;
use super::log_probabilities::{check_logits, check_top, log_probabilities, reported};
use super::parameters::{SamplingParams, check_listed};
use super::past::{Past, Tokens};
use crate::flow::token::Token;

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    vocabulary: usize,
    biased: Arc<[u32]>,
    biases: Arc<[f32]>,
    tokens_min: usize,
    end_tokens: Arc<[u32]>,
    grammar: Option<Grammar>,
    top: Option<usize>,
}

/// Buffers that are reused from token to token: 24 bytes per token of the vocabulary.
#[derive(Clone, Debug, Default)]
pub struct SamplerScratch {
    weights: Vec<f64>,
    candidates: Vec<Candidate>,
    changed: Vec<f32>,
    tally: Vec<u32>,
}

impl SamplerScratch {
    fn buffers(&mut self, vocabulary: usize) -> ChoiceScratch<'_> {
        self.weights.resize(vocabulary, 0.0);
        self.candidates.resize(vocabulary, Candidate::default());
        self.changed.resize(vocabulary, 0.0);
        self.tally.resize(vocabulary, 0);
        ChoiceScratch {
            weights: &mut self.weights,
            candidates: &mut self.candidates,
            changed: &mut self.changed,
            tally: &mut self.tally,
        }
    }
}

impl Sampler {
    /// A sampler for a model with `vocabulary` logits.
    ///
    /// # Errors
    /// Same as [`SamplingParams::check`] and [`SamplingParams::check_tokens`].
    pub fn new(params: SamplingParams, vocabulary: usize) -> Result<Self, SamplingError> {
        params.check()?;
        params.check_tokens(vocabulary)?;
        let biased = params.logit_bias.keys().copied().collect();
        let biases = params.logit_bias.values().map(|&bias| bias as f32).collect();
        let (end_tokens, grammar) = (Arc::new([]), None);
        Ok(Sampler { params, vocabulary, biased, biases, tokens_min: 0, end_tokens, grammar, top: None })
    }

    /// Forbids `end_tokens` until `tokens_min` tokens are produced. A grammar has priority: if it
    /// allows only end tokens, the reply ends earlier.
    ///
    /// # Errors
    /// [`SamplingError::TooManyTokens`] for more than 1,024 end tokens, if there is a minimum.
    pub fn with_tokens_min(mut self, tokens_min: usize, end_tokens: Arc<[u32]>) -> Result<Self, SamplingError> {
        if tokens_min > 0 {
            check_listed("stop_token_ids", end_tokens.len())?;
        }
        (self.tokens_min, self.end_tokens) = (tokens_min, end_tokens);
        Ok(self)
    }

    /// Forbids tokens that `grammar` does not allow. The grammar must have been compiled
    /// for the same model.
    #[must_use]
    pub fn with_grammar(mut self, grammar: Grammar) -> Self {
        self.grammar = Some(grammar);
        self
    }

    /// Reports the log-probabilities of each chosen token and of the `top` likeliest tokens; `top`
    /// is from 0 to 20.
    ///
    /// # Errors
    /// [`SamplingError::TooManyLogProbabilities`].
    pub fn with_log_probabilities(mut self, top: usize) -> Result<Self, SamplingError> {
        check_top(top)?;
        self.top = Some(top);
        Ok(self)
    }

    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether the sampler always chooses the token with the largest logit and reports nothing. For
    /// such a sampler, the device's argmax is enough.
    pub fn is_plain_argmax(&self) -> bool {
        let changes = self.reads_past() || !self.params.logit_bias.is_empty() || self.tokens_min > 0;
        self.params.is_greedy() && !changes && self.top.is_none()
    }

    /// Whether the host must see each token before the next one is chosen, because a grammar
    /// determines which tokens may follow.
    pub fn must_see(&self) -> bool {
        self.grammar.is_some()
    }

    /// The number of leading tokens of `next` that the sampler's grammar allows after `produced`:
    /// all of them if there is no grammar, and 0 if the grammar has failed.
    pub fn allowed_prefix_len(&self, produced: &[u32], next: &[u32]) -> usize {
        let allowed = self.grammar.as_ref().map(|grammar| grammar.allowed_prefix_len(produced, next).unwrap_or(0));
        allowed.unwrap_or(next.len())
    }

    /// Whether the sampler reads the tokens produced so far, so that [`Past::at`] is not enough.
    pub fn reads_past(&self) -> bool {
        self.params.penalizes() || self.grammar.is_some()
    }

    /// Whether the sampler also reads the prompt.
    pub fn reads_prompt(&self) -> bool {
        self.params.repetition_penalty != 1.0
    }

    /// The part of a prompt that the sampler reads: each distinct token once, or nothing. The
    /// repetition penalty depends on whether a token occurs, not on how often, and a prompt with
    /// pictures consists mostly of one placeholder token.
    pub fn read_of(&self, prompt: &[u32]) -> Arc<[u32]> {
        if self.reads_prompt() {
            prompt.iter().copied().collect::<BTreeSet<u32>>().into_iter().collect()
        } else {
            Arc::new([])
        }
    }

    /// Chooses the token after `past`. Equal logits, past and seed give the same token, in any
    /// batch and after any restart.
    ///
    /// # Errors
    /// For bad logits: [`SamplingError::NoLogits`], [`SamplingError::BadLogit`] for NaN and
    /// +infinity, [`SamplingError::NothingAllowed`] if each token is forbidden or has a logit of
    /// -infinity, [`SamplingError::Width`]. Otherwise [`SamplingError::PastMissing`], or
    /// [`SamplingError::Grammar`] if a grammar exceeds its limits.
    pub fn sample(
        &self,
        logits: &[f32], // [vocabulary]
        past: Past<'_>,
        scratch: &mut SamplerScratch,
    ) -> Result<Token, SamplingError> {
        check_logits(logits)?;
        if logits.len() != self.vocabulary {
            return Err(SamplingError::Width { logits: logits.len(), vocabulary: self.vocabulary });
        }
        let buffers = scratch.buffers(self.vocabulary);
        let chosen = self.with_lists(past, |row, row_lists| choose(logits, row, row_lists, buffers))?;
        let id = chosen.map_err(|fault| self.error_of(fault))?;
        let log_probabilities = self.top.map(|top| log_probabilities(logits, id, top)).transpose()?.map(Box::new);
        Ok(Token { id, position: past.position(), log_probabilities })
    }

    /// Adds a row to a batch for [`sample_into`](bursar_kernels::Scope::sample_into), which then
    /// chooses the token after `past`. On an error, the device ignores the added row.
    ///
    /// # Errors
    /// Same as [`sample`](Self::sample), without the errors for bad logits.
    pub fn ask(&self, past: Past<'_>, batch: &mut SampleBatch) -> Result<(), SamplingError> {
        let asked = self.with_lists(past, |row, row_lists| batch.push(row, row_lists));
        if asked.is_err() {
            batch.push_ignored();
        }
        asked
    }

    /// The token that the device chose for `position`.
    ///
    /// # Errors
    /// [`SamplingError::NonFiniteLogits`] or [`SamplingError::NothingAllowed`].
    pub fn answer(&self, outcome: &Outcome, position: u64) -> Result<Token, SamplingError> {
        let id = outcome.chosen.map_err(|fault| self.error_of(fault))?;
        Ok(Token { id, position, log_probabilities: reported(outcome).map(Box::new) })
    }

    fn error_of(&self, fault: Fault) -> SamplingError {
        match fault {
            Fault::NonFiniteLogits => SamplingError::NonFiniteLogits,
            // No sampler reads the outcome of an ignored row.
            Fault::NothingAllowed | Fault::Ignored => SamplingError::NothingAllowed { logits: self.vocabulary },
        }
    }

    /// Calls `done` with the row and the lists that ask the device for the token after `past`.
    fn with_lists<T>(
        &self,
        past: Past<'_>,
        done: impl FnOnce(&SampleRow, &RowLists<'_>) -> T,
    ) -> Result<T, SamplingError> {
        let Tokens { prompt, produced, unseen } = match past.tokens() {
            None if self.reads_past() => return Err(SamplingError::PastMissing),
            tokens => tokens.unwrap_or(Tokens { prompt: &[], produced: &[], unseen: None }),
        };
        let allowed = self.grammar.as_ref().map(|grammar| grammar.allowed(produced)).transpose()?;
        let must_end = allowed.as_ref().is_some_and(|allowed| allowed.only_ends());
        let too_short = past.position() < self.tokens_min as u64;
        let row_lists = RowLists {
            allowed: allowed.as_ref().map(|allowed| allowed.words()),
            forbidden: if too_short && !must_end { &self.end_tokens } else { &[] },
            biased: &self.biased,
            biases: &self.biases,
            prompt,
            produced,
            unseen,
        };
        Ok(done(&self.row(past.position()), &row_lists))
    }

    fn row(&self, position: u64) -> SampleRow {
        let params = &self.params;
        SampleRow {
            temperature: params.temperature,
            top_p: params.top_p,
            min_p_logarithm: params.min_p.ln(),
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            seed: params.seed,
            position,
            repetition: params.repetition_penalty as f32,
            top_k: u32::try_from(params.top_k).unwrap_or(u32::MAX),
            top: self.top.map_or(NO_REPORT, |top| top as u32),
            ignored: false,
            given: None,
        }
    }
}
