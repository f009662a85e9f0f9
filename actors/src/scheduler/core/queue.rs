//! The order of those that wait (ADR 44): the most urgent first, then by what their tenants were given, then by age. None
//! waits for good: when some others were admitted the oldest is next, whatever else the order says. What cannot be served
//! in time goes before it has taken a block.

use std::{cmp::Reverse, time::Duration};

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    deadline::{Deadline, Deadlines},
    kv::SequenceId,
    pace::StepWork,
};

/// So many others may be admitted before the oldest that waits. Then it is next. Priorities thus keep seven of eight
/// admissions, also beside a long queue of less urgent requests, where an age that makes urgent would end them.
const BEFORE_OLDEST: u32 = 7;

/// Beyond these, so many may be admitted before one that is next and does not fit yet.
const PASSES_MAX: u32 = 32;

/// How many are looked at for one that fits, when the next does not.
const LOOKED_AT: usize = 8;

/// The oldest that waits, and how many others were admitted since it became that.
#[derive(Debug, Default)]
pub(super) struct Turn {
    oldest: Option<SequenceId>,
    admitted: u32,
}

impl Sequence {
    /// Least for the most urgent; of those, for the oldest.
    pub(super) fn urgency(&self) -> (i32, SequenceId) {
        (self.spec.standing.priority, self.id())
    }
}

impl SchedulerCore {
    /// The waiting sequences that may be admitted next, in order: the one that is next, and some that may pass it if it
    /// does not fit. Among equally urgent ones those that lost their blocks come first, because readers wait for them.
    pub(super) fn next_in_order(&self) -> Vec<SequenceId> {
        let place = |sequence: &Sequence| {
            let (priority, id) = sequence.urgency();
            // One that lost its blocks had its turn.
            let is_new = sequence.preemptions == 0;
            let given = if is_new { self.tenants.counter(&sequence.spec.standing.tenant) } else { 0 };
            (priority, is_new, given, id)
        };
        let mut places: Vec<_> = self.waiting.values().map(place).collect();
        if places.len() > LOOKED_AT + 1 {
            places.select_nth_unstable(LOOKED_AT);
            places.truncate(LOOKED_AT + 1);
        }
        places.sort_unstable();
        let mut order: Vec<_> = places.into_iter().map(|(.., id)| id).collect();
        if let Some(oldest) = self.turn_of() {
            order.retain(|id| *id != oldest);
            order.insert(0, oldest);
        }
        order
    }

    /// The oldest that waits, if it is its turn.
    pub(super) fn turn_of(&self) -> Option<SequenceId> {
        let oldest = self.waiting.first_key_value().map(|(oldest, _)| *oldest);
        oldest.filter(|_| self.turn.oldest == oldest && self.turn.admitted >= BEFORE_OLDEST)
    }

    /// Whether another may still be admitted before `next`, which does not fit. None passes one that lost its blocks.
    pub(super) fn may_be_passed(&self, next: SequenceId) -> bool {
        let next = &self.waiting[&next];
        next.preemptions == 0 && next.passed < PASSES_MAX
    }

    /// Counts an admission against the turn of the oldest. `id` still waits.
    pub(super) fn count_turn(&mut self, id: SequenceId) {
        let oldest = self.waiting.first_key_value().map(|(oldest, _)| *oldest);
        if self.turn.oldest != oldest || oldest == Some(id) {
            self.turn = Turn { oldest: oldest.filter(|oldest| *oldest != id), admitted: 0 };
        }
        self.turn.admitted += 1;
    }

    /// Drops the sequences that can no longer be served in time: those that wait, and those that were admitted and had no
    /// share of a step yet. Those whose blocks a copy fills go when it has ended.
    pub(super) fn drop_late(&mut self, effects: &mut Vec<Effect>) {
        let missed = |sequence: &Sequence| Some((sequence.id(), self.missed(sequence)?));
        let without_share = self.running.values().filter(|s| !s.has_begun && !s.cancelled && !s.is_fetching);
        let late: Vec<_> = self.waiting.values().chain(without_share).filter_map(missed).collect();
        for (id, deadline) in late {
            self.waiting.remove(&id);
            self.take_out(id);
            // What came from host memory stays known.
            self.kv.release(id);
            effects.push(Effect::Late(id, deadline));
        }
    }

    /// The deadline that a sequence has missed, or would miss if it had a share of the next step.
    fn missed(&self, sequence: &Sequence) -> Option<Deadline> {
        let Deadlines { queue, first_token, reply } = sequence.due;
        if !sequence.has_begun && queue.is_some_and(|due| due < self.now) {
            return Some(Deadline::Queue);
        }
        let first_token = first_token.filter(|_| sequence.spec.produced == 0);
        let due = [(first_token, Deadline::FirstToken), (reply, Deadline::Reply)];
        let first = due.into_iter().filter_map(|(due, deadline)| Some((due?, deadline))).min()?;
        // What blocks hold is looked up only where it matters.
        let is_missed = |found| first.0 < self.now + self.until_token(sequence, found);
        (is_missed(0) && is_missed(self.kv.known_prefix(sequence.takeable()) * BLOCK_TOKENS)).then_some(first.1)
    }

    /// The least time until the sequence's next token, by what steps cost: that of one step with its tokens alone, but
    /// for those `found` in blocks. Zero where no costs are known.
    fn until_token(&self, sequence: &Sequence, found: usize) -> Duration {
        let Some(pace) = &self.pace else { return Duration::ZERO };
        let mut work = StepWork::default();
        work.add_prompt(found, (sequence.tokens() - found).min(self.limits.step_tokens));
        Duration::from_micros(pace.costs.predict(&work, false))
    }

    /// The running sequences that are less urgent than `next` and may lose their blocks once more, the least urgent and
    /// youngest first.
    pub(super) fn less_urgent(&self, next: &Sequence) -> Vec<SequenceId> {
        let priority = next.spec.standing.priority;
        let may_go =
            |s: &&Sequence| s.spec.standing.priority > priority && !s.is_kept() && !s.has_turn && !s.is_fetching;
        let mut may_go: Vec<_> = self.running.values().filter(may_go).map(Sequence::urgency).collect();
        may_go.sort_unstable_by_key(|urgency| Reverse(*urgency));
        may_go.into_iter().map(|(_, id)| id).collect()
    }
}
