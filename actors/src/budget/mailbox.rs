//! The mailbox: what survives a budget actor. It holds notes that leases post, the table of live leases, the fences
//! that leases wait for, the gates, and the current actor.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use bursar_budgets::{
    Bytes, Device, DeviceError, FenceWatch, Gate, Holding, Label, LeaseId, LeaseMeter, Memory, PendingReclaim,
    ReleaseNote, ReleaseNotes, RequestId, RevokeHandle,
};
use dashmap::DashMap;
use ractor::{ActorId, ActorRef};
use tokio::sync::watch;

use super::{BudgetMessage, Elastic, Lendable, lease_sums::LeaseSums};
use crate::{
    event::{Event, EventLog, Leased},
    metric::{self, DeviceLabel},
};

/// Shared by the budget actor, its successors, and every lease.
pub struct BudgetMailbox {
    notes: Mutex<VecDeque<Note>>,
    seat: watch::Sender<Seat>,
    next_request: AtomicU64,
    /// Written by the budget actor alone. Read by metrics, and by a successor that rebuilds the ledger.
    leases: DashMap<LeaseId, Holding>,
    books: Arc<Mutex<Books>>,
    events: EventLog,
}

/// What a successor must tell its ledger again. Used by the budget actor alone.
#[derive(Default)]
pub(super) struct Books {
    /// Revokers of live segments, and memory that waits for its fence. A successor without them would call backed bytes
    /// free.
    pub(super) watch: FenceWatch,
    /// Leases that are being returned.
    pub(super) ending: BTreeSet<LeaseId>,
    /// The last lease granted.
    pub(super) last_lease: Option<LeaseId>,
    /// The gate of each model.
    pub(super) gates: BTreeMap<Label, Gate>,
    /// Bytes of the canary, as listeners were last told.
    pub(super) canary_told: Bytes,
    /// Bytes that our process holds beyond leases and the device's own overhead, as far as explained.
    pub(super) beside: Bytes,
    /// The use of each lease.
    pub(super) meters: BTreeMap<LeaseId, LeaseMeter>,
    /// The card of a group on which others leave the least, if they do not leave the same on all.
    pub(super) fullest: Option<DeviceLabel>,
    /// What owners declared about elastic leases.
    pub(super) elastic: BTreeMap<LeaseId, Elastic>,
    /// The sums of leases by model and class.
    pub(super) sums: LeaseSums,
    /// Whether a thread gives back what waits for fences, as the runtime is over.
    is_given_back: bool,
}

/// A note from a lease or its owner. There are at most four per live lease.
pub(super) enum Note {
    /// The lease has ended.
    Released(ReleaseNote),
    /// A segment is paid for by this lease.
    Segment(LeaseId, RevokeHandle),
    /// The owner obeys orders from now on.
    Obeys(LeaseId, Elastic),
    /// A model needs more of its keys and values than before.
    KvDemand,
    /// Its memory was returned to the device, or that failed.
    Reclaimed(PendingReclaim, Result<(), DeviceError>),
}

/// Between two looks at fences that no budget watches.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The actor that answers for the budget.
#[derive(Clone, Default)]
pub(super) enum Seat {
    /// None yet.
    #[default]
    Empty,
    /// This one, or a successor soon.
    Taken(ActorRef<BudgetMessage>),
    /// None ever again.
    Closed,
}

impl Default for BudgetMailbox {
    fn default() -> Self {
        BudgetMailbox {
            notes: Mutex::default(),
            seat: watch::Sender::new(Seat::Empty),
            next_request: AtomicU64::default(),
            leases: DashMap::default(),
            books: Arc::default(),
            events: EventLog::default(),
        }
    }
}

impl BudgetMailbox {
    /// Installs an actor, unless the runtime ended while it started.
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

    /// The runtime is over. Callers that wait, and later ones, hear so at once. Memory that still waits for a fence is given
    /// back after it, however long a user keeps a lease or a handle.
    pub(crate) fn close(&self) {
        self.seat.send_replace(Seat::Closed);
        self.events.close();
        // What obeys orders holds handles of this mailbox.
        let obeys = std::mem::take(&mut self.books().elastic);
        drop(obeys);
        self.read_last_notes();
    }

    /// Does what is left to do for leases, if no budget will: called when the runtime is over, when a budget is, and for each
    /// note after that.
    pub(super) fn read_last_notes(&self) {
        if !matches!(*self.seat.borrow(), Seat::Closed) {
            return;
        }
        let notes = std::mem::take(&mut *lock(&self.notes));
        for note in notes {
            match note {
                Note::Released(note) => drop(self.books().watch.released(note)),
                Note::Reclaimed(reclaim, outcome) => end_reclaim(&self.books, reclaim, outcome),
                // Threads of dead owners end by themselves, and give their segments back.
                Note::Segment(..) | Note::Obeys(..) | Note::KvDemand => {}
            }
        }
        let mut books = self.books();
        if books.watch.waiting() > 0 && !books.is_given_back {
            // This is called in drops, which must not wait. Without a thread, the memory stays where it is.
            let theirs = self.books.clone();
            let thread = thread::Builder::new().name("bursar-last-memory".to_owned());
            books.is_given_back = thread.spawn(move || give_back_after_fences(&theirs)).is_ok();
        }
    }

    /// Records the event, except for host memory: each picture leases some, and listeners do not want to hear of that.
    pub(super) fn tell_of_lease(&self, holding: &Holding, event: impl Fn(Leased) -> Event) {
        if holding.class.memory() == Memory::Device {
            self.events.tell(event(holding.into()));
        }
    }

    /// The card of a group on which others leave the least, for events of memory that is given up.
    pub(super) fn fullest_card(&self) -> Option<DeviceLabel> {
        self.books().fullest.clone()
    }

    /// The runtime is over, and nothing more is shown of the device.
    pub(crate) fn forget_shown(&self, device: &dyn Device) {
        metric::forget_device(device, self.books().sums.lines().map(|(line, _)| line));
    }

    /// The events of this device.
    pub(crate) fn events(&self) -> &EventLog {
        &self.events
    }

    /// The current actor.
    pub(super) fn actor(&self) -> Option<ActorRef<BudgetMessage>> {
        match &*self.seat.borrow() {
            Seat::Taken(actor) => Some(actor.clone()),
            Seat::Empty | Seat::Closed => None,
        }
    }

    /// Waits for an actor other than `dead`. None if there never will be one.
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

    /// A number not used by any question before.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The oldest note. Taking one at a time means that an actor dying with a note in hand loses no other.
    pub(super) fn take_note(&self) -> Option<Note> {
        lock(&self.notes).pop_front()
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    /// Returns memory to the device on a thread that may block: a whole card takes a third of a second. The outcome is
    /// posted as a note, so that a successor hears of it too.
    pub(super) fn reclaim_in_background(self: &Arc<Self>, mut reclaim: PendingReclaim) {
        let mailbox = self.clone();
        tokio::task::spawn_blocking(move || {
            let outcome = reclaim.bring();
            mailbox.put(Note::Reclaimed(reclaim, outcome));
        });
    }

    /// A dead owner's thread came late: its lease is gone, and so is the memory.
    pub(super) fn revoke(revoker: RevokeHandle) {
        // Memory that a lost device cannot take back is gone. Any other failure shows when the revoker drops.
        tokio::task::spawn_blocking(move || drop(revoker.revoke()));
    }

    /// The device is lost and replaced. Leases of the lost device are worthless. Late notes about it are ignored.
    pub(crate) fn forget_device(&self) {
        let lost: Vec<Holding> = self.leases.iter().map(|entry| entry.clone()).collect();
        self.leases.clear();
        lost.iter().for_each(|holding| self.tell_of_lease(holding, Event::LeaseFreed));
        let mut books = self.books();
        let mut sums = std::mem::take(&mut books.sums);
        sums.recount(std::iter::empty());
        let blank = Books { last_lease: books.last_lease, sums, ..Books::default() };
        let old = std::mem::replace(&mut *books, blank);
        // Users' memory may have waited there for its fence.
        tokio::task::spawn_blocking(move || drop(old));
    }

    /// The leases that lend and borrow.
    pub(super) fn lendable(&self) -> Vec<Lendable> {
        let books = self.books();
        let lendable = books.elastic.iter().filter_map(|(lease, elastic)| {
            let (lends, bytes) = (elastic.lends.as_ref()?, self.leases.get(lease)?.bytes);
            let Elastic { floor, most: share, step, .. } = *elastic;
            Some(Lendable { lease: *lease, bytes, floor, share, limit: lends.limit, step, need: lends.demand.need() })
        });
        lendable.collect()
    }

    /// The live leases.
    pub fn leases(&self) -> &DashMap<LeaseId, Holding> {
        &self.leases
    }

    /// Posts a note and wakes the actor. If there is none, its successor finds the note; if none will come, what is left to
    /// do is done.
    pub(super) fn put(&self, note: Note) {
        lock(&self.notes).push_back(note);
        match self.actor() {
            Some(actor) => drop(actor.send_message(BudgetMessage::Notes)),
            None => self.read_last_notes(),
        }
    }
}

impl ReleaseNotes for BudgetMailbox {
    fn post(&self, note: ReleaseNote) {
        self.put(Note::Released(note));
    }

    fn segment_reserved(&self, lease: LeaseId, revoker: RevokeHandle) {
        self.put(Note::Segment(lease, revoker));
    }
}

/// Gives back the memory of each lease that waits, after its fence. Ends when none waits.
fn give_back_after_fences(books: &Mutex<Books>) {
    let mut pause = PAUSE_MIN;
    loop {
        let due = {
            let mut books = lock(books);
            if books.watch.waiting() == 0 {
                books.is_given_back = false;
                return;
            }
            books.watch.due()
        };
        // A fence that has not passed for long may never.
        pause = if due.is_empty() { (2 * pause).min(PAUSE_MAX) } else { PAUSE_MIN };
        for mut reclaim in due {
            let outcome = reclaim.bring();
            end_reclaim(books, reclaim, outcome);
        }
        thread::park_timeout(pause);
    }
}

/// A reclaim that no budget hears of is over, however it went.
fn end_reclaim(books: &Mutex<Books>, reclaim: PendingReclaim, outcome: Result<(), DeviceError>) {
    lock(books).watch.home(reclaim.lease());
    if outcome.is_err_and(|error| !error.is_lost()) {
        // The device may still use it: rather lost than given to another.
        std::mem::forget(reclaim);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call that either happens or does not.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
