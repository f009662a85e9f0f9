//! Tests in which the next step is planned while the current step runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::OnceLock,
};

use bursar_kernels::UnseenToken;
use bursar_model::{
    demo,
    sampling::{GrammarCompiler, OutputFormat},
    text::Tokenizer,
};
use proptest::prelude::*;

use super::*;

impl Bed {
    fn plan(&self, place: usize) -> &StepPlan {
        self.running.get(place).expect("the step is under way")
    }

    /// The sequences for which the running step with this index chooses a token.
    fn wanted_at(&self, place: usize) -> Vec<u64> {
        self.plan(place).rows.iter().map(|row| row.sequence.0).collect()
    }
}

/// The token that the running step chooses in this row.
fn unseen(row: u32) -> InputToken {
    InputToken::Unseen(UnseenToken { row })
}

/// A sequence whose tokens are sampled.
fn drawn(id: u64, prompt: usize, tokens_max: usize) -> NewSequence {
    let params = SamplingParams { temperature: 1.0, repetition_penalty: 1.1, ..SamplingParams::default() };
    let sampler = Arc::new(Sampler::new(params, 100_000).expect("a sampler"));
    NewSequence { sampler, ..sequence(id, prompt, tokens_max) }
}

/// A sequence with a grammar, so that the host must see each token before the next one is chosen.
fn formed(id: u64, prompt: usize, tokens_max: usize) -> NewSequence {
    static SAMPLER: OnceLock<Arc<Sampler>> = OnceLock::new();
    let sampler = SAMPLER.get_or_init(|| {
        let tokenizer = demo::checkpoint().require("tokenizer.json").expect("the demo tokenizer is embedded");
        let tokenizer = Tokenizer::from_bytes(&tokenizer).expect("a tokenizer");
        let compiler = GrammarCompiler::new(&tokenizer, 864, &[858]).expect("a byte-level vocabulary");
        let grammar = compiler.compile(&OutputFormat::Regex("a*".to_owned())).expect("the grammar is small enough");
        Arc::new(Sampler::new(SamplingParams::default(), 864).expect("a sampler").with_grammar(grammar))
    });
    NewSequence { sampler: sampler.clone(), ..sequence(id, prompt, tokens_max) }
}

#[test]
fn a_step_is_planned_before_its_input_token_is_chosen() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(sequence(1, 20, 9));
    assert_eq!(bed.running.len(), 2, "the prompt step and the next step are running");
    let next = bed.plan(1);
    assert_eq!((next.batch.tokens.clone(), next.batch.positions.clone()), (vec![unseen(0)], vec![20; 3]));
    assert_eq!(
        (next.batch.context_lengths.clone(), next.batch.slots.clone()),
        (vec![21], vec![20]),
        "the position of the unseen token is known"
    );
    let last = Some(UnseenToken { row: 0 });
    assert_eq!(
        next.rows,
        [ChosenRows { sequence: SequenceId(1), position: 1, unseen: last, drafts: Vec::new(), further: None }]
    );
    bed.stepped(5);
    assert_eq!(bed.recorded(), [token(1, 5)]);
    let third = bed.plan(1);
    assert_eq!((third.batch.tokens[0], third.batch.positions[0], third.rows[0].position), (unseen(0), 21, 2));
}

#[test]
fn a_bursts_second_step_waits_briefly_for_the_other_arrivals() {
    let mut bed = Bed { is_hasty: false, ..Bed::ahead(limits(4, 64, 32)) };
    bed.admit(sequence(1, 20, 9)).admit(sequence(2, 10, 9)).admit(sequence(3, 10, 9));
    assert_eq!(bed.running.len(), 1, "the first request does not wait for another request");
    assert_eq!(bed.recorded(), [Effect::Gather]);
    bed.give(Input::Gathered);
    assert_eq!(bed.wanted_at(1), [1, 2, 3], "one step for all sequences, without a separate step for the single token");
    // The wait happens once per burst: later arrivals join the step after the next, as usual.
    bed.stepped(5);
    assert_eq!((bed.running.len(), bed.wanted_at(1)), (2, vec![1, 2, 3]));
    assert!(!bed.admit(sequence(4, 20, 9)).stepped(5).recorded().contains(&Effect::Gather));
    assert_eq!(bed.wanted_at(1), [1, 2, 3, 4]);
}

#[test]
fn a_step_that_ends_early_ends_the_burst_wait() {
    let mut bed = Bed { is_hasty: false, ..Bed::ahead(limits(2, 64, 8)) };
    bed.admit(sequence(1, 20, 9)).stepped(5);
    assert_eq!(bed.running.len(), 2, "the joined step and one step ahead are running");
    bed.give(Input::Gathered);
    assert_eq!(bed.running.len(), 2);
    assert_eq!(bed.recorded(), [Effect::Gather, token(1, 5)]);
}

#[test]
fn a_step_ahead_mixes_unseen_and_known_tokens() {
    let mut bed = Bed::ahead(limits(3, 12, 32));
    bed.admit(sequence(1, 4, 9));
    bed.admit(sequence(2, 4, 9)).admit(sequence(3, 30, 9)).stepped(5);
    // Sequence 1 decodes in the running step. The next step has sequence 1 again, the prompt of
    // sequence 2, and the start of the prompt of sequence 3.
    assert_eq!(bed.plan(0).batch.tokens, [unseen(0)]);
    assert_eq!(
        bed.plan(1).batch.tokens,
        [vec![unseen(0)], known(&[2000, 2001, 2002, 2003]), known(&(3000..3007).collect::<Vec<_>>())].concat()
    );
    bed.stepped(5);
    let third = &bed.plan(1).batch;
    assert_eq!(third.tokens, [vec![unseen(0), unseen(1)], known(&(3007..3017).collect::<Vec<_>>())].concat());
    assert_eq!(third.logit_rows, [0, 1]);
    bed.stepped(5).stepped(5);
    assert_eq!(bed.plan(1).batch.tokens[..2], [unseen(0), unseen(1)]);
}

#[test]
fn a_stop_token_discards_the_sequences_running_step() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(sequence(1, 15, 9)).stepped(7).stepped(STOP);
    assert_eq!(bed.recorded(), [token(1, 7), finished(1, Finish::Stop(STOP))], "the end is reported at once");
    assert_eq!(bed.wanted_at(0), [1], "the running step still writes the blocks");
    assert_eq!(bed.running.len(), 1, "no further step is planned for the sequence");
    bed.stepped(8);
    assert_eq!(bed.recorded(), [released(&[1])], "the token chosen after the end is dropped");
    bed.assert_all_returned();
}

#[test]
fn a_length_limit_known_in_advance_wastes_no_step() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 2));
    bed.stepped(7);
    assert_eq!((bed.running.len(), bed.recorded()), (1, vec![token(1, 7)]), "the last token is in the running step");
    bed.stepped(8);
    assert_eq!(bed.recorded(), [token(1, 8), finished(1, Finish::Length), released(&[1])]);
    bed.assert_all_returned();
}

#[test]
fn a_sequence_outside_the_running_step_is_released_at_once() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 3)).admit(sequence(2, 3, 9)).stepped(5).stepped(6);
    assert_eq!((bed.wanted_at(0), bed.wanted_at(1)), (vec![1, 2], vec![2]));
    bed.recorded();
    bed.stepped(7);
    assert_eq!(bed.recorded(), [token(1, 7), finished(1, Finish::Length), token(2, 7), released(&[1])]);
    assert_eq!(bed.wanted_at(0), [2], "the running step does not use the released blocks");
}

#[test]
fn a_sampled_row_names_the_unseen_token_before_it() {
    let mut bed = Bed::ahead(limits(3, 64, 16));
    bed.admit(drawn(1, 12, 4)).admit(sequence(2, 3, 9)).stepped(5);
    let rows = |bed: &Bed, place: usize| -> Vec<_> {
        bed.plan(place).rows.iter().map(|row| row.unseen.map(|unseen| unseen.row)).collect()
    };
    assert_eq!(rows(&bed, 1), [Some(0), None], "the second sequence begins");
    bed.stepped(5);
    assert_eq!(rows(&bed, 1), [Some(0), Some(1)]);
    assert_eq!(bed.plan(1).rows[0].position, 3);
    let mut bed = Bed::new(limits(3, 64, 16));
    bed.admit(drawn(1, 12, 4)).stepped(5);
    assert_eq!(
        (rows(&bed, 0), bed.plan(0).batch.tokens[0]),
        (vec![None], InputToken::Known(5)),
        "without look-ahead the host sees each token before the next step"
    );
}

#[test]
fn a_sequence_whose_tokens_the_host_needs_is_never_planned_ahead() {
    let mut bed = Bed::ahead(limits(2, 8, 16));
    bed.admit(formed(1, 12, 3));
    assert_eq!(bed.running.len(), 2, "a step in the middle of a prompt chooses no token");
    bed.stepped(5);
    assert_eq!((bed.running.len(), bed.wanted_at(0)), (1, vec![1]));
    bed.admit(sequence(2, 3, 9)).stepped(5);
    assert_eq!(
        (bed.running.len(), bed.plan(0).batch.tokens[0]),
        (1, InputToken::Known(5)),
        "a sequence with a grammar delays the other sequence"
    );
    bed.stepped(5);
    assert_eq!(
        (bed.running.len(), bed.plan(0).batch.tokens[0]),
        (2, InputToken::Known(5)),
        "look-ahead resumes when the last token of the first sequence is under way"
    );
    assert_eq!(bed.plan(1).batch.tokens, [unseen(1)]);
}

#[test]
fn a_few_grammar_sequences_alternate_steps_without_delaying_other_sequences() {
    let mut bed = Bed::ahead(limits(16, 64, 64));
    bed.admit(formed(0, 2, 30));
    (1..16).for_each(|id| _ = bed.admit(sequence(id, 2, 30)));
    while bed.running.len() < 2 || bed.plan(1).rows.len() < 15 {
        bed.stepped(5);
    }
    for _ in 0..6 {
        let is_in = |place: usize| bed.wanted_at(place).contains(&0);
        assert_eq!((bed.running.len(), is_in(0)), (2, !is_in(1)), "the sequence is in exactly one of the two steps");
        let both = [0, 1].map(|place| bed.plan(place).rows.len());
        assert_eq!(both.into_iter().sum::<usize>(), 31, "every other sequence is in both steps");
        let seen =
            [0, 1].map(|place| bed.plan(place).rows.iter().find(|row| row.sequence.0 == 0).map(|row| row.unseen));
        assert_eq!(seen.into_iter().flatten().collect::<Vec<_>>(), [None]);
        bed.stepped(5);
    }
}

#[test]
fn a_cancelled_sequence_is_released_after_its_last_step() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(sequence(1, 3, 9)).admit(sequence(2, 3, 9)).stepped(5);
    bed.recorded();
    assert_eq!((bed.wanted_at(0), bed.wanted_at(1)), (vec![1], vec![1, 2]));
    bed.cancel(1).stepped(6);
    assert_eq!(bed.recorded(), [], "a canceled sequence reports no token while its blocks are written");
    assert_eq!(bed.wanted_at(1), [2]);
    bed.stepped(6);
    assert_eq!(bed.recorded(), [token(2, 6), released(&[1])]);
}

#[test]
fn a_cancelled_sequence_is_not_planned_again() {
    let mut bed = Bed::ahead(limits(2, 64, 16));
    bed.is_hasty = false;
    bed.admit(sequence(1, 200, 9)).admit(sequence(2, 3, 9)).cancel(1);
    bed.give(Input::Gathered);
    assert_eq!(
        (&bed.plan(0).parts[..], &bed.plan(1).parts[..]),
        (&[SequenceId(1)][..], &[SequenceId(2)][..]),
        "no further tokens of the canceled prompt are computed"
    );
    bed.stepped(5);
    assert!(bed.recorded().contains(&released(&[1])));
    bed.cancel(2).stepped(5).stepped(5);
    bed.assert_all_returned();
}

#[test]
fn a_nan_row_ends_its_sequence_despite_a_planned_step() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    bed.admit(alike(1, 32, 9)).broke();
    assert_eq!(bed.recorded(), [finished(1, Finish::Broken)]);
    bed.stepped(7);
    assert_eq!(bed.recorded(), [released(&[1])]);
    bed.assert_all_returned();
    bed.admit(alike(2, 32, 1));
    assert_eq!(bed.parts(), [32], "the blocks of the broken sequence are not cached");
}

#[test]
fn a_wasted_step_caches_nothing() {
    let mut bed = Bed::ahead(limits(2, 64, 8));
    // The step after the reply's end would have filled a second block with a token outside the
    // reply.
    bed.admit(alike(1, 31, 9)).stepped(STOP).stepped(7);
    bed.assert_all_returned();
    assert_eq!(bed.scheduler.kv.usage().cached, 1);
}

#[test]
fn a_prompt_sharing_a_running_prefix_waits_and_reuses_it() {
    let mut bed = Bed::ahead(limits(4, 64, 16));
    bed.admit(alike(1, 40, 9)).admit(alike(2, 40, 9)).admit(sequence(3, 5, 9));
    assert_eq!((bed.wanted_at(0), bed.wanted_at(1)), (vec![1], vec![1]));
    bed.stepped(5);
    assert_eq!(bed.wanted_at(1), [1, 2, 3]);
    let starts = &bed.plan(1).batch.query_starts;
    assert_eq!(starts[2] - starts[1], 8, "32 of 40 tokens are cached");
    // Here sequence 1 ends with the running step, so no later step is planned when the other
    // requests arrive.
    let mut bed = Bed::ahead(limits(4, 64, 16));
    bed.admit(alike(1, 40, 1)).admit(alike(2, 40, 9)).admit(sequence(3, 5, 9));
    assert_eq!(bed.wanted_at(1), [3], "a sequence with another prefix does not wait");
    bed.stepped(5);
    assert!(bed.wanted_at(1).contains(&2));
    assert_eq!(bed.plan(1).batch.context_lengths.last(), Some(&40));
}

#[test]
fn no_sequence_is_preempted_for_a_step_planned_ahead() {
    let mut bed = Bed::ahead(limits(2, 64, 4));
    // Both sequences were expected to be short. Each has two blocks, and needs a third for its 33rd
    // token.
    bed.scheduler.running.extend([2, 3].map(|id| (SequenceId(id), Sequence::new(sequence(id, 15, 30)))));
    bed.give(Input::Gathered);
    while bed.running.len() == 2 {
        bed.stepped(5);
    }
    assert_eq!((bed.scheduler.counts(), bed.scheduler.preemptions().for_blocks), ((0, 2), 0));
    assert!(
        !bed.recorded.contains(&released(&[3])),
        "the next step is planned only after the ends of the running step are known"
    );
    bed.stepped(5);
    assert!(bed.recorded.contains(&released(&[3])));
    assert_eq!(bed.scheduler.preemptions().for_blocks, 1);
    while !bed.running.is_empty() {
        bed.stepped(5);
    }
    let recorded = bed.recorded();
    for id in [2, 3] {
        let tokens = recorded.iter().filter(|effect| matches!(effect, Effect::Token(of, _) if of.0 == id)).count();
        assert_eq!(tokens, 30, "every token of sequence {id} is reported once");
    }
    bed.assert_all_returned();
}

/// A sequence of a script: its kind, and the tokens that the model chooses for it.
#[derive(Clone, Debug)]
struct Role {
    prompt: usize,
    tokens_max: usize,
    /// Whether the sequence's prompt shares a prefix with all other sequences that have this flag.
    is_alike: bool,
    is_drawn: bool,
    is_formed: bool,
    is_scored: bool,
    /// The index of the token with which the sequence ends, if it gets that far.
    ends_at: usize,
    /// Whether the logits of the token at `ends_at` are NaN.
    breaks: bool,
}

impl Role {
    fn sequence(&self, id: u64) -> NewSequence {
        let of_kind = match (self.is_formed, self.is_drawn) {
            (true, _) => formed,
            (_, true) => drawn,
            _ => sequence,
        };
        let name = if self.is_alike { 90 } else { id };
        let score_prompt = self.is_scored.then_some(1);
        NewSequence { id: SequenceId(id), score_prompt, ..of_kind(name, self.prompt, self.tokens_max) }
    }

    fn chosen(&self, id: u64, position: usize) -> Option<u32> {
        if position != self.ends_at {
            Some(10 + id as u32 * 500 + position as u32)
        } else {
            (!self.breaks).then_some(STOP)
        }
    }

    /// The effects that must be reported for the sequence, unless it is canceled.
    fn effects_of(&self, id: u64) -> Vec<Effect> {
        let (finish, count) = if self.ends_at >= self.tokens_max {
            (Finish::Length, self.tokens_max)
        } else {
            (if self.breaks { Finish::Broken } else { Finish::Stop(STOP) }, self.ends_at)
        };
        (0..count)
            .map(|at| token(id, self.chosen(id, at).expect("the sequence continues")))
            .chain([finished(id, finish)])
            .collect()
    }
}

/// A script: the sequences, the limits, and the order of events.
#[derive(Clone, Debug)]
struct Script {
    limits: Limits,
    roles: Vec<Role>,
    events: Vec<u8>,
}

/// The effects reported for each sequence, the canceled sequences, and the number of steps planned
/// ahead.
#[derive(Debug, Default)]
struct Played {
    recorded: BTreeMap<u64, Vec<Effect>>,
    scored: BTreeMap<u64, Vec<u32>>,
    cancelled: Vec<u64>,
    planned_ahead: usize,
}

impl Script {
    fn play(&self, mut bed: Bed) -> Played {
        let (mut played, mut seen) = (Played::default(), 0);
        // The tokens that the device chose in the step that was planned last.
        let mut previous: Vec<Option<u32>> = Vec::new();
        let mut arrived = 0;
        let endless = std::iter::repeat(&u8::MAX);
        for event in self.events.iter().chain(endless) {
            match *event {
                0..=59 if arrived < self.roles.len() => {
                    bed.admit(self.roles[arrived].sequence(arrived as u64));
                    arrived += 1;
                }
                60..=79 if arrived > 0 => {
                    let id = u64::from(*event) % arrived as u64;
                    played.cancelled.push(id);
                    bed.cancel(id);
                }
                _ if bed.running.is_empty() && arrived == self.roles.len() => break,
                u8::MAX if bed.running.is_empty() => {
                    bed.admit(self.roles[arrived].sequence(arrived as u64));
                    arrived += 1;
                }
                _ if bed.running.is_empty() => {}
                _ => {
                    let plan = bed.running.pop_front().expect("a step was checked to be running");
                    seen -= 1;
                    let tokens = plan.rows.iter().map(|row| vec![self.chosen(row)]).collect();
                    bed.give(Input::Stepped(tokens));
                }
            }
            while seen < bed.running.len() {
                played.planned_ahead += usize::from(seen == 1);
                let plan = &bed.running[seen];
                self.check(plan, &previous);
                for scored in &plan.scored {
                    let of = played.scored.entry(scored.sequence.0).or_default();
                    assert_eq!(of.len() + 1, scored.first, "each token except the first is scored once, in order");
                    of.extend_from_slice(&scored.tokens);
                }
                previous = plan.rows.iter().map(|row| self.chosen(row)).collect();
                seen += 1;
            }
        }
        bed.assert_all_returned();
        for effect in bed.recorded() {
            if let Effect::Token(id, _) | Effect::Finished(id, _) = effect {
                played.recorded.entry(id.0).or_default().push(effect);
            }
        }
        played
    }

    fn chosen(&self, row: &ChosenRows) -> Option<u32> {
        self.roles[row.sequence.0 as usize].chosen(row.sequence.0, row.position)
    }

    /// Checks that each token passed to a step is the right one, even if the host has not seen it.
    fn check(&self, plan: &StepPlan, previous: &[Option<u32>]) {
        let batch = &plan.batch;
        assert!(batch.sequence_count() <= self.limits.sequences && batch.token_count() <= self.limits.step_tokens);
        let distinct: BTreeSet<_> = batch.slots.iter().collect();
        assert_eq!(distinct.len(), batch.slots.len(), "each token is written to a separate slot");
        for (part, id) in plan.parts.iter().enumerate() {
            let role = &self.roles[id.0 as usize];
            if let Some(row) = plan.rows.iter().find(|row| row.sequence == *id) {
                let unseen = row.unseen.map(|unseen| previous[unseen.row as usize]);
                assert!(unseen.is_none_or(|unseen| unseen == role.chosen(id.0, row.position - 1)), "{row:?}");
                assert!(unseen.is_none() || !role.is_formed, "a sequence with a grammar must see {row:?} first");
            }
            let prompt = role.sequence(id.0).tokens;
            let rows = batch.query_starts[part] as usize..batch.query_starts[part + 1] as usize;
            let first = batch.context_lengths[part] as usize - rows.len();
            for (place, row) in (first..).zip(rows) {
                let fed = match batch.tokens[row] {
                    InputToken::Unseen(unseen) => previous[unseen.row as usize],
                    InputToken::Known(id) => Some(id),
                };
                let stands = prompt.get(place).copied().map_or_else(|| role.chosen(id.0, place - prompt.len()), Some);
                assert_eq!(fed, stands, "token {place} of {id}");
            }
        }
    }
}

fn any_role() -> impl Strategy<Value = Role> {
    (1usize..60, 1usize..30, any::<[bool; 4]>(), 0usize..60, any::<bool>()).prop_map(
        |(prompt, tokens_max, [is_alike, is_drawn, is_formed, is_scored], ends_at, breaks)| {
            // Few sequences have a grammar, because a single sequence with a grammar delays all
            // other sequences.
            let is_formed = is_formed && ends_at % 3 == 0;
            Role { prompt, tokens_max, is_alike, is_drawn, is_formed, is_scored, ends_at, breaks }
        },
    )
}

fn any_script() -> impl Strategy<Value = Script> {
    let stage = (1usize..6, 0usize..40, 6usize..20);
    let roles = proptest::collection::vec(any_role(), 1..10);
    (stage, roles, proptest::collection::vec(0u8..250, 0..150)).prop_map(
        |((sequences, more, blocks), roles, events)| Script {
            limits: limits(sequences, sequences + more, blocks),
            roles,
            events,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tokens_are_the_same_with_and_without_look_ahead(script in any_script()) {
        let (with, without) = (script.play(Bed::ahead(script.limits)), script.play(Bed::new(script.limits)));
        prop_assert_eq!(without.planned_ahead, 0);
        for (id, role) in (0..).zip(&script.roles) {
            let effects = role.effects_of(id);
            let recorded = |played: &Played| played.recorded.get(&id).cloned().unwrap_or_default();
            if !with.cancelled.contains(&id) && !without.cancelled.contains(&id) {
                prop_assert_eq!(&recorded(&with), &recorded(&without), "sequence {}", id);
                prop_assert_eq!(recorded(&with), effects, "sequence {}", id);
                prop_assert_eq!(with.scored.get(&id), without.scored.get(&id));
            } else {
                prop_assert!(effects.starts_with(&recorded(&with)) && effects.starts_with(&recorded(&without)), "sequence {}", id);
            }
        }
    }
}
