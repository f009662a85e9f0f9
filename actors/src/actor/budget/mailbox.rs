//! The mailbox: state that survives a budget actor. It holds notes that leases post, the table of
//! live leases, the fences that leases wait for, the gates, and the current actor.

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

/// The mailbox. The budget actor, its successors and every lease share it.
pub struct BudgetMailbox {
    notes: Mutex<VecDeque<Note>>,
    seat: watch::Sender<Seat>,
    next_request: AtomicU64,
    /// The live leases. Only the budget actor writes this table, except that `forget_device` clears
    /// it. Metrics read the table, and so does a successor that rebuilds the ledger.
    leases: DashMap<LeaseId, Holding>,
    books: Arc<Mutex<Books>>,
    events: EventLog,
}

/// State that a restarted budget actor must enter into its ledger again. While the mailbox is
/// open, only the current budget actor writes this state, except that `forget_device` resets it.
#[derive(Default)]
pub(super) struct Books {
    /// Revoke handles of live segments, and memory that waits for its fence. A successor without
    /// this data would count backed bytes as free.
    pub(super) watch: FenceWatch,
    /// Leases that are being released or revoked.
    pub(super) ending: BTreeSet<LeaseId>,
    pub(super) last_lease: Option<LeaseId>,
    pub(super) gates: BTreeMap<Label, Gate>,
    /// Bytes of the canary as last reported in an event.
    pub(super) canary_reported: Bytes,
    /// Bytes that this process holds for known reasons in addition to leases and the device's own
    /// overhead.
    pub(super) outside_leases: Bytes,
    /// Meters that count the backed bytes of each lease.
    pub(super) meters: BTreeMap<LeaseId, LeaseMeter>,
    /// The GPU of a group on which overhead and other processes leave the least memory. `None` if
    /// all GPUs have the same amount.
    pub(super) fullest: Option<DeviceLabel>,
    /// For each elastic lease, the size limits and the order callback that its owner declared.
    pub(super) elastic: BTreeMap<LeaseId, Elastic>,
    pub(super) sums: LeaseSums,
    /// `true` if the runtime has ended and a thread returns the memory that waits for fences.
    is_given_back: bool,
}

/// A note to the budget actor. It comes from a lease, an owner, a model's scheduler, or a thread
/// that returned memory.
pub(super) enum Note {
    Released(ReleaseNote),
    /// The lease pays for this segment, in addition to any segments that it already pays for.
    Segment(LeaseId, RevokeHandle),
    /// The owner accepts resize orders from now on.
    AcceptsResizeOrders(LeaseId, Elastic),
    /// A model's demand for KV cache memory has risen.
    KvDemand,
    /// The memory of a lease was returned to the device, or returning it failed.
    Reclaimed(PendingReclaim, Result<(), DeviceError>),
}

// Bounds of the pause between polls of fences when no budget actor polls them.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The actor that answers requests to the budget. The value is `Empty` before the first actor, and
/// `Closed` after the last actor.
#[derive(Clone, Default)]
pub(super) enum Seat {
    /// No actor has started yet.
    #[default]
    Empty,
    /// This actor answers. If it has died, its successor will replace this value.
    Taken(ActorRef<BudgetMessage>),
    /// The runtime has ended, so no actor will follow.
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
    /// Installs an actor, unless the runtime ended while the actor started.
    pub(super) fn seat(&self, actor: ActorRef<BudgetMessage>) {
        self.seat.send_if_modified(|seat| {
            let open = !matches!(seat, Seat::Closed);
            if open {
                *seat = Seat::Taken(actor);
            }
            open
        });
        self.events.runtime_recovered();
    }

    /// Closes the mailbox when the runtime ends. Callers that wait, and later callers, get an error
    /// at once. Memory that still waits for a fence is returned after the fence, even if a user
    /// still keeps a lease or a handle.
    pub(crate) fn close(&self) {
        self.seat.send_replace(Seat::Closed);
        self.events.close();
        // The order callbacks in `elastic` hold handles to this mailbox. Dropping them breaks the
        // cycle.
        let accepted = std::mem::take(&mut self.books().elastic);
        drop(accepted);
        self.read_last_notes();
    }

    /// If the mailbox is closed, handles the remaining notes, because no budget actor will read
    /// them. Called when the runtime ends, when a budget actor ends, and for each note after that.
    pub(super) fn read_last_notes(&self) {
        if !matches!(*self.seat.borrow(), Seat::Closed) {
            return;
        }
        let notes = std::mem::take(&mut *lock(&self.notes));
        for note in notes {
            match note {
                Note::Released(note) => drop(self.books().watch.released(note)),
                Note::Reclaimed(reclaim, outcome) => end_reclaim(&self.books, reclaim, outcome),
                // Threads of dead owners end by themselves and then return their segments.
                Note::Segment(..) | Note::AcceptsResizeOrders(..) | Note::KvDemand => {}
            }
        }
        let mut books = self.books();
        if books.watch.waiting() > 0 && !books.is_given_back {
            // This code runs in `Drop`, which must not block. If the thread cannot be spawned, the
            // memory stays backed until a later note tries again.
            let theirs = self.books.clone();
            let thread = thread::Builder::new().name("bursar-last-memory".to_owned());
            books.is_given_back = thread.spawn(move || give_back_after_fences(&theirs)).is_ok();
        }
    }

    /// Records an event of a lease of device memory. Leases of host memory are not recorded: each
    /// picture takes such a lease, so the events would flood listeners.
    pub(super) fn report_lease(&self, holding: &Holding, event: impl Fn(Leased) -> Event) {
        if holding.class.memory() == Memory::Device {
            self.events.record(event(holding.into()));
        }
    }

    /// The GPU of a group on which overhead and other processes leave the least memory. Events
    /// about memory that is given up name this GPU.
    pub(super) fn fullest_gpu(&self) -> Option<DeviceLabel> {
        self.books().fullest.clone()
    }

    /// Resets the gauges of the device after the runtime has ended.
    pub(crate) fn forget_shown(&self, device: &dyn Device) {
        metric::forget_device(device, self.books().sums.lines().map(|(line, _)| line));
    }

    pub(crate) fn events(&self) -> &EventLog {
        &self.events
    }

    pub(super) fn actor(&self) -> Option<ActorRef<BudgetMessage>> {
        match &*self.seat.borrow() {
            Seat::Taken(actor) => Some(actor.clone()),
            Seat::Empty | Seat::Closed => None,
        }
    }

    /// Waits for an actor other than `dead`. Returns `None` if the mailbox is closed.
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

    /// Returns a request number that has not been used before.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Removes the oldest note. Notes are taken one at a time, so an actor that dies while it
    /// handles a note loses only that note.
    pub(super) fn take_note(&self) -> Option<Note> {
        lock(&self.notes).pop_front()
    }

    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    /// Returns memory to the device on a thread that may block, because unmapping a whole GPU takes
    /// a third of a second. The outcome is posted as a note, so that a successor of the current
    /// actor can also read it.
    pub(super) fn reclaim_in_background(self: &Arc<Self>, mut reclaim: PendingReclaim) {
        let mailbox = self.clone();
        tokio::task::spawn_blocking(move || {
            let outcome = reclaim.release();
            mailbox.put(Note::Reclaimed(reclaim, outcome));
        });
    }

    /// Revokes a segment that a thread of a dead owner reserved after the segment's lease was
    /// revoked.
    pub(super) fn revoke(revoker: RevokeHandle) {
        // A lost device cannot take memory back. After any other failure, the memory is returned
        // when the last owner of the segment drops it.
        tokio::task::spawn_blocking(move || drop(revoker.revoke()));
    }

    /// Clears the leases of a lost device that has been replaced, because their memory no longer
    /// exists. Late notes about these leases are ignored.
    pub(crate) fn forget_device(&self) {
        let lost: Vec<Holding> = self.leases.iter().map(|entry| entry.clone()).collect();
        self.leases.clear();
        lost.iter().for_each(|holding| self.report_lease(holding, Event::LeaseFreed));
        let mut books = self.books();
        let mut sums = std::mem::take(&mut books.sums);
        sums.recount(std::iter::empty());
        let blank = Books { last_lease: books.last_lease, sums, ..Books::default() };
        let old = std::mem::replace(&mut *books, blank);
        // Dropping `old` may block, because it may hold memory that waits for its fence.
        tokio::task::spawn_blocking(move || drop(old));
    }

    pub(super) fn lendable(&self) -> Vec<Lendable> {
        let books = self.books();
        let lendable = books.elastic.iter().filter_map(|(lease, elastic)| {
            let (lends, bytes) = (elastic.lends.as_ref()?, self.leases.get(lease)?.bytes);
            let Elastic { floor, most: share, step, .. } = *elastic;
            Some(Lendable { lease: *lease, bytes, floor, share, limit: lends.limit, step, need: lends.demand.need() })
        });
        lendable.collect()
    }

    pub fn leases(&self) -> &DashMap<LeaseId, Holding> {
        &self.leases
    }

    /// Posts a note and wakes the actor. If there is no actor now, the next actor reads the note.
    /// If no actor will follow, this call handles the note.
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

/// Returns the memory of each lease that waits for a fence, once that fence has passed. Exits when
/// no lease waits.
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
        // A fence that has not passed for a long time may never pass, so it is polled less and less
        // often.
        pause = if due.is_empty() { (2 * pause).min(PAUSE_MAX) } else { PAUSE_MIN };
        for mut reclaim in due {
            let outcome = reclaim.release();
            end_reclaim(books, reclaim, outcome);
        }
        thread::park_timeout(pause);
    }
}

/// Completes a reclaim, successful or not, when no budget actor is left to notify.
fn end_reclaim(books: &Mutex<Books>, reclaim: PendingReclaim, outcome: Result<(), DeviceError>) {
    lock(books).watch.finish_release(reclaim.lease());
    if outcome.is_err_and(|error| !error.is_lost()) {
        // The device may still use this memory. Leaking it is safer than giving it to another
        // owner.
        std::mem::forget(reclaim);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change under the lock is a single call that either happens or does not, so a panic
    // elsewhere leaves no partial change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
