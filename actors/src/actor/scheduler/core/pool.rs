//! A pool that shrinks and grows while sequences run. No sequence is preempted while a step runs.
//! Shrinking therefore waits until the lane's steps and copies have ended, and no new step is
//! planned until then.

use std::cmp::Reverse;

use super::{Effect, SchedulerCore};

impl SchedulerCore {
    pub(super) fn resize(&mut self, blocks: usize, effects: &mut Vec<Effect>) {
        if blocks < self.kv.blocks() {
            self.shrinks_to = Some(blocks);
            return;
        }
        // A pending shrink is canceled, because the new size is not smaller than the current one.
        self.shrinks_to = None;
        if blocks > self.kv.blocks() {
            self.kv.grow(blocks);
            // Sequences that did not fit before may fit now.
            self.look_ahead_paused = false;
        }
        effects.push(Effect::Resized);
    }

    /// Shrinks the pool if no running step or copy can use a removed block. Sequences that lose
    /// blocks are preempted in this order: kept sequences after all other sequences, then sequences
    /// with fewer losses first, then less urgent sequences first. The content of the sequences that
    /// are preempted last stays cached longest.
    pub(super) fn shrink_when_idle(&mut self, effects: &mut Vec<Effect>) {
        let is_idle = self.under_way.is_empty() && !self.is_copying();
        let Some(to) = self.shrinks_to.take_if(|_| is_idle) else { return };
        let running = &self.running;
        let place = |holder| {
            let sequence = &running[&holder];
            (sequence.is_kept(), sequence.losses(), Reverse(sequence.urgency()))
        };
        let holders = self.kv.vacate(to, place);
        self.preemptions.by_shrinks += holders.len();
        for holder in &holders {
            let mut sequence = self.take_out(*holder).expect("only running sequences hold blocks");
            sequence.history.shrinks += 1;
            self.begin_again(sequence, effects);
        }
        effects.extend((!holders.is_empty()).then_some(Effect::Released(holders)));
        self.copy_leaving(effects);
        if self.is_copying() {
            // First the content of the tail is copied to the host. The pool shrinks when the copies
            // have ended.
            self.shrinks_to = Some(to);
            return;
        }
        self.kv.shrink(to);
        effects.push(Effect::Resized);
    }
}
