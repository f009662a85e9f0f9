//! Tests of the charges of tenants: each computed prompt token is charged once, whatever happens
//! to its sequence.

use proptest::prelude::*;

use super::*;
use crate::{
    deadline::{Deadline, Deadlines},
    tenant::{Tenant, TenantWeights},
};

const TENANTS: [&str; 2] = ["a", "b"];

fn of_tenant(tenant: &str, sequence: NewSequence) -> NewSequence {
    NewSequence {
        scheduling_params: SchedulingParams { tenant: Tenant::new(tenant), ..sequence.scheduling_params },
        ..sequence
    }
}

/// Tokens that the tenant was charged for. There must be two tenants, because the counter of a
/// single tenant always reads as 0.
fn charged(bed: &Bed, tenant: &str) -> u64 {
    bed.scheduler.waiting.tenants.counter(&Tenant::new(tenant)) / u64::from(TenantWeights::WEIGHT_MAX)
}

/// A scheduler in which a sequence of tenant `b` computes its prompt in several full steps.
/// Sequences of `a` that arrive later are therefore not in these steps.
fn busy() -> Bed {
    let mut bed = Bed::new(limits(4, 16, 32));
    bed.admit(of_tenant("b", sequence(1, 60, 1)));
    bed
}

#[test]
fn a_sequence_cancelled_before_its_first_step_is_not_charged() {
    let mut bed = busy();
    let queue = Some(Duration::from_millis(5));
    let late = NewSequence {
        scheduling_params: SchedulingParams {
            left: Deadlines { queue, ..Deadlines::default() },
            ..SchedulingParams::default()
        },
        ..sequence(3, 30, 1)
    };
    bed.admit(of_tenant("a", sequence(2, 20, 1))).admit(of_tenant("a", late)).stepped(5);
    assert_eq!((bed.scheduler.counts(), charged(&bed, "a")), ((0, 3), 50));
    bed.cancel(2).stepped(5);
    assert_eq!(charged(&bed, "a"), 30);
    bed.give(Input::Now(Duration::from_millis(6))).give(Input::Gathered);
    assert!(bed.recorded().contains(&Effect::Late(SequenceId(3), Deadline::Queue)));
    assert_eq!(charged(&bed, "a"), 0);
    bed.stepped(5).stepped(5);
    assert_eq!(charged(&bed, "b"), 60 + 2);
    bed.assert_all_returned();
}

#[test]
fn a_prompt_preempted_by_a_shrink_is_charged_once() {
    let mut bed = Bed::new(limits(4, 16, 8));
    bed.admit(of_tenant("b", sequence(1, 3, 1))).stepped(5);
    bed.admit(of_tenant("a", sequence(2, 40, 1))).stepped(5);
    let lifted = charged(&bed, "a") - 40;
    bed.give(Input::Resize(1)).stepped(5).give(Input::Resize(8));
    assert_eq!(bed.scheduler.preemptions().by_shrinks, 1);
    assert_eq!(charged(&bed, "a") - lifted, 40);
    while !bed.running.is_empty() {
        bed.stepped(5);
    }
    assert_eq!(charged(&bed, "a") - lifted, 40 + 2);
}

/// A request of a random run.
#[derive(Clone, Debug)]
struct Drawn {
    tenant: usize,
    priority: i32,
    prompt: usize,
    reply: usize,
    /// Whether the sequence begins like other sequences with this flag, so that it finds cached
    /// blocks.
    begins_alike: bool,
    /// The tokens of the request's picture, and whether cached blocks are expected to hold them.
    picture: Option<(usize, bool)>,
    /// Steps until the caller disconnects.
    leaves: Option<usize>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let what = (0usize..2, -1i32..2, 2usize..60, 1usize..40);
    let picture = proptest::option::weighted(0.4, (1usize..40, any::<bool>()));
    (what, any::<bool>(), picture, proptest::option::weighted(0.2, 0usize..30)).prop_map(
        |((tenant, priority, prompt, reply), begins_alike, picture, leaves)| Drawn {
            tenant,
            priority,
            prompt,
            reply,
            begins_alike,
            picture,
            leaves,
        },
    )
}

impl Drawn {
    /// The request's sequence, with the tokens that it has produced. A sequence that comes again
    /// has all rows of its pictures.
    fn sequence(&self, id: u64, produced: usize, comes_again: bool) -> NewSequence {
        let alike = if self.begins_alike { 7 } else { id };
        let mut spec =
            NewSequence { id: SequenceId(id), produced, ..sequence(alike, self.prompt + produced, self.reply) };
        if let Some((tokens, is_computed)) = self.picture {
            let end = tokens.clamp(1, self.prompt - 1);
            let rows: Vec<u32> = if is_computed && !comes_again { Vec::new() } else { (0..end as u32).collect() };
            let hash = PictureHash([alike as u8; 32]);
            spec.pictures =
                vec![Placeholder { cache_rows: rows.into(), content: ContentSpan { tokens: 0..end, hash } }];
        }
        spec.scheduling_params.priority = self.priority;
        of_tenant(TENANTS[self.tenant], spec)
    }
}

/// The requests of a run, and the expected charges of their tenants.
struct Account {
    requests: BTreeMap<u64, Drawn>,
    produced: BTreeMap<u64, usize>,
    /// Prompt tokens that were computed, for each sequence that has begun.
    computed: BTreeMap<u64, usize>,
    /// The amounts by which the counters rose when requests arrived again.
    lifted: [u64; 2],
    readmit: usize,
}

impl Account {
    /// Processes the effects of one input, and admits sequences again that were sent back.
    fn settle(&mut self, bed: &mut Bed) {
        loop {
            let mut returning = Vec::new();
            for effect in bed.recorded() {
                match effect {
                    Effect::Begun(id, found) => {
                        _ = self.computed.entry(id.0).or_insert_with(|| self.requests[&id.0].prompt - found)
                    }
                    Effect::Token(id, _) => *self.produced.entry(id.0).or_default() += 1,
                    Effect::Readmit(id) => returning.push(id.0),
                    _ => {}
                }
            }
            self.check(bed);
            if returning.is_empty() {
                return;
            }
            for id in returning {
                self.readmit += 1;
                let tenant = self.requests[&id].tenant;
                let counter = |bed: &Bed| bed.scheduler.waiting.tenants.counter(&Tenant::new(TENANTS[tenant]));
                let before = counter(bed);
                let produced = self.produced.get(&id).copied().unwrap_or(0);
                bed.scheduler.arrive(self.requests[&id].sequence(id, produced, true));
                self.lifted[tenant] += counter(bed) - before;
            }
            bed.give(Input::Gathered);
        }
    }

    fn check(&self, bed: &Bed) {
        for (tenant, name) in TENANTS.iter().enumerate() {
            let of_tenant = || self.requests.iter().filter(|(_, drawn)| drawn.tenant == tenant).map(|(id, _)| id);
            let computed: usize = of_tenant().filter_map(|id| self.computed.get(id)).sum();
            let replies: usize = of_tenant().filter_map(|id| self.produced.get(id)).sum();
            // Sequences that run and have had no step yet.
            let open = of_tenant().filter(|id| !self.computed.contains_key(id) && !self.produced.contains_key(id));
            let open: usize = open.filter_map(|id| bed.scheduler.running.get(&SequenceId(*id))).map(|s| s.prompt).sum();
            let parts = (computed + 2 * replies + open) as u64 * u64::from(TenantWeights::WEIGHT_MAX);
            assert_eq!(
                bed.scheduler.waiting.tenants.counter(&Tenant::new(*name)),
                parts + self.lifted[tenant],
                "the counter of {name}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn tenants_are_charged_once_for_their_computed_tokens(
        requests in proptest::collection::vec(drawn(), 2..30),
        // The largest request needs 7 blocks.
        blocks in 8usize..14,
        sizes in proptest::collection::vec(proptest::option::weighted(0.2, 0usize..99), 1..60),
        looks_ahead in any::<bool>(),
    ) {
        let limits = limits(4, 24, blocks);
        let mut bed = if looks_ahead { Bed::ahead(limits) } else { Bed::new(limits) };
        bed.hears_all = true;
        let requests: BTreeMap<u64, Drawn> = (10..).zip(requests).collect();
        for (id, drawn) in &requests {
            bed.scheduler.arrive(drawn.sequence(*id, 0, false));
        }
        // Both tenants are registered, because the counter of a single tenant always reads as 0.
        TENANTS.iter().for_each(|name| bed.scheduler.waiting.tenants.arrive(&Tenant::new(*name), std::iter::empty()));
        let mut account = Account {
            requests,
            produced: BTreeMap::new(),
            computed: BTreeMap::new(),
            lifted: [0; 2],
            readmit: 0,
        };
        bed.give(Input::Gathered);
        account.settle(&mut bed);
        for step in 0.. {
            prop_assert!(step < 20_000, "the run ends");
            let leaving = account.requests.iter().filter(|(_, drawn)| drawn.leaves == Some(step)).map(|(id, _)| *id);
            for id in leaving.collect::<Vec<_>>() {
                bed.cancel(id);
                account.settle(&mut bed);
            }
            if let Some(Some(size)) = sizes.get(step) {
                bed.give(Input::Resize(7 + size % (blocks - 6)));
                account.settle(&mut bed);
            }
            if bed.running.is_empty() {
                break;
            }
            bed.stepped(5);
            account.settle(&mut bed);
        }
        bed.assert_all_returned();
    }
}
