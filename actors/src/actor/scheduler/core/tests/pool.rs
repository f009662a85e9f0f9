//! Tests of a pool that shrinks and grows while sequences run.

use super::*;

fn resize(bed: &mut Bed, blocks: usize) {
    bed.give(Input::Resize(blocks));
}

/// Two sequences of three blocks each, with a running step of both.
fn two_of_three_blocks(mut bed: Bed) -> Bed {
    bed.admit(sequence(1, 40, 9)).admit(sequence(2, 40, 9)).stepped(5);
    bed.recorded();
    bed
}

#[test]
fn a_pool_shrink_recomputes_only_holders_of_removed_blocks() {
    let mut bed = two_of_three_blocks(Bed::new(limits(4, 100, 8)));
    resize(&mut bed, 4);
    assert_eq!(bed.recorded(), [], "the resize waits for the running step");
    bed.stepped(6);
    assert_eq!(bed.recorded(), [token(1, 6), token(2, 6), released(&[2]), Effect::Resized]);
    assert_eq!((bed.scheduler.kv.blocks(), bed.scheduler.kv_tokens(), bed.scheduler.counts()), (4, 64, (1, 1)));
    assert_eq!(bed.scheduler.preemptions(), Preemptions { by_shrinks: 1, ..Preemptions::default() });
    assert_eq!(bed.wanted(), [1], "the next step is planned at once");
    while !bed.running.is_empty() {
        bed.stepped(6);
    }
    let of_second = bed.recorded.iter().filter(|effect| matches!(effect, Effect::Token(SequenceId(2), _))).count();
    assert_eq!(of_second, 8, "every token of the second sequence is delivered once");
    bed.assert_all_returned();
}

#[test]
fn a_pending_pool_shrink_stops_planning() {
    let mut bed = two_of_three_blocks(Bed::ahead(limits(4, 100, 8)));
    assert_eq!(bed.running.len(), 2);
    resize(&mut bed, 6);
    bed.stepped(6);
    assert_eq!(bed.running.len(), 1, "running steps end and no step is added");
    bed.admit(sequence(3, 4, 2));
    assert_eq!(bed.scheduler.counts(), (1, 2), "no sequence is admitted during a resize");
    bed.recorded();
    bed.stepped(6);
    assert_eq!(bed.recorded(), [token(1, 6), token(2, 6), Effect::Resized], "no sequence held a removed block");
    assert_eq!(bed.running.len(), 2, "planning continues, with look-ahead");
    while !bed.running.is_empty() {
        bed.stepped(6);
    }
    bed.assert_all_returned();
}

#[test]
fn an_idle_pool_shrinks_at_once_and_drops_cached_blocks() {
    let mut bed = Bed::new(limits(2, 64, 8));
    bed.admit(sequence(1, 40, 1)).stepped(5);
    bed.recorded();
    assert_eq!(bed.scheduler.kv.usage().cached, 2);
    resize(&mut bed, 1);
    assert_eq!(bed.recorded(), [Effect::Resized]);
    assert_eq!((bed.scheduler.kv.blocks(), bed.scheduler.kv.usage().cached), (1, 1));
    resize(&mut bed, 1);
    assert_eq!(bed.recorded(), [Effect::Resized], "a resize to the current size is answered");
}

#[test]
fn a_larger_pool_admits_sequences_waiting_for_blocks() {
    let mut bed = Bed::new(limits(4, 100, 3));
    bed.admit(sequence(1, 40, 5)).admit(sequence(2, 40, 5));
    assert_eq!(bed.scheduler.counts(), (1, 1));
    resize(&mut bed, 8);
    assert_eq!(bed.recorded(), [Effect::Resized]);
    bed.stepped(6);
    assert_eq!((bed.scheduler.counts(), bed.parts()), ((0, 2), vec![1, 40]));
}

#[test]
fn a_resize_to_the_same_size_plans_no_step() {
    let mut bed = Bed::ahead(limits(4, 64, 4));
    // Both sequences were predicted to produce few tokens.
    bed.scheduler.running.extend([1, 2].map(|id| (SequenceId(id), Sequence::new(sequence(id, 15, 40)))));
    bed.give(Input::Gathered);
    while bed.running.len() == 2 {
        bed.stepped(5);
    }
    assert_eq!(bed.scheduler.counts(), (0, 2));
    assert_eq!(
        bed.scheduler.step(Input::Resize(4)),
        [Effect::Resized],
        "no step is planned, because the sequence would lack the same blocks again"
    );
    assert!(matches!(bed.scheduler.step(Input::Resize(8))[..], [Effect::Resized, Effect::Run(_)]));
}

#[test]
fn a_cancelled_holder_of_removed_blocks_is_dropped() {
    let mut bed = two_of_three_blocks(Bed::new(limits(4, 100, 8)));
    bed.cancel(2);
    resize(&mut bed, 4);
    bed.stepped(6);
    assert_eq!(bed.recorded(), [token(1, 6), released(&[2]), Effect::Resized]);
    assert!(!bed.scheduler.is_known(SequenceId(2)));
}

#[test]
fn a_withdrawn_pool_shrink_is_answered_and_steps_continue() {
    let mut bed = two_of_three_blocks(Bed::ahead(limits(4, 100, 8)));
    resize(&mut bed, 2);
    bed.stepped(6);
    resize(&mut bed, 8);
    assert_eq!(bed.running.len(), 2);
    assert!(bed.recorded().contains(&Effect::Resized));
    assert_eq!(bed.scheduler.kv.blocks(), 8);
}

#[test]
fn a_shrink_readmits_a_sequence_whose_pictures_were_released() {
    let mut bed = Bed::new(limits(2, 64, 8));
    let place =
        Placeholder { cache_rows: [0, 1, 2].into(), content: ContentSpan { tokens: 1..4, hash: PictureHash([1; 32]) } };
    bed.admit(NewSequence { pictures: vec![place], ..sequence(1, 40, 9) }).stepped(5);
    bed.recorded();
    resize(&mut bed, 2);
    bed.stepped(5);
    let readmit = Effect::Readmit(SequenceId(1));
    assert_eq!(bed.recorded(), [token(1, 5), readmit, released(&[1]), Effect::Resized]);
    assert!(!bed.scheduler.is_known(SequenceId(1)), "the sequence was handed back to its driver");
}

#[test]
fn a_cancellation_during_a_shrink_disturbs_no_other_sequence() {
    let mut bed = two_of_three_blocks(Bed::new(limits(4, 100, 8)));
    resize(&mut bed, 4);
    let plan = bed.running.pop_front().expect("a step is under way");
    // While the actor handles these effects, it delivers a token to a disconnected caller.
    let effects = bed.scheduler.step(Input::Stepped(vec![vec![Some(6)]; plan.rows.len()]));
    assert_eq!(bed.scheduler.step(Input::Cancel(SequenceId(2))), [], "the waiting sequence holds no blocks");
    assert_eq!(bed.record(effects).recorded(), [token(1, 6), token(2, 6), released(&[2]), Effect::Resized]);
    assert_eq!(bed.scheduler.counts(), (0, 1));
    while !bed.running.is_empty() {
        bed.stepped(6);
    }
    bed.assert_all_returned();
}

/// Sequence 2 has lost its blocks to a shrink. The small sequence 3 would fit, but must wait.
#[test]
fn new_sequences_do_not_overtake_one_preempted_by_shrinking() {
    let mut bed = two_of_three_blocks(Bed::new(limits(4, 100, 8)));
    resize(&mut bed, 5);
    bed.stepped(6).admit(sequence(3, 4, 2)).stepped(6);
    assert_eq!(bed.scheduler.counts(), (2, 1), "the second sequence is next and does not fit");
    let second = &bed.scheduler.waiting[SequenceId(2)];
    assert_eq!((second.losses(), second.is_kept()), (1, false));
}

#[test]
fn preemptions_by_shrinks_do_not_protect_a_sequence() {
    let mut bed = two_of_three_blocks(Bed::new(limits(4, 100, 12)));
    for blocks in [4, 12, 4, 12] {
        resize(&mut bed, blocks);
        bed.stepped(6);
    }
    let second = &bed.scheduler.running[&SequenceId(2)];
    assert_eq!((second.losses(), second.is_kept()), (2, false));
}

#[test]
fn a_shrink_preempts_by_urgency_and_protected_sequences_last() {
    let mut bed = Bed::new(limits(8, 200, 24));
    for (id, priority) in [(1, 0), (2, 1), (3, 0), (4, 0)] {
        let scheduling_params = SchedulingParams { priority, ..SchedulingParams::default() };
        bed.admit(NewSequence { scheduling_params, ..sequence(id, 40, 4) });
    }
    bed.stepped(5);
    bed.scheduler.running.get_mut(&SequenceId(3)).expect("the sequence runs").history.preemptions = 2;
    bed.recorded();
    resize(&mut bed, 3);
    bed.stepped(5);
    let recorded = bed.recorded();
    assert!(
        recorded.contains(&released(&[2, 4, 3])),
        "the blocks of the sequence released last stay cached longest: {recorded:?}"
    );
}
