//! Tests of the block pool: which sequences hold and share blocks, and the content
//! that free blocks keep.

use proptest::prelude::*;

use super::*;
use crate::kv::StoredBlock;

mod host;
mod windows;

const A: SequenceId = SequenceId(1);
const B: SequenceId = SequenceId(2);

/// The request of a sequence that grows to `tokens` tokens and holds `held` tokens in its blocks.
fn demand(sequence: SequenceId, held: usize, tokens: usize) -> BlockRequest {
    BlockRequest { sequence, held, more: tokens - held, tokens, prefix: Vec::new() }
}

/// Keys of the whole blocks of a sequence of `tokens` tokens. All sequences with the
/// same `name` begin alike.
fn keys(name: u32, tokens: usize) -> Vec<PrefixKey> {
    let mut keys = bursar_model::flow::PrefixKeys::default();
    keys.extend(&vec![name; tokens], &vec![[0; 3]; tokens], &[]);
    keys.as_slice().to_vec()
}

/// The request of a new sequence of `tokens` tokens that begins like all other sequences of this
/// `name`.
fn alike(sequence: SequenceId, name: u32, tokens: usize, more: usize) -> BlockRequest {
    BlockRequest { sequence, held: 0, more, tokens, prefix: keys(name, tokens - 1) }
}

/// Registers the prefix keys of the whole blocks of a sequence that holds `tokens` tokens of this
/// `name`, and adds their events.
fn fill(kv: &mut KvCore, sequence: SequenceId, name: u32, tokens: usize) {
    let keys = keys(name, tokens);
    for place in kv.name(sequence, 0, &keys) {
        let block = StoredBlock {
            key: keys[place],
            parent: place.checked_sub(1).map(|before| keys[before]),
            first_token: place * BLOCK_TOKENS,
            tokens: [name; BLOCK_TOKENS].into(),
            pictures: Vec::new(),
            salt: None,
        };
        kv.push_event(BlockEvent::Stored(block.into()));
    }
}

/// Applies all new events to the set of blocks that a listener knows.
fn apply_events(kv: &mut KvCore, known: &mut BTreeSet<PrefixKey>) {
    for event in kv.take_events() {
        match event {
            BlockEvent::Stored(block) => known.insert(block.key),
            BlockEvent::Removed(key) => known.remove(&key),
            BlockEvent::Cleared => unreachable!("a pool is never cleared"),
        };
    }
}

fn of_first_group(table: &Table) -> &Vec<u32> {
    &table.blocks[0].blocks
}

fn blocks(allotment: &Allotment) -> Vec<(SequenceId, Vec<u32>)> {
    allotment.tables.iter().map(|table| (table.sequence, of_first_group(table).clone())).collect()
}

#[test]
fn a_sequence_takes_a_block_only_after_filling_the_last() {
    let mut kv = KvCore::new(4);
    assert_eq!(blocks(&kv.allot(&[demand(A, 0, 16)])), [(A, vec![0])]);
    assert_eq!(blocks(&kv.allot(&[demand(A, 16, 17), demand(B, 0, 1)])), [(A, vec![0, 1]), (B, vec![2])]);
    assert_eq!(blocks(&kv.allot(&[demand(A, 17, 32)])), [(A, vec![0, 1])]);
}

#[test]
fn truncating_a_sequence_returns_its_tail_blocks_as_blank() {
    let mut kv = KvCore::new(6);
    kv.allot(&[demand(A, 0, 70)]);
    fill(&mut kv, A, 7, 40);
    kv.truncate(A, 40);
    assert_eq!(kv.usage(), KvUse { blocks: 6, held: 3, cached: 0 });
    kv.truncate(A, 48);
    kv.truncate(B, 3);
    assert_eq!(kv.usage().held, 3, "truncating beyond the end, or an unknown sequence, changes nothing");
    assert_eq!(blocks(&kv.allot(&[demand(A, 40, 50)])), [(A, vec![0, 1, 2, 3])], "the fourth block is blank");
}

#[test]
fn an_unmet_demand_takes_no_blocks_and_is_not_overtaken() {
    let mut kv = KvCore::new(3);
    let allotment = kv.allot(&[demand(A, 0, 20), demand(B, 0, 40), demand(SequenceId(3), 0, 1)]);
    assert_eq!(blocks(&allotment), [(A, vec![0, 1])]);
    assert_eq!((allotment.short_by, kv.free_blocks()), (2, 1));
}

#[test]
fn a_sequence_shares_the_blocks_of_a_cached_prefix() {
    let mut kv = KvCore::new(8);
    kv.allot(&[demand(A, 0, 40)]);
    fill(&mut kv, A, 7, 40);
    let table = &kv.allot(&[alike(B, 7, 40, 40)]).tables[0];
    assert_eq!((table.held, of_first_group(table)), (32, &vec![0, 1, 3]), "the partly filled block of A is not shared");
    assert_eq!(kv.free_blocks(), 4);
    kv.release(A);
    assert_eq!(kv.free_blocks(), 5, "B still holds the shared blocks");
    kv.release(B);
    assert_eq!(kv.usage(), KvUse { blocks: 8, held: 0, cached: 2 });
}

#[test]
fn released_blocks_stay_cached_until_blocks_run_out() {
    let mut kv = KvCore::new(3);
    kv.allot(&[demand(A, 0, 33)]);
    fill(&mut kv, A, 7, 33);
    kv.release(A);
    assert_eq!(kv.usage().cached, 2);
    let again = kv.allot(&[alike(A, 7, 33, 33)]);
    assert_eq!(again.tables[0].held, 32);
    kv.release(A);
    // Another sequence needs two blocks: the blank block, and the last cached block.
    kv.allot(&[demand(B, 0, 32)]);
    kv.release(B);
    assert_eq!(kv.allot(&[alike(A, 7, 33, 33)]).tables[0].held, 16, "the first block is still cached");
}

#[test]
fn a_fully_cached_sequence_still_has_a_token_to_compute() {
    let mut kv = KvCore::new(4);
    kv.allot(&[demand(A, 0, 32)]);
    fill(&mut kv, A, 7, 32);
    let table = &kv.allot(&[alike(B, 7, 32, 32)]).tables[0];
    assert_eq!((table.held, of_first_group(table).len()), (16, 2));
    assert_ne!(of_first_group(table)[1], 1, "the last block is written again, so B needs a separate block");
}

#[test]
fn shared_cached_blocks_do_not_count_as_free() {
    let mut kv = KvCore::new(3);
    kv.allot(&[demand(A, 0, 32)]);
    fill(&mut kv, A, 7, 32);
    kv.release(A);
    // B shares two of the three free blocks. It would need two more.
    let allotment = kv.allot(&[alike(B, 7, 64, 64)]);
    assert_eq!((allotment.tables.len(), allotment.short_by), (0, 1));
    assert_eq!(kv.usage(), KvUse { blocks: 3, held: 0, cached: 2 }, "a refused request changes nothing");
}

#[test]
fn duplicate_blocks_stay_separate_and_only_one_is_shared() {
    let mut kv = KvCore::new(6);
    kv.allot(&[demand(A, 0, 17), demand(B, 0, 17)]);
    fill(&mut kv, A, 7, 17);
    fill(&mut kv, B, 7, 17);
    assert_eq!(of_first_group(&kv.allot(&[alike(SequenceId(3), 7, 17, 17)]).tables[0])[0], 0);
    kv.release(B);
    assert_eq!(kv.usage().cached, 0, "the block of B is blank again, because only the block of A is shared");
}

#[test]
fn a_step_with_cached_blocks_requests_only_the_rest() {
    let mut kv = KvCore::new(8);
    kv.allot(&[demand(A, 0, 48)]);
    fill(&mut kv, A, 7, 48);
    // B has 50 tokens. 48 of them are cached, and the step can hold 20 tokens.
    let table = &kv.allot(&[alike(B, 7, 50, 20)]).tables[0];
    assert_eq!((table.held, of_first_group(table).len()), (48, 4));
}

#[test]
fn a_shrink_drops_the_removed_blocks_and_their_holders() {
    let mut kv = KvCore::new(8);
    kv.allot(&[demand(A, 0, 32), demand(B, 0, 48), demand(SequenceId(3), 0, 16)]);
    fill(&mut kv, SequenceId(3), 9, 16);
    fill(&mut kv, B, 7, 48);
    kv.release(SequenceId(3));
    assert_eq!(kv.usage(), KvUse { blocks: 8, held: 5, cached: 1 });
    assert_eq!(kv.shrink(4), [B], "A holds blocks 0 and 1");
    assert_eq!(kv.usage(), KvUse { blocks: 4, held: 2, cached: 2 }, "blocks 2 and 3 of B are still cached");
    assert_eq!(kv.allot(&[alike(B, 7, 48, 48)]).short_by, 1, "three blocks do not fit");
    assert_eq!(kv.allot(&[alike(B, 7, 33, 33)]).short_by, 1);
    kv.release(A);
    assert_eq!(
        kv.allot(&[alike(B, 7, 48, 48)]).tables[0].held,
        32,
        "the shrink dropped the content of the third block of B"
    );
}

#[test]
fn removing_a_shared_block_drops_both_of_its_holders() {
    let mut kv = KvCore::new(6);
    kv.allot(&[demand(SequenceId(9), 0, 32), demand(A, 0, 33)]);
    fill(&mut kv, A, 7, 33);
    kv.allot(&[alike(B, 7, 33, 33)]);
    assert_eq!(kv.shrink(3), [SequenceId(9), B, A].into_iter().filter(|id| id.0 != 9).collect::<Vec<_>>());
    assert_eq!(kv.usage(), KvUse { blocks: 3, held: 2, cached: 1 });
}

#[test]
fn block_events_report_named_blocks_and_evicted_content() {
    let (mut kv, mut known) = (KvCore::new(3), BTreeSet::new());
    kv.allot(&[demand(A, 0, 33)]);
    fill(&mut kv, A, 7, 33);
    kv.release(A);
    apply_events(&mut kv, &mut known);
    assert_eq!(known, keys(7, 33).into_iter().collect(), "released blocks keep their content");
    kv.allot(&[demand(B, 0, 32)]);
    apply_events(&mut kv, &mut known);
    assert_eq!(known, keys(7, 16).into_iter().collect());
    kv.release(B);
    kv.shrink(0);
    apply_events(&mut kv, &mut known);
    assert_eq!(known, BTreeSet::new());
}

#[test]
fn new_blocks_are_blank_and_the_lowest_are_taken_first() {
    let mut kv = KvCore::new(2);
    kv.allot(&[demand(A, 0, 17)]);
    kv.grow(5);
    assert_eq!(kv.usage(), KvUse { blocks: 5, held: 2, cached: 0 });
    assert_eq!(blocks(&kv.allot(&[demand(B, 0, 33)])), [(B, vec![2, 3, 4])]);
    kv.release(A);
    kv.grow(3);
    assert_eq!(kv.blocks(), 5, "a size below the current one does not grow the pool");
    assert_eq!(blocks(&kv.allot(&[demand(A, 0, 1)])), [(A, vec![0])]);
}

#[test]
fn a_sequence_id_displays_its_number() {
    assert_eq!(SequenceId(7).to_string(), "sequence 7");
}

#[cfg(debug_assertions)]
#[test]
fn a_lost_block_is_noticed_unless_the_pool_is_large() {
    let notices = |blocks| {
        let mut kv = KvCore::new(blocks);
        kv.blank.pop_first();
        std::panic::catch_unwind(|| kv.check()).is_err()
    };
    assert_eq!([1, CHECKED_MAX, CHECKED_MAX + 1].map(notices), [true, true, false]);
}

/// The groups of models without and with windows.
fn groups() -> impl Strategy<Value = CacheGroups> {
    let of = |windows: &[Option<usize>]| CacheGroups::new(windows.iter().copied().enumerate());
    let models = [of(&[None]), of(&[None, Some(20)]), of(&[Some(33)]), of(&[None, Some(1), Some(40)])];
    proptest::sample::select(models.to_vec())
}

/// The blocks that sequences hold, each once.
fn held_blocks(kv: &KvCore) -> BTreeSet<u32> {
    kv.tables.values().flatten().flat_map(|table| table.blocks.iter().copied()).collect()
}

proptest! {
    /// Compares the pool with a reference that only records the content written to each block.
    /// Tokens that are reported as cached have the content of the sequence's own beginning. No
    /// block of a sequence is written by another sequence, and no block is lost.
    #[test]
    fn the_pool_loses_no_block_and_shares_only_equal_content(
        groups in groups(),
        steps in proptest::collection::vec((0u8..5, 0u64..6, 1usize..90, 0u32..3), 1..120),
    ) {
        let mut kv = KvCore::new(12).with_groups(groups.clone());
        // The content of each block: the cache group, the name, and the index in its sequence.
        let mut content: Vec<Option<(usize, u32, usize)>> = vec![None; 12];
        let mut alive: BTreeMap<u64, (u32, usize)> = BTreeMap::new();
        for (kind, number, tokens, name) in steps {
            let sequence = SequenceId(number);
            if kind == 0 {
                kv.release(sequence);
                alive.remove(&number);
                continue;
            }
            if kind == 1 {
                // Resizes the pool. The returned sequences are exactly those sequences that held a
                // removed block.
                let to = tokens / 5;
                let before = kv.blocks();
                let tables = kv.tables.clone();
                let gone = if to < before {
                    kv.shrink(to)
                } else {
                    kv.grow(to);
                    Vec::new()
                };
                prop_assert_eq!(kv.blocks(), to);
                let holds = |id: &SequenceId| {
                    let mut blocks = tables.get(id).into_iter().flatten().flat_map(|table| &table.blocks);
                    blocks.any(|block| *block as usize >= to)
                };
                for id in alive.keys().map(|number| SequenceId(*number)) {
                    prop_assert_eq!(gone.contains(&id), holds(&id));
                }
                alive.retain(|number, _| !gone.contains(&SequenceId(*number)));
                content.resize(to, None);
                let held = held_blocks(&kv);
                prop_assert!(held.iter().all(|block| (*block as usize) < kv.blocks()));
                prop_assert_eq!(kv.free_blocks() + held.len(), kv.blocks());
                prop_assert_eq!(kv.named.len(), kv.pool.iter().filter(|block| block.name.is_some()).count());
                continue;
            }
            let (name, held) = alive.get(&number).copied().unwrap_or((name, 0));
            if tokens <= held {
                continue;
            }
            let mut wanted = demand(sequence, held, tokens);
            if held == 0 {
                wanted.prefix = keys(name, tokens - 1);
            }
            let allotment = kv.allot(&[wanted]);
            let Some(table) = allotment.tables.first() else {
                prop_assert!(allotment.short_by > 0);
                continue;
            };
            prop_assert!(table.held >= held && table.held < tokens);
            for (group, blocks) in table.blocks.iter().enumerate() {
                prop_assert_eq!(blocks.end(), tokens.div_ceil(BLOCK_TOKENS));
                prop_assert!(blocks.skipped <= groups.first_read(group, table.held));
                for (place, block) in (blocks.skipped..).zip(&blocks.blocks) {
                    let content = &mut content[*block as usize];
                    if place < table.held / BLOCK_TOKENS {
                        prop_assert_eq!(*content, Some((group, name, place)));
                    } else {
                        *content = Some((group, name, place));
                    }
                }
            }
            alive.insert(number, (name, tokens));
            fill(&mut kv, sequence, name, tokens);
            kv.release_skipped(sequence, tokens);
            for (group, blocks) in kv.tables[&sequence].iter().enumerate() {
                prop_assert_eq!(blocks.skipped, groups.first_read(group, tokens));
                prop_assert_eq!(blocks.end(), tokens.div_ceil(BLOCK_TOKENS));
            }
            prop_assert_eq!(kv.free_blocks() + held_blocks(&kv).len(), kv.blocks());
            let full = || kv.tables.values().flat_map(|of| &of[..groups.full()]).flat_map(|table| &table.blocks);
            prop_assert_eq!(kv.shared_blocks(), full().count() - full().collect::<BTreeSet<_>>().len());
        }
    }
}
