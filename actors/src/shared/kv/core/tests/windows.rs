//! Tests of cache groups with windows.

use std::cell::Cell;

use super::*;

/// A pool for a model with layers of full attention and layers with a window of 32 tokens.
fn mixed(blocks: usize) -> KvCore {
    KvCore::new(blocks).with_groups(CacheGroups::new([(0, None), (1, Some(32))]))
}

/// The numbers of blocks skipped and held in each group.
fn shape(kv: &KvCore, sequence: SequenceId) -> Vec<(usize, usize)> {
    kv.tables[&sequence].iter().map(|table| (table.skipped, table.blocks.len())).collect()
}

/// Runs a sequence of this `name` to `tokens` tokens in one step.
fn run(kv: &mut KvCore, sequence: SequenceId, name: u32, tokens: usize) -> usize {
    let held = kv.allot(&[alike(sequence, name, tokens, tokens)]).tables[0].held;
    fill(kv, sequence, name, tokens);
    kv.release_skipped(sequence, tokens);
    held
}

#[test]
fn blocks_before_the_window_are_released_when_their_step_ends() {
    let mut kv = mixed(12);
    kv.allot(&[demand(A, 0, 80)]);
    assert_eq!(shape(&kv, A), [(0, 5), (0, 5)], "the rows of the step read all five blocks");
    kv.release_skipped(A, 80);
    assert_eq!(shape(&kv, A), [(0, 5), (3, 2)], "the next token reads the last 31 tokens");
    kv.allot(&[demand(A, 80, 81)]);
    kv.release_skipped(A, 81);
    assert_eq!(shape(&kv, A), [(0, 6), (3, 3)]);
    assert_eq!(kv.usage(), KvUse { blocks: 12, held: 9, cached: 0 });
    kv.release_skipped(B, 81);
    kv.release(A);
    assert_eq!(kv.usage().held, 0);
}

#[test]
fn a_pool_with_only_windows_runs_sequences_of_any_length() {
    let mut kv = KvCore::new(4).with_groups(CacheGroups::new([(0, Some(32))]));
    kv.allot(&[demand(A, 0, 1)]);
    for tokens in 1..1000 {
        assert_eq!(kv.allot(&[demand(A, tokens, tokens + 1)]).short_by, 0, "{tokens} tokens");
        kv.release_skipped(A, tokens + 1);
    }
    assert!(kv.usage().held <= 3);
}

#[test]
fn a_prefix_needs_only_the_window_blocks_at_its_end() {
    let mut kv = mixed(16);
    run(&mut kv, A, 7, 81);
    // The last block is not whole. The first three blocks of the window's group are free.
    assert_eq!(kv.usage(), KvUse { blocks: 16, held: 9, cached: 3 });
    let table = &kv.allot(&[alike(B, 7, 81, 81)]).tables[0];
    assert_eq!((table.held, shape(&kv, B)), (80, vec![(0, 6), (3, 3)]));
    let of_a = kv.tables[&A].iter().map(|table| table.blocks[..table.blocks.len() - 1].to_vec());
    let of_b = kv.tables[&B].iter().map(|table| table.blocks[..table.blocks.len() - 1].to_vec());
    assert!(of_a.eq(of_b), "both read the same blocks");
}

#[test]
fn a_prefix_ends_where_a_window_is_complete() {
    let mut kv = mixed(16);
    run(&mut kv, A, 7, 97);
    kv.release(A);
    let (whole, known) = (keys(7, 96), |kv: &KvCore| kv.known_prefix(&keys(7, 96)));
    assert_eq!(known(&kv), 6);
    let removed = kv.named[&Name { group: 1, key: whole[4] }];
    kv.idle.retain(|(_, block)| *block != removed);
    kv.forget(removed);
    kv.blank.insert(removed);
    assert_eq!(known(&kv), 4, "the window at the end of the fifth and of the sixth block is incomplete");
    let removed = kv.named[&Name { group: 0, key: whole[1] }];
    kv.idle.retain(|(_, block)| *block != removed);
    kv.forget(removed);
    kv.blank.insert(removed);
    assert_eq!(known(&kv), 1, "full attention reads every block");
}

#[test]
fn only_blocks_of_the_first_group_are_reported() {
    let (mut kv, mut known) = (mixed(12), BTreeSet::new());
    run(&mut kv, A, 7, 81);
    apply_events(&mut kv, &mut known);
    assert_eq!(known, keys(7, 80).into_iter().collect());
    kv.release(A);
    let full = kv.named.iter().filter(|(name, _)| name.group == 0).count();
    assert_eq!((full, kv.named.len()), (5, 10));
    // B takes the two blank blocks, and then two blocks of the second group, which were released
    // before all other blocks.
    kv.allot(&[demand(B, 0, 32)]);
    apply_events(&mut kv, &mut known);
    assert_eq!((known.len(), kv.named.len()), (5, 8));
    kv.shrink(0);
    apply_events(&mut kv, &mut known);
    assert!(known.is_empty());
}

#[test]
fn a_pool_with_only_windows_emits_no_block_events() {
    let mut kv = KvCore::new(12).with_groups(CacheGroups::new([(0, Some(32))]));
    // The prompt runs in chunks that are longer than the window. Blocks are named when the last
    // chunk has chosen a token, and the first blocks have been released by then.
    for (held, tokens) in [(0, 64), (64, 128), (128, 161)] {
        assert_eq!(kv.allot(&[demand(A, held, tokens)]).short_by, 0);
        if tokens == 161 {
            fill(&mut kv, A, 7, tokens);
        }
        kv.release_skipped(A, tokens);
    }
    assert!(!kv.named.contains_key(&Name { group: 0, key: keys(7, 16)[0] }) && kv.known_prefix(&keys(7, 160)) == 10);
    assert_eq!(kv.take_events(), []);
    kv.release(A);
    kv.shrink(0);
    assert_eq!(kv.take_events(), []);
}

#[test]
fn blocks_that_sequences_share_are_counted() {
    let mut kv = KvCore::new(5_000).with_groups(CacheGroups::new([(0, None), (1, Some(2_000 * BLOCK_TOKENS))]));
    let tokens = 2_000 * BLOCK_TOKENS;
    run(&mut kv, A, 7, tokens);
    run(&mut kv, B, 7, tokens);
    assert_eq!(kv.shared_blocks(), 1_999);
    kv.release(A);
    assert_eq!(kv.shared_blocks(), 0);
}

#[test]
fn an_unknown_prompt_needs_few_lookups_despite_its_many_blocks() {
    let kv = KvCore::new(12).with_groups(CacheGroups::new([(0, Some(4_000 * BLOCK_TOKENS))]));
    let prompt = keys(7, 16_000 * BLOCK_TOKENS);
    let asked = Cell::new(0);
    let has = |_: &Name| {
        asked.set(asked.get() + 1);
        false
    };
    assert_eq!(kv.longest(&prompt, has, |_| true), 0);
    assert!(asked.get() <= 5, "{} of 16,000 blocks were looked up", asked.get());
}

#[test]
fn a_prefix_is_fetched_from_the_host_in_every_group() {
    let mut kv = mixed(12).with_host(16);
    run(&mut kv, A, 7, 81);
    kv.release(A);
    kv.allot(&[demand(B, 0, 96)]);
    assert_eq!(kv.take_leaving().blocks.to_host.len(), 10, "all named blocks of both groups are copied");
    kv.release(B);
    let found = kv.beginning(&keys(7, 80));
    assert_eq!(found, Beginning { blocks: 5, resident: 0, missing: 7, lacks_state: false, fits: true });
    let copies = kv.fetch(A, &keys(7, 80)).expect("the host has the prefix");
    assert_eq!((copies.blocks.to_device.len(), shape(&kv, A)), (7, vec![(0, 5), (3, 2)]));
    assert!(kv.is_coming(&keys(7, 80)));
    kv.fetched(A);
    let table = &kv.allot(&[alike(B, 7, 81, 1)]).tables[0];
    assert_eq!((table.held, shape(&kv, B)), (80, vec![(0, 6), (3, 3)]));
}
