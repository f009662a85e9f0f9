//! Pure: content in slots of host memory, the second tier of the prefix cache (vLLM calls it
//! offloading, SGLang HiCache), of snapshots of states, and of the vision cache.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bursar_kernels::ops::copy_blocks::BlockCopy;

/// The content of each slot of host memory. If there are too few free slots, the least recently
/// used content is evicted.
///
/// Copies run in the order in which they were decided. A slot therefore counts as filled from the
/// moment of the decision, and its content may be fetched or replaced from then on.
///
/// The caller keeps the clock. Each use must have a different time.
#[derive(Clone, Debug)]
pub(crate) struct HostSlots<K> {
    slots: usize,
    /// The lowest slots are used next, so that content that is adjacent on the device is adjacent
    /// here.
    free: BTreeSet<u32>,
    stored: BTreeMap<K, Stored>,
    /// Stored content by its last use.
    by_use: BTreeMap<u64, K>,
}

#[derive(Clone, Debug)]
struct Stored {
    slots: Arc<[u32]>,
    used: u64,
}

impl<K: Ord + Copy> HostSlots<K> {
    /// A tier with `slots` empty slots.
    pub(crate) fn new(slots: usize) -> Self {
        HostSlots { slots, free: (0..slots as u32).collect(), stored: BTreeMap::new(), by_use: BTreeMap::new() }
    }

    /// Whether there is a host tier.
    pub(crate) fn is_there(&self) -> bool {
        self.slots > 0
    }

    /// The number of slots with content.
    pub(crate) fn in_use(&self) -> usize {
        self.slots - self.free.len()
    }

    pub(crate) fn holds(&self, key: &K) -> bool {
        self.stored.contains_key(key)
    }

    /// The slots of some content, in order.
    pub(crate) fn slots(&self, key: &K) -> Option<&[u32]> {
        self.stored.get(key).map(|stored| &*stored.slots)
    }

    /// The slots of some content, in order. Marks the content as used at `now`.
    pub(crate) fn fetch(&mut self, key: &K, now: u64) -> Option<Arc<[u32]>> {
        let stored = self.stored.get_mut(key)?;
        self.by_use.remove(&stored.used);
        self.by_use.insert(now, *key);
        stored.used = now;
        Some(stored.slots.clone())
    }

    /// Stores content that takes `slots` slots and was last used at `used`, and returns its slots.
    /// Returns `None` if the content is stored already, or if the slots do not suffice even after
    /// evicting all content for which `is_kept` returns `false`.
    pub(crate) fn store(
        &mut self,
        key: K,
        slots: usize,
        used: u64,
        is_kept: impl Fn(&K) -> bool,
    ) -> Option<Arc<[u32]>> {
        if self.fetch(&key, used).is_some() {
            return None;
        }
        self.evict_for(slots, is_kept)?;
        Some(self.put(key, slots, used))
    }

    /// Stores the content of blocks that leave the device, in one slot each. `leaving` lists the
    /// least useful block first. Content in `kept` is stored already; it is marked as used now and
    /// is not evicted. If there are too few slots, the least useful blocks of `leaving` are lost.
    /// Returns the copies to make, and the evicted content. `clock` is advanced for each use.
    pub(crate) fn store_blocks(
        &mut self,
        leaving: &[(K, u32)],
        kept: &[K],
        clock: &mut u64,
    ) -> (Vec<BlockCopy>, Vec<K>) {
        let mut seen = BTreeSet::new();
        let is_new = |(key, _): &&(K, u32)| !self.holds(key) && seen.insert(*key);
        let mut new: Vec<_> = leaving.iter().filter(is_new).copied().collect();
        let mut now = || {
            *clock += 1;
            *clock
        };
        // The last block of a sequence is marked as used first, so that it is evicted first.
        for key in kept.iter().rev() {
            self.fetch(key, now());
        }
        // Content that is stored already was in use on the device until now.
        for (key, _) in leaving {
            self.fetch(key, now());
        }
        new.drain(..new.len().saturating_sub(self.slots - kept.len()));
        let evicted = self.evict_for(new.len(), |_| false).expect("eviction freed enough slots");
        let mut new: Vec<_> = new.into_iter().map(|(key, block)| (block, key, now())).collect();
        // Adjacent blocks get adjacent slots, so that one copy moves them.
        new.sort_unstable_by_key(|(block, ..)| *block);
        let copy = |(block, key, used)| BlockCopy { block, slot: self.put(key, 1, used)[0] };
        (new.into_iter().map(copy).collect(), evicted)
    }

    /// Stores content in free slots.
    fn put(&mut self, key: K, slots: usize, used: u64) -> Arc<[u32]> {
        let slots: Arc<[u32]> = (0..slots).map_while(|_| self.free.pop_first()).collect();
        self.by_use.insert(used, key);
        self.stored.insert(key, Stored { slots: slots.clone(), used });
        slots
    }

    /// Evicts the least recently used content until `slots` slots are free, and returns the evicted
    /// content. Returns `None` and evicts nothing if that cannot succeed.
    fn evict_for(&mut self, slots: usize, is_kept: impl Fn(&K) -> bool) -> Option<Vec<K>> {
        let mut free = self.free.len();
        let mut victims = Vec::new();
        let mut unused = self.by_use.values().filter(|key| !is_kept(key));
        while free < slots {
            let victim = unused.next()?;
            free += self.stored[victim].slots.len();
            victims.push(*victim);
        }
        victims.iter().for_each(|victim| self.remove(victim));
        Some(victims)
    }

    /// Forgets some content, if it is stored.
    pub(crate) fn remove(&mut self, key: &K) {
        if let Some(Stored { slots, used }) = self.stored.remove(key) {
            self.by_use.remove(&used);
            self.free.extend(slots.iter());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of a lookup that finds content in these slots.
    fn slots(slots: &[u32]) -> Option<Arc<[u32]>> {
        Some(slots.into())
    }

    fn copy(block: u32, slot: u32) -> BlockCopy {
        BlockCopy { block, slot }
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted_unless_kept() {
        let mut host = HostSlots::<u8>::new(8);
        let none = |_: &u8| false;
        assert_eq!(host.store(1, 3, 1, none), slots(&[0, 1, 2]));
        assert_eq!(host.store(2, 4, 2, none), slots(&[3, 4, 5, 6]));
        assert_eq!(host.store(2, 4, 3, none), None, "the entry is stored already");
        assert_eq!(host.fetch(&1, 4), slots(&[0, 1, 2]));
        assert_eq!(host.store(3, 9, 5, none), None, "the entry is larger than the pool");
        assert_eq!(host.store(3, 2, 5, |key| *key == 2), slots(&[0, 1]), "entry 2 is kept, so entry 1 is evicted");
        assert_eq!(host.store(4, 8, 6, |key| *key == 3), None);
        assert!(host.holds(&2) && host.holds(&3) && !host.holds(&1), "a refused entry evicts nothing");
        assert_eq!(host.in_use(), 6);
        assert_eq!(host.store(5, 4, 7, none), slots(&[2, 3, 4, 5]), "the second entry was used before the third");
        assert!(host.holds(&3) && !host.holds(&2));
    }

    #[test]
    fn blocks_stored_in_reverse_order_get_adjacent_host_slots() {
        let (mut host, mut clock) = (HostSlots::new(4), 0);
        let leaving = [("third", 9), ("second", 8), ("first", 7)];
        assert_eq!(host.store_blocks(&leaving, &[], &mut clock).0, [copy(7, 0), copy(8, 1), copy(9, 2)]);
        assert_eq!(host.slots(&"first"), Some(&[0][..]));
        assert_eq!(host.store_blocks(&leaving, &[], &mut clock).0, [], "the blocks are stored already");
    }

    #[test]
    fn a_full_tier_evicts_old_blocks_except_fetched_ones() {
        let (mut host, mut clock, old, new) = (HostSlots::new(3), 0, [10, 11], [20, 21, 22, 23]);
        host.store_blocks(&[(old[1], 1), (old[0], 0)], &[], &mut clock);
        let leaving = [(new[3], 5), (new[2], 4), (new[1], 3), (new[0], 2)];
        let (copies, evicted) = host.store_blocks(&leaving, &old, &mut clock);
        assert_eq!(copies, [copy(2, 2)], "only the beginning fits next to the kept blocks");
        assert!(evicted.is_empty());
        assert!(host.fetch(&old[0], clock + 1).is_some() && host.fetch(&new[0], clock + 2).is_some());
        assert!(host.fetch(&new[1], clock + 3).is_none());
        clock += 3;
        let (_, evicted) = host.store_blocks(&[(30, 6)], &[], &mut clock);
        assert_eq!(evicted, [old[1]]);
        assert_eq!((host.slots(&old[1]), host.slots(&old[0]), host.in_use()), (None, Some(&[0][..]), 3));
    }

    #[test]
    fn a_tier_without_slots_stores_nothing() {
        assert_eq!(HostSlots::new(0).store_blocks(&[(1, 3)], &[], &mut 0), (vec![], vec![]));
    }
}
