//! Watches the fences that leases wait for. This is separate from the ledger, so that the ledger
//! stays pure.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Backing, DeviceError, Fence, LeaseId, ReleaseNote, RevokeHandle};

/// The fences of all leases that are being returned, and the memory that stays backed until these
/// fences have passed. The watch also keeps the revoke handles of all segments, because the owner
/// of a segment may die.
///
/// The caller that drives the ledger calls [`FenceWatch::passed`] regularly, and sends the ledger
/// one [`crate::Input::FencePassed`] for each returned lease. Unbacking the memory of a whole GPU
/// takes a third of a second. To avoid blocking that long, call [`FenceWatch::due`], call
/// [`PendingReclaim::release`] for each lease on another thread, and call
/// [`FenceWatch::finish_release`] before informing the ledger.
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
    revokers: BTreeMap<LeaseId, Vec<RevokeHandle>>,
    /// Leases whose memory is being returned to the device now.
    coming: BTreeSet<LeaseId>,
}

/// A lease whose fence has passed. Its memory must be returned to the device before
/// the ledger is informed.
#[derive(Debug)]
#[must_use = "its memory stays backed until it is released"]
pub struct PendingReclaim {
    lease: LeaseId,
    revokers: Vec<RevokeHandle>,
    backings: Vec<Backing>,
}

#[derive(Debug, Default)]
struct Pending {
    fence: Fence,
    backings: Vec<Backing>,
    revoke: bool,
}

impl FenceWatch {
    /// Records that this lease now pays for a segment. A thread of a dead owner that has not
    /// noticed the death may reserve a segment for a lease that the ledger no longer holds. Revoke
    /// such a segment at once instead of calling this function.
    pub fn segment_reserved(&mut self, lease: LeaseId, revoker: RevokeHandle) {
        let revokers = self.revokers.entry(lease).or_default();
        revokers.retain(|revoker| !revoker.is_dropped());
        revokers.push(revoker);
    }

    /// Records that a lease has ended. Returns `true` if all of its fences have passed, none of its
    /// memory is backed, and none is being returned now. The result is the `passed` of
    /// [`crate::Input::Release`].
    pub fn released(&mut self, note: ReleaseNote) -> bool {
        self.revokers.remove(&note.lease);
        if note.fence.is_passed() && note.backings.is_empty() && !self.pending.contains_key(&note.lease) {
            // If the lease's memory is being returned now, `finish_release` reports the lease when
            // the return is done.
            return !self.is_being_released(note.lease);
        }
        let pending = self.pending.entry(note.lease).or_default();
        pending.fence = std::mem::take(&mut pending.fence).and(note.fence);
        pending.backings.extend(note.backings);
        false
    }

    /// Records that this lease must wait for this fence before it shrinks.
    pub fn wait(&mut self, lease: LeaseId, fence: Fence) {
        let pending = self.pending.entry(lease).or_default();
        pending.fence = std::mem::take(&mut pending.fence).and(fence);
    }

    /// Records that a lease is revoked from a dead owner. Once this fence has passed, the lease's
    /// segments are unbacked, even if a thread still owns them.
    pub fn revoke(&mut self, lease: LeaseId, fence: Fence) {
        self.wait(lease, fence);
        self.pending.entry(lease).or_default().revoke = true;
    }

    /// Unbacks the memory of all leases whose fence has passed. Returns these
    /// leases, each only once.
    ///
    /// # Errors
    /// Any error of the device while a segment is unbacked. The next successful call returns all of
    /// these leases, including leases whose memory was returned before the error.
    pub fn passed(&mut self) -> Result<Vec<LeaseId>, DeviceError> {
        let mut due = self.due();
        if let Err(error) = due.iter_mut().try_for_each(PendingReclaim::release) {
            due.into_iter().for_each(|due| self.requeue(due));
            return Err(error);
        }
        Ok(due.into_iter().map(|due| self.finish_release(due.lease)).collect())
    }

    /// Removes and returns the leases whose fence has passed, each only once. Their memory is still
    /// backed: call [`release`](PendingReclaim::release) for each on a thread that may block.
    pub fn due(&mut self) -> Vec<PendingReclaim> {
        let is_due =
            |(lease, pending): &(&LeaseId, &Pending)| pending.fence.is_passed() && !self.coming.contains(*lease);
        let due: Vec<LeaseId> = self.pending.iter().filter(is_due).map(|(lease, _)| *lease).collect();
        let begin = |lease| {
            let Pending { backings, revoke, .. } = self.pending.remove(&lease).expect("the lease was collected above");
            let revokers = self.revokers.get(&lease).filter(|_| revoke).cloned().unwrap_or_default();
            self.coming.insert(lease);
            PendingReclaim { lease, revokers, backings }
        };
        due.into_iter().map(begin).collect()
    }

    /// Records that the memory of this lease has been returned. Returns the lease, so that the
    /// caller can inform the ledger.
    pub fn finish_release(&mut self, lease: LeaseId) -> LeaseId {
        self.coming.remove(&lease);
        lease
    }

    /// Records that the memory of this lease could not be returned. A later
    /// [`due`](FenceWatch::due) returns the lease again.
    pub fn requeue(&mut self, PendingReclaim { lease, revokers, backings }: PendingReclaim) {
        self.coming.remove(&lease);
        let pending = self.pending.entry(lease).or_default();
        pending.backings.extend(backings);
        if !revokers.is_empty() {
            pending.revoke = true;
            // A release note may have removed these revoke handles from the map.
            self.revokers.entry(lease).or_insert(revokers);
        }
    }

    /// Whether no lease waits for a fence and no memory is being returned.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.coming.is_empty()
    }

    /// Whether this lease's memory is being returned now. A segment that is reserved for the lease
    /// at this point must be revoked at once.
    pub fn is_being_released(&self, lease: LeaseId) -> bool {
        self.coming.contains(&lease)
    }

    /// Whether this lease waits for a fence, or its memory is being returned.
    pub fn waits_for(&self, lease: LeaseId) -> bool {
        self.pending.contains_key(&lease) || self.coming.contains(&lease)
    }

    pub fn waiting(&self) -> usize {
        self.pending.len()
    }
}

impl PendingReclaim {
    pub fn lease(&self) -> LeaseId {
        self.lease
    }

    /// Whether the lease has no memory left to return, so that [`release`](PendingReclaim::release)
    /// would do nothing.
    pub fn is_light(&self) -> bool {
        self.revokers.iter().all(RevokeHandle::is_dropped) && self.backings.is_empty()
    }

    /// Returns the memory to the device, which may take a third of a second for a whole GPU.
    ///
    /// # Errors
    /// Any error of the device. The call may be repeated.
    pub fn release(&mut self) -> Result<(), DeviceError> {
        self.revokers.iter().try_for_each(RevokeHandle::revoke)?;
        self.backings.clear();
        Ok(())
    }
}
