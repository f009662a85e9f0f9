//! The sampler: one row of logits and a sequence's past, to the next token. The one place that chooses.
//!
//! The order is that of vLLM's `v1/sample/sampler.py`, and of transformers 5.17's `generation/logits_process.py` where both
//! have a step:
//!
//! 1. log-probabilities are read off, before anything is changed;
//! 2. the grammar forbids what cannot follow;
//! 3. end tokens are forbidden in a reply that is too short;
//! 4. biases are added;
//! 5. repetition, frequency and presence penalties;
//! 6. greedy choice; or temperature, top-k, top-p, min-p (in transformers' order; vLLM has min-p before top-k), and a
//!    draw.

use std::sync::Arc;

use super::candidates::Candidates;
use super::grammar::Grammar;
use super::log_probabilities::{check_top, log_probabilities};
use super::parameters::SamplingParams;
use super::past::{Past, Tokens};
use super::{penalties, philox};
use crate::error::SamplingError;
use crate::flow::token::Token;

/// Chooses the tokens of one sequence.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplingParams,
    vocabulary: usize,
    tokens_min: usize,
    end_tokens: Arc<[u32]>,
    grammar: Option<Grammar>,
    top: Option<usize>,
}

/// Buffers that are reused from token to token: 24 bytes for each of the vocabulary's tokens at most.
#[derive(Clone, Debug, Default)]
pub struct SamplerScratch {
    logits: Vec<f32>,
    tally: Vec<u32>,
    candidates: Candidates,
}

impl Sampler {
    /// For a model with `vocabulary` logits.
    ///
    /// # Errors
    /// As [`SamplingParams::check`] and [`SamplingParams::check_tokens`].
    pub fn new(params: SamplingParams, vocabulary: usize) -> Result<Self, SamplingError> {
        params.check()?;
        params.check_tokens(vocabulary)?;
        Ok(Sampler { params, vocabulary, tokens_min: 0, end_tokens: Arc::new([]), grammar: None, top: None })
    }

    /// Forbids `end_tokens` until `tokens_min` tokens were produced. A grammar that is complete goes before: what it does
    /// not let go on ends.
    #[must_use]
    pub fn with_tokens_min(mut self, tokens_min: usize, end_tokens: Arc<[u32]>) -> Self {
        (self.tokens_min, self.end_tokens) = (tokens_min, end_tokens);
        self
    }

    /// Forbids what `grammar` does not let follow. It must have been compiled for the same model.
    #[must_use]
    pub fn with_grammar(mut self, grammar: Grammar) -> Self {
        self.grammar = Some(grammar);
        self
    }

    /// Reports how likely the model held each chosen token and the `top` likeliest: at most 20, or none with 0.
    ///
    /// # Errors
    /// [`SamplingError::TooManyLogProbabilities`].
    pub fn with_log_probabilities(mut self, top: usize) -> Result<Self, SamplingError> {
        check_top(top)?;
        self.top = Some(top);
        Ok(self)
    }

    /// The parameters.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether it takes the largest logit and reports nothing, whatever the past: the device's argmax will do.
    pub fn is_plain_argmax(&self) -> bool {
        let changes = self.reads_past() || !self.params.logit_bias.is_empty() || self.tokens_min > 0;
        self.params.is_greedy() && !changes && self.top.is_none()
    }

    /// Whether it reads the tokens produced so far, so that [`Past::at`] is not enough.
    pub fn reads_past(&self) -> bool {
        self.params.penalises() || self.grammar.is_some()
    }

    /// Whether it reads the prompt too.
    pub fn reads_prompt(&self) -> bool {
        self.params.repetition_penalty != 1.0
    }

    /// The token after `past`. The same logits, past and seed give the same token, in whatever batch and life.
    ///
    /// # Errors
    /// What is wrong with the logits: [`SamplingError::NoLogits`], [`SamplingError::BadLogit`] for NaN and +infinity,
    /// [`SamplingError::NothingAllowed`] when all are -infinity or forbidden, [`SamplingError::Width`];
    /// [`SamplingError::PastMissing`]; and [`SamplingError::Grammar`] when a grammar takes more than its limits.
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
        let SamplerScratch { logits: changed, tally, candidates } = scratch;
        let position = past.position();
        let allowed = self.change(logits, past, changed, tally)?;
        let id = match self.params.is_greedy() {
            true => likeliest(allowed),
            false => candidates.draw(allowed, &self.params, philox::uniform(self.params.seed, position)),
        };
        let log_probabilities = self.top.map(|top| log_probabilities(logits, id, top)).transpose()?.map(Box::new);
        Ok(Token { id, position, log_probabilities })
    }

    /// The logits that are chosen from; at least one is finite.
    fn change<'a>(
        &self,
        logits: &'a [f32],
        past: Past<'_>,
        changed: &'a mut Vec<f32>,
        tally: &mut Vec<u32>,
    ) -> Result<&'a [f32], SamplingError> {
        let too_short = past.position() < self.tokens_min as u64;
        if !self.reads_past() && self.params.logit_bias.is_empty() && !too_short {
            return Ok(logits);
        }
        let tokens = match past.tokens() {
            None if self.reads_past() => return Err(SamplingError::PastMissing),
            tokens => tokens.unwrap_or(Tokens { prompt: &[], produced: &[] }),
        };
        changed.clear();
        changed.extend_from_slice(logits);
        let mut must_end = false;
        if let Some(grammar) = &self.grammar {
            let allowed = grammar.allowed(tokens.produced)?;
            allowed.restrict(changed);
            must_end = allowed.only_ends();
        }
        if too_short && !must_end {
            let known = self.end_tokens.iter().filter(|&&id| (id as usize) < logits.len());
            known.for_each(|&id| changed[id as usize] = f32::NEG_INFINITY);
        }
        penalties::add_biases(changed, &self.params);
        if self.params.penalises() {
            penalties::penalise(changed, &self.params, tokens, tally);
        }
        match changed.iter().any(|logit| *logit > f32::NEG_INFINITY) {
            true => Ok(changed),
            false => Err(SamplingError::NothingAllowed { logits: logits.len() }),
        }
    }
}

pub(super) fn check_logits(logits: &[f32]) -> Result<(), SamplingError> {
    if logits.is_empty() {
        return Err(SamplingError::NoLogits);
    }
    if let Some(token) = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        return Err(SamplingError::BadLogit { token });
    }
    if logits.iter().all(|&logit| logit == f32::NEG_INFINITY) {
        return Err(SamplingError::NothingAllowed { logits: logits.len() });
    }
    Ok(())
}

/// The first of the largest, as `argmax` of torch and numpy on a CPU.
fn likeliest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = id;
        }
    }
    best as u32
}
