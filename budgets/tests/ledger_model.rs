//! Comparison of the ledger with a naive model, over thousands of random histories.

use std::collections::{BTreeMap, BTreeSet};

use bursar_budgets::*;
use proptest::prelude::*;

const NAMES: [&str; 3] = ["vision", "kv", "index"];
const TOTAL: u64 = 1000;
const HOST_TOTAL: u64 = 300;
const WAITING_MAX: usize = 4;

/// One event. A lease or request is selected by a number modulo the count of leases or requests.
#[derive(Clone, Debug)]
enum Op {
    Ask { name: usize, class: usize, bytes: u64, priority: usize, wait: bool },
    Resize { pick: usize, to: u64, wait: bool, passed: bool },
    Release { pick: usize, passed: bool },
    FencePassed { pick: usize },
    Die { name: usize },
    Withdraw { pick: usize },
    Foreign(u64),
    Overhead(u64),
    Canary(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let ask = (0..3usize, 0..4usize, 0..500u64, 0..3usize, any::<bool>())
        .prop_map(|(name, class, bytes, priority, wait)| Op::Ask { name, class, bytes, priority, wait });
    let resize = (any::<usize>(), 0..600u64, any::<bool>(), any::<bool>())
        .prop_map(|(pick, to, wait, passed)| Op::Resize { pick, to, wait, passed });
    let one = prop_oneof![
        8 => ask,
        4 => resize,
        4 => (any::<usize>(), any::<bool>()).prop_map(|(pick, passed)| Op::Release { pick, passed }),
        5 => any::<usize>().prop_map(|pick| Op::FencePassed { pick }),
        2 => (0..3usize).prop_map(|name| Op::Die { name }),
        1 => any::<usize>().prop_map(|pick| Op::Withdraw { pick }),
        2 => (0..700u64).prop_map(Op::Foreign),
        1 => (0..200u64).prop_map(Op::Overhead),
        1 => (0..200u64).prop_map(Op::Canary),
    ];
    proptest::collection::vec(one, 1..60)
}

fn class_of(number: usize) -> Class {
    [Class::Kv, Class::VisionCache, Class::external("index"), Class::Host][number].clone()
}

fn priority_of(number: usize) -> Priority {
    [Priority::Background, Priority::Serving, Priority::Startup][number]
}

/// An effect of a step, reduced to what the naive model can predict.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    Yes(u64),
    No(u64),
    Later(u64),
    Freed(u64, u64),
    Cleared(String, u64),
    Canary(u64),
    Short(u64),
}

fn outcome_of(effect: &Effect, canary: u64) -> Option<Outcome> {
    Some(match effect {
        Effect::Granted(grant) => Outcome::Yes(grant.request().0),
        Effect::Resized(resized) => Outcome::Yes(resized.request().0),
        Effect::Refused(refused) => Outcome::No(refused.request.0),
        Effect::Waiting { request, .. } => Outcome::Later(request.0),
        Effect::Freed { lease, bytes } => Outcome::Freed(lease.0, bytes.0),
        Effect::OwnerCleared { owner } => Outcome::Cleared(owner.name.to_string(), owner.generation),
        Effect::CanaryGiven { bytes } => Outcome::Canary(canary - bytes.0),
        Effect::CanaryTaken { bytes } => Outcome::Canary(canary + bytes.0),
        Effect::Deficit { short_by, .. } => Outcome::Short(short_by.0),
        Effect::DeficitOver => Outcome::Short(0),
        Effect::Revoking { .. } | Effect::GiveUp { .. } | Effect::GateMoved { .. } | Effect::GateStuck(_) => {
            return None;
        }
    })
}

#[derive(Clone, Debug)]
struct NaiveLease {
    id: u64,
    name: usize,
    generation: u64,
    host: bool,
    priority: Priority,
    bytes: u64,
    /// The smaller size that the lease gets after a fence, and the number of the request that asked
    /// for the shrink.
    shrinks: Option<(u64, u64)>,
    ends: bool,
}

#[derive(Clone, Debug)]
struct NaiveRequest {
    id: u64,
    host: bool,
    priority: Priority,
    more: u64,
    /// For a new lease: the index of its owner's name, and the owner's generation.
    new_for: Option<(usize, u64)>,
    /// For a lease that grows: its number and new size.
    grows: Option<(u64, u64)>,
}

/// The rules of the ledger, implemented as simple loops.
#[derive(Clone, Debug, Default)]
struct Naive {
    leases: Vec<NaiveLease>,
    waiting: Vec<NaiveRequest>,
    next: u64,
    foreign: u64,
    overhead: u64,
    canary: u64,
    wanted: u64,
    short: u64,
    profiling: bool,
    dying: Vec<(usize, u64)>,
    outcomes: Vec<Outcome>,
}

impl Naive {
    fn granted(&self, host: bool) -> u64 {
        self.leases.iter().filter(|lease| lease.host == host).map(|lease| lease.bytes).sum()
    }

    fn available(&self, host: bool) -> u64 {
        if host {
            HOST_TOTAL - self.granted(true)
        } else {
            TOTAL.saturating_sub(self.granted(false) + self.foreign + self.overhead + self.wanted)
        }
    }

    fn attainable(&self, host: bool) -> u64 {
        if host { HOST_TOTAL } else { TOTAL.saturating_sub(self.overhead + self.wanted) }
    }

    fn size(&self, request: &NaiveRequest) -> u64 {
        request.grows.map_or(request.more, |(_, to)| to)
    }

    fn request(&mut self, request: NaiveRequest, wait: bool) {
        if self.size(&request) > self.attainable(request.host) {
            return self.outcomes.push(Outcome::No(request.id));
        }
        let others = self.waiting.iter().filter(|other| other.host == request.host);
        let (mut ahead, mut all) = (0, 0);
        for other in others {
            all += 1;
            ahead += usize::from(other.priority >= request.priority);
        }
        if ahead == 0 && request.more <= self.available(request.host) {
            self.fulfil(request);
        } else if !wait || all >= WAITING_MAX {
            self.outcomes.push(Outcome::No(request.id));
        } else {
            self.outcomes.push(Outcome::Later(request.id));
            self.waiting.push(request);
        }
    }

    fn fulfil(&mut self, request: NaiveRequest) {
        self.outcomes.push(Outcome::Yes(request.id));
        if let Some((lease, to)) = request.grows {
            self.lease(lease).unwrap().bytes = to;
        }
        if let Some((name, generation)) = request.new_for {
            self.next += 1;
            let NaiveRequest { host, priority, more, .. } = request;
            let id = self.next;
            self.leases.push(NaiveLease {
                id,
                name,
                generation,
                host,
                priority,
                bytes: more,
                shrinks: None,
                ends: false,
            });
        }
    }

    fn lease(&mut self, id: u64) -> Option<&mut NaiveLease> {
        self.leases.iter_mut().find(|lease| lease.id == id)
    }

    /// Refuses the waiting requests for which `leaves` is true, in the order of service.
    fn refuse(&mut self, leaves: impl Fn(&NaiveRequest) -> bool) {
        while let Some(place) = self.in_order().into_iter().find(|place| leaves(&self.waiting[*place])) {
            let request = self.waiting.remove(place);
            self.outcomes.push(Outcome::No(request.id));
        }
    }

    /// Indices of the waiting requests in the order of service: device before host, high priority
    /// before low, old before new.
    fn in_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.waiting.len()).collect();
        order.sort_by_key(|place| {
            let request = &self.waiting[*place];
            (request.host, std::cmp::Reverse(request.priority), *place)
        });
        order
    }

    fn end(&mut self, id: u64) {
        let lease = self.lease(id).unwrap();
        lease.ends = true;
        if let Some((_, question)) = lease.shrinks.take() {
            self.outcomes.push(Outcome::No(question));
        }
        self.refuse(|request| request.grows.is_some_and(|(lease, _)| lease == id));
    }

    fn free(&mut self, id: u64) {
        let place = self.leases.iter().position(|lease| lease.id == id).unwrap();
        let lease = self.leases.remove(place);
        self.outcomes.push(Outcome::Freed(id, lease.bytes));
    }

    fn settle(&mut self) {
        for (name, generation) in std::mem::take(&mut self.dying) {
            if self.leases.iter().any(|lease| lease.name == name && lease.generation <= generation) {
                self.dying.push((name, generation));
            } else {
                self.outcomes.push(Outcome::Cleared(NAMES[name].into(), generation));
            }
        }
        let spent = self.granted(false) + self.foreign + self.overhead;
        let before = self.canary;
        self.canary = if spent + self.wanted <= TOTAL {
            self.wanted
        } else if spent + self.canary.min(self.wanted) <= TOTAL {
            self.canary.min(self.wanted)
        } else {
            0
        };
        if self.canary != before {
            self.outcomes.push(Outcome::Canary(self.canary));
        }
        let short = (spent + self.canary).saturating_sub(TOTAL);
        if short != self.short {
            self.short = short;
            self.outcomes.push(Outcome::Short(short));
        }
        for host in [false, true] {
            let attainable = self.attainable(host);
            self.refuse(|request| {
                request.host == host && request.grows.map_or(request.more, |(_, to)| to) > attainable
            });
            while let Some(place) = self.in_order().into_iter().find(|place| self.waiting[*place].host == host) {
                if self.waiting[place].more > self.available(host) {
                    break;
                }
                let request = self.waiting.remove(place);
                self.fulfil(request);
            }
        }
    }
}

/// The ledger and the naive model, with the state that a runtime would keep.
struct Life {
    ledger: Ledger,
    naive: Naive,
    generations: [u64; 3],
    questions: u64,
    open: BTreeSet<u64>,
    trace: Vec<Effect>,
}

impl Life {
    fn new() -> Life {
        let config =
            LedgerConfig { host_total: Bytes(HOST_TOTAL), waiting_max: WAITING_MAX, ..LedgerConfig::new(Bytes(TOTAL)) };
        Life {
            ledger: Ledger::new(config),
            naive: Naive::default(),
            generations: [0; 3],
            questions: 0,
            open: BTreeSet::new(),
            trace: Vec::new(),
        }
    }

    fn question(&mut self) -> u64 {
        self.questions += 1;
        self.open.insert(self.questions);
        self.questions
    }

    fn play(&mut self, op: &Op) {
        let canary = self.naive.canary;
        let Some(input) = self.input(op) else { return };
        self.naive.settle();
        let effects = self.ledger.step(input);
        let outcomes: Vec<Outcome> = effects.iter().filter_map(|effect| outcome_of(effect, canary)).collect();
        assert_eq!(outcomes, std::mem::take(&mut self.naive.outcomes), "after {op:?}");
        for effect in &effects {
            if let Some(Outcome::Yes(id) | Outcome::No(id)) = outcome_of(effect, canary) {
                assert!(self.open.remove(&id), "request {id} is answered twice");
            }
        }
        self.compare();
        self.trace.extend(effects);
    }

    fn compare(&self) {
        let (seen, naive) = (self.ledger.snapshot(), &self.naive);
        let spent = seen.granted + seen.overhead + seen.foreign + seen.canary;
        assert_eq!(seen.deficit, spent.saturating_sub(seen.total));
        assert_eq!(seen.free, seen.total.saturating_sub(spent));
        assert_eq!((seen.granted.0, seen.host_granted.0), (naive.granted(false), naive.granted(true)));
        assert_eq!((seen.canary.0, seen.canary_wanted.0, seen.foreign.0), (naive.canary, naive.wanted, naive.foreign));
        let leases: Vec<_> = seen.leases.iter().map(|lease| (lease.id.0, lease.bytes.0)).collect();
        assert_eq!(leases, naive.leases.iter().map(|lease| (lease.id, lease.bytes)).collect::<Vec<_>>());
        let waiting: Vec<_> = seen.waiting.iter().map(|request| request.request.0).collect();
        assert_eq!(waiting, naive.in_order().into_iter().map(|place| naive.waiting[place].id).collect::<Vec<_>>());
        // Every request is answered. A request is open only if it is waiting, or if a
        // fence will answer it.
        let shrinks = naive.leases.iter().filter_map(|lease| Some(lease.shrinks?.1));
        assert_eq!(self.open, waiting.into_iter().chain(shrinks).collect());
    }

    /// Applies an event to the naive model. Returns the ledger's input, or `None` if the
    /// event does not apply.
    fn input(&mut self, op: &Op) -> Option<Input> {
        let leases = self.naive.leases.len();
        let picked = |pick: usize, naive: &Naive| naive.leases[pick % leases].id;
        Some(match *op {
            Op::Ask { name, class, bytes, priority, wait } => {
                let id = self.question();
                let (generation, priority) = (self.generations[name], priority_of(priority));
                let class = class_of(class);
                let host = class == Class::Host;
                let early = self.naive.leases.iter().any(|lease| lease.name == name && lease.generation < generation);
                if bytes == 0 || early {
                    self.naive.outcomes.push(Outcome::No(id));
                } else {
                    self.naive.profiling |= !class.is_guest();
                    let new_for = Some((name, generation));
                    self.naive.request(NaiveRequest { id, host, priority, more: bytes, new_for, grows: None }, wait);
                }
                let owner = Owner::new(NAMES[name], generation);
                let request = Request::new(owner, class, "demo", Bytes(bytes)).priority(priority);
                Input::Ask { id: RequestId(id), request, wait }
            }
            Op::Resize { pick, to, wait, passed } if leases > 0 => {
                let (id, lease) = (self.question(), picked(pick, &self.naive));
                self.naive.refuse(|request| request.grows.is_some_and(|(of, _)| of == lease));
                let held = self.naive.lease(lease).unwrap();
                let NaiveLease { host, priority, bytes, .. } = *held;
                if held.ends || held.shrinks.is_some() {
                    self.naive.outcomes.push(Outcome::No(id));
                } else if to > bytes {
                    let grows = Some((lease, to));
                    self.naive
                        .request(NaiveRequest { id, host, priority, more: to - bytes, new_for: None, grows }, wait);
                } else if passed || to == bytes {
                    held.bytes = to;
                    self.naive.outcomes.push(Outcome::Yes(id));
                } else {
                    held.shrinks = Some((to, id));
                }
                Input::Resize { id: RequestId(id), lease: LeaseId(lease), to: Bytes(to), wait, passed }
            }
            Op::Release { pick, passed } if leases > 0 => {
                let lease = picked(pick, &self.naive);
                if !self.naive.lease(lease).unwrap().ends {
                    self.naive.end(lease);
                    if passed {
                        self.naive.free(lease);
                    }
                }
                Input::Release { lease: LeaseId(lease), passed }
            }
            Op::FencePassed { pick } if leases > 0 => {
                let lease = picked(pick, &self.naive);
                let held = self.naive.lease(lease).unwrap();
                if held.ends {
                    self.naive.free(lease);
                } else if let Some((to, id)) = held.shrinks.take() {
                    held.bytes = to;
                    self.naive.outcomes.push(Outcome::Yes(id));
                }
                Input::FencePassed { lease: LeaseId(lease) }
            }
            Op::Die { name } => {
                let generation = self.generations[name];
                self.generations[name] += 1;
                self.naive.refuse(|request| request.new_for.is_some_and(|(of, _)| of == name));
                let of_name = |lease: &&NaiveLease| lease.name == name && !lease.ends;
                for lease in self.naive.leases.iter().filter(of_name).map(|lease| lease.id).collect::<Vec<_>>() {
                    self.naive.end(lease);
                }
                self.naive.dying.push((name, generation));
                self.naive.dying.sort_by_key(|(name, generation)| (NAMES[*name], *generation));
                Input::OwnerDied { owner: Owner::new(NAMES[name], generation) }
            }
            Op::Withdraw { pick } if self.questions > 0 => {
                let id = 1 + pick as u64 % self.questions;
                self.naive.refuse(|request| request.id == id);
                Input::Withdraw { id: RequestId(id) }
            }
            Op::Foreign(bytes) => {
                let kept = if self.naive.profiling { self.naive.foreign } else { 0 };
                self.naive.foreign = kept.max(bytes);
                Input::Foreign(Bytes(bytes))
            }
            Op::Overhead(bytes) => {
                self.naive.overhead = bytes;
                Input::Overhead(Bytes(bytes))
            }
            Op::Canary(bytes) => {
                self.naive.wanted = bytes;
                Input::Canary(Bytes(bytes))
            }
            _ => return None,
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_agrees_with_the_naive_model(ops in ops()) {
        let mut life = Life::new();
        ops.iter().for_each(|op| life.play(op));
    }

    #[test]
    fn the_same_inputs_give_the_same_trace(ops in ops()) {
        let (mut one, mut other) = (Life::new(), Life::new());
        ops.iter().for_each(|op| one.play(op));
        ops.iter().for_each(|op| other.play(op));
        prop_assert_eq!(one.trace, other.trace);
        prop_assert_eq!(one.ledger.snapshot(), other.ledger.snapshot());
    }

    #[test]
    fn all_bytes_of_dead_owners_are_freed_after_their_fences(ops in ops()) {
        let mut life = Life::new();
        ops.iter().for_each(|op| life.play(op));
        (0..3).for_each(|name| life.play(&Op::Die { name }));
        let mut held: BTreeMap<u64, Bytes> = BTreeMap::new();
        for lease in life.ledger.snapshot().leases {
            held.insert(lease.id.0, lease.bytes);
        }
        let before = life.trace.len();
        while !life.naive.leases.is_empty() {
            life.play(&Op::FencePassed { pick: 0 });
        }
        for effect in &life.trace[before..] {
            if let Effect::Freed { lease, bytes } = effect {
                prop_assert_eq!(held.remove(&lease.0), Some(*bytes));
            }
        }
        prop_assert!(held.is_empty());
        prop_assert_eq!(life.ledger.snapshot().granted, Bytes::ZERO);
        prop_assert!(life.naive.dying.is_empty());
        let cleared = life.trace.iter().filter_map(|effect| match effect {
            Effect::OwnerCleared { owner } => Some(owner.clone()),
            _ => None,
        });
        let (mut seen, mut count) = (BTreeSet::new(), 0);
        cleared.for_each(|owner| { seen.insert(owner); count += 1; });
        prop_assert_eq!(seen.len(), count, "an owner is cleared once");
        prop_assert_eq!(count as u64, life.generations.iter().sum::<u64>(), "every dead owner is cleared");
    }
}
