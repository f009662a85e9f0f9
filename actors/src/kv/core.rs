//! Which sequence holds which block, and what free blocks still contain: pure.
//!
//! Whole blocks are named by their content (a [`PrefixKey`] covers everything before it too), so a sequence that begins
//! like another takes its blocks. This is automatic prefix caching, as in vLLM and SGLang (RadixAttention, arXiv
//! 2312.07104). Free blocks keep their content until they are reused: the longest unused first, and of one sequence the
//! last block first.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use bursar_kernels::BLOCK_TOKENS;
use bursar_model::flow::PrefixKey;

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
pub struct Demand {
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
        }
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

    /// Blocks that a sequence with this prefix would find, whether or not one holds them.
    pub fn known_prefix(&self, prefix: &[PrefixKey]) -> usize {
        prefix.iter().take_while(|key| self.named.contains_key(key)).count()
    }

    /// Blocks saved by sharing: those in all tables, counted in each, less those that are held.
    pub fn shared_blocks(&self) -> usize {
        let in_tables: usize = self.tables.values().map(Vec::len).sum();
        in_tables - (self.blocks() - self.free_blocks())
    }

    /// Meets demands in order. The first that cannot be met, and the ones after it, change nothing.
    pub fn allot(&mut self, demands: &[Demand]) -> Allotment {
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
    fn meet(&mut self, demand: &Demand) -> Result<Table, usize> {
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
            let key = self.pool[block as usize].key.take().expect("an idle block has content");
            self.named.remove(&key);
            block
        });
        self.pool[block as usize].references = 1;
        block
    }

    /// Names blocks that a step has filled, from the `first` of the sequence's table on, so that others may share them.
    /// If another block got the same name first, that one stays the shared one. Unknown sequences are ignored.
    pub fn name(&mut self, sequence: SequenceId, first: usize, keys: &[PrefixKey]) {
        let Some(table) = self.tables.get(&sequence) else { return };
        for (block, key) in table[first..].iter().zip(keys) {
            let entry = &mut self.pool[*block as usize];
            if entry.key.is_none() && !self.named.contains_key(key) {
                entry.key = Some(*key);
                self.named.insert(*key, *block);
            }
        }
        self.check();
    }

    /// Forgets a sequence. Blocks in no other table become free, and named ones keep their content for now. An unknown
    /// sequence is ignored.
    pub fn release(&mut self, sequence: SequenceId) {
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

    /// Gives up all blocks but the first `to`. Every sequence with a block in the tail is released, because blocks
    /// cannot be moved, and no other sequence is. Returns the released ones, youngest first; they must be recomputed.
    /// Their other blocks keep their content for now.
    pub fn shrink(&mut self, to: usize) -> Vec<SequenceId> {
        let tail = to as u32..;
        let holds = |(_, blocks): &(&SequenceId, &Vec<u32>)| blocks.iter().any(|block| tail.contains(block));
        let holders: Vec<SequenceId> = self.tables.iter().rev().filter(holds).map(|(id, _)| *id).collect();
        holders.iter().for_each(|holder| self.release(*holder));
        for (block, entry) in self.pool.iter().enumerate().skip(to) {
            assert_eq!(entry.references, 0, "whoever held block {block} has been released");
            self.idle.remove(&(entry.idle_since, block as u32));
            if let Some(key) = entry.key {
                self.named.remove(&key);
            }
        }
        self.blank.split_off(&(to as u32));
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
