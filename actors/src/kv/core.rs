//! Who holds which block: reference counts and block tables, pure.

use std::{collections::BTreeMap, fmt};

use bursar_kernels::BLOCK_TOKENS;

/// One sequence of an engine, never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// How long a sequence will be after the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Whose.
    pub sequence: SequenceId,
    /// Tokens that must have a place, those already held included.
    pub tokens: usize,
}

/// The answer to a list of demands: those that were met, in order. What follows the first that could not be met was
/// not tried, so that a short demand never overtakes a long one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allotment {
    /// The whole table of each sequence whose demand was met.
    pub tables: Vec<(SequenceId, Vec<u32>)>,
    /// Blocks that the first demand that was not met is short of; zero if all were met.
    pub short_by: usize,
}

/// The pool of blocks.
#[derive(Clone, Debug)]
pub struct KvCore {
    /// How many tables name each block.
    references: Vec<u32>,
    /// Blocks that no table names; the last is taken next, so that few pages are touched.
    free: Vec<u32>,
    tables: BTreeMap<SequenceId, Vec<u32>>,
}

impl KvCore {
    /// A pool of `blocks` blocks, all free.
    pub fn new(blocks: usize) -> Self {
        KvCore { references: vec![0; blocks], free: (0..blocks as u32).rev().collect(), tables: BTreeMap::new() }
    }

    /// Blocks that no table names.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// All blocks.
    pub fn blocks(&self) -> usize {
        self.references.len()
    }

    /// Meets demands in order, up to the first that cannot be met; that one and those behind it change nothing.
    pub fn allot(&mut self, demands: &[Demand]) -> Allotment {
        let mut allotment = Allotment::default();
        for demand in demands {
            let held = self.tables.get(&demand.sequence).map_or(0, Vec::len);
            let more = demand.tokens.div_ceil(BLOCK_TOKENS).saturating_sub(held);
            if more > self.free.len() {
                allotment.short_by = more - self.free.len();
                break;
            }
            let table = self.tables.entry(demand.sequence).or_default();
            for block in self.free.drain(self.free.len() - more..).rev() {
                self.references[block as usize] += 1;
                table.push(block);
            }
            allotment.tables.push((demand.sequence, table.clone()));
        }
        self.check();
        allotment
    }

    /// A new sequence shares the whole blocks of the first `tokens` tokens of another; gives the tokens shared. A
    /// block that is only begun is not shared, as both would write into it.
    pub fn fork(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> usize {
        assert!(!self.tables.contains_key(&to), "{to} has a table already");
        let Some(table) = self.tables.get(&from) else { return 0 };
        let shared: Vec<u32> = table.iter().take(tokens / BLOCK_TOKENS).copied().collect();
        for block in &shared {
            self.references[*block as usize] += 1;
        }
        let count = shared.len() * BLOCK_TOKENS;
        self.tables.insert(to, shared);
        self.check();
        count
    }

    /// Forgets a sequence; blocks that no other shares are free again. Unknown sequences are nobody's loss.
    pub fn release(&mut self, sequence: SequenceId) {
        for block in self.tables.remove(&sequence).into_iter().flatten().rev() {
            let references = &mut self.references[block as usize];
            *references -= 1;
            if *references == 0 {
                self.free.push(block);
            }
        }
        self.check();
    }

    /// Every block is either free or named, and free ones are listed once.
    fn check(&self) {
        let named = self.references.iter().filter(|references| **references > 0).count();
        assert_eq!(named + self.free.len(), self.references.len(), "blocks were lost or doubled");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: SequenceId = SequenceId(1);
    const B: SequenceId = SequenceId(2);

    fn demand(sequence: SequenceId, tokens: usize) -> Demand {
        Demand { sequence, tokens }
    }

    #[test]
    fn a_sequence_takes_a_block_only_when_it_outgrows_the_last() {
        let mut kv = KvCore::new(4);
        assert_eq!(kv.allot(&[demand(A, 16)]).tables, [(A, vec![0])]);
        assert_eq!(kv.allot(&[demand(A, 17), demand(B, 1)]).tables, [(A, vec![0, 1]), (B, vec![2])]);
        assert_eq!(kv.allot(&[demand(A, 32)]).tables, [(A, vec![0, 1])]);
    }

    #[test]
    fn a_demand_that_cannot_be_met_takes_nothing_and_is_not_overtaken() {
        let mut kv = KvCore::new(3);
        let allotment = kv.allot(&[demand(A, 20), demand(B, 40), demand(SequenceId(3), 1)]);
        assert_eq!(allotment.tables, [(A, vec![0, 1])]);
        assert_eq!((allotment.short_by, kv.free_blocks()), (2, 1));
    }

    #[test]
    fn a_shared_block_is_free_only_after_both_have_let_go() {
        let mut kv = KvCore::new(4);
        kv.allot(&[demand(A, 40)]);
        assert_eq!(kv.fork(A, B, 39), 32);
        kv.release(A);
        assert_eq!(kv.free_blocks(), 2, "the begun block of A is free, the two shared ones are not");
        assert_eq!(kv.allot(&[demand(B, 33)]).tables, [(B, vec![0, 1, 2])]);
        kv.release(B);
        assert_eq!(kv.free_blocks(), 4);
    }

    proptest! {
        /// Against a model that only counts: blocks of a sequence never overlap another's unless shared by a fork.
        #[test]
        fn no_block_is_lost_or_given_twice(steps in proptest::collection::vec((0u8..3, 0u64..6, 0usize..90), 1..80)) {
            let mut kv = KvCore::new(12);
            let mut lengths: BTreeMap<u64, usize> = BTreeMap::new();
            let mut next = 100u64;
            for (kind, sequence, tokens) in steps {
                match kind {
                    0 => {
                        let met = kv.allot(&[demand(SequenceId(sequence), tokens)]);
                        if let [(_, table)] = &met.tables[..] {
                            let length = lengths.entry(sequence).or_default();
                            *length = (*length).max(tokens.div_ceil(BLOCK_TOKENS));
                            prop_assert_eq!(table.len(), *length);
                            let distinct: std::collections::BTreeSet<_> = table.iter().collect();
                            prop_assert_eq!(distinct.len(), table.len());
                        } else {
                            prop_assert!(met.short_by > 0);
                        }
                    }
                    1 => {
                        next += 1;
                        let shared = kv.fork(SequenceId(sequence), SequenceId(next), tokens);
                        prop_assert!(shared <= tokens && shared.is_multiple_of(BLOCK_TOKENS));
                        kv.release(SequenceId(next));
                    }
                    _ => {
                        kv.release(SequenceId(sequence));
                        lengths.remove(&sequence);
                    }
                }
                prop_assert_eq!(kv.free_blocks() + lengths.values().sum::<usize>(), kv.blocks());
            }
        }
    }
}
