//! Tests of the state of a single sequence, and of its effect on steps.

use super::*;

#[test]
fn the_debug_output_of_a_sequence_shows_no_tokens() {
    let returning = NewSequence { produced: 2, ..sequence(7, 5, 9) };
    assert_eq!(format!("{returning:?}"), "NewSequence(sequence 7, 5 tokens, 2 of 9 produced)");
}

#[test]
fn samples_share_whole_prompt_blocks_before_the_last_token() {
    let shared = |prompt| Sequence::new(sequence(1, prompt, 9)).shared_tokens();
    assert_eq!([1, 15, 16, 17, 32, 33].map(shared), [0, 0, 0, 16, 16, 32]);
}

/// The sequences of the second step, and how many tokens of each it runs. The first step runs the
/// first four of 30 tokens of sequence 1. `second` arrives while that step runs.
fn second_step_beside(second: NewSequence) -> (Vec<SequenceId>, Vec<usize>) {
    let mut bed = Bed::new(limits(2, 4, 32));
    bed.admit(sequence(1, 30, 9)).admit(second).stepped(5);
    (bed.running[0].parts.clone(), bed.parts())
}

#[test]
fn only_decoding_sequences_are_planned_before_older_prompts() {
    let first_alone = (vec![SequenceId(1)], vec![4]);
    assert_eq!(second_step_beside(sequence(2, 1, 9)), first_alone, "a prompt of one token waits for the older one");
    let returning = |tokens| NewSequence { produced: 1, ..sequence(2, tokens, 9) };
    assert_eq!(second_step_beside(returning(2)), first_alone, "a recomputed sequence waits for the older prompt");
}

#[test]
fn a_recomputed_prompt_is_scored_only_where_unscored() {
    let mut scheduler = SchedulerCore::new(limits(4, 100, 8));
    let mut scored = Sequence::new(NewSequence { score_prompt: Some(3), ..sequence(1, 20, 9) });
    scored.launch(7, 0, None);
    scored.forget_cache();
    scored.launch(4, 0, None);
    scheduler.running.insert(SequenceId(1), scored);
    let plan = scheduler.plan(
        &[SequenceTokens { sequence: SequenceId(1), tokens: 16, drafts: 0, further: 0 }],
        &[Table { sequence: SequenceId(1), blocks: vec![vec![0, 1].into()], held: 4 }],
        &[None],
    );
    assert_eq!(plan.scored[0].first, 8, "seven steps scored the tokens 1 to 7");
    assert_eq!(plan.scored[0].tokens, (1008..1020).collect::<Vec<_>>());
    assert_eq!(plan.batch.score_rows, (3..15).collect::<Vec<_>>());
}

#[test]
fn a_sequence_admitted_at_its_limit_ends_after_one_token() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(NewSequence { produced: 2, ..sequence(1, 5, 2) }).stepped(6);
    assert_eq!(bed.recorded(), [token(1, 6), finished(1, Finish::Length), released(&[1])]);
    bed.assert_all_returned();
}
