//! The fences that leases wait for, looked at outside the ledger so that the ledger stays pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Backing, DeviceError, Fence, LeaseId, ReleaseNote, Revoker};

/// Keeps the fence of every lease that is on its way home, the memory that stays backed until then, and the revokers of
/// segments whose owner may die.
///
/// Whoever drives the ledger calls [`FenceWatch::passed`] now and then, and gives the ledger one
/// [`crate::Input::FencePassed`] for each lease it returns. To unback a whole card takes a third of a second: whoever
/// cannot wait that long calls [`FenceWatch::due`] instead, lets another thread do it, and says [`FenceWatch::home`]
/// before it tells the ledger.
///
/// ```
/// use bursar_budgets::*;
/// let (mut watch, lane) = (FenceWatch::default(), Timeline::new());
/// let step = lane.issue();
/// watch.wait(LeaseId(7), lane.fence_here());
/// assert!(watch.passed()?.is_empty());
/// lane.complete(step);
/// assert_eq!(watch.passed()?, [LeaseId(7)]);
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Debug, Default)]
pub struct FenceWatch {
    pending: BTreeMap<LeaseId, Pending>,
    revokers: BTreeMap<LeaseId, Vec<Revoker>>,
    /// Leases whose memory somebody gives back to the device right now.
    coming: BTreeSet<LeaseId>,
}

/// A lease whose fence has passed, and the memory that has to be given back before the ledger may hear of it.
#[derive(Debug)]
#[must_use = "its memory stays backed until it is brought home"]
pub struct PendingReclaim {
    lease: LeaseId,
    revokers: Vec<Revoker>,
    backings: Vec<Backing>,
}

#[derive(Debug, Default)]
struct Pending {
    fence: Fence,
    backings: Vec<Backing>,
    revoke: bool,
}

impl FenceWatch {
    /// A segment is paid for by this lease. If the ledger no longer holds that lease (a dead owner's thread that has not
    /// noticed), revoke the segment at once instead.
    pub fn segment_reserved(&mut self, lease: LeaseId, revoker: Revoker) {
        let revokers = self.revokers.entry(lease).or_default();
        revokers.retain(|revoker| !revoker.is_spent());
        revokers.push(revoker);
    }

    /// A lease has ended. Returns whether its fence has passed already and nothing of it is backed any more: the `passed`
    /// of [`crate::Input::Release`].
    pub fn released(&mut self, note: ReleaseNote) -> bool {
        self.revokers.remove(&note.lease);
        if note.fence.is_passed() && note.backings.is_empty() && !self.pending.contains_key(&note.lease) {
            // What is on its last stretch arrives without this.
            return !self.is_coming_home(note.lease);
        }
        let pending = self.pending.entry(note.lease).or_default();
        pending.fence = std::mem::take(&mut pending.fence).and(note.fence);
        pending.backings.extend(note.backings);
        false
    }

    /// A lease waits for this fence, to shrink.
    pub fn wait(&mut self, lease: LeaseId, fence: Fence) {
        let pending = self.pending.entry(lease).or_default();
        pending.fence = std::mem::take(&mut pending.fence).and(fence);
    }

    /// A lease is taken from a dead owner: behind this fence its segments are unbacked, wherever they still live.
    pub fn revoke(&mut self, lease: LeaseId, fence: Fence) {
        self.wait(lease, fence);
        self.pending.entry(lease).or_default().revoke = true;
    }

    /// The leases whose fence has passed, each once, with their memory given back to the device.
    ///
    /// # Errors
    /// What the device says when a segment cannot be unbacked; that lease and those after it are returned by a later call.
    pub fn passed(&mut self) -> Result<Vec<LeaseId>, DeviceError> {
        let mut home = Vec::new();
        let mut outcome = Ok(());
        for mut due in self.due() {
            if outcome.is_ok() {
                outcome = due.bring();
            }
            match outcome {
                Ok(()) => home.push(self.home(due.lease)),
                Err(_) => self.put_back(due),
            }
        }
        outcome.map(|()| home)
    }

    /// The leases whose fence has passed, each once. Nothing has been given back yet: that is what each is to be
    /// [brought](PendingReclaim::bring) for, on a thread that may take its time.
    pub fn due(&mut self) -> Vec<PendingReclaim> {
        let is_due =
            |(lease, pending): &(&LeaseId, &Pending)| pending.fence.is_passed() && !self.coming.contains(*lease);
        let due: Vec<LeaseId> = self.pending.iter().filter(is_due).map(|(lease, _)| *lease).collect();
        let begin = |lease| {
            let Pending { backings, revoke, .. } = self.pending.remove(&lease).expect("listed above");
            let revokers = self.revokers.get(&lease).filter(|_| revoke).cloned().unwrap_or_default();
            self.coming.insert(lease);
            PendingReclaim { lease, revokers, backings }
        };
        due.into_iter().map(begin).collect()
    }

    /// This lease has been brought home: now the ledger may hear of it.
    pub fn home(&mut self, lease: LeaseId) -> LeaseId {
        self.coming.remove(&lease);
        lease
    }

    /// It could not be brought home; a later [`due`](FenceWatch::due) gives it again.
    pub fn put_back(&mut self, PendingReclaim { lease, revokers, backings }: PendingReclaim) {
        self.coming.remove(&lease);
        let pending = self.pending.entry(lease).or_default();
        pending.backings.extend(backings);
        if !revokers.is_empty() {
            pending.revoke = true;
            // A release note may have taken them off the list meanwhile.
            self.revokers.entry(lease).or_insert(revokers);
        }
    }

    /// Whether nothing waits for its fence, and nothing is on its way home.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.coming.is_empty()
    }

    /// Whether its memory is being given back right now: a segment that turns up for it is too late.
    pub fn is_coming_home(&self, lease: LeaseId) -> bool {
        self.coming.contains(&lease)
    }

    /// Whether this lease still waits for its fence, or is on its last stretch home.
    pub fn waits_for(&self, lease: LeaseId) -> bool {
        self.pending.contains_key(&lease) || self.coming.contains(&lease)
    }

    /// How many leases still wait for a fence.
    pub fn waiting(&self) -> usize {
        self.pending.len()
    }
}

impl PendingReclaim {
    /// Whose memory.
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Whether there is nothing left to ask the device for.
    pub fn is_light(&self) -> bool {
        self.revokers.iter().all(Revoker::is_spent) && self.backings.is_empty()
    }

    /// Gives the memory back to the device; it may take a third of a second for a whole card.
    ///
    /// # Errors
    /// What the device says. It may be tried again.
    pub fn bring(&mut self) -> Result<(), DeviceError> {
        self.revokers.iter().try_for_each(Revoker::revoke)?;
        self.backings.clear();
        Ok(())
    }
}
