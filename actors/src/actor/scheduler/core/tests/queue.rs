//! Tests of the queue's order: which sequence is next, which are preempted, and that no sequence
//! waits forever.

use std::{collections::BTreeSet, time::Duration};

use proptest::prelude::*;

use super::{admit::Losses, *};
use crate::{
    deadline::{Deadline, Deadlines},
    tenant::{Tenant, TenantWeights},
    token_interval::{MeasuredCosts, MeasuredStep, StepWork, TokenInterval},
};

fn urgent(id: u64, priority: i32, prompt: usize, tokens_max: usize) -> NewSequence {
    NewSequence {
        scheduling_params: SchedulingParams { priority, ..SchedulingParams::default() },
        ..sequence(id, prompt, tokens_max)
    }
}

impl Bed {
    fn ids(&self) -> [Vec<u64>; 2] {
        let waiting = self.scheduler.waiting.values().map(|s| s.id().0).collect();
        [waiting, self.scheduler.running.keys().map(|id| id.0).collect()]
    }

    /// Ends steps until no step is left. Returns the sequences in the order in which they ended.
    fn ends(&mut self) -> Vec<u64> {
        self.recorded();
        while !self.running.is_empty() {
            self.stepped(5);
        }
        let ended = self.recorded().into_iter().filter_map(|effect| match effect {
            Effect::Finished(id, _) => Some(id.0),
            _ => None,
        });
        ended.collect()
    }
}

#[test]
fn waiting_sequences_are_admitted_by_priority_then_age() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(urgent(1, i32::MIN, 3, 1));
    for (id, priority) in [(2, 0), (3, 5), (4, -1), (5, 0), (6, -1)] {
        bed.admit(urgent(id, priority, 3, 1));
    }
    assert_eq!(bed.ends(), [1, 4, 6, 2, 5, 3]);
    bed.assert_all_returned();
}

#[test]
fn every_eighth_admission_is_the_oldest_sequence_regardless_of_priority() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(urgent(1, -2, 3, 1)).admit(urgent(2, 9, 3, 1)).admit(urgent(3, 8, 3, 1));
    (4..40).for_each(|id| _ = bed.admit(urgent(id, -1, 3, 1)));
    let ended = bed.ends();
    let place = |id| ended.iter().position(|ended| *ended == id).expect("the sequence ended");
    assert_eq!(
        (place(2), place(3)),
        (1 + 7, 1 + 7 + 1 + 7),
        "every eighth admission is the oldest sequence; the seven others are the most urgent"
    );
}

#[test]
fn an_urgent_sequence_preempts_the_least_urgent_running_one() {
    let mut bed = Bed::new(limits(2, 64, 16));
    bed.admit(urgent(1, 3, 3, 9)).admit(urgent(2, 0, 3, 9)).stepped(5);
    bed.admit(urgent(3, 0, 3, 2)).stepped(5);
    assert_eq!((bed.ids(), bed.scheduler.preemptions().for_priority), ([vec![1], vec![2, 3]], 1));
    let recorded = bed.recorded();
    assert!(recorded.contains(&released(&[1])), "{recorded:?}");
    let ended = bed.ends();
    assert_eq!(ended, [3, 2, 1], "the first sequence continued when a slot was free");
    bed.assert_all_returned();
}

#[test]
fn an_urgent_sequence_preempts_the_fewest_sequences_that_suffice() {
    // By prediction, three sequences of four blocks and one sequence of three blocks run in 16
    // blocks.
    let waiting = |priority, prompt| {
        let mut bed = Bed::new(limits(8, 200, 16));
        (1..=3).for_each(|id| _ = bed.admit(urgent(id, id as i32, 40, 8)));
        bed.admit(urgent(4, 9, 20, 8)).stepped(5);
        bed.admit(urgent(5, priority, prompt, 8)).stepped(5);
        let [waiting, _] = bed.ids();
        bed.ends();
        bed.assert_all_returned();
        waiting
    };
    assert_eq!(waiting(0, 20), [4], "preempting the least urgent sequence is enough");
    assert_eq!(waiting(0, 60), [3], "preempting another sequence is enough, but preempting the least urgent is not");
    assert_eq!(waiting(0, 70), [3, 4], "both sequences must be preempted");
    assert_eq!(waiting(2, 130), [5], "preempting the two less urgent sequences would not be enough");
    assert_eq!(waiting(9, 20), [5], "sequences of equal priority are not preempted");
}

#[test]
fn a_sequence_is_preempted_for_priority_at_most_twice() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(urgent(1, 5, 3, 40)).stepped(5);
    for id in 2..=4 {
        bed.admit(urgent(id, 0, 3, 2));
        for _ in 0..6 {
            bed.stepped(5);
        }
    }
    assert_eq!((bed.ids(), bed.scheduler.preemptions().for_priority), ([vec![4], vec![1]], 2));
    assert_eq!(bed.ends(), [1, 4]);
    bed.assert_all_returned();
}

#[test]
fn no_sequence_is_preempted_for_priority_during_a_step() {
    let mut bed = Bed::ahead(limits(1, 64, 8));
    bed.admit(urgent(1, 5, 3, 40));
    assert_eq!(bed.running.len(), 2, "the next step is planned ahead");
    bed.admit(urgent(2, 0, 3, 2)).stepped(5);
    assert_eq!(
        (bed.ids(), bed.running.len()),
        ([vec![2], vec![1]], 1),
        "no step is planned ahead while a more urgent sequence waits"
    );
    bed.stepped(5);
    assert_eq!(bed.ids(), [vec![1], vec![2]]);
    assert_eq!(bed.ends(), [2, 1]);
    bed.assert_all_returned();
}

impl Bed {
    fn at(&mut self, milliseconds: u64) -> &mut Bed {
        self.give(Input::Now(Duration::from_millis(milliseconds)))
    }
}

fn until(id: u64, prompt: usize, left: Deadlines) -> NewSequence {
    NewSequence {
        scheduling_params: SchedulingParams { left, ..SchedulingParams::default() },
        ..sequence(id, prompt, 9)
    }
}

fn milliseconds(left: u64) -> Option<Duration> {
    Some(Duration::from_millis(left))
}

fn late(id: u64, deadline: Deadline) -> Effect {
    Effect::Late(SequenceId(id), deadline)
}

#[test]
fn a_sequence_past_its_queue_deadline_is_dropped_before_admission() {
    let mut bed = Bed::new(limits(1, 64, 8));
    let queue = |left| Deadlines { queue: milliseconds(left), ..Deadlines::default() };
    bed.at(1000).admit(sequence(1, 3, 2)).admit(until(2, 3, queue(50))).admit(until(3, 3, queue(51)));
    bed.recorded();
    bed.at(1050).stepped(5);
    assert_eq!(bed.recorded(), [token(1, 5)], "a sequence exactly at its deadline is in time");
    bed.at(1051).stepped(5);
    let recorded = bed.recorded();
    assert!(recorded.contains(&late(2, Deadline::Queue)), "{recorded:?}");
    assert!(!bed.scheduler.is_known(SequenceId(2)) && bed.running[0].parts == [SequenceId(3)]);
    bed.at(9999);
    assert_eq!(bed.ends(), [3], "the third sequence began before its deadline");
    bed.assert_all_returned();
}

#[test]
fn a_met_queue_deadline_does_not_apply_after_preemption() {
    let mut bed = Bed::new(limits(1, 64, 8));
    let left = Deadlines { queue: milliseconds(10), ..Deadlines::default() };
    let spec = until(1, 3, left);
    bed.admit(NewSequence {
        scheduling_params: SchedulingParams { priority: 1, ..spec.scheduling_params.clone() },
        ..spec
    })
    .stepped(5);
    bed.admit(urgent(2, 0, 3, 9)).at(500).stepped(5);
    assert_eq!(bed.ids(), [vec![1], vec![2]]);
    bed.at(600);
    assert_eq!(bed.ends(), [2, 1]);
}

#[test]
fn a_sequence_that_cannot_meet_its_deadline_is_not_begun() {
    let work = |prompt: usize, decoding: usize| {
        let mut work = StepWork::default();
        work.add_prompt(0, prompt);
        (0..decoding).for_each(|_| work.add_decoding(16));
        work
    };
    // Each token takes one millisecond.
    let steps = [(0, 1), (0, 8), (16, 1), (256, 1)].map(|(prompt, decoding)| MeasuredStep {
        work: work(prompt, decoding),
        micros: 1000 * (prompt + decoding) as u64,
    });
    let measured = MeasuredCosts { steps: steps.to_vec(), launches: Vec::new() };
    let token_interval = TokenInterval::new(milliseconds(33), &measured);
    let mut bed =
        Bed::of(SchedulerCore::new(limits(4, 256, 32)).with_token_interval(token_interval).without_look_ahead(), 1);
    let first = |left| Deadlines { first_token: milliseconds(left), ..Deadlines::default() };
    let reply = |left| Deadlines { reply: milliseconds(left), ..Deadlines::default() };
    bed.admit(until(1, 200, first(100))).admit(until(2, 200, first(300))).stepped(5);
    bed.admit(until(3, 200, reply(100)));
    // All blocks of this prompt except the last are shared with sequence 2.
    let begins_alike = NewSequence { id: SequenceId(4), ..until(2, 200, first(100)) };
    bed.admit(begins_alike).stepped(5);
    let recorded = bed.recorded();
    let is_late = |id| recorded.iter().find(|effect| matches!(effect, Effect::Late(of, _) if of.0 == id));
    assert_eq!(is_late(1), Some(&late(1, Deadline::FirstToken)));
    assert_eq!((is_late(2), is_late(3)), (None, Some(&late(3, Deadline::Reply))));
    assert_eq!(is_late(4), None, "most of the prompt is cached");
    assert_eq!(bed.ends().len(), 2);
    bed.assert_all_returned();
}

fn of_tenant(id: u64, tenant: &str, prompt: usize, tokens_max: usize) -> NewSequence {
    let scheduling_params = SchedulingParams { tenant: Tenant::new(tenant), ..SchedulingParams::default() };
    NewSequence { scheduling_params, ..sequence(id, prompt, tokens_max) }
}

/// Runs one sequence at a time: 60 of tenant `busy`, and from the tenth step on 20 of tenant
/// `calm`. Returns how many `calm` sequences are among the next 20 that end.
fn calm_beside_busy(weights: Option<TenantWeights>) -> usize {
    let scheduler = SchedulerCore::new(limits(1, 64, 8)).with_tenants(weights.unwrap_or_default());
    let mut bed = Bed::of(scheduler.without_look_ahead(), 1);
    (1..=60).for_each(|id| _ = bed.admit(of_tenant(id, "busy", 20, 1)));
    (0..10).for_each(|_| _ = bed.stepped(5));
    (101..=120).for_each(|id| _ = bed.admit(of_tenant(id, "calm", 20, 1)));
    let ended = bed.ends();
    bed.assert_all_returned();
    ended[..20].iter().filter(|id| **id > 100).count()
}

#[test]
fn waiting_tenants_share_steps_by_weight_without_credit_for_absence() {
    assert!(
        (9..=11).contains(&calm_beside_busy(None)),
        "calm gets half of the steps, although it sent no requests before"
    );
    let weights = TenantWeights::of([("calm", 3)]);
    assert!((14..=16).contains(&calm_beside_busy(weights)), "calm gets three quarters of the steps");
    let weights = TenantWeights::of([("busy", 1000)]);
    assert!(calm_beside_busy(weights) <= 2, "calm gets almost no steps");
}

#[test]
fn an_urgent_request_precedes_another_tenants_fair_share() {
    let mut bed = Bed::new(limits(1, 64, 8));
    bed.admit(of_tenant(1, "busy", 20, 9)).admit(of_tenant(2, "calm", 20, 1));
    let scheduling_params =
        SchedulingParams { priority: -1, tenant: Tenant::new("busy"), ..SchedulingParams::default() };
    bed.admit(NewSequence { scheduling_params, ..sequence(3, 20, 1) });
    assert_eq!(bed.ends(), [3, 1, 2], "the preempted sequence continues before the other tenant begins");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn counters_of_waiting_tenants_differ_within_a_bound(
        requests in proptest::collection::vec((0usize..3, 1usize..40, 1usize..20), 20..60),
        sequences in 1usize..4,
        looks_ahead in any::<bool>(),
    ) {
        let limits = limits(sequences, 48, 40);
        let mut bed = if looks_ahead { Bed::ahead(limits) } else { Bed::new(limits) };
        for (id, (tenant, prompt, reply)) in (1..).zip(&requests) {
            bed.admit(of_tenant(id, ["a", "b", "c"][*tenant], *prompt, *reply));
        }
        // The bound in the paper on fair serving (arXiv 2401.00588) is twice the larger of two
        // charges: the charge of one prompt, and the charge of all running replies. Serving the
        // oldest sequence out of order adds one prompt.
        let bound = 2 * (2 * 20 * sequences as u64).max(40) + 40;
        while !bed.running.is_empty() {
            let tenants = bed.scheduler.waiting.values().map(|s| s.spec.scheduling_params.tenant.clone());
            let tenants: BTreeSet<_> = tenants.collect();
            let counters = tenants.iter().map(|tenant| bed.scheduler.waiting.tenants.counter(tenant));
            let waiting: BTreeSet<_> = counters.collect();
            if let (Some(least), Some(most)) = (waiting.first(), waiting.last()) {
                let apart = (most - least) / u64::from(TenantWeights::WEIGHT_MAX);
                prop_assert!(apart <= bound, "the counters are {apart} tokens apart, at most {bound} are allowed");
            }
            bed.stepped(5);
        }
        bed.assert_all_returned();
    }
}

/// A request of a random run.
#[derive(Clone, Debug)]
struct Drawn {
    steps_before: usize,
    priority: i32,
    tenant: &'static str,
    prompt: usize,
    reply: usize,
    /// Steps until the caller disconnects.
    leaves: Option<usize>,
    /// Steps until the request's queue deadline.
    waits: Option<u64>,
    /// If set, the pool is resized after the request arrives. The number is reduced to the range
    /// between the smallest and the largest pool size.
    resize: Option<usize>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let scheduling_params = (-2i32..3, 0usize..3, proptest::option::weighted(0.1, 0u64..30));
    let size = (1usize..60, 1usize..60);
    let (leaves, resize) = (proptest::option::weighted(0.1, 0usize..30), proptest::option::weighted(0.2, 0usize..99));
    (0usize..4, scheduling_params, size, leaves, resize).prop_map(
        |(steps_before, (priority, tenant, waits), (prompt, reply), leaves, resize)| Drawn {
            steps_before,
            priority,
            tenant: ["", "a", "b"][tenant],
            prompt,
            reply,
            leaves,
            waits,
            resize,
        },
    )
}

/// Checks that hold for every run.
#[derive(Default)]
struct Watch {
    /// The oldest waiting sequence, and how many sequences were admitted since it became the
    /// oldest.
    oldest: Option<(SequenceId, usize)>,
    lost: Losses,
    ended: BTreeSet<SequenceId>,
    /// All effects of the scheduler, in order.
    trace: Vec<Effect>,
}

impl Watch {
    /// Checks the effects of one input.
    fn check(&mut self, bed: &mut Bed, before: &BTreeSet<SequenceId>) {
        let waiting: BTreeSet<_> = bed.scheduler.waiting.values().map(Sequence::id).collect();
        let admitted = before.difference(&waiting).filter(|id| bed.scheduler.running.contains_key(id)).count();
        let oldest = waiting.first().copied();
        self.oldest = match (self.oldest, oldest) {
            (Some((same, passed)), Some(oldest)) if same == oldest => Some((oldest, passed + admitted)),
            (_, oldest) => oldest.map(|oldest| (oldest, 0)),
        };
        assert!(self.oldest.is_none_or(|(_, passed)| passed <= 7 + 32), "{:?} was passed too often", self.oldest);
        for effect in bed.recorded() {
            match effect {
                Effect::Released(ids) => {
                    self.lost.note(bed, &ids);
                    self.trace.push(Effect::Released(ids));
                }
                Effect::Finished(id, _) | Effect::Late(id, _) => {
                    assert!(self.ended.insert(id), "{id} ends once");
                    self.trace.push(effect);
                }
                _ => self.trace.push(effect),
            }
        }
    }
}

fn run(requests: &[Drawn], limits: Limits, looks_ahead: bool) -> Watch {
    let mut bed = if looks_ahead { Bed::ahead(limits) } else { Bed::new(limits) };
    // The first replies end early, so that later replies are expected to be short.
    (100..104).for_each(|id| _ = bed.admit(sequence(id, 2, 40)));
    while !bed.running.is_empty() {
        bed.stepped(STOP);
    }
    bed.recorded();
    let mut watch = Watch::default();
    let mut leaves: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    let mut now = 0;
    let give = |bed: &mut Bed, watch: &mut Watch, input: Input| {
        let before = bed.scheduler.waiting.values().map(Sequence::id).collect::<BTreeSet<_>>();
        let before = match &input {
            Input::Admit(new) => before.into_iter().chain([new.id]).collect(),
            _ => before,
        };
        bed.give(input);
        watch.check(bed, &before);
    };
    let mut step = |bed: &mut Bed, watch: &mut Watch, leaves: &mut BTreeMap<usize, Vec<u64>>| {
        now += 1;
        bed.at(now as u64);
        for id in leaves.remove(&now).into_iter().flatten() {
            give(bed, watch, Input::Cancel(SequenceId(id)));
        }
        if let Some(plan) = bed.running.pop_front() {
            give(bed, watch, Input::Stepped(vec![vec![Some(5)]; plan.rows.len()]));
        }
        now
    };
    for (id, drawn) in (200..).zip(requests) {
        let mut at = 0;
        for _ in 0..=drawn.steps_before {
            at = step(&mut bed, &mut watch, &mut leaves);
        }
        if let Some(leaving) = drawn.leaves {
            leaves.entry(at + 1 + leaving).or_default().push(id);
        }
        let left = Deadlines { queue: drawn.waits.map(Duration::from_millis), ..Deadlines::default() };
        let scheduling_params = SchedulingParams { priority: drawn.priority, tenant: Tenant::new(drawn.tenant), left };
        let new = NewSequence { scheduling_params, ..sequence(id, drawn.prompt, drawn.reply) };
        give(&mut bed, &mut watch, Input::Admit(Box::new(new)));
        if let Some(resize) = drawn.resize {
            // The largest request needs 8 blocks.
            give(&mut bed, &mut watch, Input::Resize(8 + resize % (limits.kv_tokens / BLOCK_TOKENS - 7)));
        }
    }
    for steps in 0.. {
        assert!(steps < 30_000, "the run ends");
        if bed.running.is_empty() && leaves.is_empty() {
            break;
        }
        step(&mut bed, &mut watch, &mut leaves);
    }
    bed.assert_all_returned();
    watch
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn every_sequence_ends_without_starvation(
        requests in proptest::collection::vec(drawn(), 2..60),
        // The largest request needs 8 blocks.
        blocks in 9usize..14,
        sequences in 1usize..6,
        looks_ahead in any::<bool>(),
    ) {
        let limits = limits(sequences, 48, blocks);
        let watch = run(&requests, limits, looks_ahead);
        prop_assert_eq!(&watch.trace, &run(&requests, limits, looks_ahead).trace, "a second run has the same effects");
        let stay = (200..).zip(&requests).filter(|(_, drawn)| drawn.leaves.is_none());
        for (id, _) in stay {
            prop_assert!(watch.ended.contains(&SequenceId(id)), "{id} ends");
        }
    }
}
