//! Tests of steps that verify drafted tokens.

use bursar_kernels::UnseenToken;
use bursar_model::flow::DraftPositions;

use super::*;
use crate::{
    kv::KvUse,
    scheduler::{Drafter, NgramSizes, PromptLookup, VerifiedDrafts},
};

/// A sequence with this prompt. Its drafts are the tokens that followed an earlier occurrence of
/// its last 1 to 3 tokens.
fn quoting(id: u64, prompt: &[u32], tokens_max: usize) -> NewSequence {
    NewSequence {
        tokens: prompt.to_vec(),
        positions: (0..prompt.len() as u32).map(|position| [position; 3]).collect(),
        drafter: Drafter::PromptLookup(PromptLookup::new(NgramSizes { min: 1, max: 3 }, 256)),
        ..sequence(id, prompt.len(), tokens_max)
    }
}

/// Limits with up to `draft_tokens` drafts for a sequence.
fn drafting(sequences: usize, step_tokens: usize, blocks: usize, draft_tokens: usize) -> Limits {
    Limits { draft_tokens, ..limits(sequences, step_tokens, blocks) }
}

impl Bed {
    /// Ends the oldest running step, in which the sequences choose these tokens.
    fn chose(&mut self, tokens: &[&[u32]]) -> &mut Bed {
        self.running.pop_front().expect("a step is under way");
        self.give(Input::Stepped(tokens.iter().map(|of| of.iter().copied().map(Some).collect()).collect()))
    }

    /// The drafts of each sequence that chooses in the oldest running step.
    fn drafted(&self) -> Vec<Vec<u32>> {
        self.running.front().expect("a step is under way").rows.iter().map(|rows| rows.drafts.clone()).collect()
    }
}

#[test]
fn a_step_verifies_drafts_and_the_next_continues_after_accepted_ones() {
    let mut bed = Bed::new(drafting(2, 64, 8, 3));
    bed.admit(quoting(1, &[7, 8, 9, 10, 7], 20)).chose(&[&[8]]);
    let step = bed.running.front().expect("a step");
    assert_eq!(step.batch.tokens, known(&[8, 9, 10, 7]), "the last two tokens occurred before");
    assert_eq!((&step.batch.slots[..], &step.batch.logit_rows[..]), (&[5, 6, 7, 8][..], &[0, 1, 2, 3][..]));
    assert_eq!((&step.batch.positions[..4], step.batch.context_lengths[0]), (&[5, 6, 7, 8][..], 9));
    assert_eq!((bed.drafted(), step.rows[0].position), (vec![vec![9, 10, 7]], 1));
    bed.chose(&[&[9, 10, 11]]);
    assert_eq!(bed.recorded(), [token(1, 8), token(1, 9), token(1, 10), token(1, 11)]);
    let next = &bed.running.front().expect("a step").batch;
    assert_eq!((&next.tokens[..], &next.slots[..], next.positions[0]), (&known(&[11])[..], &[8][..], 8));
    let counted = VerifiedDrafts { drafted: 3, accepted: vec![1, 1] };
    assert_eq!(bed.scheduler.take_verified_drafts(), counted);
}

#[test]
fn a_sequence_with_drafts_is_not_planned_ahead() {
    let mut bed = Bed::ahead(drafting(2, 64, 8, 3));
    bed.admit(quoting(1, &[7, 8, 9, 10, 7], 20));
    assert_eq!(bed.running.len(), 2, "no token is known that could be followed by drafts");
    bed.chose(&[&[8]]);
    assert_eq!(bed.running.len(), 1, "drafts are expected, so the next step waits for the token before them");
    bed.chose(&[&[9]]);
    assert_eq!((bed.drafted(), bed.running.len()), (vec![vec![10, 7, 8]], 1), "no step follows the step with drafts");
    bed.chose(&[&[11]]);
    assert_eq!(
        (bed.drafted(), bed.running.len()),
        (vec![vec![]], 2),
        "a token that did not occur before has no drafts"
    );
}

#[test]
fn rejected_drafts_are_withheld_for_some_steps() {
    let mut bed = Bed::new(drafting(1, 64, 16, 2));
    bed.admit(quoting(1, &[7, 8, 7], 90)).chose(&[&[8]]);
    let mut steps = Vec::new();
    for _ in 0..9 {
        let drafts = bed.drafted()[0].len();
        steps.push(drafts);
        // The host chooses a token that differs from the draft.
        bed.chose(&[&[if drafts > 0 && bed.drafted()[0][0] == 7 { 8 } else { 7 }]]);
    }
    assert_eq!(steps, [2, 0, 2, 0, 0, 2, 0, 0, 0]);
}

#[test]
fn drafts_preempt_no_sequence_and_rejected_drafts_hold_no_blocks() {
    let prompt: Vec<u32> = (0..15).map(|at| 5 + at % 5).collect();
    let mut bed = Bed::new(drafting(4, 128, 4, 20));
    // Replies have been short so far, so that two sequences are admitted.
    bed.admit(sequence(9, 2, 9)).admit(quoting(1, &prompt, 30)).admit(quoting(2, &prompt, 30)).stepped(STOP);
    bed.chose(&[&[5], &[5]]);
    assert_eq!(bed.drafted(), [vec![0; 0], vec![]], "drafts of both sequences would need more blocks than are free");
    assert_eq!(bed.scheduler.preemptions(), Preemptions::default());
    assert_eq!(bed.scheduler.kv().usage(), KvUse { blocks: 4, held: 2, cached: 0 });
    bed.cancel(2).chose(&[&[6], &[6]]);
    assert_eq!((bed.drafted()[0].len(), bed.scheduler.kv().usage().held), (20, 3));
    bed.chose(&[&[11]]);
    assert_eq!(bed.scheduler.kv().usage().held, 2, "the 18th token is in the second block");

    let mut bed = Bed::new(drafting(1, 64, 3, 4));
    bed.admit(quoting(1, &prompt[..14], 30)).chose(&[&[9]]);
    assert_eq!((bed.drafted(), bed.scheduler.kv().usage().held), (vec![vec![5, 6, 7, 8]], 2));
    bed.chose(&[&[11]]);
    assert_eq!(bed.scheduler.kv().usage().held, 1, "the second block had only rejected drafts");
}

#[test]
fn blocks_are_named_by_accepted_tokens_only() {
    let prompt: Vec<u32> = (0..14).map(|at| 5 + at % 5).collect();
    let mut bed = Bed::new(drafting(2, 64, 8, 4));
    bed.admit(quoting(1, &prompt, 30)).chose(&[&[9]]);
    assert_eq!(bed.drafted(), [vec![5, 6, 7, 8]]);
    // The first block has 15 known tokens and an accepted draft. The next draft is rejected.
    bed.chose(&[&[5, 11]]);
    let stored: Vec<_> = bed.scheduler.take_block_events();
    let [BlockEvent::Stored(block)] = &stored[..] else { panic!("one block is whole: {stored:?}") };
    assert_eq!(*block.tokens, *[&prompt[..], &[9, 5]].concat());
    let cached = |bed: &mut Bed, id, tokens: &[u32]| {
        bed.admit(quoting(id, tokens, 1));
        bed.recorded().contains(&Effect::Begun(SequenceId(id), 16))
    };
    bed.cancel(1).chose(&[&[12]]);
    let drafted = [&prompt[..], &[9, 6, 7, 8]].concat();
    assert!(!cached(&mut bed, 2, &drafted), "these tokens were never chosen");
    bed.stepped(5);
    let chosen = [&prompt[..], &[9, 5, 11]].concat();
    assert!(cached(&mut bed, 3, &chosen), "the block is found by its accepted tokens");
}

#[test]
fn drafts_share_the_limits_of_a_step() {
    let prompt = [7, 8, 9, 10, 7];
    let drafts_of = |sequences: u64, step_tokens| {
        let mut bed = Bed::new(drafting(40, step_tokens, 80, 8));
        bed.admit(sequence(99, 2, 1));
        (1..=sequences).for_each(|id| drop(bed.admit(quoting(id, &prompt, 20)).recorded()));
        bed.stepped(5).chose(&vec![&[8][..]; sequences as usize]);
        let step = bed.running.front().expect("a step");
        assert!(step.batch.token_count() <= step_tokens);
        step.rows.iter().map(|rows| rows.drafts.len()).max().expect("a sequence")
    };
    assert_eq!([drafts_of(1, 256), drafts_of(10, 256), drafts_of(33, 256)], [8, 64 / 10, 64 / 33]);
    assert_eq!(drafts_of(2, 40), 8, "half of the other 38 tokens are enough for both");
    // The last token of a reply is never drafted.
    let mut bed = Bed::new(drafting(1, 64, 8, 8));
    bed.admit(quoting(1, &prompt, 3)).chose(&[&[8]]);
    assert_eq!(bed.drafted(), [vec![9]]);
    bed.chose(&[&[9, 10]]);
    assert_eq!(bed.recorded().last(), Some(&released(&[1])), "two tokens reach the limit of three");
    bed.assert_all_returned();
}

/// A sequence whose drafts come from the model's draft head.
fn headed(id: u64, prompt: &[u32], tokens_max: usize) -> NewSequence {
    NewSequence { drafter: Drafter::DraftHead, ..quoting(id, prompt, tokens_max) }
}

/// A scheduler for a model with a draft head.
fn with_head(running_max: usize, limits: Limits) -> Bed {
    with_head_at(DraftPositions::Advancing, running_max, limits)
}

fn with_head_at(positions: DraftPositions, running_max: usize, limits: Limits) -> Bed {
    Bed::of(SchedulerCore::new(limits).with_draft_head(Some(positions)), running_max)
}

impl Bed {
    /// Like [`chose`](Bed::chose). In addition, the draft head proposes `drafts` after the chosen
    /// tokens.
    fn chose_and_drafted(&mut self, tokens: &[&[u32]], drafts: &[&[u32]]) -> &mut Bed {
        self.scheduler.step(Input::Drafted(drafts.iter().map(|of| of.to_vec()).collect()));
        self.chose(tokens)
    }
}

#[test]
fn a_draft_head_proposes_the_drafts_of_the_next_step() {
    let mut bed = with_head(2, drafting(2, 64, 8, 3));
    bed.admit(headed(1, &[7, 8, 9], 20));
    assert_eq!(bed.running.len(), 1, "drafts are expected, so the next step waits");
    let step = bed.running.front().expect("a step");
    let chosen = |row| InputToken::Unseen(UnseenToken { row });
    let inputs = step.batch.drafts.as_ref().expect("inputs of the draft head");
    assert_eq!(inputs.tokens, [&known(&[8, 9])[..], &[chosen(0)]].concat());
    let further = step.rows[0].further.clone().expect("two further drafts");
    assert_eq!((further.count, further.index, further.position), (2, 3, 3));
    bed.chose_and_drafted(&[&[10]], &[&[11, 12, 13]]);
    let step = bed.running.front().expect("a step");
    assert_eq!((&step.batch.tokens[..], bed.drafted()), (&known(&[10, 11, 12, 13])[..], vec![vec![11, 12, 13]]));
    let inputs = step.batch.drafts.as_ref().expect("inputs of the draft head");
    assert_eq!(inputs.tokens, [chosen(0), chosen(1), chosen(2), chosen(3)]);
    bed.chose_and_drafted(&[&[11, 40]], &[&[41]]);
    assert_eq!(bed.drafted(), [[41]], "the head may draft fewer tokens than it was asked for");
    bed.chose_and_drafted(&[&[41, 42]], &[&[]]);
    assert_eq!(bed.drafted(), [[0; 0]]);
}

#[test]
fn the_draft_head_reads_the_token_after_a_chunks_end() {
    let mut bed = with_head(2, drafting(2, 16, 8, 1));
    let content = ContentSpan { tokens: 10..30, hash: PictureHash([1; 32]) };
    let prompt: Vec<u32> = (100..140).collect();
    let pictures = vec![Placeholder { content, cache_rows: (70..90).collect() }];
    bed.admit(NewSequence { pictures, ..headed(1, &prompt, 20) });
    let step = bed.running.front().expect("a step");
    let inputs = step.batch.drafts.as_ref().expect("inputs of the draft head");
    assert_eq!(inputs.tokens[15], InputToken::Known(116), "the first token of the next chunk");
    assert_eq!((inputs.picture_rows.last(), inputs.picture_cache_rows.last()), (Some(&15), Some(&76)));
    assert_eq!(step.batch.picture_rows.last(), Some(&15), "the last token of this chunk");
}

#[test]
fn blocks_reserved_for_further_drafts_are_released() {
    let prompt: Vec<u32> = (0..15).collect();
    let mut bed = with_head(2, drafting(1, 64, 3, 8));
    bed.admit(headed(1, &prompt, 30));
    assert_eq!(bed.scheduler.kv().usage().held, 2, "the prompt and seven further drafts");
    bed.chose_and_drafted(&[&[20]], &[&[21, 22, 23, 24, 25, 26, 27, 28]]);
    assert_eq!((bed.drafted()[0].len(), bed.scheduler.kv().usage().held), (8, 2));
    bed.chose_and_drafted(&[&[30]], &[&[]]);
    bed.cancel(1).chose(&[&[31]]);
    bed.assert_all_returned();
    // Further drafts at one position have no keys and values. The drafts that a step verifies have.
    let mut bed = with_head_at(DraftPositions::Constant, 2, drafting(1, 64, 3, 8));
    bed.admit(headed(1, &prompt, 30));
    assert_eq!(bed.running.front().expect("a step").rows[0].further.as_ref().expect("further drafts").count, 7);
    assert_eq!(bed.scheduler.kv().usage().held, 1, "only the prompt");
    bed.chose_and_drafted(&[&[20]], &[&[21, 22, 23, 24, 25, 26, 27, 28]]);
    assert_eq!((bed.drafted()[0].len(), bed.scheduler.kv().usage().held), (8, 2));
    // In a pool that is too small for drafts, steps run without them.
    let mut bed = with_head(2, drafting(1, 64, 1, 8));
    bed.admit(headed(1, &prompt[..14], 2));
    bed.chose_and_drafted(&[&[20]], &[&[21]]);
    assert_eq!((bed.drafted(), bed.scheduler.preemptions()), (vec![vec![]], Preemptions::default()));
}

#[test]
fn a_draft_head_also_runs_in_steps_without_drafts() {
    // 65 sequences decode, so that none has drafts and steps are planned ahead.
    let mut bed = with_head(2, drafting(65, 256, 400, 1));
    (1..=65).for_each(|id| drop(bed.admit(headed(id, &[7, 8], 20)).recorded()));
    // While fewer than 65 sequences decode, they have drafts.
    for _ in 0..4 {
        let tokens = vec![&[9][..]; bed.running[0].rows.len()];
        bed.chose_and_drafted(&tokens, &vec![&[4][..]; tokens.len()]);
    }
    assert_eq!(bed.scheduler.counts(), (0, 65));
    assert_eq!(bed.running.len(), 2, "the host need not see the tokens first");
    assert!(
        bed.running.iter().all(|step| step.batch.drafts.is_some() && step.rows.iter().all(|row| row.drafts.is_empty()))
    );
}

#[test]
fn a_sequence_may_end_inside_a_run_of_accepted_drafts() {
    let mut bed = Bed::new(drafting(1, 64, 8, 3));
    bed.admit(quoting(1, &[7, 8, 9, STOP, 7], 20)).chose(&[&[8]]);
    assert_eq!(bed.drafted(), [vec![9, STOP, 7]]);
    bed.chose(&[&[9, STOP, 7, 8]]);
    let stopped = [token(1, 8), token(1, 9), finished(1, Finish::Stop(STOP)), released(&[1])];
    assert_eq!(bed.recorded(), stopped);
    bed.assert_all_returned();

    bed.admit(quoting(2, &[7, 8, 9, 10, 7], 20)).chose(&[&[8]]);
    bed.running.pop_front();
    bed.give(Input::Stepped(vec![vec![Some(9), None]]));
    assert_eq!(bed.recorded(), [token(2, 8), token(2, 9), finished(2, Finish::Broken), released(&[2])]);
    bed.assert_all_returned();

    bed.admit(quoting(3, &[7, 8, 9, 10, 7], 20)).chose(&[&[8]]).cancel(3).chose(&[&[9, 10, 7, 8]]);
    assert_eq!(bed.recorded(), [token(3, 8), released(&[3])]);
    bed.assert_all_returned();
}

#[test]
fn placeholders_of_pictures_are_never_drafted() {
    let content = ContentSpan { tokens: 2..4, hash: PictureHash([1; 32]) };
    let pictures = vec![Placeholder { content, cache_rows: [0, 1].into() }];
    let mut bed = Bed::new(drafting(1, 64, 8, 4));
    bed.admit(NewSequence { pictures, ..quoting(1, &[7, 8, 999, 999, 9, 7], 20) }).chose(&[&[6]]);
    bed.chose(&[&[7]]);
    assert_eq!(bed.drafted(), [vec![6, 7, 6, 7]], "the later occurrence of the token is used");
    let content = ContentSpan { tokens: 1..3, hash: PictureHash([1; 32]) };
    let pictures = vec![Placeholder { content, cache_rows: [0, 1].into() }];
    let mut bed = Bed::new(drafting(1, 64, 8, 4));
    bed.admit(NewSequence { pictures, ..quoting(1, &[7, 999, 999, 9], 20) }).chose(&[&[7]]);
    assert_eq!(bed.drafted(), [vec![0; 0]], "the repeated token was followed by a picture");
}
