//! Pure: which sequence holds which block, and the reusable content of free blocks.
//!
//! Whole blocks are named by their content. A name (a [`PrefixKey`]) also covers everything before
//! the block, so two sequences with the same beginning can share its blocks. This is automatic
//! prefix caching, as in vLLM and SGLang (RadixAttention, arXiv 2312.07104). Free blocks keep their
//! content until they are reused. The least recently used block is reused first. Among the blocks
//! of one sequence, the last block is reused first. With a host tier (ADR 15), content is copied to
//! host memory before its block is reused, and is copied back when a sequence begins with it.
//!
//! A sequence has a block table for each [cache group](CacheGroups) of the model. In a group with a
//! window, the sequence releases the blocks before the window, and a prefix can be shared if the
//! blocks within the window at its end are available.

mod prefix;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use bursar_kernels::{
    BLOCK_TOKENS,
    ops::copy_blocks::{BlockCopy, CopyLists},
};
use bursar_model::flow::{BlockTable, CacheGroups, PrefixKey, StateSlots};

use super::{
    BlockEvent, Copies,
    sequence_id::SequenceId,
    states::{StatePool, StateStep, StateUse},
};
use crate::shared::host_slots::HostSlots;

/// The blocks that a sequence needs for the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRequest {
    pub sequence: SequenceId,
    /// Tokens whose keys and values are in the sequence's blocks.
    pub held: usize,
    /// Tokens that the step will compute.
    pub more: usize,
    /// All tokens of the sequence. If some are found cached, fewer than `more` may
    /// be left to compute.
    pub tokens: usize,
    /// For a sequence without blocks: the names of its first blocks, which it may share. The named
    /// blocks never contain the last token, so at least one token is left to compute.
    pub prefix: Vec<PrefixKey>,
}

/// The blocks of a sequence whose demand was met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub sequence: SequenceId,
    /// The blocks of the sequence in each cache group.
    pub blocks: Vec<BlockTable>,
    /// Tokens whose keys and values are in the blocks, because the sequence held them or because
    /// they were found cached.
    pub held: usize,
}

/// The result for a list of demands. After the first demand that cannot be met, the rest are not
/// tried, so that a small demand never overtakes a large one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allotment {
    /// One table for each demand that was met, in order.
    pub tables: Vec<Table>,
    /// Blocks missing for the first demand that was not met, or 1 if only a slot for its recurrent
    /// state is missing. 0 if all demands were met.
    pub short_by: usize,
}

/// Usage of the block pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUse {
    /// All blocks of the pool.
    pub blocks: usize,
    /// Blocks that sequences hold.
    pub held: usize,
    /// Blocks that no sequence holds, but whose content may be reused.
    pub cached: usize,
}

/// The part of a prefix that is available, on the device or in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beginning {
    /// Blocks of the prefix on the device or in host memory.
    pub blocks: usize,
    /// Blocks of the prefix with which the sequence could begin without a copy.
    pub resident: usize,
    /// Blocks, over all cache groups, that are only in host memory.
    pub missing: usize,
    /// Whether the state at the end of the blocks is only in host memory.
    pub lacks_state: bool,
    /// Whether there are enough free blocks to fetch the missing blocks into, and a slot for the
    /// state if it is missing.
    pub fits: bool,
}

/// The largest pool, in blocks, that is checked after each change.
const CHECKED_MAX: usize = 16_384;

/// The name of a block's content: keys and values of the layers of one cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Name {
    group: usize,
    key: PrefixKey,
}

#[derive(Clone, Debug, Default)]
struct Block {
    /// The number of tables that include the block.
    references: u32,
    /// The name of the block's content, if the content may be shared.
    name: Option<Name>,
    /// The value of the pool's clock when the block was last released.
    idle_since: u64,
}

impl Block {
    /// Whether the block is named in a group with full attention. Only named blocks are shared.
    fn has_full_attention(&self, groups: &CacheGroups) -> bool {
        self.name.is_some_and(|name| name.group < groups.full())
    }
}

#[derive(Clone, Debug)]
pub struct KvCore {
    groups: CacheGroups,
    pool: Vec<Block>,
    /// Blocks without content. The block with the lowest index is used next, so that few pages are
    /// touched and the tail of the pool is used last.
    blank: BTreeSet<u32>,
    /// Free blocks with content, ordered by the time of their release. The first of them is reused
    /// next.
    idle: BTreeSet<(u64, u32)>,
    named: BTreeMap<Name, u32>,
    tables: BTreeMap<SequenceId, Vec<BlockTable>>,
    /// See [`shared_blocks`](Self::shared_blocks).
    shared: usize,
    clock: u64,
    /// Slots of recurrent states. If there are any, a prefix is shared only up to a snapshot.
    states: StatePool,
    /// The host tier. If it has no slots, content is lost when its block is reused.
    host: HostSlots<Name>,
    /// Allocated blocks whose old content must be copied to the host before anything is written to
    /// the blocks, with the names of that content.
    leaving: Vec<(Name, u32)>,
    /// For each sequence whose blocks a copy is filling, the indices of those blocks in the
    /// sequence, and the names of their content.
    coming: BTreeMap<SequenceId, Vec<(usize, Name)>>,
    /// Events of named blocks since the last [`take_events`](Self::take_events).
    events: Vec<BlockEvent>,
}

impl KvCore {
    /// A pool of `blocks` blocks, all blank, for a model with one cache group with full attention.
    pub fn new(blocks: usize) -> Self {
        KvCore {
            groups: CacheGroups::default(),
            pool: vec![Block::default(); blocks],
            blank: (0..blocks as u32).collect(),
            idle: BTreeSet::new(),
            named: BTreeMap::new(),
            tables: BTreeMap::new(),
            shared: 0,
            clock: 0,
            states: StatePool::new(0, 0),
            host: HostSlots::new(0),
            leaving: Vec::new(),
            coming: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// Sets the model's cache groups. The default is one group with full attention.
    #[must_use]
    pub fn with_groups(mut self, groups: CacheGroups) -> Self {
        self.groups = groups;
        self
    }

    /// Adds a host tier that keeps up to `slots` blocks in host memory.
    #[must_use]
    pub fn with_host(mut self, slots: usize) -> Self {
        self.host = HostSlots::new(slots);
        self
    }

    /// Adds slots for the recurrent states of at most `sequences` running sequences, and for
    /// snapshots of them.
    #[must_use]
    pub fn with_states(mut self, slots: usize, sequences: usize) -> Self {
        self.states = StatePool::new(slots, sequences);
        self
    }

    /// Keeps up to `slots` evicted snapshots of states in host memory.
    #[must_use]
    pub fn with_host_states(mut self, slots: usize) -> Self {
        self.states = self.states.with_host(slots);
        self
    }

    pub fn groups(&self) -> &CacheGroups {
        &self.groups
    }

    pub fn state_usage(&self) -> StateUse {
        self.states.usage()
    }

    /// Whether the model has recurrent states.
    pub fn has_states(&self) -> bool {
        self.states.usage().slots > 0
    }

    /// The slots for the state of a sequence in a planned step. `None` for a model without
    /// recurrent states.
    pub fn plan_states(&mut self, sequence: SequenceId, step: &StateStep) -> Option<StateSlots> {
        self.states.plan_step(sequence, step)
    }

    /// Records that a step with this sequence was submitted.
    pub fn launched(&mut self, sequence: SequenceId) {
        self.states.launched(sequence);
    }

    pub fn has_host(&self) -> bool {
        self.host.is_there()
    }

    pub fn host_blocks(&self) -> usize {
        self.host.in_use()
    }

    /// Number of blocks in no table, with or without content.
    pub fn free_blocks(&self) -> usize {
        self.blank.len() + self.idle.len()
    }

    pub fn blocks(&self) -> usize {
        self.pool.len()
    }

    pub fn usage(&self) -> KvUse {
        KvUse { blocks: self.blocks(), held: self.blocks() - self.free_blocks(), cached: self.idle.len() }
    }

    /// For each cache group, the blocks in the tables of all sequences. A block that several
    /// sequences share counts once for each.
    pub fn table_blocks(&self) -> impl Iterator<Item = usize> {
        let of = |group: usize| self.tables.values().map(move |tables| tables[group].blocks.len()).sum();
        (0..self.groups.count()).map(of)
    }

    /// Number of blocks saved by sharing in the groups with full attention: the total length of
    /// their tables, minus the blocks that are held there. Blocks in a window are not shared for
    /// long, so they do not count.
    pub fn shared_blocks(&self) -> usize {
        self.shared
    }

    /// Meets demands in order. The first demand that cannot be met, and all later demands, change
    /// nothing.
    pub fn allot(&mut self, demands: &[BlockRequest]) -> Allotment {
        let mut allotment = Allotment::default();
        for demand in demands {
            match self.meet(demand) {
                Ok(table) => allotment.tables.push(table),
                Err(short_by) => {
                    allotment.short_by = short_by;
                    break;
                }
            }
        }
        self.check();
        allotment
    }

    /// Assigns blocks to a sequence, or returns the value of [`Allotment::short_by`].
    fn meet(&mut self, demand: &BlockRequest) -> Result<Table, usize> {
        let table = self.tables.get(&demand.sequence).cloned();
        let is_new = table.is_none();
        let shared = if is_new { self.resumable_prefix(&demand.prefix) } else { 0 };
        let held = demand.held.max(shared * BLOCK_TOKENS);
        let places = (held + demand.more).min(demand.tokens).div_ceil(BLOCK_TOKENS);
        let mut blocks = table.unwrap_or_else(|| self.shared_tables(&demand.prefix[..shared]));
        let fresh = blocks.iter().map(|table| places.saturating_sub(table.end())).sum::<usize>();
        let of_prefix = || blocks.iter().flat_map(|table| &table.blocks).filter(|_| is_new);
        // Shared blocks that are free now cannot also serve as new blocks.
        let woken = of_prefix().filter(|block| self.pool[**block as usize].references == 0).count();
        let available = self.free_blocks() - woken;
        if fresh > available {
            return Err(fresh - available);
        }
        if is_new {
            let resumes_from = shared.checked_sub(1).map(|last| &demand.prefix[last]);
            if !self.states.has_slot_for(resumes_from) {
                return Err(1);
            }
            let cached = self.cached_run(&demand.prefix);
            self.states.begin(demand.sequence, resumes_from, shared, cached);
        }
        of_prefix().for_each(|block| self.hold(*block));
        for table in &mut blocks {
            let fresh = places.saturating_sub(table.end());
            table.blocks.extend((0..fresh).map(|_| self.take()));
        }
        self.tables.insert(demand.sequence, blocks.clone());
        Ok(Table { sequence: demand.sequence, blocks, held })
    }

    /// Releases the blocks of a sequence that are before the windows of their groups once the
    /// sequence has `tokens` tokens. Later tokens do not read these blocks. The step that computed
    /// the `tokens` tokens must have ended. Unknown sequences are ignored.
    pub fn release_skipped(&mut self, sequence: SequenceId, tokens: usize) {
        if self.groups.full() == self.groups.count() {
            return;
        }
        let Some(mut tables) = self.tables.remove(&sequence) else { return };
        for (group, table) in tables.iter_mut().enumerate().skip(self.groups.full()) {
            let before = self.groups.first_read(group, tokens).saturating_sub(table.skipped);
            table.skipped += before;
            table.blocks.drain(..before).rev().for_each(|block| self.give_back(block));
        }
        self.tables.insert(sequence, tables);
        self.check();
    }

    /// Gives back the blocks after a sequence's first `tokens` tokens, which hold keys and values
    /// of rejected drafts. No step that runs now may include the sequence.
    pub fn truncate(&mut self, sequence: SequenceId, tokens: usize) {
        let Some(mut tables) = self.tables.remove(&sequence) else { return };
        for table in &mut tables {
            let kept = tokens.div_ceil(BLOCK_TOKENS).saturating_sub(table.skipped).min(table.blocks.len());
            let rejected = table.blocks.split_off(kept);
            assert!(
                rejected.iter().all(|block| self.pool[*block as usize].name.is_none()),
                "a block with rejected tokens of {sequence} has a name"
            );
            rejected.into_iter().rev().for_each(|block| self.give_back(block));
        }
        self.tables.insert(sequence, tables);
        self.check();
    }

    fn hold(&mut self, block: u32) {
        let entry = &mut self.pool[block as usize];
        if entry.references == 0 {
            self.idle.remove(&(entry.idle_since, block));
        } else if entry.has_full_attention(&self.groups) {
            self.shared += 1;
        }
        entry.references += 1;
    }

    /// Returns a block to write to: a blank block, or the least recently used block, whose content
    /// is forgotten.
    fn take(&mut self) -> u32 {
        let block = self.blank.pop_first().unwrap_or_else(|| {
            let (_, block) = self.idle.pop_first().expect("idle blocks were counted before");
            self.forget(block);
            block
        });
        self.pool[block as usize].references = 1;
        block
    }

    /// Removes the name of a free block's content. If the content is in host memory already, marks
    /// its slot as used now. Otherwise, with a host tier, queues the block to be copied there.
    fn forget(&mut self, block: u32) {
        let name = self.pool[block as usize].name.take().expect("an idle block has content");
        self.named.remove(&name);
        if !self.has_host() {
            return self.push_removed(name);
        }
        self.clock += 1;
        if self.host.fetch(&name, self.clock).is_none() {
            self.leaving.push((name, block));
        }
    }

    /// Adds [`BlockEvent::Removed`] for each of these names whose content is neither on the device
    /// nor in host memory, and is not being copied between them.
    fn push_lost(&mut self, names: impl IntoIterator<Item = Name>) {
        if !self.has_host() {
            return;
        }
        let is_coming = |name: &Name| self.coming.values().flatten().any(|(_, coming)| coming == name);
        let is_leaving = |name: &Name| self.leaving.iter().any(|(leaving, _)| leaving == name);
        let is_lost = |name: &Name| !self.is_known(name) && !is_coming(name) && !is_leaving(name);
        let lost: Vec<_> = names.into_iter().filter(is_lost).collect();
        lost.into_iter().for_each(|name| self.push_removed(name));
    }

    /// Reports a block as removed, and forgets the state snapshot at its end. Only blocks of the
    /// first group are reported. If any group has full attention, the first group has it, so a
    /// prefix cannot be shared past a missing block of this group.
    fn push_removed(&mut self, Name { group, key }: Name) {
        if group == 0 {
            self.states.forget(&key);
            if self.has_events() {
                self.events.push(BlockEvent::Removed(key));
            }
        }
    }

    /// Events are reported only for blocks of the first group, and only if that group has full
    /// attention. In a group with a window, the first blocks of a long prompt are released before
    /// they are named, so later blocks would have a parent that no event has announced.
    fn has_events(&self) -> bool {
        self.groups.full() > 0
    }

    /// Adds an event for a block that was just [named](Self::name).
    pub fn push_event(&mut self, event: BlockEvent) {
        self.events.push(event);
    }

    /// Returns the events of named blocks of the first cache group since the last call, in order. A
    /// block is reported as removed when it is neither on the device nor in host memory. A block
    /// may be reported as stored more than once.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    /// Returns the copies to make before anything is written to newly allocated blocks and slots of
    /// states. Each copy is returned once.
    pub fn take_leaving(&mut self) -> Copies {
        let to_host = |to_host| CopyLists { to_host, ..CopyLists::default() };
        Copies { blocks: to_host(self.take_in(&[])), states: to_host(self.states.take_leaving(&[])) }
    }

    /// Assigns host slots to the content that leaves the device. Content in `kept`
    /// stays in host memory.
    fn take_in(&mut self, kept: &[Name]) -> Vec<BlockCopy> {
        let leaving = std::mem::take(&mut self.leaving);
        let (copies, evicted) = self.host.store_blocks(&leaving, kept, &mut self.clock);
        self.push_lost(leaving.into_iter().map(|(name, _)| name).chain(evicted));
        copies
    }

    /// Makes free blocks blank, the least recently used first, until `blank` blocks are blank.
    /// Later steps then find blocks whose content has been copied already. Does nothing
    /// without a host tier.
    pub fn make_blank(&mut self, blank: usize) {
        while self.has_host()
            && self.blank.len() < blank
            && let Some((_, block)) = self.idle.pop_first()
        {
            self.forget(block);
            self.blank.insert(block);
        }
        self.check();
    }

    pub fn has_table(&self, sequence: SequenceId) -> bool {
        self.tables.contains_key(&sequence)
    }

    /// Names the snapshots of a sequence's state within its first `end` tokens, whose whole blocks
    /// have the names `keys`. Later sequences may resume from them.
    pub fn name_snapshots(&mut self, sequence: SequenceId, end: usize, keys: &[PrefixKey]) {
        self.states.name(sequence, end, keys);
    }

    /// Names blocks that a step has filled, from index `first` of the sequence's table on, so that
    /// other sequences may share them. If another block already has the name, sequences keep
    /// sharing that other block. Ignores unknown sequences and released blocks. Returns the indices
    /// of the blocks that were named in the first cache group, if its blocks are reported.
    pub fn name(&mut self, sequence: SequenceId, first: usize, keys: &[PrefixKey]) -> Vec<usize> {
        let Some(tables) = self.tables.get(&sequence) else { return Vec::new() };
        let (mut named, has_events) = (Vec::new(), self.has_events());
        for (group, table) in tables.iter().enumerate() {
            let places = first.max(table.skipped)..table.end().min(first + keys.len());
            for place in places {
                let (block, name) = (table.blocks[place - table.skipped], Name { group, key: keys[place - first] });
                let entry = &mut self.pool[block as usize];
                if entry.name.is_none() && !self.named.contains_key(&name) {
                    entry.name = Some(name);
                    self.named.insert(name, block);
                    named.extend((group == 0 && has_events).then_some(place));
                }
            }
        }
        self.check();
        named
    }

    /// Forgets a sequence. Blocks in no other table become free. Free blocks with a
    /// [`PrefixKey`] keep their content until they are reused. An unknown sequence is ignored.
    pub fn release(&mut self, sequence: SequenceId) {
        assert!(!self.coming.contains_key(&sequence), "a copy fills the blocks of {sequence}");
        self.states.release(sequence);
        // The last block is released first, because the end of a sequence is
        // useless without its beginning.
        let mut tables = self.tables.remove(&sequence).unwrap_or_default();
        let longest = tables.iter().map(BlockTable::end).max().unwrap_or(0);
        for place in (0..longest).rev() {
            for table in &mut tables {
                let block = if table.end() > place { table.blocks.pop() } else { None };
                block.into_iter().for_each(|block| self.give_back(block));
            }
        }
        self.check();
    }

    /// Removes a block from a table. If no other table includes the block, it becomes free.
    fn give_back(&mut self, block: u32) {
        let entry = &mut self.pool[block as usize];
        entry.references -= 1;
        match (entry.references, entry.name) {
            (0, None) => drop(self.blank.insert(block)),
            (0, Some(_)) => {
                self.clock += 1;
                entry.idle_since = self.clock;
                self.idle.insert((self.clock, block));
            }
            _ if entry.has_full_attention(&self.groups) => self.shared -= 1,
            _ => {}
        }
    }

    /// Makes all blocks from index `to` on blank. Each sequence with a block in that tail is
    /// released, because blocks cannot be moved. No other sequence is released. Returns the
    /// released sequences, ordered by `place`. The blocks of these sequences below `to` keep their
    /// content for now. The blocks of the last sequence keep it longest. With a host tier, the
    /// content of the tail [leaves](Self::take_leaving).
    pub fn vacate<P: Ord>(&mut self, to: usize, place: impl Fn(SequenceId) -> P) -> Vec<SequenceId> {
        let tail = to as u32..;
        let is_in_tail = |table: &BlockTable| table.blocks.iter().any(|block| tail.contains(block));
        let holds = |(_, tables): &(&SequenceId, &Vec<BlockTable>)| tables.iter().any(is_in_tail);
        let mut holders: Vec<SequenceId> = self.tables.iter().filter(holds).map(|(id, _)| *id).collect();
        holders.sort_by_key(|holder| place(*holder));
        holders.iter().for_each(|holder| self.release(*holder));
        let idle: Vec<_> = self.idle.iter().filter(|(_, block)| tail.contains(block)).copied().collect();
        for (since, block) in idle {
            self.idle.remove(&(since, block));
            self.forget(block);
            self.blank.insert(block);
        }
        self.check();
        holders
    }

    /// Shrinks the pool to `to` blocks. The tail is [vacated](Self::vacate) first, and its
    /// sequences are released from the youngest to the oldest. Content of the tail that has not
    /// been copied to the host before this call is lost.
    pub fn shrink(&mut self, to: usize) -> Vec<SequenceId> {
        let holders = self.vacate(to, Reverse);
        let gone = self.blank.split_off(&(to as u32));
        assert_eq!(
            gone.len(),
            self.pool.len().saturating_sub(to),
            "all holders of the removed blocks have been released"
        );
        let (too_late, leaving): (Vec<_>, _) = self.leaving.drain(..).partition(|(_, block)| gone.contains(block));
        self.leaving = leaving;
        self.push_lost(too_late.into_iter().map(|(name, _)| name));
        self.pool.truncate(to);
        self.check();
        holders
    }

    /// Grows the pool to `to` blocks. New blocks are blank. Does nothing if the pool is already
    /// that large or larger.
    pub fn grow(&mut self, to: usize) {
        let before = self.blocks();
        self.blank.extend(before as u32..to as u32);
        self.pool.resize(to.max(before), Block::default());
        self.check();
    }

    /// Checks that every block is blank, idle or held, exactly once. Large devices have 100,000
    /// blocks and steps of milliseconds, so large pools and release builds skip this check.
    fn check(&self) {
        if !cfg!(debug_assertions) || self.pool.len() > CHECKED_MAX {
            return;
        }
        let held = self.pool.iter().filter(|block| block.references > 0).count();
        assert_eq!(held + self.free_blocks(), self.pool.len(), "blocks were lost or counted twice");
        let full = self.pool.iter().filter(|block| block.has_full_attention(&self.groups));
        let shared = full.map(|block| block.references.saturating_sub(1) as usize).sum::<usize>();
        assert_eq!(self.shared, shared, "shared blocks were miscounted");
    }
}

#[cfg(test)]
mod tests;
