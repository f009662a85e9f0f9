//! Which sequences run and which wait: admission by predicted peak, and preemption where the prediction was wrong.

use std::collections::BTreeSet;

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    kv::SequenceId,
    scheduler::{
        NewSequence,
        admission::{SequenceForecast, predicted_peak},
    },
};

/// A sequence that lost its blocks this often is admitted again only when the pool holds it to its end, and then keeps
/// them while others lose theirs.
const PREEMPTIONS_MAX: u32 = 2;

/// How many younger sequences may be admitted before one that does not fit yet, and how many are looked at.
const OVERTAKEN_MAX: u32 = 32;
const LOOKED_AT: usize = 8;

/// Sequences sent back to their drivers whose preemptions are remembered. Drivers that never come back leave theirs.
const REMEMBERED: usize = 1024;

impl SchedulerCore {
    /// A sequence comes, or comes again.
    pub(super) fn arrive(&mut self, spec: NewSequence) {
        let preemptions = self.preempted.remove(&spec.id).unwrap_or(0);
        self.wait(Sequence { preemptions, ..Sequence::new(spec) });
    }

    /// Its driver is to admit it again.
    pub(super) fn sent_away(&mut self, sequence: &Sequence) {
        self.preempted.insert(sequence.id(), sequence.preemptions);
        if self.preempted.len() > REMEMBERED {
            self.preempted.pop_first();
        }
    }

    pub(super) fn admit_what_fits(&mut self) {
        while !self.admission_paused
            && self.running.len() < self.limits.sequences
            && let Some(id) = self.next_that_fits()
        {
            let is_oldest = self.waiting.first_key_value().is_some_and(|(oldest, _)| *oldest == id);
            self.overtaken = if is_oldest { 0 } else { self.overtaken + 1 };
            let mut sequence = self.waiting.remove(&id).expect("it waits");
            if sequence.expected.is_none() {
                sequence.expected = Some(sequence.produced() + self.expected(&sequence, false));
            }
            self.running.insert(id, sequence);
        }
    }

    /// The oldest waiting sequence, if the pool can hold it beside the running ones. Otherwise a younger one that it can
    /// hold, unless many have gone before already, or the oldest has lost its blocks to others before: then all wait
    /// until there is room for it. If none runs the oldest always fits: a request too large for the empty pool was
    /// refused earlier.
    fn next_that_fits(&self) -> Option<SequenceId> {
        let (oldest, sequence) = self.waiting.first_key_value()?;
        if self.running.is_empty() || self.fits(sequence) {
            return Some(*oldest);
        }
        let may_overtake = sequence.preemptions == 0 && self.overtaken < OVERTAKEN_MAX;
        let mut younger = self.waiting.iter().skip(1).take(if may_overtake { LOOKED_AT } else { 0 });
        younger.find(|(_, sequence)| self.fits(sequence)).map(|(id, _)| *id)
    }

    /// Whether the pool can hold `next` beside the running sequences, by prediction. Blocks that several share count once.
    fn fits(&self, next: &Sequence) -> bool {
        let held: usize = self.running.values().map(|s| s.cached.next_multiple_of(BLOCK_TOKENS)).sum();
        let busy = held * 2 > self.kv_tokens();
        let mut groups = BTreeSet::new();
        let mut forecast = |sequence: &Sequence, is_next: bool| {
            // Samples of one prompt will share its whole blocks. Those that have blocks share them already.
            let is_sample = sequence.spec.group.is_some_and(|group| !groups.insert(group));
            let of_group = if is_sample && sequence.cached == 0 { sequence.shared_tokens() } else { 0 };
            let found = if is_next { self.kv.held_prefix(sequence.takeable()) * BLOCK_TOKENS } else { 0 };
            let to_come = if sequence.is_kept() { sequence.remaining() } else { self.expected(sequence, busy) };
            SequenceForecast { held: sequence.tokens() - of_group.max(found), to_come }
        };
        let mut forecasts: Vec<_> = self.running.values().map(|sequence| forecast(sequence, false)).collect();
        forecasts.push(forecast(next, true));
        let shared = self.kv.shared_blocks() * BLOCK_TOKENS;
        let fits = predicted_peak(&mut forecasts, BLOCK_TOKENS).saturating_sub(shared) <= self.kv_tokens();
        fits && (!next.is_kept() || self.keeps(next))
    }

    /// Tokens that the sequence is expected to produce yet.
    fn expected(&self, sequence: &Sequence, busy: bool) -> usize {
        self.replies.expected(sequence.spec.tokens_max, sequence.produced(), sequence.remaining(), busy)
    }

    /// Whether the pool holds `next` and every other kept sequence to their ends, whatever the rest does.
    fn keeps(&self, next: &Sequence) -> bool {
        let kept = self.running.values().filter(|sequence| sequence.is_kept()).chain([next]);
        let tokens = |s: &Sequence| (s.tokens() + s.remaining()).next_multiple_of(BLOCK_TOKENS);
        kept.map(tokens).sum::<usize>() <= self.kv_tokens()
    }

    /// Preempts the youngest sequence, to be recomputed later, so that the oldest makes progress. One that was preempted
    /// often is spared while there is another. Its pictures may have left the vision cache since it read them. Only its
    /// driver can get them back.
    pub(super) fn preempt_youngest(&mut self, effects: &mut Vec<Effect>) {
        let may_go = self.running.values().rev().find(|sequence| !sequence.is_kept()).map(Sequence::id);
        // None only in a pool that has shrunk.
        let id = may_go.unwrap_or_else(|| *self.running.last_key_value().expect("a sequence lacks blocks").0);
        let mut sequence = self.running.remove(&id).expect("it runs");
        assert!(!self.running.is_empty(), "{id} alone does not fit the pool; it should have been refused at the door");
        self.admission_paused = true;
        self.preemptions.for_blocks += 1;
        sequence.preemptions += 1;
        self.begin_again(sequence, effects);
        self.release(vec![id], effects);
    }
}

impl Sequence {
    /// Whether it keeps its blocks while others lose theirs.
    fn is_kept(&self) -> bool {
        self.preemptions >= PREEMPTIONS_MAX
    }
}
