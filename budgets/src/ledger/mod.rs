//! Pure: the state machine that knows every grant.

mod check;
mod effect;
mod input;
mod settle;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeBounds,
};

pub use effect::{Effect, Refusal, Refused};
pub use input::Input;

use crate::{
    Account, Admission, Bytes, Class, Gate, Grant, Holding, Label, LeaseId, LedgerConfig, Memory, Owner, Request,
    RequestId, Reservations, Resized, Waiting,
};

/// All leases of one device, and of the host memory that is leased with the device.
///
/// Pure: no I/O, clock or threads. The same inputs produce the same effects. Every step checks rule
/// 1 (`granted + overhead + foreign + canary <= total`) at its beginning and end, in release builds
/// too. Debug builds also recompute the sums on every step. Release builds recompute them about
/// once every N steps, where N is the number of leases. Rule 1 can be broken only between a
/// `Deficit` and the next `DeficitOver`, because overhead and other processes grow without asking
/// the ledger.
///
/// The canary is an account, not a lease. No owner has to return it, and no owner's death can leak
/// it: the step that needs the canary's bytes takes them. While part of the canary is missing, the
/// ledger grants none of the bytes that the canary needs, so the canary is restored first.
///
/// ```
/// use bursar_budgets::*;
/// let mut ledger = Ledger::new(LedgerConfig::new(Bytes::mib(512)));
/// ledger.step(Input::Canary(Bytes::mib(32)));
/// let request = Request::new(Owner::new("kv", 0), Class::Kv, "demo", Bytes::mib(500));
/// let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
/// let Effect::Refused(refused) = &effects[0] else { panic!("500 + 32 > 512") };
/// assert_eq!(refused.reason.hint().unwrap(), "ask for 20,971,520 B less, keep a smaller canary, or use a larger device");
/// ```
#[derive(Clone, Debug)]
pub struct Ledger {
    device: Account,
    host: Account,
    leases: BTreeMap<LeaseId, Entry>,
    /// Leases by owner, so that checking a claim reads only the leases of the claim's owner and its
    /// other generations.
    owners: BTreeMap<Owner, BTreeSet<LeaseId>>,
    next_lease: LeaseId,
    device_queue: Admission<RequestKind>,
    host_queue: Admission<RequestKind>,
    gates: BTreeMap<Label, GateState>,
    /// The latest generation of each name that is known to be dead.
    dead: BTreeMap<Label, u64>,
    /// Dead owners that still hold leases.
    clearing: BTreeSet<Owner>,
    /// The deficit that the last `Deficit` effect reported; 0 after `DeficitOver`.
    announced_deficit: Bytes,
    unaudited_steps: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) holding: Holding,
    pub(crate) state: State,
    /// The smallest size to which the owner can shrink the lease.
    floor: Bytes,
}

/// The progress of a lease from granted to freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Held,
    /// The lease is held, but its tail waits for a fence.
    Shrinking {
        to: Bytes,
        request: RequestId,
    },
    /// The lease has ended, and all of it waits for a fence.
    Revoking,
}

#[derive(Clone, Debug)]
pub(crate) enum RequestKind {
    New(Request),
    Grow { lease: LeaseId, to: Bytes },
}

/// A model's gate, and the bytes that each claimant held when the gate froze.
#[derive(Clone, Debug, Default)]
struct GateState {
    gate: Gate,
    reservations: Reservations,
}

/// A request for more bytes, with the fields that the gate checks.
struct Claim<'a> {
    owner: &'a Owner,
    class: &'a Class,
    model: &'a Label,
    more: Bytes,
}

impl Ledger {
    pub fn new(config: LedgerConfig) -> Ledger {
        let LedgerConfig { total, overhead, host_total, waiting_max } = config;
        Ledger {
            device: Account { total, overhead, ..Account::default() },
            host: Account { total: host_total, ..Account::default() },
            leases: BTreeMap::new(),
            owners: BTreeMap::new(),
            next_lease: LeaseId(1),
            device_queue: Admission::new(waiting_max),
            host_queue: Admission::new(waiting_max),
            gates: BTreeMap::new(),
            dead: BTreeMap::new(),
            clearing: BTreeSet::new(),
            announced_deficit: Bytes::ZERO,
            unaudited_steps: 0,
        }
    }

    /// Rebuilds the ledger of a restarted budget actor from the live leases. All gates are open, so
    /// the caller must freeze them again. The leases and `config.overhead` must fit `config.total`,
    /// or the next step panics. A step that then adds too much foreign memory or overhead reports a
    /// `Deficit`.
    pub fn rebuild(config: LedgerConfig, live: impl IntoIterator<Item = Holding>) -> Ledger {
        let mut ledger = Ledger::new(config);
        for holding in live {
            ledger.next_lease = ledger.next_lease.max(holding.id.next());
            if !holding.class.is_guest() {
                ledger.gates.entry(holding.model.clone()).or_default();
            }
            ledger.insert(holding);
        }
        ledger
    }

    /// Gives new leases numbers above `last`. A late release note for a lease that a previous
    /// ledger freed then matches no new lease.
    pub fn number_leases_after(&mut self, last: LeaseId) {
        self.next_lease = self.next_lease.max(last.next());
    }

    /// Applies one input and returns the resulting effects.
    pub fn step(&mut self, input: Input) -> Vec<Effect> {
        self.check_accounts();
        let mut effects = Vec::new();
        match input {
            Input::Ask { id, request, wait } => self.ask(id, request, wait, &mut effects),
            Input::Resize { id, lease, to, wait, passed } => {
                self.withdraw_growth(lease, Refusal::Withdrawn, &mut effects);
                match self.leases.get(&lease).filter(|entry| entry.state == State::Held).map(|e| e.holding.bytes) {
                    None => refuse(id, Refusal::NotHeld { lease }, &mut effects),
                    Some(bytes) if to > bytes => self.grow(id, lease, to, wait, &mut effects),
                    Some(_) => self.shrink(id, lease, to, passed, &mut effects),
                }
            }
            Input::Release { lease, passed } => self.release(lease, passed, &mut effects),
            Input::FencePassed { lease } => self.fence_passed(lease, &mut effects),
            Input::OwnerDied { owner } => self.owner_died(owner, &mut effects),
            Input::Withdraw { id } => {
                self.withdraw(|waiting| waiting.id == id, |_| Refusal::Withdrawn, &mut effects);
            }
            Input::Foreign(bytes) => {
                // Another process may take back the memory that it frees now. Memory sizes that a
                // starting model chose from the smaller value would then be too large.
                self.device.foreign = if self.is_profiling() { self.device.foreign.max(bytes) } else { bytes };
            }
            Input::Floor { lease, to } => {
                if let Some(entry) = self.leases.get_mut(&lease) {
                    entry.floor = to;
                }
            }
            Input::Remind { ahead } => self.remind(ahead, &mut effects),
            Input::Overhead(bytes) => self.device.overhead = bytes,
            Input::Canary(bytes) => self.device.canary_wanted = bytes,
            Input::Gate { model, to } => self.move_gate(model, to, &mut effects),
        }
        self.settle(&mut effects);
        self.check_accounts();
        self.audit_periodically();
        effects
    }

    pub fn account(&self, memory: Memory) -> &Account {
        match memory {
            Memory::Device => &self.device,
            Memory::Host => &self.host,
        }
    }

    /// The largest number of bytes that a request could get now if no other request were waiting.
    pub fn available(&self, memory: Memory) -> Bytes {
        self.account(memory).available()
    }

    /// A model's gate. The gate of an unknown model is open.
    pub fn gate(&self, model: &str) -> Gate {
        self.gates.get(model).map_or(Gate::Open, |post| post.gate)
    }

    /// Whether at least one model is being sized. A model is being sized while its gate is open.
    pub fn is_profiling(&self) -> bool {
        self.profiling() > 0
    }

    /// The number of models that are being sized.
    pub fn profiling(&self) -> usize {
        self.gates.values().filter(|post| post.gate == Gate::Open).count()
    }

    /// The number of requests that wait for this memory.
    pub fn waiting_for(&self, memory: Memory) -> usize {
        self.queue(memory).iter().count()
    }

    /// The bytes that the first waiting request asks for; 0 if no request waits.
    pub fn awaited(&self, memory: Memory) -> Bytes {
        self.queue(memory).iter().next().map_or(Bytes::ZERO, |waiting| waiting.bytes)
    }

    /// The data of a lease, until the lease is freed.
    pub fn holding(&self, lease: LeaseId) -> Option<&Holding> {
        self.leases.get(&lease).map(|entry| &entry.holding)
    }

    /// Whether this owner and its earlier generations hold nothing and can get no more grants. This
    /// is true from [`Effect::OwnerCleared`] on.
    pub fn is_cleared(&self, owner: &Owner) -> bool {
        self.dead.get(&owner.name).is_some_and(|dead| owner.generation <= *dead) && self.is_released(owner)
    }

    /// The sum of all leases of a name in all generations, including leases that wait for a fence.
    pub fn held_by(&self, name: &str) -> Bytes {
        let all = Owner::new(name, 0)..=Owner::new(name, u64::MAX);
        self.holdings_of(all).map(|holding| holding.bytes).sum()
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.leases.values()
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Waiting<RequestKind>> {
        self.device_queue.iter().chain(self.host_queue.iter())
    }

    pub(crate) fn gates(&self) -> impl Iterator<Item = (&Label, Gate)> {
        self.gates.iter().map(|(model, post)| (model, post.gate))
    }

    fn holdings(&self) -> impl Iterator<Item = &Holding> {
        self.entries().map(|entry| &entry.holding)
    }

    fn holdings_of(&self, owners: impl RangeBounds<Owner>) -> impl Iterator<Item = &Holding> {
        self.owners.range(owners).flat_map(|(_, leases)| leases).map(|lease| &self.leases[lease].holding)
    }

    /// Whether this owner and its earlier generations hold no lease.
    fn is_released(&self, owner: &Owner) -> bool {
        self.owners.range(owner.first()..=owner.clone()).next().is_none()
    }

    /// Adds a new lease to all maps and sums.
    fn insert(&mut self, holding: Holding) {
        let id = holding.id;
        self.account_mut(holding.class.memory()).granted += holding.bytes;
        self.owners.entry(holding.owner.clone()).or_default().insert(id);
        let twice = self.leases.insert(id, Entry { holding, state: State::Held, floor: Bytes::ZERO });
        assert!(twice.is_none(), "{id} is in the ledger only once");
    }

    /// Removes a lease from all maps and sums.
    fn remove(&mut self, lease: LeaseId) -> Holding {
        let holding = self.leases.remove(&lease).expect("the caller has found this lease").holding;
        self.account_mut(holding.class.memory()).granted -= holding.bytes;
        let left = self.owners.get_mut(&holding.owner).expect("the owner was added with the lease");
        left.remove(&lease);
        if left.is_empty() {
            self.owners.remove(&holding.owner);
        }
        holding
    }

    fn account_mut(&mut self, memory: Memory) -> &mut Account {
        match memory {
            Memory::Device => &mut self.device,
            Memory::Host => &mut self.host,
        }
    }

    fn queue(&self, memory: Memory) -> &Admission<RequestKind> {
        match memory {
            Memory::Device => &self.device_queue,
            Memory::Host => &self.host_queue,
        }
    }

    fn queue_mut(&mut self, memory: Memory) -> &mut Admission<RequestKind> {
        match memory {
            Memory::Device => &mut self.device_queue,
            Memory::Host => &mut self.host_queue,
        }
    }

    fn ask(&mut self, id: RequestId, request: Request, wait: bool, effects: &mut Vec<Effect>) {
        if let Err(reason) = self.check_claimant(&request) {
            return refuse(id, reason, effects);
        }
        if !request.class.is_guest() {
            // A model's first claim opens its gate.
            self.gates.entry(request.model.clone()).or_default();
        }
        let (memory, priority, bytes) = (request.class.memory(), request.priority, request.bytes);
        let waiting = Waiting { id, priority, bytes, kind: RequestKind::New(request) };
        self.fulfil_or_queue(memory, waiting, wait, effects);
    }

    /// Checks everything about a new lease except its size.
    fn check_claimant(&self, request: &Request) -> Result<(), Refusal> {
        let Request { owner, class, model, bytes, .. } = request;
        if *class == Class::Canary {
            return Err(Refusal::CanaryAsked);
        }
        if bytes.is_zero() {
            return Err(Refusal::Nothing);
        }
        if self.dead.get(&owner.name).is_some_and(|dead| owner.generation <= *dead) {
            return Err(Refusal::OwnerDead { owner: owner.clone() });
        }
        let earlier = owner.first()..owner.clone();
        if self.owners.range(earlier.clone()).next().is_some() {
            let held = self.holdings_of(earlier).map(|holding| holding.bytes).sum();
            return Err(Refusal::PredecessorHolds { owner: owner.clone(), held });
        }
        self.check_gate(Claim { owner, class, model, more: *bytes })
    }

    fn check_gate(&self, claim: Claim<'_>) -> Result<(), Refusal> {
        let Some(post) = self.gates.get(claim.model).filter(|post| post.gate != Gate::Open) else { return Ok(()) };
        let held: Bytes = self
            .holdings_of(claim.owner.first()..=Owner { generation: u64::MAX, ..claim.owner.clone() })
            .filter(|h| h.model == *claim.model && h.class == *claim.class)
            .map(|holding| holding.bytes)
            .sum();
        let asked = held.saturating_add(claim.more);
        let reserved = match (post.gate, post.reservations.reserved(claim.owner, claim.class)) {
            (Gate::Open, _) => return Ok(()),
            (Gate::Frozen, _) if claim.class.is_guest() => return Ok(()),
            (Gate::Frozen, Some(_)) if claim.class.is_elastic() => return Ok(()),
            (Gate::Frozen, Some(reserved)) if asked <= reserved => return Ok(()),
            (Gate::Frozen, reserved) => reserved.unwrap_or_default(),
            (Gate::Teardown, _) => Bytes::ZERO,
        };
        let (model, owner, class) = (claim.model.clone(), claim.owner.clone(), claim.class.clone());
        Err(Refusal::GateClosed { model, gate: post.gate, owner, class, reserved, asked })
    }

    fn grow(&mut self, id: RequestId, lease: LeaseId, to: Bytes, wait: bool, effects: &mut Vec<Effect>) {
        let holding = &self.leases[&lease].holding;
        let (memory, priority, more) = (holding.class.memory(), holding.priority, to - holding.bytes);
        let Holding { owner, class, model, .. } = holding;
        if let Err(reason) = self.check_gate(Claim { owner, class, model, more }) {
            return refuse(id, reason, effects);
        }
        let waiting = Waiting { id, priority, bytes: more, kind: RequestKind::Grow { lease, to } };
        self.fulfil_or_queue(memory, waiting, wait, effects);
    }

    fn fulfil_or_queue(
        &mut self,
        memory: Memory,
        waiting: Waiting<RequestKind>,
        wait: bool,
        effects: &mut Vec<Effect>,
    ) {
        let (account, id, asked) = (self.account(memory), waiting.id, waiting.bytes);
        let (available, attainable, size) = (account.available(), account.attainable(), waiting.kind.size());
        if let Some(short_by) = size.checked_sub(attainable).filter(|short| !short.is_zero()) {
            return refuse(id, Refusal::TooLarge { asked: size, attainable, short_by }, effects);
        }
        let ahead = self.queue_mut(memory).ahead_of(waiting.priority);
        if ahead == 0 && asked <= available {
            return self.fulfil(waiting, effects);
        }
        if !wait && asked > available {
            return refuse(id, Refusal::Short { asked, available, short_by: asked - available }, effects);
        }
        if !wait {
            return refuse(id, Refusal::Behind { asked, ahead }, effects);
        }
        effects.push(match self.queue_mut(memory).push(waiting) {
            Ok(ahead) => Effect::Waiting { request: id, ahead },
            Err(overloaded) => Effect::Refused(Refused { request: id, reason: Refusal::Overloaded(overloaded) }),
        });
    }

    fn fulfil(&mut self, waiting: Waiting<RequestKind>, effects: &mut Vec<Effect>) {
        match waiting.kind {
            RequestKind::New(request) => {
                let id = self.next_lease;
                self.next_lease = id.next();
                let holding = Holding::of(id, request);
                self.insert(holding.clone());
                effects.push(Effect::Granted(Grant { request: waiting.id, holding }));
            }
            RequestKind::Grow { lease, to } => self.set_size(waiting.id, lease, to, effects),
        }
    }

    fn shrink(&mut self, id: RequestId, lease: LeaseId, to: Bytes, passed: bool, effects: &mut Vec<Effect>) {
        let entry = self.leases.get_mut(&lease).expect("the caller has found this lease");
        if passed || to == entry.holding.bytes {
            self.set_size(id, lease, to, effects);
        } else {
            entry.state = State::Shrinking { to, request: id };
        }
    }

    fn set_size(&mut self, request: RequestId, lease: LeaseId, to: Bytes, effects: &mut Vec<Effect>) {
        let entry = self.leases.get_mut(&lease).expect("a lease that changes its size is in the ledger");
        let (from, memory) = (entry.holding.bytes, entry.holding.class.memory());
        (entry.holding.bytes, entry.state) = (to, State::Held);
        let account = self.account_mut(memory);
        account.granted = account.granted - from + to;
        effects.push(Effect::Resized(Resized { request, lease, from, to }));
    }

    fn move_gate(&mut self, model: Label, to: Gate, effects: &mut Vec<Effect>) {
        let known = self.gates.contains_key(&model);
        let held: Vec<Holding> = self.holdings().filter(|holding| holding.model == model).cloned().collect();
        let post = self.gates.entry(model.clone()).or_default();
        if !known && to == Gate::Open {
            return effects.push(Effect::GateMoved { model, to });
        }
        if let Err(error) = post.gate.check_move(&model, to, held.iter().map(|holding| holding.bytes).sum()) {
            return effects.push(Effect::GateStuck(error));
        }
        if post.gate == Gate::Teardown {
            // The model has returned its last byte, so its gate is removed. An open gate would make
            // the model count as profiling although the model is not starting.
            self.gates.remove(&model);
            return effects.push(Effect::GateMoved { model, to });
        }
        (post.gate, post.reservations) = (to, Reservations::default());
        if to == Gate::Frozen {
            for holding in &held {
                post.reservations.add(&holding.owner, &holding.class, holding.bytes);
            }
        }
        effects.push(Effect::GateMoved { model, to });
    }
}

impl RequestKind {
    /// The size that the lease would have.
    fn size(&self) -> Bytes {
        match self {
            RequestKind::New(request) => request.bytes,
            RequestKind::Grow { to, .. } => *to,
        }
    }
}

fn refuse(request: RequestId, reason: Refusal, effects: &mut Vec<Effect>) {
    effects.push(Effect::Refused(Refused { request, reason }));
}
