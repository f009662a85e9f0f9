//! Admission by predicted peak, and preemption where the prediction was wrong.

use std::collections::BTreeSet;

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    kv::SequenceId,
    scheduler::{
        NewSequence,
        admission::{SequenceForecast, predicted_peak},
        drafts::Backoff,
        sequence::{Charge, History},
    },
};

/// A sequence that was preempted this often for other sequences is admitted again only when the
/// pool can hold it to its end. From then on it is a kept sequence: it keeps its blocks while other
/// sequences lose theirs. Only a shrink still takes blocks of a kept sequence: if they are in the
/// removed tail, because blocks cannot be moved, or if the smaller pool cannot hold all kept
/// sequences. Losses to shrinks do not count here. A shrink takes blocks from many sequences at
/// once. If they all became kept sequences, only a few of them could be admitted again at a time.
const PREEMPTIONS_MAX: u32 = 2;

/// Maximum number of sequences whose history is kept after they were sent back to their drivers.
/// Without a limit, drivers that never admit their sequences again would leave entries forever.
const REMEMBERED: usize = 1024;

impl SchedulerCore {
    /// Queues a sequence that is new, or that its driver admits again.
    pub(super) fn arrive(&mut self, spec: NewSequence) {
        let history = self.sent_away.remove(&spec.id).unwrap_or_default();
        let due = spec.scheduling_params.left.map(|_, left| Some(self.now.saturating_add(left)));
        let mut sequence = Sequence { history, due, ..Sequence::new(spec) };
        if self.draft_limit.is_none() {
            sequence.backoff = Backoff::never();
        }
        let served = self.running.values().map(|s| &s.spec.scheduling_params.tenant);
        self.waiting.join(sequence.id(), sequence.rank(), sequence, served);
    }

    /// Keeps the history of a sequence that its driver will admit again.
    pub(super) fn remember(&mut self, sequence: &Sequence) {
        if sequence.history != History::default() {
            self.sent_away.insert(sequence.id(), sequence.history);
        }
        if self.sent_away.len() > REMEMBERED {
            self.sent_away.pop_first();
        }
    }

    pub(super) fn admit_what_fits(&mut self, effects: &mut Vec<Effect>) {
        // Admission is paused until the admitted sequences have run a step. They may have left
        // without a step, while their blocks were being fetched from host memory.
        self.admission_paused &= !self.running.is_empty();
        while !self.admission_paused
            && let Some(id) = self.next_to_admit(effects)
        {
            let has_turn = self.waiting.must_serve() == Some(id);
            let waiting = &self.waiting[id];
            let is_due = waiting.history.charge == Charge::None && waiting.produced() == 0;
            let cost = is_due.then_some(waiting.prompt);
            let mut sequence = self.waiting.serve(id, cost);
            sequence.has_turn = has_turn;
            if is_due {
                sequence.history.charge = Charge::Whole;
            }
            if sequence.expected.is_none() {
                sequence.expected = Some(sequence.produced() + self.expected(&sequence, false));
            }
            self.running.insert(id, sequence);
        }
        self.lacks_blocks =
            !self.waiting.is_empty() && !self.admission_paused && self.running.len() < self.limits.sequences;
    }

    /// Returns the next sequence in order if it fits together with the running sequences, or if
    /// less urgent sequences can be preempted for it. Otherwise returns a later sequence that fits
    /// and may overtake the next sequence. Once too many sequences have overtaken the next
    /// sequence, or if it lost its blocks before, all other sequences wait until it fits. If no
    /// sequence runs, the next sequence always fits, because a request too large for the empty pool
    /// was refused earlier.
    fn next_to_admit(&mut self, effects: &mut Vec<Effect>) -> Option<SequenceId> {
        let is_full = self.running.len() >= self.limits.sequences;
        if self.waiting.is_empty() || is_full && !self.some_may_make_way() {
            return None;
        }
        let order = self.waiting.order();
        let (next, sequence) = (order[0], &self.waiting[order[0]]);
        if self.running.is_empty() || self.fits_without(sequence, &[]) {
            return Some(next);
        }
        let less_urgent = self.less_urgent(sequence);
        if !less_urgent.is_empty() && self.fits_without(sequence, &less_urgent) {
            // No sequence is preempted while a step runs.
            self.look_ahead_paused = !self.under_way.is_empty();
            return (!self.look_ahead_paused).then(|| self.make_way(next, less_urgent, effects));
        }
        if is_full || !self.waiting.may_be_passed(next) {
            return None;
        }
        let other = *order[1..].iter().find(|id| self.fits_without(&self.waiting[**id], &[]))?;
        self.waiting.pass(next);
        Some(other)
    }

    /// Whether a waiting sequence is more urgent than a running sequence.
    fn some_may_make_way(&self) -> bool {
        let priority = |sequence: &Sequence| sequence.spec.scheduling_params.priority;
        self.waiting.values().map(priority).min() < self.running.values().map(priority).max()
    }

    /// Preempts as few of the `less_urgent` sequences as possible so that `next` fits, the least
    /// urgent first. No other sequence is admitted before a step has run.
    fn make_way(
        &mut self,
        next: SequenceId,
        mut less_urgent: Vec<SequenceId>,
        effects: &mut Vec<Effect>,
    ) -> SequenceId {
        let fits = |gone: &[SequenceId]| self.fits_without(&self.waiting[next], gone);
        // The first sequence is usually enough, so prefixes of the list are tried first. Each
        // prefix is twice as long as the previous prefix.
        let mut some = 1;
        while some < less_urgent.len() && !fits(&less_urgent[..some]) {
            some *= 2;
        }
        less_urgent.truncate(some);
        for spared in less_urgent.clone().into_iter().rev() {
            let others: Vec<_> = less_urgent.iter().copied().filter(|id| *id != spared).collect();
            if fits(&others) {
                less_urgent = others;
            }
        }
        self.admission_paused = true;
        self.preemptions.for_priority += less_urgent.len();
        less_urgent.into_iter().for_each(|id| self.preempt(id, effects));
        next
    }

    /// Whether there is a permit for `next`, and the pool is predicted to hold `next` together with
    /// the running sequences that are not in `gone`. Blocks that several sequences share count
    /// once.
    fn fits_without(&self, next: &Sequence, gone: &[SequenceId]) -> bool {
        let stay: Vec<_> = self.running.values().filter(|sequence| !gone.contains(&sequence.id())).collect();
        if stay.len() >= self.limits.sequences {
            return false;
        }
        let kv_groups = self.kv.groups();
        let held: usize = stay.iter().map(|s| kv_groups.blocks_for(s.cached, 1)).sum();
        let busy = held * 2 > self.kv.blocks();
        let mut groups = BTreeSet::new();
        let mut forecast = |sequence: &Sequence, is_next: bool| {
            // A sample without blocks will share the whole blocks of its prompt with the other
            // samples. A sample with blocks shares them already.
            let is_sample = sequence.spec.group.is_some_and(|group| !groups.insert(group));
            let of_group = if is_sample && sequence.cached == 0 { sequence.shared_tokens() } else { 0 };
            let found = if is_next { self.kv.held_prefix(sequence.takeable()) * BLOCK_TOKENS } else { 0 };
            let to_come = if sequence.is_kept() { sequence.remaining() } else { self.expected(sequence, busy) };
            let tokens = sequence.tokens();
            SequenceForecast {
                held: tokens - of_group.max(found),
                to_come,
                windowed: kv_groups.windowed_blocks_for(tokens + to_come, 1) * BLOCK_TOKENS,
            }
        };
        let mut forecasts: Vec<_> = stay.iter().map(|sequence| forecast(sequence, false)).collect();
        forecasts.push(forecast(next, true));
        let shared = self.kv.shared_blocks() * BLOCK_TOKENS;
        let peak = predicted_peak(&mut forecasts, kv_groups.full(), BLOCK_TOKENS) + self.prefill_overhead(next, &stay);
        let fits = peak.saturating_sub(shared) <= self.kv_tokens();
        fits && (!next.is_kept() || self.keeps(next, &stay))
    }

    /// Additional space, in tokens, that prompts need in groups with a window, compared with
    /// decoding sequences of the same length. A prompt needs this space because it holds all blocks
    /// of the chunks of two steps. The result is at most the tokens of two steps per group, because
    /// all prompts share the steps.
    fn prefill_overhead(&self, next: &Sequence, stay: &[&Sequence]) -> usize {
        let (groups, step_tokens) = (self.kv.groups(), self.limits.step_tokens);
        let windowed = groups.count() - groups.full();
        if windowed == 0 {
            return 0;
        }
        let prompts = stay.iter().copied().filter(|sequence| !sequence.is_decoding()).chain([next]);
        let more = |tokens| groups.windowed_blocks_for(tokens, step_tokens) - groups.windowed_blocks_for(tokens, 1);
        let more = prompts.map(|sequence| more(sequence.tokens())).sum::<usize>() * BLOCK_TOKENS;
        more.min(windowed * 2 * step_tokens)
    }

    /// Tokens that the sequence is still expected to produce.
    fn expected(&self, sequence: &Sequence, busy: bool) -> usize {
        self.replies.expected(sequence.spec.tokens_max, sequence.produced(), sequence.remaining(), busy)
    }

    /// Whether the pool can hold `next` and every kept sequence in `stay` to their ends, regardless
    /// of other sequences.
    fn keeps(&self, next: &Sequence, stay: &[&Sequence]) -> bool {
        let kept = stay.iter().copied().filter(|sequence| sequence.is_kept()).chain([next]);
        let (groups, step_tokens) = (self.kv.groups(), self.limits.step_tokens);
        let blocks = |s: &Sequence| groups.blocks_for(s.tokens() + s.remaining(), step_tokens);
        kept.map(blocks).sum::<usize>() <= self.kv.blocks()
    }

    /// Preempts the youngest of the least urgent sequences, so that the oldest of the most urgent
    /// sequences makes progress. The preempted sequence is recomputed later. A kept sequence is
    /// preempted only if all running sequences are kept.
    pub(super) fn preempt_for_blocks(&mut self, effects: &mut Vec<Effect>) {
        let least_urgent = |is_spared: fn(&Sequence) -> bool| {
            let may_go = self.running.values().filter(|sequence| !is_spared(sequence));
            may_go.map(Sequence::urgency).max().map(|(_, id)| id)
        };
        // All running sequences can be kept sequences only in a pool that has shrunk.
        let id = least_urgent(Sequence::is_kept)
            .or_else(|| least_urgent(|_| false))
            .expect("a running sequence lacks blocks");
        self.admission_paused = true;
        self.preemptions.for_blocks += 1;
        self.preempt(id, effects);
        assert!(!self.running.is_empty(), "{id} does not fit the pool by itself; admission should have refused it");
    }

    /// Preempts a running sequence. Its pictures may have left the vision cache since it read them,
    /// and only its driver can get them back.
    fn preempt(&mut self, id: SequenceId, effects: &mut Vec<Effect>) {
        let mut sequence = self.take_out(id).expect("the sequence runs");
        sequence.history.preemptions += 1;
        self.begin_again(sequence, effects);
        self.release(vec![id], effects);
    }
}

impl Sequence {
    /// How often the sequence lost its blocks, for any reason.
    pub(super) fn losses(&self) -> u32 {
        self.history.preemptions + self.history.shrinks
    }

    /// Whether the sequence keeps its blocks while other sequences lose theirs.
    pub(super) fn is_kept(&self) -> bool {
        self.history.preemptions >= PREEMPTIONS_MAX
    }
}
