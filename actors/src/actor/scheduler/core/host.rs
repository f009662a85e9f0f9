//! Blocks that are copied to host memory, and copied back for sequences that begin with
//! them (ADR 15).

use bursar_kernels::{BLOCK_TOKENS, ops::copy_blocks::PREPARED_JOBS};

use super::{Effect, SchedulerCore, Sequence};
use crate::{
    kv::{Copies, SequenceId},
    scheduler::step::CopyUnderWay,
    token_interval::CopyCosts,
};

/// While this many copies are running, only copies that a step needs may begin. The device has
/// timing events for these copies and for the copies of two steps, and the lane's queue can hold
/// all of them.
const AHEAD: usize = PREPARED_JOBS - 2;

/// With a host tier, 1 / `BLANK_SHARE` of the pool, but no more than a step needs, is kept blank:
/// free, with no content that must still be copied. Steps then seldom wait for copies to the host.
const BLANK_SHARE: usize = 16;

impl SchedulerCore {
    /// Keeps up to `slots` blocks in host memory. They are copied back when `costs` say that this
    /// is quicker than recomputing them.
    #[must_use]
    pub fn with_host(mut self, slots: usize, costs: CopyCosts) -> Self {
        self.kv = self.kv.with_host(slots);
        self.copies.costs = costs;
        self
    }

    /// Keeps up to `slots` snapshots of states in host memory. Copying one snapshot takes as long
    /// as copying `blocks` blocks.
    #[must_use]
    pub fn with_host_states(mut self, slots: usize, blocks: usize) -> Self {
        self.kv = self.kv.with_host_states(slots);
        self.copies.state_blocks = blocks;
        self
    }

    /// Whether copies are running on the lane. The blocks and slots that the copies use must not be
    /// removed.
    pub(super) fn is_copying(&self) -> bool {
        !self.copies.under_way.is_empty()
    }

    /// Whether blocks are being fetched for a sequence.
    pub(super) fn is_fetching(&self) -> bool {
        self.copies.under_way.iter().any(|copy| copy.fetches.is_some())
    }

    /// Submits copies to the lane, if there are any.
    fn copy(&mut self, copies: Copies, fetches: Option<(SequenceId, usize)>, effects: &mut Vec<Effect>) {
        if !copies.is_empty() {
            self.copies
                .under_way
                .push_back(CopyUnderWay { blocks: copies.in_blocks(self.copies.state_blocks), fetches });
            effects.push(Effect::Copy(Box::new(copies)));
        }
    }

    /// Copies to the host the content that the next step would overwrite.
    pub(super) fn copy_leaving(&mut self, effects: &mut Vec<Effect>) {
        let leaving = self.kv.take_leaving();
        self.copy(leaving, None, effects);
    }

    /// Copies the content of free blocks to the host ahead of time, so that later steps find blank
    /// blocks.
    pub(super) fn copy_ahead(&mut self, effects: &mut Vec<Effect>) {
        if !self.kv.has_host() || self.shrinks_to.is_some() || self.copies.under_way.len() >= AHEAD {
            return;
        }
        let of_step = self.limits.step_tokens.div_ceil(BLOCK_TOKENS) * self.kv.groups().count();
        self.kv.make_blank(of_step.min(self.kv.blocks() / BLANK_SHARE));
        self.copy_leaving(effects);
    }

    /// Begins to fetch the blocks that admitted sequences begin with and that only the host has.
    /// The blocks of the oldest sequence are fetched first.
    pub(super) fn fetch(&mut self, effects: &mut Vec<Effect>) {
        if !self.kv.has_host() || self.shrinks_to.is_some() {
            return;
        }
        let waits = |s: &&Sequence| !s.is_fetching && !s.cancelled && self.waits_for_host(s);
        let waiting: Vec<_> = self.running.values().filter(waits).map(Sequence::id).collect();
        for id in waiting {
            if self.copies.under_way.len() >= AHEAD {
                return;
            }
            let sequence = self.running.get_mut(&id).expect("the sequence runs");
            let prefix = sequence.takeable();
            // If the blocks are already being fetched for another sequence, this sequence finds
            // them on the device afterward.
            if self.kv.is_coming(prefix) {
                continue;
            }
            let tokens = self.kv.beginning(prefix).blocks * BLOCK_TOKENS;
            if let Some(copies) = self.kv.fetch(id, prefix) {
                sequence.is_fetching = true;
                self.copy(copies, Some((id, tokens)), effects);
            }
        }
    }

    /// Whether a sequence should wait for blocks from host memory instead of recomputing them.
    pub(super) fn waits_for_host(&self, sequence: &Sequence) -> bool {
        if sequence.is_fetching {
            return true;
        }
        let prefix = sequence.takeable();
        if !self.kv.has_host() || prefix.is_empty() || self.kv.has_table(sequence.id()) {
            return false;
        }
        let found = self.kv.beginning(prefix);
        let (cached, tokens) = (found.resident * BLOCK_TOKENS, (found.blocks - found.resident) * BLOCK_TOKENS);
        let missing = found.missing + if found.lacks_state { self.copies.state_blocks } else { 0 };
        missing > 0
            && (sequence.must_find > 0 || self.copies.costs.is_copy_cheaper(missing, cached, tokens))
            && (self.kv.is_coming(prefix) || found.fits)
    }

    /// Handles the end of the oldest copies, which took `micros` µs.
    pub(super) fn copied(&mut self, micros: u64, effects: &mut Vec<Effect>) {
        let copy = self.copies.under_way.pop_front().expect("only copies under way can end");
        self.copies.costs.learn(copy.blocks, micros);
        let Some((id, tokens)) = copy.fetches else { return };
        self.kv.fetched(id);
        let sequence = self.running.get_mut(&id).expect("the blocks are kept while a copy fills them");
        sequence.is_fetching = false;
        if sequence.cancelled {
            self.take_out(id);
            return self.release(vec![id], effects);
        }
        (sequence.cached, sequence.named) = (tokens, tokens);
    }
}
