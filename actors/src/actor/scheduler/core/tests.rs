//! Tests of the scheduler and its blocks, with steps that end when the test says so. In this file,
//! one step runs at a time. Look-ahead is tested in `ahead.rs`.

use std::sync::Arc;

use bursar_kernels::InputToken;
use bursar_model::{
    flow::{ContentSpan, PictureHash, PrefixKeys},
    sampling::{Sampler, SamplingParams},
};

use super::*;
use crate::{
    kv::Copies,
    scheduler::{Drafter, Finish, Placeholder, SchedulingParams},
};

mod admit;
mod ahead;
mod charges;
mod drafts;
mod host;
mod pictures;
mod pool;
mod queue;
mod sequences;
mod states;
mod token_interval;
mod windows;

const STOP: u32 = 0;

fn limits(sequences: usize, step_tokens: usize, blocks: usize) -> Limits {
    Limits { sequences, step_tokens, draft_tokens: 0, kv_tokens: blocks * BLOCK_TOKENS }
}

/// A sequence whose tokens and positions count up from `1000 * id`.
fn sequence(id: u64, prompt: usize, tokens_max: usize) -> NewSequence {
    let tokens: Vec<u32> = (0..prompt as u32).map(|token| id as u32 * 1000 + token).collect();
    NewSequence {
        id: SequenceId(id),
        positions: tokens.iter().map(|token| [*token; 3]).collect(),
        next_position: prompt as u32,
        tokens,
        produced: 0,
        tokens_max,
        pictures: Vec::new(),
        stop_tokens: [STOP].into(),
        prefix: PrefixKeys::default(),
        scheduling_params: SchedulingParams::default(),
        group: None,
        score_prompt: None,
        sampler: Arc::new(Sampler::new(SamplingParams::default(), 100_000).expect("greedy")),
        prompt_read: [].into(),
        drafter: Drafter::None,
    }
}

/// The scheduler, its blocks, and all effects that it reported.
struct Bed {
    scheduler: SchedulerCore,
    recorded: Vec<Effect>,
    /// The running steps, the oldest first.
    running: VecDeque<StepPlan>,
    /// How many steps may run at once.
    running_max: usize,
    /// Whether a burst's gathering time is over at once.
    is_hasty: bool,
    /// How often the pool shrank.
    shrinks: usize,
    /// Whether [`Effect::Begun`] is recorded even if no token was cached.
    hears_all: bool,
    /// Number of steps that were submitted.
    launched: usize,
    /// Copies that were submitted, each with the number of steps before it.
    copies: VecDeque<(usize, Copies)>,
}

impl Bed {
    /// A scheduler that runs one step at a time.
    fn new(limits: Limits) -> Bed {
        Bed::of(SchedulerCore::new(limits).without_look_ahead(), 1)
    }

    /// A scheduler that plans the next step while the current step runs.
    fn ahead(limits: Limits) -> Bed {
        Bed::of(SchedulerCore::new(limits), 2)
    }

    fn of(scheduler: SchedulerCore, running_max: usize) -> Bed {
        Bed {
            scheduler,
            recorded: Vec::new(),
            running: VecDeque::new(),
            running_max,
            is_hasty: true,
            shrinks: 0,
            hears_all: false,
            launched: 0,
            copies: VecDeque::new(),
        }
    }

    fn give(&mut self, input: Input) -> &mut Bed {
        let blocks = self.scheduler.kv.blocks();
        let is_idle = self.running.is_empty();
        let effects = self.scheduler.step(input);
        assert!(self.scheduler.kv.blocks() >= blocks || is_idle, "a step may still name a removed block");
        self.shrinks += usize::from(self.scheduler.kv.blocks() < blocks);
        self.record(effects)
    }

    fn record(&mut self, effects: Vec<Effect>) -> &mut Bed {
        let mut effects = VecDeque::from(effects);
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Run(plan) => {
                    self.running.push_back(*plan);
                    self.launched += 1;
                    assert!(self.running.len() <= self.running_max, "{} steps run at once", self.running.len());
                }
                Effect::Released(sequences) => {
                    let is_used = |id| self.running.iter().any(|plan| plan.parts.contains(id));
                    assert!(!sequences.iter().any(is_used), "a released block is still used by a running step");
                    self.recorded.push(Effect::Released(sequences));
                }
                Effect::Gather if self.is_hasty => effects.extend(self.scheduler.step(Input::Gathered)),
                Effect::Copy(copies) => {
                    self.copies.push_back((self.launched, (*copies).clone()));
                    self.recorded.push(Effect::Copy(copies));
                }
                // Sequences without cached tokens, and waits for blocks, are not recorded.
                Effect::Begun(_, 0) if !self.hears_all => {}
                Effect::LacksBlocks(..) => {}
                effect => self.recorded.push(effect),
            }
        }
        self
    }

    fn admit(&mut self, sequence: NewSequence) -> &mut Bed {
        self.give(Input::Admit(Box::new(sequence)))
    }

    fn cancel(&mut self, id: u64) -> &mut Bed {
        self.give(Input::Cancel(SequenceId(id)))
    }

    /// Ends the oldest running step as if all logits were NaN.
    fn broke(&mut self) -> &mut Bed {
        let plan = self.running.pop_front().expect("a step is under way");
        self.give(Input::Stepped(vec![vec![None]; plan.rows.len()]))
    }

    /// Ends the oldest running step. Every row gets this token.
    fn stepped(&mut self, token: u32) -> &mut Bed {
        let plan = self.running.pop_front().expect("a step is under way");
        self.give(Input::Stepped(vec![vec![Some(token)]; plan.rows.len()]))
    }

    /// The token count of each part of the oldest running step.
    fn parts(&self) -> Vec<usize> {
        let plan = self.running.front().expect("a step is under way");
        plan.batch.query_starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect()
    }

    fn wanted(&self) -> Vec<u64> {
        self.running.front().expect("a step is under way").rows.iter().map(|row| row.sequence.0).collect()
    }

    fn recorded(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.recorded)
    }

    fn assert_all_returned(&self) {
        assert_eq!(self.scheduler.counts(), (0, 0));
        assert_eq!(self.scheduler.kv.free_blocks(), self.scheduler.kv.blocks());
        assert!(self.running.is_empty());
    }
}

fn known(ids: &[u32]) -> Vec<InputToken> {
    ids.iter().copied().map(InputToken::Known).collect()
}

fn token(id: u64, token: u32) -> Effect {
    Effect::Token(SequenceId(id), token)
}

fn finished(id: u64, finish: Finish) -> Effect {
    Effect::Finished(SequenceId(id), finish)
}

fn released(ids: &[u64]) -> Effect {
    Effect::Released(ids.iter().map(|id| SequenceId(*id)).collect())
}

#[test]
fn a_long_prompt_samples_only_in_its_last_chunk() {
    let mut bed = Bed::new(limits(2, 10, 8));
    bed.admit(sequence(1, 25, 2));
    assert_eq!((bed.parts(), bed.wanted()), (vec![10], vec![]));
    assert_eq!(bed.running.front().expect("a step").batch.tokens[..2], known(&[1000, 1001]));
    bed.stepped(5);
    let second = &bed.running.front().expect("a step").batch;
    assert_eq!((second.tokens[0], second.context_lengths[0]), (InputToken::Known(1010), 20));
    assert_eq!(second.slots[..7], [10, 11, 12, 13, 14, 15, 16], "the slots continue in the next block");
    bed.stepped(5);
    assert_eq!((bed.parts(), bed.wanted()), (vec![5], vec![1]));
    bed.stepped(5);
    assert_eq!((bed.parts(), bed.wanted()), (vec![1], vec![1]), "the sequence decodes after its prompt");
    assert_eq!(bed.running.front().expect("a step").batch.positions, [25, 25, 25]);
    bed.stepped(6);
    assert_eq!(bed.recorded(), [token(1, 5), token(1, 6), finished(1, Finish::Length), released(&[1])]);
    bed.assert_all_returned();
}

#[test]
fn a_prompt_that_fills_its_last_step_samples_there() {
    let mut bed = Bed::new(limits(1, 10, 8));
    bed.admit(sequence(1, 20, 1));
    bed.stepped(5);
    assert_eq!((bed.parts(), bed.wanted()), (vec![10], vec![1]));
    bed.stepped(9);
    assert_eq!(bed.recorded(), [token(1, 9), finished(1, Finish::Length), released(&[1])]);
}

#[test]
fn decoding_goes_first_and_prompts_share_the_rest_by_age() {
    let mut bed = Bed::new(limits(4, 10, 32));
    bed.admit(sequence(1, 4, 9)).stepped(5);
    bed.admit(sequence(2, 30, 9)).admit(sequence(3, 30, 9)).stepped(5);
    assert_eq!(bed.parts(), [1, 9], "one token of the first sequence; the second sequence gets the rest of the step");
    bed.stepped(5).stepped(5).stepped(5);
    assert_eq!(bed.parts(), [1, 3, 6], "the second prompt ends and the third begins");
    assert_eq!(bed.wanted(), [1, 2]);
}

#[test]
fn running_sequences_never_exceed_the_stressed_number() {
    let mut bed = Bed::new(limits(2, 64, 32));
    (1..=5).for_each(|id| {
        bed.admit(sequence(id, 3, 4));
    });
    bed.stepped(5);
    assert_eq!(bed.scheduler.counts(), (3, 2));
    assert_eq!(bed.parts(), [1, 3]);
}

#[test]
fn waiting_sequences_are_admitted_by_age_despite_a_cancellation() {
    let mut bed = Bed::new(limits(1, 64, 32));
    [1, 4, 2, 3].into_iter().for_each(|id| _ = bed.admit(sequence(id, 3, 1)));
    let known = |bed: &Bed| [1, 2, 3, 4].map(|id| bed.scheduler.is_known(SequenceId(id)));
    bed.cancel(3);
    assert_eq!(known(&bed), [true, true, false, true]);
    let order = std::iter::from_fn(|| {
        let id = bed.running.front()?.parts[0];
        bed.stepped(5);
        Some(id.0)
    });
    assert_eq!(order.collect::<Vec<_>>(), [1, 2, 4]);
}

#[test]
fn replies_are_expected_short_until_half_the_pool_is_held() {
    let running_beside = |prompt| {
        let mut bed = Bed::new(limits(4, 128, 8));
        // Replies have been short so far.
        bed.admit(sequence(1, 2, 9)).stepped(STOP);
        bed.admit(sequence(2, prompt, 200)).admit(sequence(3, 10, 200)).stepped(5);
        bed.scheduler.counts()
    };
    assert_eq!((running_beside(64), running_beside(65)), ((0, 2), (1, 1)));
}

#[test]
fn a_stop_token_ends_a_sequence_without_being_sent() {
    let mut bed = Bed::new(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 9)).stepped(7).stepped(STOP);
    assert_eq!(bed.recorded(), [token(1, 7), finished(1, Finish::Stop(STOP)), released(&[1])]);
    bed.assert_all_returned();
}

#[test]
fn a_row_of_nans_ends_only_its_own_sequence() {
    let mut bed = Bed::new(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 1)).admit(sequence(2, 3, 9)).stepped(7);
    bed.recorded();
    bed.broke();
    assert_eq!(bed.recorded(), [finished(2, Finish::Broken), released(&[2])]);
    bed.assert_all_returned();
}

#[test]
fn a_waiting_sequence_is_cancelled_silently() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(sequence(1, 3, 2)).admit(sequence(2, 3, 2)).cancel(2);
    bed.stepped(5).stepped(5);
    assert_eq!(bed.recorded().last(), Some(&released(&[1])));
    bed.assert_all_returned();
}

#[test]
fn a_sequence_cancelled_during_a_step_ends_silently_after_it() {
    let mut bed = Bed::new(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 9)).admit(sequence(2, 3, 1)).stepped(5);
    bed.recorded();
    bed.cancel(1);
    assert_eq!(bed.recorded(), [], "the blocks of the sequence are still being written");
    bed.stepped(6);
    let recorded = bed.recorded();
    assert_eq!(recorded, [token(2, 6), finished(2, Finish::Length), released(&[1, 2])]);
    bed.assert_all_returned();
}

#[test]
fn a_running_sequence_outside_the_step_is_cancelled_after_it() {
    let mut bed = Bed::new(limits(2, 4, 8));
    bed.admit(sequence(1, 6, 9)).admit(sequence(2, 6, 9)).stepped(5);
    // The running step has two tokens of each of the first two sequences. Both are canceled while
    // it runs.
    bed.admit(sequence(3, 6, 9)).cancel(2).cancel(1);
    bed.stepped(5);
    assert_eq!(bed.recorded(), [released(&[1, 2])]);
    assert_eq!(bed.scheduler.counts(), (0, 1), "the third sequence runs again");
}

#[test]
fn a_cancellation_between_the_effects_of_a_step_is_harmless() {
    // The actor learns that the caller has disconnected between the effects of a step, when the
    // next step is already planned.
    let mut scheduler = SchedulerCore::new(limits(2, 64, 8)).without_look_ahead();
    scheduler.step(Input::Admit(Box::new(sequence(1, 3, 9))));
    let effects = scheduler.step(Input::Stepped(vec![vec![Some(5)]]));
    assert_eq!(effects[0], token(1, 5));
    assert!(matches!(effects[1..], [Effect::Run(_)]));
    assert_eq!(scheduler.step(Input::Cancel(SequenceId(1))), []);
    assert_eq!(scheduler.step(Input::Stepped(vec![vec![Some(6)]])), [released(&[1])]);
}

#[test]
fn cancelling_an_unknown_sequence_or_twice_is_harmless() {
    let mut bed = Bed::new(limits(2, 64, 8));
    bed.cancel(9).admit(sequence(1, 3, 2)).cancel(1).cancel(1).stepped(5).cancel(1);
    assert_eq!(bed.recorded(), [released(&[1])]);
    bed.assert_all_returned();
}

/// Two sequences that were expected to be short, in a pool that cannot hold both to their ends.
fn two_that_outgrow_the_pool() -> Bed {
    let mut bed = Bed::new(limits(4, 64, 4));
    // Replies have been short so far.
    bed.admit(sequence(1, 2, 9)).stepped(STOP);
    bed.recorded();
    bed.admit(sequence(2, 15, 40)).admit(sequence(3, 15, 40)).stepped(5);
    bed
}

#[test]
fn the_youngest_sequence_is_preempted_requeued_first_and_recomputed() {
    let mut bed = two_that_outgrow_the_pool();
    while bed.scheduler.counts().1 == 2 || bed.scheduler.counts().0 == 0 {
        bed.admit(sequence(4, 5, 3));
        if bed.scheduler.counts().0 > 0 && bed.recorded.contains(&released(&[3])) {
            break;
        }
        bed.cancel(4).stepped(6);
    }
    assert_eq!(
        bed.scheduler.waiting.values().map(Sequence::id).next(),
        Some(SequenceId(3)),
        "the preempted sequence is queued before later sequences"
    );
    let preempted = &bed.scheduler.waiting[SequenceId(3)];
    assert!(preempted.spec.produced > 0);
    assert_eq!((preempted.cached, preempted.named), (0, 0), "a preempted sequence holds no blocks");
    while !bed.running.is_empty() {
        bed.stepped(6);
    }
    let recorded = bed.recorded();
    for id in [2, 3] {
        let tokens = recorded.iter().filter(|effect| matches!(effect, Effect::Token(of, _) if of.0 == id)).count();
        assert_eq!(tokens, 40, "every token of sequence {id} is reported once");
        assert_eq!(recorded.iter().filter(|effect| **effect == finished(id, Finish::Length)).count(), 1);
    }
    bed.assert_all_returned();
}

#[test]
fn no_sequence_is_admitted_between_a_preemption_and_the_next_step() {
    // Samples of one prompt are expected to share its blocks. These samples begin in the same
    // step, so they cannot.
    let mut bed = Bed::new(limits(4, 200, 8));
    let sample = |id| NewSequence { group: Some(1), ..alike(id, 40, 9) };
    (1..=2).for_each(|id| bed.scheduler.wait(Sequence::new(sample(id))));
    let effects = bed.scheduler.step(Input::Admit(Box::new(sample(3))));
    assert!(effects.contains(&Effect::LacksBlocks(vec![SequenceId(3)], 1)), "{effects:?}");
    bed.record(effects);
    assert_eq!(bed.recorded(), [released(&[3])]);
    assert_eq!(bed.parts(), [40, 40], "the preempted sequence fits by prediction but is not admitted at once");
    assert_eq!((bed.scheduler.counts(), bed.scheduler.preemptions().for_blocks), ((1, 2), 1));
    bed.stepped(5);
    assert_eq!(bed.parts(), [1, 1], "the other sequences share no prefix and will need the remaining blocks");
}

#[test]
fn no_sequence_is_preempted_for_blocks_that_a_cancelled_one_returns() {
    let mut bed = two_that_outgrow_the_pool();
    while bed.running[0].batch.context_lengths != [32, 31] {
        bed.stepped(6);
    }
    bed.recorded();
    bed.cancel(2).stepped(6);
    assert_eq!(bed.recorded(), [token(3, 6), released(&[2])]);
    assert_eq!((bed.scheduler.counts(), bed.wanted()), ((0, 1), vec![3]), "the third sequence is not preempted");
    assert_eq!(bed.scheduler.preemptions(), Preemptions::default());
}

#[test]
fn a_long_prompt_does_not_keep_decoding_sequences_waiting() {
    // In mistral.rs (2024), length buckets preempted all other sequences.
    let mut bed = Bed::new(limits(4, 8, 64));
    bed.admit(sequence(1, 2, 50)).stepped(5);
    bed.admit(sequence(2, 200, 5));
    bed.recorded();
    for _ in 0..20 {
        bed.stepped(5);
        assert!(bed.recorded().contains(&token(1, 5)), "every step delivers a token");
    }
}

#[test]
fn pictures_are_cut_at_chunk_borders() {
    let mut bed = Bed::new(limits(1, 10, 8));
    let mut spec = sequence(1, 24, 1);
    // The second placeholder crosses the first chunk border, and the third crosses the second
    // border. Both show the same picture.
    let place = |tokens: std::ops::Range<usize>, first: u32| Placeholder {
        cache_rows: (first..).take(tokens.len()).collect(),
        content: ContentSpan { tokens, hash: PictureHash([first as u8; 32]) },
    };
    spec.pictures = vec![place(2..4, 50), place(8..13, 70), place(18..23, 70)];
    bed.admit(spec);
    let seen = |bed: &Bed| {
        let batch = &bed.running.front().expect("a step").batch;
        (batch.picture_rows.clone(), batch.picture_cache_rows.clone())
    };
    assert_eq!(seen(&bed), (vec![2, 3, 8, 9], vec![50, 51, 70, 71]));
    bed.stepped(5);
    assert_eq!(seen(&bed), (vec![0, 1, 2, 8, 9], vec![72, 73, 74, 70, 71]));
    bed.stepped(5);
    assert_eq!(seen(&bed), (vec![0, 1, 2], vec![72, 73, 74]));
    bed.stepped(5);
    bed.assert_all_returned();
}

#[test]
fn a_readmitted_sequence_continues_with_its_produced_tokens() {
    let mut bed = Bed::new(limits(1, 64, 8));
    let mut again = sequence(1, 6, 5);
    again.produced = 3;
    bed.admit(again).stepped(5);
    assert_eq!(bed.scheduler.sequence(SequenceId(1)).expect("the sequence runs").produced, 4);
    bed.stepped(5);
    assert_eq!(bed.recorded(), [token(1, 5), token(1, 5), finished(1, Finish::Length), released(&[1])]);
}

#[test]
fn a_sequence_filling_the_pool_alone_runs_to_its_end() {
    let mut bed = Bed::new(limits(4, 64, 2));
    bed.admit(sequence(1, 20, 12)).admit(sequence(2, 20, 12));
    for _ in 0..24 {
        bed.stepped(5);
    }
    bed.assert_all_returned();
}

/// A sequence with the same tokens as every other sequence from this function.
fn alike(id: u64, prompt: usize, tokens_max: usize) -> NewSequence {
    NewSequence { id: SequenceId(id), ..sequence(7, prompt, tokens_max) }
}

#[test]
fn a_sequence_with_a_cached_prefix_computes_only_the_rest() {
    let mut bed = Bed::new(limits(4, 64, 16));
    bed.admit(alike(1, 40, 2)).stepped(5);
    bed.admit(alike(2, 40, 2));
    assert_eq!(bed.parts(), [1], "the first sequence decodes");
    bed.stepped(5);
    assert_eq!(bed.parts(), [8], "32 of 40 tokens are cached");
    let batch = &bed.running.front().expect("a step").batch;
    assert_eq!(
        (batch.tokens[0], batch.context_lengths[0], batch.block_tables[..2].to_vec()),
        (InputToken::Known(7032), 40, vec![0, 1])
    );
    bed.stepped(5).stepped(5);
    assert!(bed.recorded().contains(&Effect::Begun(SequenceId(2), 32)));
    bed.admit(alike(3, 40, 1));
    assert_eq!(bed.parts(), [8], "the prefix is still cached after both sequences ended");
    bed.stepped(5);
    bed.assert_all_returned();
}

#[test]
fn the_next_turn_reuses_the_blocks_of_the_reply() {
    let mut bed = Bed::new(limits(1, 64, 16));
    bed.admit(sequence(1, 20, 20));
    (0..20).for_each(|_| _ = bed.stepped(5));
    let mut second = sequence(1, 20, 1);
    second.id = SequenceId(2);
    second.tokens.extend([5; 25]);
    second.positions.extend((20..45).map(|position| [position; 3]));
    bed.admit(second);
    // No step computed the last token of the reply, so the block with that token is not whole.
    assert_eq!(bed.parts(), [45 - 32]);
    bed.stepped(5);
    bed.assert_all_returned();
}

#[test]
fn a_shared_block_is_not_written_again_by_a_waiting_sequence() {
    let mut bed = Bed::new(limits(4, 80, 6));
    bed.admit(alike(1, 40, 30)).stepped(5);
    // Sequence 2 shares two blocks of sequence 1 and takes one more block. Sequence 3 finds no
    // free block, and sequence 2 is preempted.
    bed.admit(alike(2, 40, 20)).admit(sequence(3, 40, 3));
    for _ in 0..200 {
        let Some(plan) = bed.running.front() else { break };
        let mut written: Vec<_> = plan.batch.slots.iter().map(|slot| slot / BLOCK_TOKENS as u32).collect();
        written.dedup();
        for (part, id) in plan.parts.iter().enumerate() {
            let others = (0..plan.parts.len()).filter(|other| *other != part);
            let table = |part: usize| {
                let length = plan.batch.context_lengths[part] as usize;
                plan.batch.block_tables[part * plan.batch.blocks_max()..][..length.div_ceil(BLOCK_TOKENS)].to_vec()
            };
            let own: Vec<_> = table(part);
            let shared = others.flat_map(table).filter(|block| own.contains(block));
            assert!(shared.into_iter().all(|block| !written.contains(&block)), "{id} writes a block that is read");
        }
        bed.stepped(5);
    }
    bed.assert_all_returned();
}

#[test]
fn a_prompt_is_scored_once_despite_chunks_and_recomputation() {
    let mut bed = Bed::new(limits(2, 10, 5));
    bed.admit(sequence(1, 30, 40));
    for _ in 0..3 {
        bed.stepped(5);
    }
    let scored = NewSequence { score_prompt: Some(3), ..sequence(2, 33, 3) };
    bed.admit(scored.clone());
    let mut recorded: Vec<(usize, u32)> = Vec::new();
    for _ in 0..200 {
        let Some(plan) = bed.running.front() else { break };
        assert_eq!(plan.batch.score_rows.len(), plan.scored.iter().map(|scored| scored.tokens.len()).sum::<usize>());
        for scored in &plan.scored {
            assert_eq!((scored.sequence, scored.top), (SequenceId(2), 3));
            recorded.extend((scored.first..).zip(scored.tokens.iter().copied()));
        }
        bed.stepped(5);
    }
    let expected: Vec<_> = (1..33).zip(scored.tokens[1..].iter().copied()).collect();
    assert_eq!(recorded, expected, "each token except the first is scored once, in order");
    bed.assert_all_returned();
}

#[test]
fn a_prefix_without_a_valid_next_token_is_never_reused() {
    let mut bed = Bed::new(limits(2, 32, 16));
    // There are two steps. The first chunk runs before the host can detect that its values are NaN.
    bed.admit(alike(1, 60, 4)).stepped(5);
    bed.broke();
    assert!(bed.recorded().contains(&finished(1, Finish::Broken)));
    bed.admit(alike(2, 60, 4));
    assert_eq!(bed.parts(), [32]);
    bed.stepped(5).stepped(5);
    bed.admit(alike(3, 60, 1)).stepped(5);
    assert_eq!(bed.parts(), [1, 60 - 48], "blocks before a valid choice are cached");
}

#[test]
fn a_prompt_to_be_scored_is_computed_even_when_cached() {
    let mut bed = Bed::new(limits(2, 64, 16));
    bed.admit(alike(1, 40, 1)).stepped(5);
    bed.admit(NewSequence { score_prompt: Some(0), ..alike(2, 40, 1) });
    assert_eq!(bed.parts(), [40]);
    assert_eq!(bed.running.front().expect("a step").batch.score_rows.len(), 39);
    bed.stepped(5);
    bed.assert_all_returned();
}
