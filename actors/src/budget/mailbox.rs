//! The mailbox: what survives a budget actor. Notes that leases post, the table of live leases, the fences that leases
//! wait for, the gates, and who sits there now.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use bursar_budgets::{
    Bytes, DeviceError, FenceWatch, Gate, Holding, Label, LeaseId, LeaseMeter, Memory, PendingReclaim, ReleaseNote,
    ReleaseNotes, RequestId, Revoker,
};
use dashmap::DashMap;
use ractor::{ActorId, ActorRef};
use tokio::sync::watch;

use super::{BudgetMessage, Elastic, lease_sums::LeaseSums};
use crate::{
    event::{Event, EventLog, Leased},
    metric::{self, DeviceLabel},
};

/// Shared by the budget actor, its successors, and every lease.
pub struct BudgetMailbox {
    notes: Mutex<VecDeque<Note>>,
    seat: watch::Sender<Seat>,
    next_request: AtomicU64,
    /// Written by the budget actor alone; read by metrics, and by a successor that rebuilds the ledger.
    leases: DashMap<LeaseId, Holding>,
    books: Mutex<Books>,
    events: EventLog,
}

/// What the ledger is told and a successor has to be told again. Used by the budget actor alone.
#[derive(Default)]
pub(super) struct Books {
    /// Revokers of live segments, and memory that waits for its fence: a successor without them would call bytes free
    /// that are backed.
    pub(super) watch: FenceWatch,
    /// Leases that are on their way home.
    pub(super) ending: BTreeSet<LeaseId>,
    /// The last lease that was granted.
    pub(super) last_lease: Option<LeaseId>,
    /// How far each model's startup is.
    pub(super) gates: BTreeMap<Label, Gate>,
    /// What listeners know to be kept free of use.
    pub(super) canary_told: Bytes,
    /// What our process holds beside leases and what the device counts as overhead, as far as it is known why.
    pub(super) beside: Bytes,
    /// How much of each lease is in use.
    pub(super) meters: BTreeMap<LeaseId, LeaseMeter>,
    /// What owners have said of leases that may become smaller and larger.
    pub(super) elastic: BTreeMap<LeaseId, Elastic>,
    /// What the leases sum up to.
    pub(super) sums: LeaseSums,
}

/// What a lease has to say, or its owner of it. There are never more than four for each live lease.
pub(super) enum Note {
    /// It has ended.
    Released(ReleaseNote),
    /// A segment is paid for by it.
    Segment(LeaseId, Revoker),
    /// Its owner obeys orders from now on.
    Obeys(LeaseId, Elastic),
    /// Its memory has been given back to the device, or not.
    Home(PendingReclaim, Result<(), DeviceError>),
}

/// Who answers for the budget.
#[derive(Clone, Default)]
pub(super) enum Seat {
    /// Nobody yet.
    #[default]
    Empty,
    /// This one, or its successor soon.
    Taken(ActorRef<BudgetMessage>),
    /// Nobody ever again.
    Closed,
}

impl Default for BudgetMailbox {
    fn default() -> Self {
        BudgetMailbox {
            notes: Mutex::default(),
            seat: watch::Sender::new(Seat::Empty),
            next_request: AtomicU64::default(),
            leases: DashMap::default(),
            books: Mutex::default(),
            events: EventLog::default(),
        }
    }
}

impl BudgetMailbox {
    /// An actor takes its seat, unless the runtime ended while it started.
    pub(super) fn seat(&self, actor: ActorRef<BudgetMessage>) {
        self.seat.send_if_modified(|seat| {
            let open = !matches!(seat, Seat::Closed);
            if open {
                *seat = Seat::Taken(actor);
            }
            open
        });
        self.events.is_back();
    }

    /// The runtime is over: whoever asks from now on, or still waits, hears so at once.
    pub(crate) fn close(&self) {
        self.seat.send_replace(Seat::Closed);
        self.events.close();
    }

    /// Host memory is leased for each picture: nobody wants to hear of that.
    pub(super) fn tell_of_lease(&self, holding: &Holding, event: impl Fn(Leased) -> Event) {
        if holding.class.memory() == Memory::Device {
            self.events.tell(event(holding.into()));
        }
    }

    /// The runtime is over, and nothing more is shown of the device.
    pub(crate) fn forget_shown(&self, device: &DeviceLabel) {
        metric::forget_device(device, self.books().sums.lines().map(|(line, _)| line));
    }

    /// What has happened.
    pub(crate) fn events(&self) -> &EventLog {
        &self.events
    }

    /// Who sits there now.
    pub(super) fn actor(&self) -> Option<ActorRef<BudgetMessage>> {
        match &*self.seat.borrow() {
            Seat::Taken(actor) => Some(actor.clone()),
            Seat::Empty | Seat::Closed => None,
        }
    }

    /// Somebody other than `dead`, as soon as there is one; none if there never will be.
    pub(super) async fn actor_after(&self, dead: Option<ActorId>) -> Option<ActorRef<BudgetMessage>> {
        let mut seat = self.seat.subscribe();
        let is_settled = |seat: &Seat| match seat {
            Seat::Empty => false,
            Seat::Taken(actor) => Some(actor.get_id()) != dead,
            Seat::Closed => true,
        };
        match seat.wait_for(is_settled).await.as_deref() {
            Ok(Seat::Taken(actor)) => Some(actor.clone()),
            _ => None,
        }
    }

    /// A number that no question has had.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The oldest note. One at a time: an actor that dies with a note in its hand loses no other.
    pub(super) fn take_note(&self) -> Option<Note> {
        lock(&self.notes).pop_front()
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    /// Gives memory back to the device on a thread that may wait for it: a whole card takes a third of a second. What
    /// came of it is a note, so that a successor hears of it too.
    pub(super) fn bring_home(self: &Arc<Self>, mut reclaim: PendingReclaim) {
        let mailbox = self.clone();
        tokio::task::spawn_blocking(move || {
            let outcome = reclaim.bring();
            mailbox.put(Note::Home(reclaim, outcome));
        });
    }

    /// A dead owner's thread came late: its lease is gone, and so is the memory.
    pub(super) fn revoke(revoker: Revoker) {
        // What a device that is lost does not take back is nobody's any more; anything else shows when it drops.
        tokio::task::spawn_blocking(move || drop(revoker.revoke()));
    }

    /// Its device is lost, and another takes its place: what was leased of the first is worth nothing. Notes about it
    /// may still come and hit nobody.
    pub(crate) fn forget_device(&self) {
        let lost: Vec<Holding> = self.leases.iter().map(|entry| entry.clone()).collect();
        self.leases.clear();
        lost.iter().for_each(|holding| self.tell_of_lease(holding, Event::LeaseFreed));
        let mut books = self.books();
        let mut sums = std::mem::take(&mut books.sums);
        sums.recount(std::iter::empty());
        let blank = Books { last_lease: books.last_lease, sums, ..Books::default() };
        let old = std::mem::replace(&mut *books, blank);
        // Memory of users may have waited there for its fence.
        tokio::task::spawn_blocking(move || drop(old));
    }

    /// The live leases.
    pub fn leases(&self) -> &DashMap<LeaseId, Holding> {
        &self.leases
    }

    /// Puts a note into the mailbox and wakes its actor. If there is none, its successor finds the note.
    pub(super) fn put(&self, note: Note) {
        lock(&self.notes).push_back(note);
        if let Some(actor) = self.actor() {
            drop(actor.send_message(BudgetMessage::Notes));
        }
    }
}

impl ReleaseNotes for BudgetMailbox {
    fn post(&self, note: ReleaseNote) {
        self.put(Note::Released(note));
    }

    fn segment_reserved(&self, lease: LeaseId, revoker: Revoker) {
        self.put(Note::Segment(lease, revoker));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call that either happens or does not.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
