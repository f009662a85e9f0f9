//! Tests of the scheduler with cache groups that have windows.

use super::*;

/// A scheduler for layers with these windows that plans the next step while the current step runs.
fn bed(limits: Limits, windows: &[Option<usize>]) -> Bed {
    let groups = CacheGroups::new(windows.iter().copied().enumerate());
    Bed::of(SchedulerCore::new(limits).with_groups(groups), 2)
}

/// Ends all steps. Returns the most sequences that ran at once.
fn run(bed: &mut Bed) -> usize {
    let mut most = 0;
    while !bed.running.is_empty() {
        most = most.max(bed.scheduler.counts().1);
        bed.stepped(5);
    }
    most
}

#[test]
fn windows_admit_sequences_that_are_longer_than_the_pool() {
    // A window of 32 tokens lies in at most three blocks. The tokens of two steps, 64 each, take
    // eight blocks.
    let mut bed = bed(limits(8, 64, 32), &[Some(32)]);
    (1..=8).for_each(|id| drop(bed.admit(sequence(id, 100, 500)).recorded()));
    assert_eq!((run(&mut bed), bed.scheduler.preemptions()), (8, Preemptions::default()));
    bed.assert_all_returned();
}

#[test]
fn the_smallest_pool_for_a_sequence_never_lacks_a_block() {
    let groups = [vec![Some(32)], vec![None, Some(20)], vec![Some(1), Some(50)]];
    for windows in groups {
        let cache_groups = CacheGroups::new(windows.iter().copied().enumerate());
        let blocks = cache_groups.blocks_for(420, 24);
        assert!(cache_groups.tokens_in(blocks, 24) >= 420);
        let mut bed = bed(limits(2, 24, blocks), &windows);
        bed.admit(sequence(1, 400, 20));
        run(&mut bed);
        assert_eq!(bed.scheduler.preemptions(), Preemptions::default(), "{windows:?} in {blocks} blocks");
        bed.assert_all_returned();
    }
}

#[test]
fn a_shared_prompt_is_resumed_within_its_window() {
    let mut bed = bed(limits(4, 128, 64), &[None, Some(32)]);
    bed.admit(alike(1, 100, 2)).stepped(5).stepped(5);
    bed.admit(alike(2, 100, 2));
    assert_eq!(bed.parts(), [100 - 96], "six blocks are cached");
    let batch = &bed.running.front().expect("a step").batch;
    assert_eq!((batch.groups, batch.blocks_max()), (2, 7));
    let windowed = &batch.block_tables[7..];
    // The token after 96 tokens reads from token 65 on, which is in the fifth block.
    assert!(windowed[..4] == [0; 4] && windowed[4..].iter().all(|block| *block > 0), "{windowed:?}");
    bed.stepped(5).stepped(5);
    bed.assert_all_returned();
}
