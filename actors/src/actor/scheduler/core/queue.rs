//! Waiting sequences: their priority in the [`Line`](crate::order::Line), the choice of sequences
//! to preempt for them, and their deadlines. Pictures wait in a `Line` too. Sequences that cannot
//! be served in time are dropped before they take a block.

use std::{cmp::Reverse, time::Duration};

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    deadline::{Deadline, Deadlines},
    kv::SequenceId,
    order::Priority,
    scheduler::SchedulingParams,
    token_interval::StepWork,
};

impl Sequence {
    /// A sort key. The most urgent sequence has the smallest key. Among equally urgent sequences,
    /// the oldest has the smallest key.
    pub(super) fn urgency(&self) -> (i32, SequenceId) {
        (self.spec.scheduling_params.priority, self.id())
    }

    /// The priority with which the sequence waits. Among equally urgent sequences, the sequences
    /// that lost their blocks are first.
    pub(super) fn rank(&self) -> Priority {
        let SchedulingParams { priority, tenant, .. } = &self.spec.scheduling_params;
        Priority { priority: *priority, tenant: tenant.clone(), had_turn: self.losses() > 0 }
    }
}

impl SchedulerCore {
    /// Drops the sequences that can no longer be served in time: waiting sequences, and admitted
    /// sequences that have not been part of a step yet. A sequence whose blocks a copy is filling
    /// is dropped after the copy has ended.
    pub(super) fn drop_late(&mut self, effects: &mut Vec<Effect>) {
        let missed = |sequence: &Sequence| Some((sequence.id(), self.missed(sequence)?));
        let without_share = self.running.values().filter(|s| !s.has_begun && !s.cancelled && !s.is_fetching);
        let late: Vec<_> = self.waiting.values().chain(without_share).filter_map(missed).collect();
        for (id, deadline) in late {
            self.waiting.leave(id);
            self.take_out(id);
            // Blocks that were fetched from host memory keep their names and content.
            self.kv.release(id);
            effects.push(Effect::Late(id, deadline));
        }
    }

    /// The deadline that a sequence has missed, or would miss even if it were part of the next
    /// step.
    fn missed(&self, sequence: &Sequence) -> Option<Deadline> {
        let Deadlines { queue, first_token, reply } = sequence.due;
        if !sequence.has_begun && queue.is_some_and(|due| due < self.now) {
            return Some(Deadline::Queue);
        }
        let first_token = first_token.filter(|_| sequence.spec.produced == 0);
        let due = [(first_token, Deadline::FirstToken), (reply, Deadline::Reply)];
        let first = due.into_iter().filter_map(|(due, deadline)| Some((due?, deadline))).min()?;
        // The cached blocks are looked up only if the deadline would be missed without them.
        let is_missed = |found| first.0 < self.now + self.until_token(sequence, found);
        (is_missed(0) && is_missed(self.kv.known_prefix(sequence.takeable()) * BLOCK_TOKENS)).then_some(first.1)
    }

    /// The shortest time until the sequence's next token, by the step costs: the duration of one
    /// step with only this sequence, of which `found` tokens are cached. Zero if no costs are
    /// known.
    fn until_token(&self, sequence: &Sequence, found: usize) -> Duration {
        let Some(token_interval) = &self.token_interval else { return Duration::ZERO };
        let mut work = StepWork::default();
        work.add_prompt(found, (sequence.tokens() - found).min(self.limits.step_tokens));
        Duration::from_micros(token_interval.costs.predict(&work, false))
    }

    /// The running sequences that are less urgent than `next` and may be preempted once more, the
    /// least urgent and youngest first.
    pub(super) fn less_urgent(&self, next: &Sequence) -> Vec<SequenceId> {
        let priority = next.spec.scheduling_params.priority;
        let may_go = |s: &&Sequence| {
            s.spec.scheduling_params.priority > priority && !s.is_kept() && !s.has_turn && !s.is_fetching
        };
        let mut may_go: Vec<_> = self.running.values().filter(may_go).map(Sequence::urgency).collect();
        may_go.sort_unstable_by_key(|urgency| Reverse(*urgency));
        may_go.into_iter().map(|(_, id)| id).collect()
    }
}
