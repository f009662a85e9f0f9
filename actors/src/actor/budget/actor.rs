//! The budget actor, which connects the pure ledger to messages, the device and the clock.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bursar_budgets::{
    Bytes, Class, Device, Effect, Gate, GateError, Holding, Input, Label, Lease, LeaseId, Ledger, LedgerConfig, Memory,
    Owner, Refusal, RequestId, Resized, Snapshot,
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::time::Instant;

use super::{
    BudgetMailbox, BudgetMessage, Lending, PressureBackoff, Regrowth, ResizeOrder, WatchOptions, gpus::Gpu, lease_sums,
    mailbox::Note,
};
use crate::{metric::DeviceLabel, responder::Responder};

mod effects;
mod probe;
mod show;

/// Interval at which fences are polled while at least one lease waits for a fence.
const FENCE_POLL: Duration = Duration::from_micros(500);

/// Keeps the ledger of one device.
pub struct BudgetActor;

/// Called when the budget finds that the device is lost.
pub type OnLoss = Box<dyn FnOnce() + Send>;

pub struct BudgetArguments {
    pub device: Arc<dyn Device>,
    /// Notes from leases, the table of live leases, and the current actor. The mailbox outlives
    /// this actor.
    pub mailbox: Arc<BudgetMailbox>,
    /// Total bytes of device and host memory.
    pub config: LedgerConfig,
    /// Bytes kept free on purpose. They are given up first when another process takes memory.
    pub canary: Bytes,
    /// Called once when the device is lost. `None` if no caller needs to know.
    pub on_loss: Option<OnLoss>,
    pub watch: WatchOptions,
}

pub struct BudgetState {
    ledger: Ledger,
    device: Arc<dyn Device>,
    mailbox: Arc<BudgetMailbox>,
    asked: BTreeMap<RequestId, Asked>,
    clearing: Vec<(Owner, Responder<()>)>,
    polling: bool,
    /// Called when the device is lost. `None` after the call.
    on_loss: Option<OnLoss>,
    watch: WatchOptions,
    regrowth: Regrowth,
    lending: Lending,
    /// Whether lending must be decided again: a model's demand has risen, a resize was requested,
    /// a probe ran, or borrowed memory must be returned.
    may_lend: bool,
    /// Bytes that this process held outside leases and overhead, at the last probe.
    drifted: Bytes,
    /// Memory of each GPU at the last probe.
    gpus: Vec<Gpu>,
    backoff: PressureBackoff,
    born: Instant,
    name: DeviceLabel,
    shown: Option<Shown>,
    all_shown: Option<Instant>,
}

/// The values last set on the ledger's gauges. They are compared after every message, and the
/// gauges are set again if a value has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shown {
    overhead: Bytes,
    foreign: Bytes,
    owed: Bytes,
    deficit: Bytes,
    canary: Bytes,
    canary_wanted: Bytes,
    host_total: Bytes,
    host_leased: Bytes,
    waiting: usize,
}

/// A request that the ledger has not answered yet.
struct Asked {
    /// Model, class and bytes of the request. `None` if the lease to be resized no longer exists.
    what: Option<(Label, Class, Bytes)>,
    since: Instant,
    asker: Asker,
}

enum Asker {
    Lease(Responder<Result<Lease, Refusal>>),
    Resize(Responder<Result<Resized, Refusal>>),
}

impl Asked {
    fn now(what: Option<(Label, Class, Bytes)>, asker: Asker) -> Self {
        Asked { what, since: Instant::now(), asker }
    }
}

impl Actor for BudgetActor {
    type Msg = BudgetMessage;
    type State = BudgetState;
    type Arguments = BudgetArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<BudgetMessage>,
        arguments: BudgetArguments,
    ) -> Result<BudgetState, ActorProcessingErr> {
        let BudgetArguments { device, mailbox, config, canary, on_loss, watch } = arguments;
        let live: Vec<_> = mailbox.leases().iter().map(|entry| entry.value().clone()).collect();
        mailbox.books().sums.recount(live.iter().cloned());
        let mut state = BudgetState {
            ledger: Ledger::rebuild(config, live),
            name: DeviceLabel::of(device.as_ref()),
            device,
            mailbox,
            asked: BTreeMap::new(),
            clearing: Vec::new(),
            polling: false,
            on_loss,
            watch,
            regrowth: Regrowth::new(watch.patience),
            lending: Lending::new(watch.every, watch.patience),
            may_lend: false,
            drifted: Bytes::ZERO,
            gpus: Vec::new(),
            backoff: PressureBackoff::default(),
            born: Instant::now(),
            shown: None,
            all_shown: None,
        };
        state.step(Input::Canary(canary));
        state.pick_up();
        // Measure before the first grant, because other processes may use this GPU.
        state.look_at_overhead();
        if let Some(memory) = state.measure()? {
            let drift = state.drift().filter(|_| !state.ledger.is_profiling());
            state.drifted = drift.unwrap_or_default();
            state.set_probe_gauges(memory, drift);
        }
        state.report_canary();
        state.mailbox.seat(myself.clone());
        // Reads notes that were posted while there was no actor.
        drop(myself.send_message(BudgetMessage::Notes));
        myself.send_after(watch.pause(None), || BudgetMessage::Probe);
        myself.send_after(watch.quick_check_pause(), || BudgetMessage::QuickCheck);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<BudgetMessage>,
        message: BudgetMessage,
        state: &mut BudgetState,
    ) -> Result<(), ActorProcessingErr> {
        // Account for memory that libraries have allocated since the last message before this
        // message is answered.
        state.look_at_overhead();
        match message {
            BudgetMessage::Ask { id, request, wait, reply } => {
                let what = (request.model.clone(), request.class.clone(), request.bytes);
                state.asked.insert(id, Asked::now(Some(what), Asker::Lease(reply)));
                state.step(Input::Ask { id, request, wait });
            }
            BudgetMessage::Resize { id, lease, to, wait, reply } => {
                let what = |holding: &Holding| (holding.model.clone(), holding.class.clone(), to);
                let what = state.ledger.holding(lease).map(what);
                state.asked.insert(id, Asked::now(what, Asker::Resize(reply)));
                state.may_lend = true;
                // Before an owner shrinks a lease, it shrinks the segment, which waits for the
                // fence of the segment's last use. That fence has therefore passed when the lease
                // shrinks.
                state.step(Input::Resize { id, lease, to, wait, passed: true });
            }
            BudgetMessage::Withdraw(id) => state.step(Input::Withdraw { id }),
            BudgetMessage::OwnerDied { owner, reply } => {
                state.clearing.push((owner.clone(), reply));
                state.step(Input::OwnerDied { owner: owner.clone() });
                // If the owner was already cleared, the ledger does not report `OwnerCleared`
                // again, so the message is answered here.
                state.answer_cleared();
            }
            BudgetMessage::Gate { model, to, reply } => {
                if to == Gate::Open {
                    // While a gate is open, the ledger ignores a decrease of foreign memory.
                    // Measure before the gate opens.
                    state.measure()?;
                }
                reply.answer(state.move_gate(model, to));
            }
            BudgetMessage::Available { is_leased, reply } => {
                if is_leased {
                    state.count_loaded_as_overhead();
                }
                state.measure()?;
                reply.answer(state.ledger.available(Memory::Device));
            }
            BudgetMessage::Measure(reply) => {
                // A model that is being sized may hold memory that it has not leased yet. The
                // answer counts that memory as foreign. The ledger must not, so the ledger is not
                // updated.
                let (memory, seen) =
                    if state.ledger.is_profiling() { state.seen()?.unzip() } else { (state.measure()?, None) };
                // The caller may have installed a metrics recorder since the last update. It
                // expects all gauges to be set when the answer arrives.
                state.all_shown = None;
                memory.into_iter().for_each(|memory| state.set_probe_gauges(memory, None));
                let ledger = state.snapshot();
                let more = seen.unwrap_or_default().saturating_sub(ledger.foreign);
                reply.answer(Snapshot {
                    foreign: ledger.foreign + more,
                    free: ledger.free.saturating_sub(more),
                    deficit: ledger.deficit + more.saturating_sub(ledger.free),
                    ..ledger
                });
            }
            BudgetMessage::Snapshot(reply) => reply.answer(state.snapshot()),
            BudgetMessage::Notes => {}
            BudgetMessage::Poll => state.polling = false,
            BudgetMessage::Probe => {
                state.probe()?;
                let since = state.backoff.since(state.born.elapsed());
                myself.send_after(state.watch.pause(since), || BudgetMessage::Probe);
            }
            BudgetMessage::QuickCheck => {
                if state.is_taken_from()? {
                    state.probe()?;
                }
                myself.send_after(state.watch.quick_check_pause(), || BudgetMessage::QuickCheck);
            }
            BudgetMessage::InjectFault(fault) => return Err(fault.inject().into()),
        }
        state.read_notes()?;
        state.look_at_fences();
        if std::mem::take(&mut state.may_lend) {
            state.lend();
            state.answer_cleared();
        }
        state.report_loss();
        state.show_changes();
        if state.mailbox.books().watch.waiting() > 0 && !state.polling {
            state.polling = true;
            myself.send_after(FENCE_POLL, || BudgetMessage::Poll);
        }
        Ok(())
    }
}

impl Drop for BudgetState {
    /// This actor may have read a `ReleaseNote` after the mailbox was closed. The memory of the
    /// released leases must still be returned.
    fn drop(&mut self) {
        self.mailbox.read_last_notes();
    }
}

impl BudgetState {
    /// Restores state from before a restart: the gates of models, the floors of elastic leases, and
    /// leases that were being returned.
    fn pick_up(&mut self) {
        let (gates, ending, last_lease, floors) = {
            let books = self.mailbox.books();
            let floors: BTreeMap<_, _> = books.elastic.iter().map(|(lease, elastic)| (*lease, elastic.floor)).collect();
            (books.gates.clone(), books.ending.clone(), books.last_lease, floors)
        };
        if let Some(last) = last_lease {
            self.ledger.number_leases_after(last);
        }
        let elastic = |holding: &Holding| holding.class.is_elastic().then_some(holding.id);
        let elastic: Vec<LeaseId> = self.mailbox.leases().iter().filter_map(|entry| elastic(entry.value())).collect();
        for lease in elastic {
            let to = floors.get(&lease).copied().unwrap_or(Bytes::MAX);
            self.step(Input::Floor { lease, to });
        }
        for (model, to) in gates {
            self.step(Input::Gate { model, to });
        }
        for lease in ending {
            // A lease that still waits for a fence is freed when the fence passes. All other leases
            // in `ending` have already returned their memory.
            let passed = !self.mailbox.books().watch.waits_for(lease);
            self.step(Input::Release { lease, passed });
        }
    }

    fn read_notes(&mut self) -> Result<(), ActorProcessingErr> {
        while let Some(note) = self.mailbox.take_note() {
            match note {
                Note::Segment(lease, revoker) => {
                    let watch = &mut self.mailbox.books().watch;
                    if self.ledger.holding(lease).is_none() || watch.is_being_released(lease) {
                        BudgetMailbox::revoke(revoker)
                    } else {
                        watch.segment_reserved(lease, revoker)
                    }
                }
                Note::AcceptsResizeOrders(lease, elastic) => self.resize_orders_accepted(lease, elastic),
                Note::KvDemand => self.may_lend = true,
                Note::Reclaimed(reclaim, outcome) => {
                    let lease = reclaim.lease();
                    match outcome {
                        // A lost device cannot take memory back. Count the memory as returned.
                        Err(error) if !error.is_lost() => {
                            self.mailbox.books().watch.requeue(reclaim);
                            return Err(error.into());
                        }
                        _ => self.arrive(lease),
                    }
                }
                Note::Released(note) => {
                    let lease = note.lease;
                    let passed = {
                        let mut books = self.mailbox.books();
                        books.ending.insert(lease);
                        books.watch.released(note)
                    };
                    self.step(Input::Release { lease, passed });
                    if self.ledger.holding(lease).is_none() {
                        self.mailbox.books().ending.remove(&lease);
                    }
                }
            }
        }
        Ok(())
    }

    fn look_at_fences(&mut self) {
        let due = self.mailbox.books().watch.due();
        for reclaim in due {
            if reclaim.is_light() {
                self.arrive(reclaim.lease());
            } else {
                // Returning memory to the device is slow, and all other actors wait for answers
                // from this actor, so another thread returns the memory.
                self.mailbox.reclaim_in_background(reclaim);
            }
        }
    }

    /// Records that none of this lease's memory is backed any more.
    fn arrive(&mut self, lease: LeaseId) {
        self.mailbox.books().watch.finish_release(lease);
        self.step(Input::FencePassed { lease });
    }

    /// Updates the ledger's overhead if this process uses more or less memory outside leases
    /// than the ledger knows.
    fn look_at_overhead(&mut self) {
        let overhead = self.device.overhead() + self.mailbox.books().outside_leases;
        if overhead != self.ledger.account(Memory::Device).overhead {
            self.step(Input::Overhead(overhead));
        }
    }

    /// Reports a lost device once. This actor keeps running so that leases of the lost device can
    /// still be returned. The runtime stops everything else.
    fn report_loss(&mut self) {
        if self.device.check().is_err()
            && let Some(tell) = self.on_loss.take()
        {
            tell();
        }
    }

    fn step(&mut self, input: Input) {
        for effect in self.ledger.step(input) {
            self.act(effect);
        }
    }

    /// Returns the ledger's snapshot, with one line per GPU if the device is a group.
    fn snapshot(&self) -> Snapshot {
        let gpus = if self.device.ranks().is_empty() { &[][..] } else { &self.gpus };
        Snapshot { cards: gpus.iter().map(Gpu::line).collect(), ..self.ledger.snapshot() }
    }

    fn move_gate(&mut self, model: Label, to: Gate) -> Result<(), GateError> {
        let mut outcome = Ok(());
        for effect in self.ledger.step(Input::Gate { model, to }) {
            match effect {
                Effect::GateStuck(error) => outcome = Err(error),
                effect => self.act(effect),
            }
        }
        outcome
    }

    /// Answers [`BudgetMessage::OwnerDied`] for each owner whose leases have all been returned. An
    /// answer waits until all borrowed memory that must be returned is back, so that the owner's
    /// successor finds that memory free.
    fn answer_cleared(&mut self) {
        if self.clearing.is_empty() {
            return;
        }
        let is_called = !self.lending.called(&self.mailbox.lendable()).is_zero();
        self.may_lend |= is_called;
        for (cleared, reply) in std::mem::take(&mut self.clearing) {
            if !is_called && self.ledger.is_cleared(&cleared) {
                reply.answer(())
            } else {
                self.clearing.push((cleared, reply))
            }
        }
    }
}
