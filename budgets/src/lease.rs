//! The right to a number of bytes, as a handle whose end is noticed.

use std::{
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use serde::Serialize;

use crate::{AtomicBytes, Backing, Bytes, Class, Fence, Label, Owner, Priority, Request, RequestId, Revoker};

/// A lease's number. It is never used twice in the life of a ledger.
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

/// What one lease holds: all that a ledger rebuilt after a crash has to know of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holding {
    /// The lease.
    pub id: LeaseId,
    /// By whom.
    pub owner: Owner,
    /// What for.
    pub class: Class,
    /// Of which model.
    pub model: Label,
    /// How much.
    pub bytes: Bytes,
    /// How urgent it was; growing it is as urgent.
    pub priority: Priority,
}

impl Holding {
    pub(crate) fn of(id: LeaseId, request: Request) -> Holding {
        let Request { owner, class, model, bytes, priority } = request;
        Holding { id, owner, class, model, bytes, priority }
    }
}

/// The ledger's yes to a request. Only the ledger makes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub(crate) request: RequestId,
    pub(crate) holding: Holding,
}

impl Grant {
    /// The question that this answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// What is now held.
    pub fn holding(&self) -> &Holding {
        &self.holding
    }
}

/// The ledger's word that a lease has a new size. Only the ledger makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    pub(crate) request: RequestId,
    pub(crate) lease: LeaseId,
    pub(crate) from: Bytes,
    pub(crate) to: Bytes,
}

impl Resized {
    /// The question that this answers.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// Which lease.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Its size before.
    pub fn from(&self) -> Bytes {
        self.from
    }

    /// Its size from now on.
    pub fn to(&self) -> Bytes {
        self.to
    }
}

/// What a dropped lease leaves behind for the budget.
#[derive(Debug)]
pub struct ReleaseNote {
    /// Which lease has ended.
    pub lease: LeaseId,
    /// When the device is past its last use.
    pub fence: Fence,
    /// Memory that is still backed because the fence had not passed. Drop it once the fence has, and before the ledger
    /// hears of it ([`crate::FenceWatch`] does both in the right order).
    pub backings: Vec<Backing>,
}

/// Where leases post that they ended, and segments that they began. An implementation must not block, panic or call
/// back into the lease: it runs in `Drop`, perhaps while a thread unwinds. A channel's `send` is right.
pub trait ReleaseNotes: Send + Sync {
    /// The lease in this note has ended.
    fn post(&self, note: ReleaseNote);

    /// A segment is now paid for by this lease. Whoever reclaims from dead owners keeps the revoker: the dead owner's
    /// segment may live on for a while in a thread that has not noticed.
    fn segment_reserved(&self, _lease: LeaseId, _revoker: Revoker) {}
}

/// The right to a number of bytes of one class, held by one owner. Dropping it posts a release note.
///
/// Its size changes only when the ledger says so ([`Lease::resize`]). Several segments may be paid for by one lease (one
/// a layer, for KV): what they back together is never more than it.
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
/// let request = Request::new(Owner::new("index", 0), Class::tenant("index"), "mine", Bytes::mib(1));
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
    parting: Mutex<Parting>,
}

/// How much of a lease is in use, to be read while its holder works with it: how a budget tells what is ours from what
/// is not, without asking anybody.
///
/// It counts before the device backs and after it has unbacked, so it never shows less than is backed.
#[derive(Clone, Debug, Default)]
pub struct LeaseMeter(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    backed: AtomicBytes,
    has_segments: AtomicBool,
    /// Calls of the device under way.
    moving: AtomicUsize,
}

/// Memory of a lease is on its way in or out for as long as this lives.
pub(crate) struct Moving<'l>(&'l Counts);

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        self.0.moving.fetch_sub(1, SeqCst);
    }
}

impl LeaseMeter {
    /// What is in use of a lease of `granted` bytes: what its segments have backed. One that pays for no segment pays for
    /// something that has no address of ours (captured graphs, a tenant's own allocations): all of it counts as in use. A
    /// lease pays for the one or for the other; what it pays for beside its segments would look like another process.
    pub fn used(&self, granted: Bytes) -> Bytes {
        match self.0.has_segments.load(SeqCst) {
            true => self.0.backed.load(),
            false => granted,
        }
    }

    /// Whether the device is taking or giving memory of it: what it has then is between what this shows now and what it
    /// shows afterwards.
    pub fn is_moving(&self) -> bool {
        self.0.moving.load(SeqCst) > 0
    }
}

/// What segments left behind that ended before their lease.
#[derive(Default)]
struct Parting {
    fence: Fence,
    backings: Vec<Backing>,
}

impl Lease {
    /// The handle of a grant. Made once for each grant: a second handle would release the bytes twice, which the ledger
    /// would not count twice, but the first drop would end the lease under the other's feet.
    pub fn issue(grant: &Grant, notes: Arc<dyn ReleaseNotes>) -> Lease {
        Lease {
            bytes: AtomicBytes::new(grant.holding.bytes),
            holding: grant.holding.clone(),
            meter: LeaseMeter::default(),
            notes,
            parting: Mutex::default(),
        }
    }

    /// Its number.
    pub fn id(&self) -> LeaseId {
        self.holding.id
    }

    /// What for.
    pub fn class(&self) -> &Class {
        &self.holding.class
    }

    /// How much.
    pub fn bytes(&self) -> Bytes {
        self.bytes.load()
    }

    /// How much of it segments have backed.
    pub fn backed(&self) -> Bytes {
        self.meter.0.backed.load()
    }

    /// Shows how much of it is in use, for as long as anybody looks.
    pub fn meter(&self) -> LeaseMeter {
        self.meter.clone()
    }

    /// By whom.
    pub fn owner(&self) -> &Owner {
        &self.holding.owner
    }

    /// Of which model.
    pub fn model(&self) -> &Label {
        &self.holding.model
    }

    /// How urgent it was; growing it is as urgent.
    pub fn priority(&self) -> Priority {
        self.holding.priority
    }

    /// What a ledger that is rebuilt after a crash has to know of it.
    pub fn holding(&self) -> Holding {
        Holding { bytes: self.bytes(), ..self.holding.clone() }
    }

    /// Takes on the size that the ledger settled on.
    ///
    /// # Panics
    /// When the word is about another lease, or segments still back more than the new size: our bugs.
    pub fn resize(&self, resized: &Resized) {
        assert_eq!(resized.lease, self.id(), "this lease was not the one resized");
        let backed = self.backed();
        assert!(backed <= resized.to, "{} cannot shrink to {}: {backed} of it are backed", self.id(), resized.to);
        self.bytes.store(resized.to);
    }

    /// Ends the lease, but its bytes are free only after this fence.
    pub fn release_after(self, fence: Fence) {
        self.part(fence, None);
    }

    /// To be held around a call of the device, and what is counted with it.
    pub(crate) fn moving(&self) -> Moving<'_> {
        self.meter.0.moving.fetch_add(1, SeqCst);
        Moving(&self.meter.0)
    }

    /// Counts bytes as backed. Going over the lease is our bug.
    pub(crate) fn spend(&self, bytes: Bytes) {
        let backed = self.meter.0.backed.fetch_add(bytes) + bytes;
        assert!(
            backed <= self.bytes(),
            "{} of class {} pays for {}, not for {backed}",
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

    /// The fence that segments have asked for so far.
    pub(crate) fn parting_fence(&self) -> Fence {
        self.parting.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).fence.clone()
    }

    pub(crate) fn announce(&self, revoker: Revoker) {
        self.meter.0.has_segments.store(true, SeqCst);
        self.notes.segment_reserved(self.id(), revoker);
    }

    /// Remembers a fence, and perhaps memory that must stay backed until it, for the release note.
    pub(crate) fn part(&self, fence: Fence, backing: Option<Backing>) {
        let mut parting = self.parting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let before = std::mem::take(&mut parting.fence);
        parting.fence = before.and(fence);
        parting.backings.extend(backing);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Parting { fence, backings } =
            std::mem::take(self.parting.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()));
        self.notes.post(ReleaseNote { lease: self.holding.id, fence, backings });
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {} of {} for {})", self.id(), self.bytes(), self.class(), self.model(), self.owner())
    }
}
