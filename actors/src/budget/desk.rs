//! The desk: what survives a budget actor. Notes that leases post, the table of live leases, and who sits there now.

use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, Ordering},
};

use bursar_budgets::{Holding, LeaseId, ReleaseNote, ReleaseNotes, RequestId, Revoker};
use dashmap::DashMap;
use ractor::ActorRef;

use super::BudgetMessage;

/// Shared by the budget actor, its successors, and every lease.
#[derive(Default)]
pub struct Desk {
    notes: Mutex<Vec<Note>>,
    actor: Mutex<Option<ActorRef<BudgetMessage>>>,
    next_request: AtomicU64,
    /// Written by the budget actor alone; read by metrics, and by a successor that rebuilds the ledger.
    leases: DashMap<LeaseId, Holding>,
}

/// What a lease has to say. There are never more than two for each live lease.
pub(super) enum Note {
    /// It has ended.
    Released(ReleaseNote),
    /// A segment is paid for by it.
    Segment(LeaseId, Revoker),
}

impl Desk {
    /// An actor takes its seat.
    pub(super) fn seat(&self, actor: ActorRef<BudgetMessage>) {
        *lock(&self.actor) = Some(actor);
    }

    /// Who sits there now.
    pub(super) fn actor(&self) -> Option<ActorRef<BudgetMessage>> {
        lock(&self.actor).clone()
    }

    /// A number that no question has had.
    pub(super) fn next_request(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub(super) fn take_notes(&self) -> Vec<Note> {
        std::mem::take(&mut *lock(&self.notes))
    }

    /// The live leases.
    pub fn leases(&self) -> &DashMap<LeaseId, Holding> {
        &self.leases
    }

    /// Puts a note on the desk and rings. If nobody sits there, a successor finds it.
    fn put(&self, note: Note) {
        lock(&self.notes).push(note);
        if let Some(actor) = self.actor() {
            drop(actor.send_message(BudgetMessage::Notes));
        }
    }
}

impl ReleaseNotes for Desk {
    fn post(&self, note: ReleaseNote) {
        self.put(Note::Released(note));
    }

    fn segment_reserved(&self, lease: LeaseId, revoker: Revoker) {
        self.put(Note::Segment(lease, revoker));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
