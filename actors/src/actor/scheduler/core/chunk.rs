//! The tokens that a step runs: one for each decoding sequence, and chunks of prompts. While
//! replies are in progress, the prompt tokens are limited so that the step keeps the promised token
//! interval, as predicted by the step costs.

use bursar_model::DRAFTS_OF_STEP;

use super::{RunningStep, SchedulerCore, Sequence, SequenceTokens};
use crate::token_interval::{StepWork, TokenInterval};

/// The fewest prompt tokens that a step with prompts runs in addition to decoding, so that prompts
/// make progress whatever interval is promised. Larger chunks are whole multiples of this number.
/// Chunks are smaller if fewer tokens are left in the prompts or in the step.
const CHUNK_LEAST: usize = 16;

impl SchedulerCore {
    /// One token and the drafts of each decoding sequence, then chunks of prompts up to the step's
    /// limit, the oldest first unless the token interval limits them (see `split`). While replies
    /// are in progress, the chunks are limited to the tokens that the promised interval allows.
    pub(super) fn shares(&self) -> Vec<SequenceTokens> {
        let drafts_max = self.drafts_each();
        let further_max = self.further_drafts_max(drafts_max);
        let runs = |sequence: &&Sequence| {
            !sequence.is_over()
                && !sequence.waits_to_be_seen(drafts_max)
                && !self.finds_more_soon(sequence)
                && !self.waits_for_host(sequence)
        };
        let (decoding, prompts): (Vec<_>, Vec<_>) = self.running.values().filter(runs).partition(|s| s.is_decoding());
        let share = |sequence: &&Sequence| {
            let drafts = if sequence.to_come > 0 { 0 } else { sequence.drafts_within(drafts_max) };
            let further = sequence.further_drafts(1, drafts, further_max);
            SequenceTokens { sequence: sequence.id(), tokens: 1, drafts, further }
        };
        let mut shares: Vec<_> = decoding.iter().map(share).collect();
        let rows = |share: &SequenceTokens| 1 + share.drafts + self.running[&share.sequence].state_lag;
        // Sequences with one row come first, because attention processes them together.
        shares.sort_by_key(|share| rows(share) > 1);
        // Normally every sequence fits. A sequence is left out only if accepted drafts of two
        // earlier steps must run again in this step.
        let mut budget = self.limits.step_tokens;
        shares.retain(|share| {
            let left = budget.checked_sub(rows(share));
            budget = left.unwrap_or(budget);
            left.is_some()
        });
        let target = self.token_interval.as_ref().filter(|_| !prompts.is_empty() && self.has_streams());
        let tokens =
            match target.and_then(|token_interval| self.within_interval(token_interval, &decoding, &prompts, budget)) {
                Some(budget) => self.split(&prompts, budget),
                None => self.in_order(&prompts, budget),
            };
        let of_prompts = prompts.iter().zip(tokens).map(|(s, tokens)| {
            let further = s.further_drafts(tokens, 0, further_max);
            SequenceTokens { sequence: s.id(), tokens, drafts: 0, further }
        });
        shares.extend(of_prompts.filter(|share| share.tokens > 0));
        shares
    }

    /// Maximum number of drafts for each decoding sequence. Each decoding sequence needs one token
    /// of the step, a picture that must be whole needs its tokens, and drafts may take half of the
    /// rest, at most [`DRAFTS_OF_STEP`]. Measured goodput may lower the number. With recurrent
    /// states, one token is set aside for every sequence that may run, not only for decoding
    /// sequences, so that the next step can run accepted drafts again.
    pub(super) fn drafts_each(&self) -> usize {
        if self.limits.draft_tokens == 0 {
            return 0;
        }
        self.drafts_among(self.streams())
    }

    /// Maximum number of drafts for each of `decoding` sequences.
    fn drafts_among(&self, decoding: usize) -> usize {
        let sequences = if self.kv.has_states() { self.limits.sequences } else { decoding };
        let others = sequences + self.whole_picture_tokens;
        let most = DRAFTS_OF_STEP.min(self.limits.step_tokens.saturating_sub(others) / 2);
        let limit = self.draft_limit.as_ref().map_or(self.limits.draft_tokens, |limit| limit.drafts_for(decoding));
        limit.min(most.checked_div(decoding).unwrap_or(0))
    }

    /// Maximum number of drafts that the draft head computes after its first draft, for each
    /// sequence of the next step. The lane waits for the tokens of a step with further drafts, so
    /// no such step is planned ahead.
    fn further_drafts_max(&self, drafts_max: usize) -> usize {
        if self.draft_head.is_none() || !self.under_way.is_empty() || drafts_max == 0 && self.has_streams() {
            return 0;
        }
        self.drafts_among(self.running.len()).saturating_sub(1)
    }

    /// The number of decoding sequences, whose readers wait for the next token.
    pub fn streams(&self) -> usize {
        self.running.values().filter(|s| s.is_decoding() && !s.is_over()).count()
    }

    fn has_streams(&self) -> bool {
        self.running.values().any(|s| s.is_decoding() && !s.is_over())
    }

    pub(super) fn work(&self, shares: &[SequenceTokens]) -> StepWork {
        let mut work = StepWork::default();
        for share in shares {
            add(&mut work, &self.running[&share.sequence], share.tokens);
        }
        work
    }

    /// Updates the step costs from the oldest running step, which took `micros` µs. A step with
    /// drafts is ignored.
    pub(super) fn learn(&mut self, micros: u64) {
        let has_drafts = |step: &RunningStep| step.sequences.iter().any(|running| running.drafts + running.further > 0);
        if let (Some(token_interval), Some(step)) =
            (&mut self.token_interval, self.under_way.front().filter(|step| !has_drafts(step)))
        {
            token_interval.costs.learn(&step.work, step.pictures, micros);
        }
    }

    /// Records whether pictures are being encoded on the same GPU now.
    pub(super) fn now_encodes(&mut self, encodes: bool) {
        self.encodes = encodes;
        self.under_way.iter_mut().for_each(|step| step.pictures |= encodes);
    }

    /// The most prompt tokens with which the step keeps the promise. `None` if the step keeps the
    /// promise with all prompt tokens that fit.
    fn within_interval(
        &self,
        token_interval: &TokenInterval,
        decoding: &[&Sequence],
        prompts: &[&Sequence],
        budget: usize,
    ) -> Option<usize> {
        let mut alone = StepWork::default();
        decoding.iter().for_each(|sequence| add(&mut alone, sequence, 1));
        let mut allowed = token_interval.step_micros(token_interval.costs.predict(&alone, self.encodes));
        if self.some_join_every_other_step() {
            allowed /= 2;
        }
        let keeps = |chunk: usize| {
            let mut work = alone;
            prompts
                .iter()
                .zip(self.split(prompts, chunk))
                .for_each(|(sequence, tokens)| add(&mut work, sequence, tokens));
            token_interval.costs.predict(&work, self.encodes) <= allowed
        };
        if keeps(budget) {
            return None;
        }
        // `low` and `high` are in units of `CHUNK_LEAST` tokens. A chunk of `low` keeps the promise
        // or is the smallest chunk. A chunk of `high` does not keep the promise.
        let (mut low, mut high) = (1, budget.div_ceil(CHUNK_LEAST));
        while low + 1 < high {
            let middle = low.midpoint(high);
            if keeps(middle * CHUNK_LEAST) { low = middle } else { high = middle }
        }
        Some((low * CHUNK_LEAST).min(budget))
    }

    /// Divides `budget` tokens among the prompts in order: first all tokens of the oldest prompt,
    /// then of the next oldest.
    fn in_order(&self, prompts: &[&Sequence], mut budget: usize) -> Vec<usize> {
        let take = |sequence: &&Sequence| {
            let tokens = self.chunk_within(sequence, budget);
            budget -= tokens;
            tokens
        };
        prompts.iter().map(take).collect()
    }

    /// Divides `budget` tokens among prompts that do not all fit. The oldest prompt gets half, so
    /// that every step advances it. If its next tokens are a picture that must be whole and that
    /// half would cut, it gets the picture, even above `budget`. The rest goes to the prompts with
    /// the fewest tokens left, because the requests with these prompts then stop waiting soonest. A
    /// picture that does not fit the rest waits, at the latest until its prompt is the oldest. The
    /// oldest prompt also gets the tokens that no other prompt uses.
    pub(super) fn split(&self, prompts: &[&Sequence], budget: usize) -> Vec<usize> {
        let mut tokens = vec![0; prompts.len()];
        let Some(oldest) = prompts.first() else { return tokens };
        let half = oldest.pending().min(budget.div_ceil(2));
        tokens[0] = match self.chunk_within(oldest, half) {
            0 if half > 0 => oldest.whole_pictures_from(half),
            chunk => chunk,
        };
        let mut left = budget.saturating_sub(tokens[0]);
        let mut others: Vec<_> = (1..prompts.len()).collect();
        others.sort_by_key(|place| prompts[*place].pending());
        for place in others {
            tokens[place] = self.chunk_within(prompts[place], left);
            left -= tokens[place];
        }
        tokens[0] = tokens[0].max(self.chunk_within(oldest, tokens[0] + left));
        tokens
    }

    /// The most tokens of a prompt, up to `budget`, that a step may run.
    fn chunk_within(&self, sequence: &Sequence, budget: usize) -> usize {
        let tokens = sequence.pending().min(budget);
        if self.whole_picture_tokens == 0 { tokens } else { sequence.whole_pictures_within(tokens) }
    }

    /// Whether some sequence runs only in every other step, because the host must see its tokens
    /// first. The token interval of that sequence is two steps.
    fn some_join_every_other_step(&self) -> bool {
        let drafts_max = self.drafts_each();
        let seen = self.running.values().filter(|s| s.is_decoding() && s.must_be_seen(drafts_max)).count();
        // If more than 1 in `LEFT_OUT` running sequences must be seen, no step is planned ahead,
        // and each step runs all sequences.
        self.looks_ahead && seen > 0 && seen * super::LEFT_OUT <= self.running.len()
    }
}

fn add(work: &mut StepWork, sequence: &Sequence, tokens: usize) {
    if sequence.is_decoding() { work.add_decoding(sequence.tokens()) } else { work.add_prompt(sequence.cached, tokens) }
}
