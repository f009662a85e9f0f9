//! Tests of which sequences are admitted, which wait and which lose blocks.

use proptest::prelude::*;

use super::*;

/// How often sequences lost their blocks.
#[derive(Debug, Default)]
pub(super) struct Losses {
    of: BTreeMap<SequenceId, usize>,
}

impl Losses {
    /// Counts the `released` sequences that have lost their blocks and wait.
    pub(super) fn note(&mut self, bed: &Bed, released: &[SequenceId]) {
        for id in released.iter().filter(|id| bed.scheduler.is_known(**id)) {
            let losses = self.of.entry(*id).or_default();
            *losses += 1;
            // A shrink takes the blocks in the tail, or leaves too few blocks for all sequences.
            let shrinks = bed.shrinks;
            assert!(*losses <= 2 + shrinks, "{id} lost its blocks {losses} times after {shrinks} shrinks");
        }
    }
}

/// Runs steps until sequence `id` has its first token. Returns how many steps that took.
fn until_first_token(bed: &mut Bed, id: u64, mut between: impl FnMut(&mut Bed, u64)) -> u64 {
    for steps in 0..10_000 {
        if bed.recorded().contains(&token(id, 5)) {
            return steps;
        }
        between(bed, steps);
        bed.stepped(5);
    }
    panic!("{id} starves");
}

#[test]
fn small_requests_overtake_one_that_does_not_fit_yet() {
    let mut bed = Bed::new(limits(8, 400, 24));
    bed.admit(sequence(1, 150, 50)).stepped(5);
    bed.admit(sequence(2, 250, 50)).admit(sequence(3, 20, 10));
    assert_eq!(bed.scheduler.counts(), (2, 1), "the third sequence waits while a step runs");
    bed.stepped(5);
    assert_eq!(
        bed.scheduler.waiting.values().map(Sequence::id).collect::<Vec<_>>(),
        [SequenceId(2)],
        "the small sequence is running"
    );
    while !bed.running.is_empty() {
        bed.stepped(5);
    }
    bed.assert_all_returned();
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    let mut bed = Bed::new(limits(8, 400, 24));
    bed.admit(sequence(1, 150, 60)).stepped(5);
    bed.admit(sequence(2, 300, 50));
    let small = |bed: &mut Bed, steps: u64| {
        bed.admit(sequence(3 + steps, 20, 10));
    };
    let steps = until_first_token(&mut bed, 2, small);
    assert!(steps < 150, "at most 32 small sequences pass, and each takes 10 steps: {steps}");
}

#[test]
fn no_sequence_overtakes_a_preempted_one() {
    let mut bed = Bed::new(limits(4, 64, 4));
    bed.admit(sequence(1, 2, 9)).stepped(STOP);
    bed.admit(sequence(2, 15, 40)).admit(sequence(3, 15, 40)).stepped(5);
    while !bed.recorded().contains(&released(&[3])) {
        bed.stepped(5);
    }
    bed.admit(sequence(4, 1, 1));
    (0..3).for_each(|_| _ = bed.stepped(5));
    assert!(bed.scheduler.waiting.contains(SequenceId(3)) && bed.scheduler.waiting.contains(SequenceId(4)));
}

#[test]
fn a_prefix_shared_with_a_running_sequence_counts_once() {
    // Two prompts of 97 tokens take 14 blocks, or 8 with a common beginning.
    let admitted = |second: NewSequence| {
        let mut bed = Bed::new(limits(4, 200, 12));
        bed.admit(alike(1, 97, 12)).stepped(5);
        bed.admit(second).stepped(5);
        bed.scheduler.counts().1
    };
    assert_eq!((admitted(alike(2, 97, 12)), admitted(sequence(2, 97, 12))), (2, 1));
}

#[test]
fn known_short_replies_let_admission_exceed_half_the_pool() {
    // There are 64 blocks. A sequence with a reply of 22 tokens takes 5 blocks in the end, and a
    // sequence with a reply of 400 tokens takes 28.
    let at_once = |known: u64| {
        let mut bed = Bed::new(limits(32, 512, 64));
        for id in 0..known {
            bed.admit(sequence(id, 48, 400));
            (0..21).for_each(|_| _ = bed.stepped(5));
            bed.stepped(STOP);
        }
        (100..109).for_each(|id| _ = bed.admit(sequence(id, 48, 400)));
        bed.stepped(5).stepped(5);
        (110..120).for_each(|id| _ = bed.admit(sequence(id, 48, 400)));
        bed.stepped(5).stepped(5);
        bed.scheduler.running.len()
    };
    assert_eq!(at_once(1), 9, "every sequence may run to its limit");
    assert_eq!(at_once(12), 11);
}

#[test]
fn prediction_errors_of_reply_lengths_are_recorded() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(sequence(1, 3, 20)).stepped(5).stepped(5).stepped(STOP);
    assert_eq!(bed.scheduler.take_prediction_errors(), [17], "without a prediction, the limit is expected");
    bed.admit(sequence(2, 3, 20)).stepped(5).stepped(STOP);
    assert_eq!(bed.scheduler.take_prediction_errors(), [1]);
    assert_eq!(bed.scheduler.take_prediction_errors(), [0; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn no_sequence_is_preempted_more_than_twice_except_by_shrinks(
        requests in proptest::collection::vec((0usize..6, 1usize..40, 1usize..60, proptest::option::weighted(0.3, 0usize..99)), 2..20),
        blocks in 7usize..12,
        looks_ahead in any::<bool>(),
    ) {
        // The first replies end early, so that later replies are expected to be short.
        let limits = limits(6, 48, blocks);
        let mut bed = if looks_ahead { Bed::ahead(limits) } else { Bed::new(limits) };
        (100..104).for_each(|id| _ = bed.admit(sequence(id, 2, 40)));
        while !bed.running.is_empty() {
            bed.stepped(STOP);
        }
        bed.recorded();
        let mut lost = Losses::default();
        let count = |bed: &mut Bed, lost: &mut Losses| {
            for effect in bed.recorded() {
                let Effect::Released(ids) = effect else { continue };
                lost.note(bed, &ids);
            }
        };
        for (id, (steps, prompt, reply, resize)) in (200..).zip(&requests) {
            for _ in 0..*steps {
                if !bed.running.is_empty() {
                    bed.stepped(5);
                }
                count(&mut bed, &mut lost);
            }
            bed.admit(sequence(id, *prompt, *reply));
            count(&mut bed, &mut lost);
            if let Some(resize) = resize {
                // The largest request needs 7 blocks.
                bed.give(Input::Resize(7 + resize % (blocks - 6)));
                count(&mut bed, &mut lost);
            }
        }
        for steps in 0.. {
            prop_assert!(steps < 20_000, "the run ends");
            if bed.running.is_empty() {
                break;
            }
            bed.stepped(5);
            count(&mut bed, &mut lost);
        }
        bed.assert_all_returned();
    }
}

#[test]
fn samples_of_one_prompt_are_admitted_where_unrelated_prompts_wait() {
    // The pool holds one prompt of 96 tokens and four replies, but not two prompts.
    let run = |group: Option<u64>| {
        let mut bed = Bed::new(limits(8, 128, 14));
        let sample = |id| match group {
            Some(_) => NewSequence { group, ..alike(id, 97, 12) },
            None => sequence(id, 97, 12),
        };
        bed.admit(sample(1)).stepped(5);
        bed.admit(sample(2)).admit(sample(3)).admit(sample(4)).stepped(5);
        bed.running.front().expect("a step").parts.len()
    };
    assert_eq!((run(Some(1)), run(None)), (4, 1));
}
