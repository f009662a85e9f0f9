//! A pool that shrinks and grows while sequences run. No sequence is preempted while a step runs, so shrinking waits
//! for the lane's steps and plans no new ones.

use bursar_kernels::BLOCK_TOKENS;

use super::{Effect, SchedulerCore, Shrinking};
use crate::kv::SequenceId;

impl SchedulerCore {
    /// The number of blocks that steps are planned with.
    pub fn blocks(&self) -> usize {
        self.limits.kv_tokens / BLOCK_TOKENS
    }

    pub(super) fn resize(&mut self, blocks: usize, effects: &mut Vec<Effect>) {
        assert!(!matches!(self.shrinking, Some(Shrinking::Asked { .. })), "one change of the pool at a time");
        if blocks < self.blocks() {
            self.shrinking = Some(Shrinking::Waits { to: blocks });
            return;
        }
        // The same number as before after all, or more.
        self.shrinking = None;
        if blocks > self.blocks() {
            self.limits.kv_tokens = blocks * BLOCK_TOKENS;
            // What did not fit before may fit now.
            self.look_ahead_paused = false;
            effects.push(Effect::Grow(blocks));
        }
        effects.push(Effect::Resized);
    }

    /// Asks for the smaller pool when no running step can use a block that goes.
    pub(super) fn shrink_when_idle(&mut self, effects: &mut Vec<Effect>) {
        if let Some(Shrinking::Waits { to }) = self.shrinking
            && self.asked.is_none()
            && self.under_way.is_empty()
        {
            self.shrinking = Some(Shrinking::Asked { to });
            effects.push(Effect::Shrink(to));
        }
    }

    /// The pool has shrunk. `holders` lost their blocks: they wait in order of age and are recomputed.
    pub(super) fn shrunk(&mut self, holders: &[SequenceId], effects: &mut Vec<Effect>) {
        let Some(Shrinking::Asked { to }) = self.shrinking.take() else {
            panic!("the pool shrank without being asked")
        };
        self.limits.kv_tokens = to * BLOCK_TOKENS;
        for holder in holders {
            // Its caller left while the kv actor was asked. Its release is already sent, and releasing it again has no
            // effect.
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
