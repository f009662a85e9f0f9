//! Pure: named blocks in host memory, the second tier of the prefix cache (vLLM calls it
//! offloading, SGLang calls it HiCache).

use std::collections::{BTreeMap, BTreeSet};

use bursar_kernels::ops::copy_blocks::BlockCopy;
use bursar_model::flow::PrefixKey;

/// The content of each slot of host memory. A full tier evicts the least recently used content.
///
/// Copies run in the order in which they were decided. A slot therefore has its content, and may be
/// reused, from the moment of the decision.
#[derive(Clone, Debug)]
pub(super) struct HostTier {
    /// The content of each slot, and the value of `clock` when the content was last used.
    slots: Vec<Option<(PrefixKey, u64)>>,
    /// Slots that were never used. The lowest slot is used next, so that blocks that are adjacent
    /// on the device are also adjacent in host memory.
    blank: BTreeSet<u32>,
    named: BTreeMap<PrefixKey, u32>,
    /// Named slots by their last use.
    by_use: BTreeSet<(u64, u32)>,
    clock: u64,
    /// Content evicted since the last [`take_forgotten`](Self::take_forgotten).
    forgotten: Vec<PrefixKey>,
}

impl HostTier {
    pub(super) fn new(slots: usize) -> Self {
        HostTier {
            slots: vec![None; slots],
            blank: (0..slots as u32).collect(),
            named: BTreeMap::new(),
            by_use: BTreeSet::new(),
            clock: 0,
            forgotten: Vec::new(),
        }
    }

    pub(super) fn blocks(&self) -> usize {
        self.named.len()
    }

    pub(super) fn slot(&self, key: &PrefixKey) -> Option<u32> {
        self.named.get(key).copied()
    }

    /// Marks this content as used now. Returns `false` if the content is not in host memory.
    pub(super) fn touch(&mut self, key: &PrefixKey) -> bool {
        let Some(slot) = self.slot(key) else { return false };
        let (_, used) = self.slots[slot as usize].as_mut().expect("a named slot has content");
        self.by_use.remove(&(*used, slot));
        self.clock += 1;
        *used = self.clock;
        self.by_use.insert((self.clock, slot));
        true
    }

    /// Assigns slots to blocks that leave the device, and returns the copies to make. `leaving`
    /// lists the least useful block first. Content in `kept` is not evicted, so if there are too
    /// few slots, the least useful blocks are lost.
    pub(super) fn take_in(&mut self, leaving: &[(PrefixKey, u32)], kept: &[PrefixKey]) -> Vec<BlockCopy> {
        let mut seen = BTreeSet::new();
        let is_new = |(key, _): &&(PrefixKey, u32)| !self.named.contains_key(key) && seen.insert(*key);
        let mut new: Vec<_> = leaving.iter().filter(is_new).copied().collect();
        // The last block of a sequence is touched first, so that it is evicted first.
        for key in kept.iter().rev() {
            self.touch(key);
        }
        new.drain(..new.len().saturating_sub(self.slots.len() - kept.len()));
        let mut slots: Vec<u32> = new.iter().map(|_| self.give_away()).collect();
        // Adjacent blocks get adjacent slots, so that one copy moves them.
        slots.sort_unstable();
        let mut by_block: Vec<u32> = new.iter().map(|(_, block)| *block).collect();
        by_block.sort_unstable();
        let copies: Vec<_> = by_block.into_iter().zip(slots).map(|(block, slot)| BlockCopy { block, slot }).collect();
        for (key, block) in new {
            let place = copies.binary_search_by_key(&block, |copy| copy.block).expect("each block has a slot");
            let slot = copies[place].slot;
            self.clock += 1;
            self.slots[slot as usize] = Some((key, self.clock));
            self.by_use.insert((self.clock, slot));
            self.named.insert(key, slot);
        }
        copies
    }

    /// Returns a blank slot, or evicts the least recently used content and returns its slot.
    fn give_away(&mut self) -> u32 {
        self.blank.pop_first().unwrap_or_else(|| {
            let (_, slot) = self.by_use.pop_first().expect("there are as many slots");
            let (key, _) = self.slots[slot as usize].take().expect("a used slot has content");
            self.named.remove(&key);
            self.forgotten.push(key);
            slot
        })
    }

    /// Returns the content that was evicted since the last call.
    pub(super) fn take_forgotten(&mut self) -> Vec<PrefixKey> {
        std::mem::take(&mut self.forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names of the first `blocks` blocks of a sequence.
    fn keys(name: u32, blocks: usize) -> Vec<PrefixKey> {
        let tokens = blocks * bursar_kernels::BLOCK_TOKENS;
        let mut keys = bursar_model::flow::PrefixKeys::default();
        keys.extend(&vec![name; tokens], &vec![[0; 3]; tokens], &[]);
        keys.as_slice().to_vec()
    }

    fn copy(block: u32, slot: u32) -> BlockCopy {
        BlockCopy { block, slot }
    }

    #[test]
    fn blocks_that_leave_last_first_are_neighbours_in_host_memory_too() {
        let (mut host, keys) = (HostTier::new(4), keys(1, 3));
        let leaving = [(keys[2], 9), (keys[1], 8), (keys[0], 7)];
        assert_eq!(host.take_in(&leaving, &[]), [copy(7, 0), copy(8, 1), copy(9, 2)]);
        assert_eq!(host.slot(&keys[0]), Some(0));
        assert_eq!(host.take_in(&leaving, &[]), [], "they are there");
    }

    #[test]
    fn a_full_tier_forgets_the_longest_unused_and_keeps_what_is_fetched() {
        let (mut host, old, new) = (HostTier::new(3), keys(1, 2), keys(2, 4));
        host.take_in(&[(old[1], 1), (old[0], 0)], &[]);
        let leaving = [(new[3], 5), (new[2], 4), (new[1], 3), (new[0], 2)];
        assert_eq!(host.take_in(&leaving, &old), [copy(2, 2)], "the beginning alone has room beside what is kept");
        assert!(host.touch(&old[0]) && host.touch(&new[0]) && !host.touch(&new[1]));
        host.take_in(&[(keys(3, 1)[0], 6)], &[]);
        assert_eq!((host.slot(&old[1]), host.slot(&old[0]), host.blocks()), (None, Some(0), 3));
    }

    #[test]
    fn a_tier_without_slots_takes_nothing() {
        assert_eq!(HostTier::new(0).take_in(&[(keys(1, 1)[0], 3)], &[]), []);
    }
}
