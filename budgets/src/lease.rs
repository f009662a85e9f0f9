//! The right to a number of bytes, as a handle. Dropping it tells the budget.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use serde::Serialize;

use crate::{AtomicBytes, Backing, Bytes, Class, Fence, Label, Owner, Priority, Request, RequestId, RevokeHandle};

/// A lease's number. A ledger never uses one twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl LeaseId {
    /// The number after this one.
    pub(crate) fn next(self) -> LeaseId {
        LeaseId(self.0 + 1)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("lease {}", self.0))
    }
}

/// What one lease holds: everything that a ledger rebuilt after a crash must know about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holding {
    /// The lease's number.
    pub id: LeaseId,
    /// The actor that holds it.
    pub owner: Owner,
    /// What the bytes are for.
    pub class: Class,
    /// The model that it serves.
    pub model: Label,
    /// Its size.
    pub bytes: Bytes,
    /// The priority of its request, which growing it uses too.
    pub priority: Priority,
}

impl Holding {
    pub(crate) fn of(id: LeaseId, request: Request) -> Holding {
        let Request { owner, class, model, bytes, priority } = request;
        Holding { id, owner, class, model, bytes, priority }
    }
}

/// A request that the ledger granted. Only the ledger makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub(crate) request: RequestId,
    pub(crate) holding: Holding,
}

impl Grant {
    /// The request that this answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// What the new lease holds.
    pub fn holding(&self) -> &Holding {
        &self.holding
    }
}

/// A new size of a lease. Only the ledger makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    pub(crate) request: RequestId,
    pub(crate) lease: LeaseId,
    pub(crate) from: Bytes,
    pub(crate) to: Bytes,
}

impl Resized {
    /// The request that this answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// The lease that was resized.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Its old size.
    pub fn from(&self) -> Bytes {
        self.from
    }

    /// Its new size.
    pub fn to(&self) -> Bytes {
        self.to
    }
}

/// What a dropped lease sends to the budget.
#[derive(Debug)]
pub struct ReleaseNote {
    /// The lease that ended.
    pub lease: LeaseId,
    /// Passes when the device is past the lease's last use.
    pub fence: Fence,
    /// Memory that is still backed because the fence had not passed. Drop it after the fence, and before telling the
    /// ledger ([`crate::FenceWatch`] keeps this order).
    pub backings: Vec<Backing>,
}

/// Where leases report their end, and segments their start. Implementations must not block, panic or call back into the
/// lease: they run in `Drop`, perhaps while a thread unwinds. Sending on a channel is fine.
pub trait ReleaseNotes: Send + Sync {
    /// The lease in this note has ended.
    fn post(&self, note: ReleaseNote);

    /// This lease now pays for a segment. Keep the revoker to reclaim from a dead owner: its segment may live on in a
    /// thread that has not noticed the death.
    fn segment_reserved(&self, _lease: LeaseId, _revoker: RevokeHandle) {}
}

/// The right to a number of bytes of one class, held by one owner. Dropping it posts a release note.
///
/// Only the ledger changes its size ([`Lease::resize`]). One lease may pay for several segments (for KV, one for each
/// layer), which together never back more than its size.
///
/// ```
/// use bursar_budgets::*;
/// use std::sync::{Arc, Mutex};
/// #[derive(Default)]
/// struct Notes(Mutex<Vec<LeaseId>>);
/// impl ReleaseNotes for Notes {
///     fn post(&self, note: ReleaseNote) { self.0.lock().unwrap().push(note.lease) }
/// }
/// let mut ledger = Ledger::new(LedgerConfig::new(Bytes::mib(64)));
/// let request = Request::new(Owner::new("index", 0), Class::external("index"), "mine", Bytes::mib(1));
/// let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
/// let Effect::Granted(grant) = &effects[0] else { unreachable!() };
/// let notes = Arc::new(Notes::default());
/// let lease = Lease::issue(grant, notes.clone());
/// let id = lease.id();
/// drop(lease);
/// assert_eq!(*notes.0.lock().unwrap(), [id]);
/// ```
pub struct Lease {
    holding: Holding,
    bytes: AtomicBytes,
    meter: LeaseMeter,
    notes: Arc<dyn ReleaseNotes>,
    pending_release: Mutex<PendingRelease>,
}

/// How much of a lease is in use, readable while its holder works with it. A budget uses this to tell our memory from
/// that of others without a message.
///
/// It counts before the device backs and after it has unbacked, so it never shows less than is backed.
#[derive(Clone, Debug, Default)]
pub struct LeaseMeter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    backed: AtomicBytes,
    has_segments: AtomicBool,
    /// Calls of the device in progress.
    moving: AtomicUsize,
}

/// Marks a lease's memory as being backed or unbacked while this lives.
pub(crate) struct Moving<'l>(&'l Counts);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, SeqCst);
    }
}

impl LeaseMeter {
    /// How much of a lease of `granted` bytes is in use: what its segments have backed. A lease without segments pays
    /// for memory at addresses that we do not know (captured graphs, a tenant's own allocations), so all of it counts.
    /// A lease must not pay for both: the part outside its segments would look like another process.
    pub fn used(&self, granted: Bytes) -> Bytes {
        if self.0.has_segments.load(SeqCst) { self.0.backed.load() } else { granted }
    }

    /// Whether the device is backing or unbacking part of it. What the device has taken is then between the value now
    /// and the value after.
    pub fn is_moving(&self) -> bool {
        self.0.moving.load(SeqCst) > 0
    }
}

/// What segments that ended before their lease left for its release note.
#[derive(Default)]
struct PendingRelease {
    fence: Fence,
    backings: Vec<Backing>,
}

impl Lease {
    /// Makes the handle of a grant. Call it once for each grant: with two handles, the first drop would end the lease
    /// while the other is in use.
    pub fn issue(grant: &Grant, notes: Arc<dyn ReleaseNotes>) -> Lease {
        Lease {
            bytes: AtomicBytes::new(grant.holding.bytes),
            holding: grant.holding.clone(),
            meter: LeaseMeter::default(),
            notes,
            pending_release: Mutex::default(),
        }
    }

    /// The lease's number.
    pub fn id(&self) -> LeaseId {
        self.holding.id
    }

    /// What its bytes are for.
    pub fn class(&self) -> &Class {
        &self.holding.class
    }

    /// Its size.
    pub fn bytes(&self) -> Bytes {
        self.bytes.load()
    }

    /// How many of its bytes segments have backed.
    pub fn backed(&self) -> Bytes {
        self.meter.0.backed.load()
    }

    /// A meter that shows how much of it is in use, even after the lease is gone.
    pub fn meter(&self) -> LeaseMeter {
        self.meter.clone()
    }

    /// The actor that holds it.
    pub fn owner(&self) -> &Owner {
        &self.holding.owner
    }

    /// The model that it serves.
    pub fn model(&self) -> &Label {
        &self.holding.model
    }

    /// The priority of its request, which growing it uses too.
    pub fn priority(&self) -> Priority {
        self.holding.priority
    }

    /// What a ledger rebuilt after a crash must know about it.
    pub fn holding(&self) -> Holding {
        Holding { bytes: self.bytes(), ..self.holding.clone() }
    }

    /// Takes the size that the ledger decided.
    ///
    /// # Panics
    /// If `resized` is for another lease, or segments back more than the new size: our bugs.
    pub fn resize(&self, resized: &Resized) {
        assert_eq!(resized.lease, self.id(), "this lease was not the one resized");
        let backed = self.backed();
        assert!(backed <= resized.to, "{} cannot shrink to {}: {backed} are still backed", self.id(), resized.to);
        self.bytes.store(resized.to);
    }

    /// Ends the lease. Its bytes are free after this fence.
    pub fn release_after(self, fence: Fence) {
        self.part(fence, None);
    }

    /// Hold this during a call of the device and the counting that belongs to it.
    pub(crate) fn moving(&self) -> Moving<'_> {
        self.meter.0.moving.fetch_add(1, SeqCst);
        Moving(&self.meter.0)
    }

    /// Counts bytes as backed. More than the lease holds is our bug.
    pub(crate) fn spend(&self, bytes: Bytes) {
        let backed = self.meter.0.backed.fetch_add(bytes) + bytes;
        assert!(
            backed <= self.bytes(),
            "{} of class {} covers {}; {backed} were to be backed",
            self.id(),
            self.class(),
            self.bytes()
        );
    }

    /// Counts bytes as no longer backed.
    pub(crate) fn save(&self, bytes: Bytes) {
        let before = self.meter.0.backed.fetch_sub(bytes);
        assert!(bytes <= before, "{} gave back {bytes} of {before}", self.id());
    }

    /// A fence that passes once all fences of its ended segments have.
    pub(crate) fn parting_fence(&self) -> Fence {
        self.pending_release.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).fence.clone()
    }

    pub(crate) fn announce(&self, revoker: RevokeHandle) {
        self.meter.0.has_segments.store(true, SeqCst);
        self.notes.segment_reserved(self.id(), revoker);
    }

    /// Keeps a fence, and perhaps memory that stays backed until then, for the release note.
    pub(crate) fn part(&self, fence: Fence, backing: Option<Backing>) {
        let mut pending_release = self.pending_release.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = std::mem::take(&mut pending_release.fence);
        pending_release.fence = before.and(fence);
        pending_release.backings.extend(backing);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let PendingRelease { fence, backings } =
            std::mem::take(self.pending_release.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()));
        self.notes.post(ReleaseNote { lease: self.holding.id, fence, backings });
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {} of {} for {})", self.id(), self.bytes(), self.class(), self.model(), self.owner())
    }
}
