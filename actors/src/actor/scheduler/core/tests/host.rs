//! Tests of blocks that are copied to host memory, and of sequences that wait until the blocks are
//! copied back.

use super::*;
use crate::token_interval::CopyCosts;

/// A bed with a host tier that can hold all blocks.
fn bed(limits: Limits) -> Bed {
    Bed::of(SchedulerCore::new(limits).without_look_ahead().with_host(64, CopyCosts::default()), 1)
}

impl Bed {
    /// Ends all running copies.
    fn all_copied(&mut self) {
        while self.scheduler.is_copying() {
            self.give(Input::Copied(10));
        }
    }

    fn stepped_if_running(&mut self, token: u32) {
        if !self.running.is_empty() {
            self.stepped(token);
        }
    }
}

/// The number of blocks copied to the host and back.
fn copied(bed: &mut Bed) -> (usize, usize) {
    let copies = bed.recorded().into_iter().filter_map(|effect| match effect {
        Effect::Copy(copies) => Some((copies.blocks.to_host.len(), copies.blocks.to_device.len())),
        _ => None,
    });
    copies.fold((0, 0), |all, copy| (all.0 + copy.0, all.1 + copy.1))
}

/// A pool of `blocks` blocks. Two of them held the beginning of the first sequence until the second
/// sequence took all blocks.
fn pushed_out(blocks: usize) -> Bed {
    let mut bed = bed(limits(4, 128, blocks));
    bed.admit(sequence(1, 40, 1)).stepped(5);
    bed.admit(sequence(2, blocks * BLOCK_TOKENS - 4, 1));
    assert_eq!(copied(&mut bed), (2, 0), "the blocks are copied before a step overwrites them");
    bed.give(Input::Copied(10)).stepped(5);
    bed.recorded();
    bed
}

/// A sequence that begins with the prompt of the first sequence, like the next turn of a
/// conversation.
fn again(id: u64) -> NewSequence {
    NewSequence { id: SequenceId(id), ..sequence(1, 44, 2) }
}

#[test]
fn an_evicted_prefix_is_fetched_from_the_host_not_recomputed() {
    let mut bed = pushed_out(4);
    bed.admit(again(3));
    assert!(bed.running.is_empty(), "the sequence waits until its blocks are copied back");
    assert_eq!(copied(&mut bed).1, 2);
    bed.give(Input::Copied(10));
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(3), 32)));
    assert_eq!(bed.parts(), [12]);
    bed.stepped(5).stepped(5);
    bed.assert_all_returned();
}

#[test]
fn other_sequences_run_while_one_sequence_is_fetched() {
    let mut bed = Bed::of(SchedulerCore::new(limits(4, 64, 6)).with_host(64, CopyCosts::default()), 2);
    bed.admit(sequence(1, 40, 1)).stepped(5);
    bed.admit(sequence(2, 92, 1)).stepped(5);
    while !bed.running.is_empty() {
        bed.stepped(5);
    }
    bed.all_copied();
    bed.admit(sequence(4, 4, 30));
    bed.recorded();
    bed.admit(again(3));
    assert_eq!(copied(&mut bed).1, 2, "the blocks are copied back while steps run");
    bed.stepped(5).stepped(5);
    assert!(bed.running.iter().all(|plan| plan.parts == [SequenceId(4)]), "the fetching sequence waits");
    bed.all_copied();
    bed.stepped(5);
    assert!(bed.running.iter().any(|plan| plan.parts.contains(&SequenceId(3))), "the fetched sequence runs");
}

#[test]
fn two_sequences_with_one_prefix_share_its_fetch() {
    let mut bed = pushed_out(8);
    bed.admit(again(3)).admit(NewSequence { tokens_max: 1, ..again(4) });
    assert_eq!(copied(&mut bed).1, 2, "both sequences share one copy");
    bed.give(Input::Copied(10));
    let found = bed.recorded().into_iter().filter(|effect| matches!(effect, Effect::Begun(_, 32))).count();
    assert_eq!(found, 2);
}

#[test]
fn a_cancelled_sequence_keeps_its_blocks_until_its_copy_ends() {
    let mut bed = pushed_out(4);
    bed.admit(again(3)).cancel(3);
    assert!(
        bed.recorded().iter().all(|effect| matches!(effect, Effect::Copy(_))),
        "the blocks are not released while a copy fills them"
    );
    assert!(bed.scheduler.is_known(SequenceId(3)));
    bed.give(Input::Copied(10));
    assert_eq!(bed.recorded(), [released(&[3])]);
    bed.assert_all_returned();
    bed.admit(again(5));
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(5), 32)), "the next sequence uses the fetched blocks");
}

#[test]
fn nothing_is_fetched_for_a_cancelled_sequence() {
    let mut bed = bed(limits(8, 400, 24));
    (1..=5).for_each(|id| _ = bed.admit(sequence(id, 40, 1)).stepped(5));
    bed.admit(sequence(6, 24 * BLOCK_TOKENS - 4, 1)).stepped(5);
    bed.all_copied();
    bed.admit(sequence(7, 4, 30));
    bed.all_copied();
    bed.recorded();
    (1..=5).for_each(|id| _ = bed.admit(NewSequence { id: SequenceId(10 + id), ..sequence(id, 44, 2) }));
    bed.stepped(5);
    let fetched = copied(&mut bed).1 / 2;
    assert!(fetched < 5 && bed.scheduler.counts() == (0, 6), "the number of copies under way is limited: {fetched}");
    (11 + fetched as u64..=15).for_each(|id| _ = bed.cancel(id));
    bed.give(Input::Copied(10)).give(Input::Copied(10));
    assert_eq!(copied(&mut bed).1, 0);
    while !bed.running.is_empty() {
        bed.stepped(5);
        bed.all_copied();
    }
    bed.assert_all_returned();
}

#[test]
fn a_pool_shrink_waits_for_running_copies() {
    let mut bed = pushed_out(4);
    bed.admit(again(3));
    bed.recorded();
    bed.give(Input::Resize(3));
    assert_eq!(bed.recorded(), [], "the resize waits for the copy");
    bed.all_copied();
    assert!(bed.recorded().contains(&Effect::Resized));
}

#[test]
fn a_shrink_copies_removed_blocks_to_the_host_first() {
    let mut bed = bed(limits(4, 64, 8));
    bed.admit(sequence(1, 40, 9)).admit(sequence(2, 40, 9)).stepped(5);
    bed.recorded();
    bed.give(Input::Resize(4)).stepped(6);
    assert_eq!(copied(&mut bed), (1, 0), "one whole block of the second sequence is in the removed tail");
    assert!(bed.running.is_empty(), "no step is planned during the copy");
    bed.give(Input::Copied(10));
    let recorded = bed.recorded();
    assert!(recorded.contains(&Effect::Resized) && bed.scheduler.kv.blocks() == 4, "{recorded:?}");
    while !bed.running.is_empty() || bed.scheduler.is_copying() {
        bed.stepped_if_running(6);
        bed.all_copied();
    }
    assert_eq!(copied(&mut bed).1, 1, "the block is copied back");
    bed.assert_all_returned();
}

#[test]
fn a_preempted_sequence_is_copied_back_without_recomputing_its_prompt() {
    let mut bed = bed(limits(4, 64, 6));
    bed.admit(sequence(1, 2, 9)).stepped(STOP);
    bed.admit(sequence(2, 17, 70)).admit(sequence(3, 17, 70)).stepped(5).stepped(5);
    bed.recorded();
    // The third sequence loses its blocks to the second sequence, which then needs all blocks.
    let mut copies = Vec::new();
    let mut longest = 0;
    while !bed.running.is_empty() || bed.scheduler.is_copying() {
        if let Some(plan) = bed.running.front() {
            let parts = plan.parts.iter().zip(bed.parts()).filter(|(id, _)| **id == SequenceId(3));
            longest = parts.map(|(_, tokens)| tokens).fold(longest, usize::max);
            bed.stepped(5);
        }
        bed.all_copied();
        for effect in bed.recorded() {
            if let Effect::Copy(more) = effect {
                copies.extend(more.blocks.to_device);
            }
        }
    }
    assert!(bed.scheduler.preemptions().for_blocks > 0, "the third sequence was preempted");
    assert!(!copies.is_empty(), "the third sequence was copied back");
    assert!(longest <= BLOCK_TOKENS, "{longest} tokens of the sequence were computed in one step");
    bed.assert_all_returned();
}

#[test]
fn a_prefix_is_recomputed_when_copying_takes_longer() {
    use crate::token_interval::{MeasuredCosts, MeasuredStep, StepCosts, StepWork};
    let step = |prompt_tokens, decoding| MeasuredStep {
        work: StepWork { prompt_tokens, decoding, ..StepWork::default() },
        micros: 100 + prompt_tokens as u64,
    };
    let measured = MeasuredCosts { steps: vec![step(0, 1), step(16, 1), step(64, 1)], launches: Vec::new() };
    let costs = CopyCosts::with_steps(StepCosts::of(&measured));
    let mut bed = Bed::of(SchedulerCore::new(limits(4, 64, 4)).without_look_ahead().with_host(64, costs), 1);
    bed.admit(sequence(1, 40, 1)).stepped(5);
    bed.admit(sequence(2, 60, 1)).give(Input::Copied(1_000_000)).stepped(5);
    bed.recorded();
    bed.admit(again(3));
    assert_eq!((copied(&mut bed).1, bed.parts()), (0, vec![44]), "a copy that takes a second is slower than computing");
}
