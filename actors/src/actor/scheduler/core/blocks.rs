//! The blocks of a step, and the cached tokens that it need not compute.

use bursar_model::flow::DraftPositions;

use super::{Charge, Effect, SchedulerCore, SequenceTokens};
use crate::kv::{Allotment, BlockRequest, SequenceId, Table};

impl SchedulerCore {
    /// Allocates the blocks that the step needs. Returns the shares without their cached tokens,
    /// and a block table for each share. Returns `None` if there are too few blocks.
    pub(super) fn take_blocks(
        &mut self,
        mut shares: Vec<SequenceTokens>,
        effects: &mut Vec<Effect>,
    ) -> Option<(Vec<SequenceTokens>, Vec<Table>)> {
        loop {
            let demands: Vec<_> = shares.iter().map(|share| self.demand(share)).collect();
            let Allotment { tables, short_by } = self.kv.allot(&demands);
            let wanted: usize = shares.iter().map(|share| share.tokens).sum();
            let lacks = |table: &&Table| table.held < self.running[&table.sequence].must_find;
            let lacking: Vec<_> = tables.iter().filter(lacks).map(|table| table.sequence).collect();
            for (share, table) in shares.iter_mut().zip(&tables).filter(|(_, table)| !lacking.contains(&table.sequence))
            {
                self.take_found(share, table, effects);
            }
            if !lacking.is_empty() {
                self.send_for_pictures(lacking, effects);
                shares = self.shares();
                continue;
            }
            // Cached tokens end within a picture, and the rest of the picture does not fit the
            // share. This happens once per sequence, because a sequence is looked up only once.
            if shares.iter().any(|share| share.tokens == 0) {
                shares = self.shares();
                continue;
            }
            if short_by > 0 && shares.iter().any(|share| self.draft_slots(share) > 0) {
                self.give_up_drafts(&mut shares);
                continue;
            }
            if short_by > 0 {
                let unmet = demands[tables.len()..].iter().filter(|demand| demand.held == 0);
                effects.push(Effect::LacksBlocks(unmet.map(|demand| demand.sequence).collect(), short_by));
                return None;
            }
            let left: usize = shares.iter().map(|share| share.tokens).sum();
            // Cached tokens are not computed, so more tokens fit in the step. The loop ends,
            // because each sequence is looked up only once.
            let more = if left < wanted { self.shares() } else { Vec::new() };
            if more.iter().map(|share| share.tokens).sum::<usize>() <= left {
                return Some((shares, tables));
            }
            shares = more;
        }
    }

    /// Sends sequences back to their drivers because the cached blocks that should hold their
    /// pictures are gone. The drivers must get rows for these pictures.
    fn send_for_pictures(&mut self, sequences: Vec<SequenceId>, effects: &mut Vec<Effect>) {
        for id in &sequences {
            let sequence = self.take_out(*id).expect("the sequence has a share of the step");
            self.begin_again(sequence, effects);
        }
        self.release(sequences, effects);
    }

    fn demand(&self, share: &SequenceTokens) -> BlockRequest {
        let sequence = &self.running[&share.sequence];
        BlockRequest {
            sequence: share.sequence,
            held: sequence.cached,
            more: share.tokens + self.draft_slots(share),
            tokens: sequence.tokens() + self.draft_slots(share),
            prefix: sequence.takeable().to_vec(),
        }
    }

    /// Slots of KV blocks that the drafts of a step need. A draft head with constant positions
    /// caches nothing for further drafts.
    fn draft_slots(&self, share: &SequenceTokens) -> usize {
        match self.draft_head {
            Some(DraftPositions::Constant) => share.drafts,
            Some(DraftPositions::Advancing) | None => share.drafts + share.further,
        }
    }

    /// Skips the first tokens of a sequence that are already cached. The share is left with 0
    /// tokens if the next picture must be whole and does not fit.
    fn take_found(&mut self, share: &mut SequenceTokens, table: &Table, effects: &mut Vec<Effect>) {
        assert_eq!(table.sequence, share.sequence, "the block tables have the order of the shares");
        let sequence = self.running.get_mut(&share.sequence).expect("the sequence has a share of the step");
        if table.held > sequence.cached {
            sequence.cached = table.held;
            sequence.named = table.held;
            share.tokens = share.tokens.min(sequence.pending());
            if self.whole_picture_tokens > 0 {
                share.tokens = sequence.whole_pictures_within(share.tokens);
            }
        }
        debug_assert!(share.further == 0 || share.tokens == sequence.pending(), "drafts follow a chosen token");
        if !sequence.has_begun {
            sequence.has_begun = true;
            if sequence.history.charge == Charge::Whole {
                sequence.history.charge = Charge::Computed;
                self.waiting.tenants.find(&sequence.spec.scheduling_params.tenant, sequence.prompt, table.held);
            }
            effects.push(Effect::Begun(share.sequence, table.held));
        }
    }
}
