//! Which sequence holds which block, and what free blocks still contain: pure.
//!
//! Whole blocks are named by their content (a [`PrefixKey`] covers everything before it too), so a sequence that begins
//! like another takes its blocks. This is automatic prefix caching, as in vLLM and SGLang (RadixAttention, arXiv
//! 2312.07104). Free blocks keep their content until they are reused: the longest unused first, and of one sequence the
//! last block first. With a host tier (ADR 15) what is reused is copied to host memory before, and fetched when a sequence
//! begins with it.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use bursar_kernels::{BLOCK_TOKENS, ops::copy_blocks::BlockCopy};
use bursar_model::flow::PrefixKey;

use super::{BlockEvent, host::HostTier};

/// The id of a sequence. An engine never reuses one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// What a sequence needs for the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRequest {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens whose keys and values are in its blocks.
    pub held: usize,
    /// Tokens that the step is to compute.
    pub more: usize,
    /// All its tokens. With cached ones, fewer than `more` may be left.
    pub tokens: usize,
    /// For a sequence without blocks: the keys of its first blocks, which may be shared. They leave at least one token
    /// to compute.
    pub prefix: Vec<PrefixKey>,
}

/// A sequence whose demand was met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The sequence.
    pub sequence: SequenceId,
    /// All its blocks, in order.
    pub blocks: Vec<u32>,
    /// Tokens whose keys and values are in the blocks: those that it held, or those found cached.
    pub held: usize,
}

/// The answer to a list of demands: the ones met, in order. After the first that cannot be met the rest are not tried,
/// so that a short demand never overtakes a long one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allotment {
    /// One table per demand that was met.
    pub tables: Vec<Table>,
    /// Blocks missing for the first demand that was not met. 0 if all were.
    pub short_by: usize,
}

/// How the blocks are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUse {
    /// All blocks of the pool.
    pub blocks: usize,
    /// Blocks that sequences hold.
    pub held: usize,
    /// Other blocks whose content may be reused.
    pub cached: usize,
}

/// The beginning of a sequence that the device and the host have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beginning {
    /// All its blocks.
    pub blocks: usize,
    /// Those before the first that only the host has.
    pub resident: usize,
    /// Those that only the host has.
    pub missing: usize,
    /// Whether there are free blocks for those.
    pub has_room: bool,
}

/// Copies of blocks, to be made in this order, and before any later step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// From the device to host memory.
    pub to_host: Vec<BlockCopy>,
    /// From host memory to the device.
    pub to_device: Vec<BlockCopy>,
}

impl Copies {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.to_host.len() + self.to_device.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The largest pool, in blocks, that is checked after each change.
const CHECKED_MAX: usize = 16_384;

/// One block.
#[derive(Clone, Debug, Default)]
struct Block {
    /// The number of tables that include it.
    references: u32,
    /// The name of its content, if it may be shared.
    key: Option<PrefixKey>,
    /// The clock when it was last released.
    idle_since: u64,
}

/// The pool of blocks.
#[derive(Clone, Debug)]
pub struct KvCore {
    pool: Vec<Block>,
    /// Blocks without content. The first is used next, so that few pages are touched and the tail is used last.
    blank: BTreeSet<u32>,
    /// Free blocks with content, by the time of their release. The first is reused next.
    idle: BTreeSet<(u64, u32)>,
    named: BTreeMap<PrefixKey, u32>,
    tables: BTreeMap<SequenceId, Vec<u32>>,
    clock: u64,
    /// None: content that is reused is lost.
    host: Option<HostTier>,
    /// Blocks that were given out, with the content that is to be copied to the host before anything is written there.
    leaving: Vec<(PrefixKey, u32)>,
    /// Sequences whose blocks a copy fills: the places in their tables, and the names of what comes there.
    coming: BTreeMap<SequenceId, Vec<(usize, PrefixKey)>>,
    /// What happened to named blocks since this was last taken.
    events: Vec<BlockEvent>,
}

impl KvCore {
    /// A pool of `blocks` blocks, all blank.
    pub fn new(blocks: usize) -> Self {
        KvCore {
            pool: vec![Block::default(); blocks],
            blank: (0..blocks as u32).collect(),
            idle: BTreeSet::new(),
            named: BTreeMap::new(),
            tables: BTreeMap::new(),
            clock: 0,
            host: None,
            leaving: Vec::new(),
            coming: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// Keeps up to `slots` blocks in host memory.
    #[must_use]
    pub fn with_host(mut self, slots: usize) -> Self {
        self.host = (slots > 0).then(|| HostTier::new(slots));
        self
    }

    /// Whether there is a host tier.
    pub fn has_host(&self) -> bool {
        self.host.is_some()
    }

    /// Blocks whose content is in host memory.
    pub fn host_blocks(&self) -> usize {
        self.host.as_ref().map_or(0, HostTier::blocks)
    }

    /// Blocks in no table, with or without content.
    pub fn free_blocks(&self) -> usize {
        self.blank.len() + self.idle.len()
    }

    /// All blocks.
    pub fn blocks(&self) -> usize {
        self.pool.len()
    }

    /// How they are used.
    pub fn usage(&self) -> KvUse {
        KvUse { blocks: self.blocks(), held: self.blocks() - self.free_blocks(), cached: self.idle.len() }
    }

    /// Blocks that a sequence with this prefix would share with those that hold them now.
    pub fn held_prefix(&self, prefix: &[PrefixKey]) -> usize {
        let found = prefix.iter().map_while(|key| self.named.get(key));
        found.filter(|block| self.pool[**block as usize].references > 0).count()
    }

    /// Blocks that a sequence with this prefix would find on the device or in host memory, whether or not one holds them.
    pub fn known_prefix(&self, prefix: &[PrefixKey]) -> usize {
        let on_host = |key| self.host.as_ref().is_some_and(|host| host.slot(key).is_some());
        prefix.iter().take_while(|key| self.named.contains_key(key) || on_host(key)).count()
    }

    /// Blocks saved by sharing: those in all tables, counted in each, less those that are held.
    pub fn shared_blocks(&self) -> usize {
        let in_tables: usize = self.tables.values().map(Vec::len).sum();
        in_tables - (self.blocks() - self.free_blocks())
    }

    /// Meets demands in order. The first that cannot be met, and the ones after it, change nothing.
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

    /// Gives a sequence its blocks, or returns how many are missing.
    fn meet(&mut self, demand: &BlockRequest) -> Result<Table, usize> {
        let table = self.tables.get(&demand.sequence).cloned();
        let shared: Vec<u32> = match table {
            Some(_) => Vec::new(),
            None => demand.prefix.iter().map_while(|key| self.named.get(key).copied()).collect(),
        };
        let held = demand.held.max(shared.len() * BLOCK_TOKENS);
        let places = (held + demand.more).min(demand.tokens).div_ceil(BLOCK_TOKENS);
        let mut blocks = table.unwrap_or_default();
        let fresh = places.saturating_sub(blocks.len() + shared.len());
        // Shared blocks that are free now cannot also serve as new blocks.
        let woken = shared.iter().filter(|block| self.pool[**block as usize].references == 0).count();
        let available = self.free_blocks() - woken;
        if fresh > available {
            return Err(fresh - available);
        }
        shared.iter().for_each(|block| self.hold(*block));
        blocks.extend(shared);
        blocks.extend((0..fresh).map(|_| self.take()));
        self.tables.insert(demand.sequence, blocks.clone());
        Ok(Table { sequence: demand.sequence, blocks, held })
    }

    fn hold(&mut self, block: u32) {
        let entry = &mut self.pool[block as usize];
        if entry.references == 0 {
            self.idle.remove(&(entry.idle_since, block));
        }
        entry.references += 1;
    }

    /// A block to write: a blank one, or the longest unused, whose content is forgotten.
    fn take(&mut self) -> u32 {
        let block = self.blank.pop_first().unwrap_or_else(|| {
            let (_, block) = self.idle.pop_first().expect("counted before");
            self.forget(block);
            block
        });
        self.pool[block as usize].references = 1;
        block
    }

    /// A free block's content is here no longer. Its copy in host memory is used now, or is to be made.
    fn forget(&mut self, block: u32) {
        let key = self.pool[block as usize].key.take().expect("an idle block has content");
        self.named.remove(&key);
        match self.host.as_mut().map(|host| host.touch(&key)) {
            Some(true) => {}
            Some(false) => self.leaving.push((key, block)),
            None => self.events.push(BlockEvent::Removed(key)),
        }
    }

    /// Tells of those of these keys that no sequence would find any more.
    fn tell_lost(&mut self, keys: impl IntoIterator<Item = PrefixKey>) {
        let Some(host) = &self.host else { return };
        let is_coming = |key: &PrefixKey| self.coming.values().flatten().any(|(_, coming)| coming == key);
        let is_leaving = |key: &PrefixKey| self.leaving.iter().any(|(leaving, _)| leaving == key);
        let is_lost = |key: &PrefixKey| {
            !self.named.contains_key(key) && host.slot(key).is_none() && !is_coming(key) && !is_leaving(key)
        };
        self.events.extend(keys.into_iter().filter(is_lost).map(BlockEvent::Removed));
    }

    /// Adds what a block has to what is told of it. For blocks that were just [named](Self::name).
    pub fn tell(&mut self, event: BlockEvent) {
        self.events.push(event);
    }

    /// What happened to named blocks since the last call, in order. A block is removed when no sequence would find it,
    /// on the device or in host memory. One that is stored may have been before.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    /// The copies to make before anything is written to blocks that were given out. Each is returned once.
    pub fn take_leaving(&mut self) -> Vec<BlockCopy> {
        self.take_in(&[])
    }

    /// Takes what leaves into host memory, beside what is `kept` there.
    fn take_in(&mut self, kept: &[PrefixKey]) -> Vec<BlockCopy> {
        let leaving = std::mem::take(&mut self.leaving);
        let Some(host) = &mut self.host else { return Vec::new() };
        let copies = host.take_in(&leaving, kept);
        let forgotten = host.take_forgotten();
        self.tell_lost(leaving.into_iter().map(|(key, _)| key).chain(forgotten));
        copies
    }

    /// Makes blocks blank, the longest unused first, until `blank` are. With a host tier, steps then find blocks whose
    /// content has been copied already.
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

    /// How much of `prefix` is on the device or in host memory.
    pub fn beginning(&self, prefix: &[PrefixKey]) -> Beginning {
        let mut found = Beginning::default();
        let Some(host) = &self.host else { return found };
        // Free ones that it will hold cannot be given out.
        let mut woken = 0;
        for key in prefix {
            match self.named.get(key) {
                Some(block) => {
                    found.resident += usize::from(found.missing == 0);
                    woken += usize::from(self.pool[*block as usize].references == 0);
                }
                None if host.slot(key).is_some() => found.missing += 1,
                None => break,
            }
            found.blocks += 1;
        }
        found.has_room = found.missing <= self.free_blocks() - woken;
        found
    }

    /// Gives a sequence without blocks those of its beginning, with copies of what only the host has. Its blocks are its
    /// own, and no step may use them, until the copies have ended ([`fetched`](Self::fetched)). None, and nothing
    /// changes, if nothing is missing or there are too few free blocks.
    pub fn fetch(&mut self, sequence: SequenceId, prefix: &[PrefixKey]) -> Option<Copies> {
        let found = self.beginning(prefix);
        let prefix = &prefix[..found.blocks];
        let on_device: Vec<Option<u32>> = prefix.iter().map(|key| self.named.get(key).copied()).collect();
        if found.missing == 0 || !found.has_room || self.tables.contains_key(&sequence) {
            return None;
        }
        // Held before any is taken, so that none of them is given out.
        on_device.iter().flatten().for_each(|block| self.hold(*block));
        let table: Vec<u32> = on_device.iter().map(|block| block.unwrap_or_else(|| self.take())).collect();
        let missing = (0..prefix.len()).filter(|place| on_device[*place].is_none());
        let coming: Vec<_> = missing.map(|place| (place, prefix[place])).collect();
        let kept: Vec<_> = coming.iter().map(|(_, key)| *key).collect();
        let to_host = self.take_in(&kept);
        let host = self.host.as_ref().expect("something was found there");
        let slot = |key| host.slot(key).expect("it was kept");
        let to_device = coming.iter().map(|(place, key)| BlockCopy { block: table[*place], slot: slot(key) }).collect();
        self.coming.insert(sequence, coming);
        self.tables.insert(sequence, table);
        self.check();
        Some(Copies { to_host, to_device })
    }

    /// The copies of a sequence's beginning have ended: others may share it.
    pub fn fetched(&mut self, sequence: SequenceId) {
        let coming = self.coming.remove(&sequence).expect("it was being fetched");
        for (place, key) in coming {
            self.name(sequence, place, &[key]);
        }
    }

    /// Whether a copy under way brings the first block of `prefix` that the device does not have.
    pub fn is_coming(&self, prefix: &[PrefixKey]) -> bool {
        let next = prefix.iter().find(|key| !self.named.contains_key(key));
        let comes = |next| self.coming.values().flatten().any(|(_, key)| key == next);
        !self.coming.is_empty() && next.is_some_and(comes)
    }

    /// Whether a sequence has blocks.
    pub fn has_table(&self, sequence: SequenceId) -> bool {
        self.tables.contains_key(&sequence)
    }

    /// Names blocks that a step has filled, from the `first` of the sequence's table on, so that others may share them.
    /// If another block got the same name first, that one stays the shared one. Unknown sequences are ignored. Returns
    /// the places of those that got their name.
    pub fn name(&mut self, sequence: SequenceId, first: usize, keys: &[PrefixKey]) -> Vec<usize> {
        let Some(table) = self.tables.get(&sequence) else { return Vec::new() };
        let mut named = Vec::new();
        for ((place, block), key) in table.iter().enumerate().skip(first).zip(keys) {
            let entry = &mut self.pool[*block as usize];
            if entry.key.is_none() && !self.named.contains_key(key) {
                entry.key = Some(*key);
                self.named.insert(*key, *block);
                named.push(place);
            }
        }
        self.check();
        named
    }

    /// Forgets a sequence. Blocks in no other table become free, and named ones keep their content for now. An unknown
    /// sequence is ignored.
    pub fn release(&mut self, sequence: SequenceId) {
        assert!(!self.coming.contains_key(&sequence), "a copy fills the blocks of {sequence}");
        // The last block first: without its beginning, the end of a sequence is useless.
        for block in self.tables.remove(&sequence).into_iter().flatten().rev() {
            let entry = &mut self.pool[block as usize];
            entry.references -= 1;
            match (entry.references, entry.key) {
                (0, None) => drop(self.blank.insert(block)),
                (0, Some(_)) => {
                    self.clock += 1;
                    entry.idle_since = self.clock;
                    self.idle.insert((self.clock, block));
                }
                _ => {}
            }
        }
        self.check();
    }

    /// Makes all blocks but the first `to` blank. Every sequence with a block in that tail is released, because blocks
    /// cannot be moved, and no other sequence is. Returns the released ones, in the order of their `place`; their other
    /// blocks keep their content for now, those of the last for longest. With a host tier, what the tail has
    /// [leaves](Self::take_leaving).
    pub fn vacate<P: Ord>(&mut self, to: usize, place: impl Fn(SequenceId) -> P) -> Vec<SequenceId> {
        let tail = to as u32..;
        let holds = |(_, blocks): &(&SequenceId, &Vec<u32>)| blocks.iter().any(|block| tail.contains(block));
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

    /// Gives up all blocks but the first `to`, [vacated](Self::vacate) first, by the youngest first. What has not left by
    /// then is lost.
    pub fn shrink(&mut self, to: usize) -> Vec<SequenceId> {
        let holders = self.vacate(to, Reverse);
        let gone = self.blank.split_off(&(to as u32));
        assert_eq!(
            gone.len(),
            self.pool.len().saturating_sub(to),
            "whoever held a block of the tail has been released"
        );
        let (too_late, leaving): (Vec<_>, _) = self.leaving.drain(..).partition(|(_, block)| gone.contains(block));
        self.leaving = leaving;
        self.tell_lost(too_late.into_iter().map(|(key, _)| key));
        self.pool.truncate(to);
        self.check();
        holders
    }

    /// Grows the pool to `to` blocks. New blocks are blank. Does nothing if there are that many already.
    pub fn grow(&mut self, to: usize) {
        let before = self.blocks();
        self.blank.extend(before as u32..to as u32);
        self.pool.resize(to.max(before), Block::default());
        self.check();
    }

    /// Every block is blank, idle or held, exactly once. Large devices have 100,000 blocks and steps of milliseconds,
    /// so large pools and release builds skip this.
    fn check(&self) {
        if !cfg!(debug_assertions) || self.pool.len() > CHECKED_MAX {
            return;
        }
        let held = self.pool.iter().filter(|block| block.references > 0).count();
        assert_eq!(held + self.free_blocks(), self.pool.len(), "blocks were lost or doubled");
    }
}

#[cfg(test)]
mod tests;
