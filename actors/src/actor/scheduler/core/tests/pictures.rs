//! Tests of how long a sequence holds its pictures, of preemption before and after a step reads
//! them, and of chunks that must not cut a picture.

use super::*;

/// A prompt in which these token indices are a picture.
fn shown(id: u64, prompt: usize, tokens_max: usize, picture: std::ops::Range<usize>) -> NewSequence {
    let place = Placeholder {
        cache_rows: (0..picture.len() as u32).collect(),
        content: ContentSpan { tokens: picture, hash: PictureHash([id as u8; 32]) },
    };
    NewSequence { pictures: vec![place], ..sequence(id, prompt, tokens_max) }
}

/// The sequences that read pictures in the newest step, and the sequences whose pictures no later
/// step reads.
fn picture_use(bed: &Bed) -> (Vec<u64>, Vec<u64>) {
    let PictureUse { read, no_longer_read } = &bed.running.back().expect("a step is under way").shown;
    (read.iter().map(|id| id.0).collect(), no_longer_read.iter().map(|id| id.0).collect())
}

#[test]
fn a_picture_is_held_until_its_last_token_is_computed() {
    let mut bed = Bed::new(limits(1, 10, 8));
    let mut spec = shown(1, 34, 3, 2..4);
    spec.pictures.extend(shown(1, 34, 3, 12..16).pictures);
    bed.admit(spec);
    assert_eq!(picture_use(&bed), (vec![1], vec![]), "the second picture is in the next chunk");
    bed.stepped(5);
    assert_eq!(picture_use(&bed), (vec![1], vec![1]));
    for _ in 0..2 {
        bed.stepped(5);
        assert_eq!(picture_use(&bed), (vec![], vec![]), "the remaining tokens are text");
    }
    (0..3).for_each(|_| _ = bed.stepped(5));
    bed.assert_all_returned();
}

#[test]
fn a_picture_in_two_chunks_is_held_for_both() {
    let mut bed = Bed::new(limits(1, 10, 8));
    bed.admit(shown(1, 34, 3, 2..24)).stepped(5);
    assert_eq!(picture_use(&bed), (vec![1], vec![]), "the step reads 20 of the picture's 24 tokens");
    bed.stepped(5);
    assert_eq!(picture_use(&bed), (vec![1], vec![1]));
}

#[test]
fn a_step_planned_ahead_holds_the_pictures_that_it_reads() {
    let mut bed = Bed::ahead(limits(1, 10, 8));
    bed.admit(shown(1, 24, 3, 4..14));
    let seen: Vec<_> =
        bed.running.iter().map(|plan| (plan.shown.read.len(), plan.shown.no_longer_read.len())).collect();
    assert_eq!(seen, [(1, 0), (1, 1)], "the picture spans the border between two chunks");
}

#[test]
fn a_sequence_with_cached_pictures_releases_them_without_reading() {
    let mut bed = Bed::new(limits(2, 64, 16));
    bed.admit(shown(1, 40, 1, 2..30)).stepped(5);
    let mut again = shown(1, 40, 2, 2..30);
    again.id = SequenceId(2);
    bed.admit(again);
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(2), 32)));
    assert_eq!(picture_use(&bed), (vec![], vec![2]));
}

/// A sequence whose picture has no rows, because cached blocks are expected to hold its tokens.
fn computed(id: u64, tokens: usize, tokens_max: usize, place: std::ops::Range<usize>) -> NewSequence {
    let mut spec = shown(1, tokens, tokens_max, place);
    spec.pictures[0].cache_rows = [].into();
    NewSequence { id: SequenceId(id), ..spec }
}

#[test]
fn a_picture_in_cached_blocks_needs_no_embedding_rows() {
    let mut bed = Bed::new(limits(2, 64, 16));
    bed.admit(shown(1, 40, 1, 2..30)).stepped(5);
    bed.admit(computed(2, 40, 9, 2..30));
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(2), 32)));
    assert!(bed.running.back().expect("a step").batch.picture_rows.is_empty());
    bed.stepped(5);
    bed.scheduler.step(Input::Resize(1));
    let effects = bed.scheduler.step(Input::Resize(1));
    assert!(effects.is_empty(), "the step uses the blocks");
    bed.stepped(5);
    assert!(
        bed.recorded.contains(&Effect::Readmit(SequenceId(2))),
        "a sequence without its blocks needs the rows again: {:?}",
        bed.recorded
    );
}

#[test]
fn evicted_blocks_readmit_a_sequence_without_picture_rows() {
    let mut bed = Bed::new(limits(2, 64, 4));
    bed.admit(shown(1, 40, 1, 2..30)).stepped(5);
    // Sequence 3 takes the blocks while sequence 4 waits for its turn.
    bed.admit(sequence(3, 60, 1)).admit(computed(4, 40, 9, 2..30));
    while !bed.running.is_empty() {
        bed.stepped(5);
    }
    let recorded: Vec<_> =
        bed.recorded.iter().filter(|e| matches!(e, Effect::Readmit(_) | Effect::Begun(..))).collect();
    assert_eq!(recorded.last(), Some(&&Effect::Readmit(SequenceId(4))), "{recorded:?}");
    assert!(!bed.recorded.contains(&Effect::Begun(SequenceId(4), 0)) && !bed.scheduler.is_known(SequenceId(4)));
    bed.assert_all_returned();
}

#[test]
fn a_sequence_preempted_after_its_pictures_returns_with_its_tokens() {
    let mut bed = Bed::new(limits(4, 64, 4));
    // Replies have been short so far, so both sequences are admitted although the pool cannot hold
    // them to their ends.
    bed.admit(sequence(1, 2, 9)).stepped(STOP);
    bed.admit(sequence(2, 15, 40)).admit(shown(3, 15, 40, 3..9));
    let is_readmitted = |bed: &Bed| bed.recorded.contains(&Effect::Readmit(SequenceId(3)));
    while !is_readmitted(&bed) {
        bed.stepped(6);
    }
    assert!(!bed.scheduler.is_known(SequenceId(3)), "the sequence was handed back to its driver");
    let behind = bed
        .recorded
        .iter()
        .position(|effect| *effect == Effect::Readmit(SequenceId(3)))
        .expect("the effect was just reported");
    assert_eq!(bed.recorded[behind + 1], released(&[3]), "the driver is notified before the sequence is released");
    let of_third = |bed: &Bed| bed.recorded.iter().filter(|e| matches!(e, Effect::Token(SequenceId(3), _))).count();
    let produced = of_third(&bed);
    assert!(produced > 0);
    bed.admit(sequence(4, 5, 3));
    let mut again = shown(3, 15 + produced, 40, 3..9);
    again.produced = produced;
    bed.admit(again);
    let waiting: Vec<_> = bed.scheduler.waiting.values().map(Sequence::id).collect();
    assert_eq!(waiting.first(), Some(&SequenceId(3)), "the sequence keeps its age and is queued before later ones");
    while !bed.running.is_empty() {
        bed.stepped(6);
    }
    assert_eq!(of_third(&bed), 40, "every token is reported once");
    bed.assert_all_returned();
}

#[test]
fn a_sequence_preempted_before_its_pictures_keeps_them() {
    let mut scheduler = SchedulerCore::new(limits(4, 100, 4));
    scheduler.running.insert(SequenceId(1), Sequence::new(sequence(1, 40, 8)));
    scheduler.running.insert(SequenceId(2), Sequence::new(shown(2, 40, 8, 1..5)));
    let effects = scheduler.step(Input::Gathered);
    assert!(effects.contains(&released(&[2])), "{effects:?}");
    assert!(scheduler.is_known(SequenceId(2)), "the sequence starts again with the pictures it holds");
}

/// A scheduler for a model whose pictures, of at most 24 tokens, must be whole.
fn whole(limits: Limits) -> SchedulerCore {
    SchedulerCore::new(limits).without_look_ahead().with_whole_pictures(24)
}

#[test]
fn a_step_ends_before_a_whole_picture_that_does_not_fit() {
    let mut bed = Bed::of(whole(limits(2, 30, 8)), 1);
    bed.admit(shown(1, 60, 3, 20..44));
    let mut chunks = Vec::new();
    for _ in 0..3 {
        chunks.push(bed.parts()[0]);
        bed.stepped(5);
    }
    assert_eq!(chunks, [20, 30, 10], "the picture and six tokens after it are the second chunk");
}

#[test]
fn another_prompt_fills_a_step_that_a_picture_does_not_fit() {
    let mut bed = Bed::of(whole(limits(3, 30, 16)), 1);
    bed.admit(sequence(1, 10, 3)).admit(shown(2, 40, 3, 10..34)).admit(sequence(3, 20, 1)).stepped(5);
    assert_eq!(bed.parts(), [1, 10, 19], "the picture does not fit after the text before it");
}

#[test]
fn a_short_interval_runs_a_whole_picture_all_the_same() {
    let scheduler = whole(limits(8, 200, 64));
    let interval = super::token_interval::tight();
    let mut bed = Bed::of(scheduler.with_token_interval(interval), 1);
    bed.admit(sequence(1, 10, 50)).stepped(5);
    bed.admit(shown(2, 60, 3, 4..28)).stepped(5);
    let mut chunks = Vec::new();
    while let [_, chunk] = bed.parts()[..] {
        chunks.push(chunk);
        bed.stepped(5);
    }
    assert_eq!(chunks[..2], [4, 24], "the text before the picture, and then the picture: {chunks:?}");
}

#[test]
fn a_full_step_leaves_a_cut_picture_alone() {
    let mut bed = Bed::of(SchedulerCore::new(limits(2, 4, 16)).without_look_ahead(), 1);
    bed.admit(shown(1, 40, 3, 1..33)).stepped(5);
    let prompts: Vec<_> = bed.scheduler.running.values().collect();
    assert_eq!(bed.scheduler.split(&prompts, 0), [0], "the step has no tokens left for prompts");
    assert_eq!(bed.scheduler.split(&prompts, 3), [3]);
}

#[test]
fn cached_tokens_that_end_within_a_picture_leave_a_whole_chunk() {
    let mut bed = Bed::of(whole(limits(2, 40, 16)), 1);
    bed.admit(shown(1, 40, 1, 10..34)).stepped(5);
    let mut again = shown(1, 40, 2, 10..34);
    again.id = SequenceId(2);
    // Another picture follows the shared tokens. With 32 cached tokens, the step could run 40 more
    // and would cut it.
    again.tokens.extend(500..540);
    again.positions.extend((40..80).map(|position| [position; 3]));
    again.next_position = 80;
    again.pictures.extend(shown(2, 80, 2, 50..74).pictures);
    bed.admit(again);
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(2), 32)));
    assert_eq!(bed.parts(), [18], "the end of the first picture and the text before the second");
    bed.stepped(5);
    assert_eq!(bed.parts(), [30]);
}
