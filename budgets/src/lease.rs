//! The handle to a number of leased bytes. Dropping the handle reports the end of the
//! lease to the budget.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use serde::Serialize;

use crate::{AtomicBytes, Backing, Bytes, Class, Fence, Label, Owner, Priority, Request, RequestId, RevokeHandle};

/// A lease's number. A ledger never reuses a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

impl LeaseId {
    pub(crate) fn next(self) -> LeaseId {
        LeaseId(self.0 + 1)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("lease {}", self.0))
    }
}

/// The data of one lease that a ledger needs when it is rebuilt after a crash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holding {
    pub id: LeaseId,
    pub owner: Owner,
    pub class: Class,
    pub model: Label,
    pub bytes: Bytes,
    /// The priority of the lease's request. Requests to grow the lease use the same priority.
    pub priority: Priority,
}

impl Holding {
    pub(crate) fn of(id: LeaseId, request: Request) -> Holding {
        let Request { owner, class, model, bytes, priority } = request;
        Holding { id, owner, class, model, bytes, priority }
    }
}

/// A request that the ledger granted. Only the ledger creates grants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub(crate) request: RequestId,
    pub(crate) holding: Holding,
}

impl Grant {
    /// The request that this grant answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    pub fn holding(&self) -> &Holding {
        &self.holding
    }
}

/// A new size of a lease. Only the ledger creates resizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    pub(crate) request: RequestId,
    pub(crate) lease: LeaseId,
    pub(crate) from: Bytes,
    pub(crate) to: Bytes,
}

impl Resized {
    /// The request that this resize answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    pub fn from(&self) -> Bytes {
        self.from
    }

    pub fn to(&self) -> Bytes {
        self.to
    }
}

/// The message that a dropped lease sends to the budget.
#[derive(Debug)]
pub struct ReleaseNote {
    pub lease: LeaseId,
    /// Passes when the device has executed the last use of the lease.
    pub fence: Fence,
    /// Memory that is still backed because the fence had not passed. Drop these backings after the
    /// fence has passed and before the ledger is informed ([`crate::FenceWatch`] keeps this order).
    pub backings: Vec<Backing>,
}

/// A receiver of messages about the end of leases and the start of segments. Implementations must
/// not block, panic or call back into the lease, because `post` runs in `Drop`, possibly while a
/// thread unwinds. An implementation may send on a channel.
pub trait ReleaseNotes: Send + Sync {
    /// The lease in this note has ended.
    fn post(&self, note: ReleaseNote);

    /// This lease now pays for a segment. Keep the revoke handle to reclaim memory from a dead
    /// owner, because the segment may live on in a thread that has not noticed the owner's death.
    fn segment_reserved(&self, _lease: LeaseId, _revoker: RevokeHandle) {}
}

/// The right to a number of bytes of one class, held by one owner. Dropping the lease
/// posts a release note.
///
/// Only the ledger decides the size of a lease; [`Lease::resize`] applies it. One lease may pay for
/// several segments, for example one per layer for the KV cache. Together, these segments never
/// back more than the lease's size.
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

/// A view of how much of a lease is in use, which can be read while the holder works with the
/// lease. The budget uses it to distinguish this process's memory from other processes' memory
/// without sending a message.
///
/// Bytes are added before the device backs them and subtracted after it has unbacked them, so the
/// meter never shows less than is backed.
#[derive(Clone, Debug, Default)]
pub struct LeaseMeter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    backed: AtomicBytes,
    has_segments: AtomicBool,
    /// The number of device calls in progress that back or unback memory of the lease.
    moving: AtomicUsize,
}

/// A guard that exists while a device call backs or unbacks memory of the lease.
/// [`LeaseMeter::is_moving`] is true until all guards have dropped.
pub(crate) struct Moving<'l>(&'l Counts);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, SeqCst);
    }
}

impl LeaseMeter {
    /// How much of a lease of `granted` bytes is in use: the bytes that its segments have backed. A
    /// lease without segments pays for memory at unknown addresses (captured graphs, a user's own
    /// allocations), so such a lease counts in full. A lease must not pay for both kinds of memory,
    /// because the bytes outside its segments would count as memory of another process.
    pub fn used(&self, granted: Bytes) -> Bytes {
        if self.0.has_segments.load(SeqCst) { self.0.backed.load() } else { granted }
    }

    /// Whether the device is backing or unbacking part of the lease right now. The memory
    /// that the device has taken is then between the meter's value before the call and its
    /// value after the call.
    pub fn is_moving(&self) -> bool {
        self.0.moving.load(SeqCst) > 0
    }
}

/// Fences and memory of segments that ended before their lease, kept for the lease's release note.
#[derive(Default)]
struct PendingRelease {
    fence: Fence,
    backings: Vec<Backing>,
}

impl Lease {
    /// Creates the handle of a grant. Call this once for each grant. With two handles, dropping the
    /// first would end the lease while the second is in use.
    pub fn issue(grant: &Grant, notes: Arc<dyn ReleaseNotes>) -> Lease {
        Lease {
            bytes: AtomicBytes::new(grant.holding.bytes),
            holding: grant.holding.clone(),
            meter: LeaseMeter::default(),
            notes,
            pending_release: Mutex::default(),
        }
    }

    pub fn id(&self) -> LeaseId {
        self.holding.id
    }

    pub fn class(&self) -> &Class {
        &self.holding.class
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes.load()
    }

    /// The number of bytes that the lease's segments have backed.
    pub fn backed(&self) -> Bytes {
        self.meter.0.backed.load()
    }

    /// A meter of the lease's use. It stays valid after the lease is dropped.
    pub fn meter(&self) -> LeaseMeter {
        self.meter.clone()
    }

    pub fn owner(&self) -> &Owner {
        &self.holding.owner
    }

    pub fn model(&self) -> &Label {
        &self.holding.model
    }

    /// The priority of the lease's request. Requests to grow the lease use the same priority.
    pub fn priority(&self) -> Priority {
        self.holding.priority
    }

    /// The data that a ledger needs when it is rebuilt after a crash.
    pub fn holding(&self) -> Holding {
        Holding { bytes: self.bytes(), ..self.holding.clone() }
    }

    /// Applies the size that the ledger decided.
    ///
    /// # Panics
    /// If `resized` is for another lease, or segments back more than the new size. Both
    /// are bugs in Bursar.
    pub fn resize(&self, resized: &Resized) {
        assert_eq!(resized.lease, self.id(), "the resize is for another lease");
        let backed = self.backed();
        assert!(backed <= resized.to, "{} cannot shrink to {}: {backed} are still backed", self.id(), resized.to);
        self.bytes.store(resized.to);
    }

    /// Ends the lease. Its bytes become free once this fence and the fences of its ended segments
    /// have passed.
    pub fn release_after(self, fence: Fence) {
        self.defer_release(fence, None);
    }

    /// Returns a guard. Keep it during a device call and during the [`spend`](Lease::spend) or
    /// [`save`](Lease::save) that records the call.
    pub(crate) fn moving(&self) -> Moving<'_> {
        self.meter.0.moving.fetch_add(1, SeqCst);
        Moving(&self.meter.0)
    }

    /// Counts bytes as backed. Panics if that is more than the lease's size, which is
    /// a bug in Bursar.
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

    /// A fence that passes once the fences of all ended segments have passed.
    pub(crate) fn pending_fence(&self) -> Fence {
        self.pending_release.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).fence.clone()
    }

    pub(crate) fn announce(&self, revoker: RevokeHandle) {
        self.meter.0.has_segments.store(true, SeqCst);
        self.notes.segment_reserved(self.id(), revoker);
    }

    /// Keeps a fence for the release note, and with it any memory that stays backed until
    /// the fence has passed.
    pub(crate) fn defer_release(&self, fence: Fence, backing: Option<Backing>) {
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
