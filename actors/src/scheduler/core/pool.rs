//! A pool that becomes smaller or larger while sequences run. Nobody is preempted while a step is under way, so a smaller
//! pool waits for the steps that the lane has, and plans none meanwhile.

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Shrinking};
use crate::kv::SequenceId;

impl SchedulerCore {
    /// The blocks that it plans with.
    pub fn blocks(&self) -> usize {
        self.limits.kv_tokens / BLOCK_TOKENS
    }

    pub(super) fn resize(&mut self, blocks: usize, effects: &mut Vec<Effect>) {
        assert!(!matches!(self.shrinking, Some(Shrinking::Asked { .. })), "one change of the pool at a time");
        if blocks < self.blocks() {
            self.shrinking = Some(Shrinking::Waits { to: blocks });
            return;
        }
        // As many as before, after all, or more.
        self.shrinking = None;
        if blocks > self.blocks() {
            self.limits.kv_tokens = blocks * BLOCK_TOKENS;
            // What did not suffice may suffice now.
            self.look_ahead_paused = false;
            effects.push(Effect::Grow(blocks));
        }
        effects.push(Effect::Resized);
    }

    /// Asks for the smaller pool when no step can name a block that goes.
    pub(super) fn shrink_when_idle(&mut self, effects: &mut Vec<Effect>) {
        if let Some(Shrinking::Waits { to }) = self.shrinking
            && self.asked.is_none()
            && self.under_way.is_empty()
        {
            self.shrinking = Some(Shrinking::Asked { to });
            effects.push(Effect::Shrink(to));
        }
    }

    /// The pool is smaller, and these have lost their blocks with it: they wait by their age, and are computed again.
    pub(super) fn shrunk(&mut self, holders: &[SequenceId], effects: &mut Vec<Effect>) {
        let Some(Shrinking::Asked { to }) = self.shrinking.take() else {
            panic!("the pool shrank without being asked")
        };
        self.limits.kv_tokens = to * BLOCK_TOKENS;
        for holder in holders {
            // One whose caller went while the kv actor was asked: its release is on the way, and this one hits nobody.
            let Some(sequence) = self.running.remove(holder) else { continue };
            if !sequence.cancelled {
                self.begin_again(sequence, effects);
            }
        }
        if !holders.is_empty() {
            effects.push(Effect::Release(holders.to_vec()));
        }
        effects.push(Effect::Resized);
    }
}
