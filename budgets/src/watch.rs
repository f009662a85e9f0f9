//! The fences that leases wait for, looked at outside the ledger so that the ledger stays pure.

use std::collections::BTreeMap;

use crate::{Backing, DeviceError, Fence, LeaseId, ReleaseNote, Revoker};

/// Keeps the fence of every lease that is on its way home, the memory that stays backed until then, and the revokers of
/// segments whose owner may die.
///
/// Whoever drives the ledger calls [`FenceWatch::passed`] now and then, and gives the ledger one
/// [`crate::Input::FencePassed`] for each lease it returns.
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

    /// A lease has ended. Returns whether its fence has passed already: the `passed` of [`crate::Input::Release`].
    pub fn released(&mut self, note: ReleaseNote) -> bool {
        self.revokers.remove(&note.lease);
        if note.fence.is_passed() && !self.pending.contains_key(&note.lease) {
            return true; // Dropping the note drops its backings.
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
        let passed: Vec<LeaseId> =
            self.pending.iter().filter(|(_, pending)| pending.fence.is_passed()).map(|(lease, _)| *lease).collect();
        for lease in &passed {
            if self.pending[lease].revoke {
                for revoker in self.revokers.get(lease).into_iter().flatten() {
                    revoker.revoke()?;
                }
                self.revokers.remove(lease);
            }
        }
        for lease in &passed {
            self.pending.remove(lease);
        }
        Ok(passed)
    }

    /// Whether this lease still waits for its fence.
    pub fn waits_for(&self, lease: LeaseId) -> bool {
        self.pending.contains_key(&lease)
    }

    /// How many leases still wait.
    pub fn waiting(&self) -> usize {
        self.pending.len()
    }
}
