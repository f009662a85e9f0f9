//! Pure: the available part of a prefix, and the copies that fetch it from host memory.

use bursar_kernels::{
    BLOCK_TOKENS,
    ops::copy_blocks::{BlockCopy, CopyLists},
};
use bursar_model::flow::{BlockTable, PrefixKey};

use super::{Beginning, KvCore, Name};
use crate::kv::{Copies, SequenceId};

impl KvCore {
    /// Number of blocks of the first cache group that a sequence with this prefix would share with
    /// the sequences that hold them now.
    pub fn held_prefix(&self, prefix: &[PrefixKey]) -> usize {
        let shared = self.shared_tables(&prefix[..self.resumable_prefix(prefix)]);
        shared[0].blocks.iter().filter(|block| self.pool[**block as usize].references > 0).count()
    }

    /// Number of blocks of a prefix that a sequence would find on the device or in host
    /// memory, whether or not another sequence holds them.
    pub fn known_prefix(&self, prefix: &[PrefixKey]) -> usize {
        self.longest(prefix, |name| self.is_known(name), |key| self.states.is_known(key))
    }

    /// Number of blocks at the beginning of `prefix` with which a sequence can begin without a copy
    /// from the host.
    pub(super) fn resumable_prefix(&self, prefix: &[PrefixKey]) -> usize {
        self.longest(prefix, |name| self.named.contains_key(name), |key| self.states.is_resumable(key))
    }

    /// Length, in blocks, of the longest beginning of `prefix` after which a sequence can continue:
    /// `has` is true for all blocks that the next token reads, and `has_state` for the last block.
    pub(super) fn longest(
        &self,
        prefix: &[PrefixKey],
        has: impl Fn(&Name) -> bool,
        has_state: impl Fn(&PrefixKey) -> bool,
    ) -> usize {
        let full = self.groups.full();
        let lacks = |group: usize, place: usize| !has(&Name { group, key: prefix[place] });
        // A group with full attention reads every block, so its usable blocks end at the first
        // missing block.
        let run = |group| (0..prefix.len()).find(|place| lacks(group, *place)).unwrap_or(prefix.len());
        let mut end = (0..full).map(run).min().unwrap_or(prefix.len());
        // Windows are searched from the last one backward. All windows that end between a missing
        // block and `end` include the missing block. The search continues at the first missing
        // block of a window, which skips the most windows.
        while end > 0 {
            if !has_state(&prefix[end - 1]) {
                end -= 1;
                continue;
            }
            let window = |group| self.groups.first_read(group, end * BLOCK_TOKENS)..end;
            let missing = |group| window(group).find(|place| lacks(group, *place));
            let Some(missing) = (full..self.groups.count()).find_map(missing) else { break };
            end = missing;
        }
        end
    }

    pub(super) fn is_known(&self, name: &Name) -> bool {
        self.named.contains_key(name) || self.host.holds(name)
    }

    /// Number of blocks at the beginning of `prefix` that the first cache group has on the device.
    pub(super) fn cached_run(&self, prefix: &[PrefixKey]) -> usize {
        prefix.iter().take_while(|key| self.named.contains_key(&Name { group: 0, key: **key })).count()
    }

    /// For each cache group, the number of leading blocks that a sequence with this prefix skips,
    /// and the names of the blocks that the sequence reads.
    fn blocks_to_read(&self, prefix: &[PrefixKey]) -> impl Iterator<Item = (usize, Vec<Name>)> {
        (0..self.groups.count()).map(move |group| {
            let first = self.groups.first_read(group, prefix.len() * BLOCK_TOKENS);
            (first, prefix[first..].iter().map(|key| Name { group, key: *key }).collect())
        })
    }

    /// The names of all blocks that a sequence which begins with `prefix` reads.
    fn names(&self, prefix: &[PrefixKey]) -> impl Iterator<Item = Name> {
        self.blocks_to_read(prefix).flat_map(|(_, names)| names)
    }

    /// The block tables of a new sequence that shares `prefix`, all of which is on the device.
    pub(super) fn shared_tables(&self, prefix: &[PrefixKey]) -> Vec<BlockTable> {
        let table = |(skipped, names): (usize, Vec<Name>)| BlockTable {
            skipped,
            blocks: names.iter().map(|name| self.named[name]).collect(),
        };
        self.blocks_to_read(prefix).map(table).collect()
    }

    /// Returns how much of `prefix` is on the device or in host memory.
    pub fn beginning(&self, prefix: &[PrefixKey]) -> Beginning {
        let mut found = Beginning::default();
        if !self.has_host() {
            return found;
        }
        found.blocks = self.known_prefix(prefix);
        let prefix = &prefix[..found.blocks];
        found.resident = self.resumable_prefix(prefix);
        found.lacks_state = prefix.last().is_some_and(|key| self.states.is_only_on_host(key));
        // Free blocks that the sequence will share cannot be allocated to it as new blocks.
        let on_device: Vec<_> = self.names(prefix).map(|name| self.named.get(&name)).collect();
        let is_free = |block: &&u32| self.pool[**block as usize].references == 0;
        let woken = on_device.iter().flatten().filter(|block| is_free(block)).count();
        found.missing = on_device.iter().filter(|block| block.is_none()).count();
        let has_slot = !found.lacks_state || self.states.has_slot_for_copy();
        found.fits = has_slot && found.missing <= self.free_blocks() - woken;
        found
    }

    /// Assigns the available blocks of `prefix` to a sequence without blocks, and returns the
    /// copies that bring the missing blocks and the missing state from the host. Until
    /// [`fetched`](Self::fetched) is called, no step may use the fetched blocks and state, and no
    /// other sequence may share these blocks. Returns `None` and changes nothing if nothing is
    /// missing or there are too few free blocks or slots.
    pub fn fetch(&mut self, sequence: SequenceId, prefix: &[PrefixKey]) -> Option<Copies> {
        let found = self.beginning(prefix);
        let prefix = &prefix[..found.blocks];
        let has_state = found.lacks_state || prefix.last().is_none_or(|key| self.states.has_slot_for(Some(key)));
        let is_complete = found.missing == 0 && !found.lacks_state;
        if is_complete || !found.fits || !has_state || self.tables.contains_key(&sequence) {
            return None;
        }
        let read: Vec<_> = self.blocks_to_read(prefix).collect();
        // The blocks on the device are held before any block is taken, so that none of them is
        // reused.
        let on_device: Vec<u32> = self.names(prefix).filter_map(|name| self.named.get(&name).copied()).collect();
        on_device.into_iter().for_each(|block| self.hold(block));
        let (mut tables, mut coming, mut to_device) = (Vec::new(), Vec::new(), Vec::new());
        for (skipped, names) in read {
            let mut table = BlockTable { skipped, blocks: Vec::with_capacity(names.len()) };
            for name in names {
                let block = self.named.get(&name).copied().unwrap_or_else(|| {
                    let block = self.take();
                    coming.push((table.end(), name));
                    to_device.push((name, block));
                    block
                });
                table.blocks.push(block);
            }
            tables.push(table);
        }
        let kept: Vec<_> = coming.iter().map(|(_, name)| *name).collect();
        let to_host = self.take_in(&kept);
        let slot = |name| self.host.slots(name).expect("the content was kept on the host")[0];
        let to_device = to_device.iter().map(|(name, block)| BlockCopy { block: *block, slot: slot(name) }).collect();
        let last = prefix.last().expect("a prefix of which something is missing is not empty");
        let state = if found.lacks_state {
            Some(self.states.begin_from_host(sequence, last, prefix.len()))
        } else {
            self.states.begin(sequence, Some(last), prefix.len(), prefix.len());
            None
        };
        let kept: &[PrefixKey] = if found.lacks_state { &[*last] } else { &[] };
        let states = CopyLists { to_host: self.states.take_leaving(kept), to_device: state.into_iter().collect() };
        self.coming.insert(sequence, coming);
        self.tables.insert(sequence, tables);
        self.check();
        Some(Copies { blocks: CopyLists { to_host, to_device }, states })
    }

    /// Names the blocks that were fetched for a sequence, because their copies have ended. Other
    /// sequences may share them from now on.
    pub fn fetched(&mut self, sequence: SequenceId) {
        let coming = self.coming.remove(&sequence).expect("the sequence was fetching");
        for (place, name) in coming {
            self.name(sequence, place, &[name.key]);
        }
        self.states.fetched(sequence);
    }

    /// Whether a running copy fetches content that this prefix waits for: the first missing block
    /// of a group with full attention, a missing block within a window, or the state at the end of
    /// the known part of `prefix`.
    pub fn is_coming(&self, prefix: &[PrefixKey]) -> bool {
        let known = &prefix[..self.known_prefix(prefix)];
        let is_missing = |name: &Name| !self.named.contains_key(name);
        let comes = |name: Name| self.coming.values().flatten().any(|(_, coming)| *coming == name);
        let first = |group| prefix.iter().map(|key| Name { group, key: *key }).find(is_missing);
        let full = self.groups.full();
        let in_windows = || self.names(known).filter(|name| name.group >= full).filter(is_missing);
        let is_at_end = |key| known.last() == Some(key);
        self.states.coming().any(is_at_end)
            || !self.coming.is_empty() && (0..full).filter_map(first).chain(in_windows()).any(comes)
    }
}
