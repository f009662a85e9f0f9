//! A range of reserved addresses of which a leased prefix is backed by memory.

use std::sync::Arc;

use crate::{
    Address, Bytes, Device, DeviceError, Fence, HostCopy, Lease,
    backing::{Backing, Mapping, RevokeHandle},
};

/// Reserved addresses, a backed prefix of them, and the lease that pays for that prefix.
///
/// Growing and shrinking move the end of the prefix, so addresses are stable. Dropping a segment
/// returns its memory at once if the device has finished everything issued so far and the lease
/// waits for no other fence. Otherwise the memory is part of the lease's release note and is
/// returned after the fence.
///
/// ```
/// use bursar_budgets::{*, testing::HostControl};
/// # use std::sync::Arc;
/// # struct Nobody;
/// # impl ReleaseNotes for Nobody { fn post(&self, _: ReleaseNote) {} }
/// # let mut ledger = Ledger::new(LedgerConfig::new(Bytes::mib(4)));
/// # let request = Request::new(Owner::new("kv", 0), Class::Kv, "demo", Bytes::mib(2));
/// # let effects = ledger.step(Input::Ask { id: RequestId(1), request, wait: false });
/// # let Effect::Granted(grant) = &effects[0] else { unreachable!() };
/// # let lease = Lease::issue(grant, Arc::new(Nobody));
/// let device = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(4)))?);
/// let kv = Segment::reserve(device.clone(), Bytes::mib(4), lease)?;
/// kv.back_to(Bytes::mib(2))?;
/// kv.shrink_to(Bytes::mib(1), &Fence::passed())?;
/// assert_eq!((kv.backed(), device.counts().backed), (Bytes::mib(1), Bytes::mib(1)));
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Segment {
    backing: Option<Backing>,
    lease: Arc<Lease>,
}

impl Segment {
    /// Reserves addresses for `bytes_max`, rounded up to whole pages, without backing them.
    ///
    /// Pass an `Arc<Lease>` if one lease pays for several segments.
    ///
    /// # Errors
    /// Any error of the device. The lease is then dropped, which releases it.
    pub fn reserve(
        device: Arc<dyn Device>,
        bytes_max: Bytes,
        lease: impl Into<Arc<Lease>>,
    ) -> Result<Segment, DeviceError> {
        let lease = lease.into();
        let reserved = bytes_max.round_up(device.page());
        let address = device.reserve(reserved)?;
        let addresses = device.addresses(address);
        let mapping = Arc::new(Mapping::new(device, addresses, reserved));
        lease.announce(RevokeHandle(Arc::downgrade(&mapping)));
        Ok(Segment { backing: Some(Backing(mapping)), lease })
    }

    /// Backs the prefix up to `bytes`, rounded up to whole pages. Does nothing if the prefix
    /// is already that long.
    ///
    /// # Errors
    /// Any error of the device; the prefix then keeps its length. [`DeviceError::BadRange`] if
    /// the segment was revoked.
    ///
    /// # Panics
    /// If the lease is too small, or fewer addresses were reserved. Both are bugs in Bursar. Leases
    /// that pay for segments have a size in whole pages.
    pub fn back_to(&self, bytes: Bytes) -> Result<(), DeviceError> {
        let mapping = self.mapping();
        let bytes = bytes.round_up(mapping.device.page());
        assert!(bytes <= mapping.reserved, "{bytes} of {} reserved cannot be backed", mapping.reserved);
        let mut extent = mapping.lock();
        let Some(more) = bytes.checked_sub(extent.backed).filter(|more| !more.is_zero()) else { return Ok(()) };
        let end = mapping.address().offset(extent.backed);
        if extent.revoked {
            let reason = "the lease was revoked";
            return Err(DeviceError::BadRange { address: end, bytes: more, verb: "backed", reason });
        }
        let _moving = self.lease.moving();
        self.lease.spend(more);
        mapping.device.back(end, more).inspect_err(|_| self.lease.save(more))?;
        extent.backed = bytes;
        Ok(())
    }

    /// Unbacks the tail down to `bytes`, rounded up to whole pages. Does nothing if the prefix is
    /// already that short. The lease keeps its size: the caller must then resize the lease.
    ///
    /// # Errors
    /// Any error of the device; the prefix then keeps its length.
    ///
    /// # Panics
    /// If the fence has not passed, which is a bug in Bursar. The fence must have been made after
    /// the last use of the tail.
    pub fn shrink_to(&self, bytes: Bytes, last_use: &Fence) -> Result<(), DeviceError> {
        assert!(last_use.is_passed(), "the device still uses the tail that is to be unbacked");
        let mapping = self.mapping();
        let bytes = bytes.round_up(mapping.device.page());
        let mut extent = mapping.lock();
        let Some(less) = extent.backed.checked_sub(bytes).filter(|less| !less.is_zero()) else { return Ok(()) };
        let _moving = self.lease.moving();
        mapping.device.unback(mapping.address().offset(bytes), less)?;
        extent.backed = bytes;
        self.lease.save(less);
        Ok(())
    }

    /// Copies the backed prefix into host memory, and waits for the copy. Nothing may write to the
    /// prefix during the copy.
    ///
    /// # Errors
    /// The same as [`Device::copy_out`].
    pub fn copy_out(&self) -> Result<HostCopy, DeviceError> {
        let mapping = self.mapping();
        mapping.device.clone().copy_out(mapping.address(), self.backed())
    }

    /// Copies back the result of [`copy_out`](Segment::copy_out). The backed prefix must be at
    /// least as long as it was at the call to `copy_out`.
    ///
    /// # Errors
    /// The same as [`Device::copy_in`].
    pub fn copy_in(&self, copy: &HostCopy) -> Result<(), DeviceError> {
        let mapping = self.mapping();
        mapping.device.copy_in(copy, mapping.address())
    }

    /// The start address. It never changes.
    pub fn address(&self) -> Address {
        self.mapping().address()
    }

    /// The start address on one rank of a [group](crate::DeviceGroup). Without a
    /// group, `rank` is ignored.
    pub fn address_on(&self, rank: usize) -> Address {
        match &self.mapping().addresses[..] {
            [only] => *only,
            addresses => addresses[rank],
        }
    }

    /// Lets each rank of a group access the memory that its reachable peers have backed.
    ///
    /// # Errors
    /// The same as [`Device::open_to_ranks`].
    pub fn open_to_ranks(&self) -> Result<(), DeviceError> {
        let mapping = self.mapping();
        mapping.device.open_to_ranks(mapping.address(), self.backed())
    }

    /// Length of the backed prefix, in whole pages.
    pub fn backed(&self) -> Bytes {
        self.mapping().lock().backed
    }

    /// Length of the reserved addresses, in whole pages.
    pub fn reserved(&self) -> Bytes {
        self.mapping().reserved
    }

    /// The lease that pays for the backed prefix.
    pub fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.mapping().device
    }

    /// A handle that can unback the memory if the owner dies.
    pub fn revoker(&self) -> RevokeHandle {
        RevokeHandle(Arc::downgrade(&self.backing.as_ref().expect("a segment has its backing until it drops").0))
    }

    /// Ends the segment. Its memory is returned once this fence has passed and the device has
    /// finished everything issued so far.
    pub fn release_after(self, fence: Fence) {
        self.lease.defer_release(fence, None);
    }

    fn mapping(&self) -> &Mapping {
        &self.backing.as_ref().expect("a segment has its backing until it drops").0
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let Some(backing) = self.backing.take() else { return };
        let (backed, fence) = (backing.0.lock().backed, backing.0.device.fence_here());
        let fence = self.lease.pending_fence().and(fence);
        if fence.is_passed() {
            let _moving = self.lease.moving();
            // Unback while the segment still exists, so that a revoke handle waits for this call.
            // If the handle found the segment gone, the ledger would count the memory as returned
            // too early. An error is ignored, because this call fails only on a lost device, which
            // has lost the memory too.
            drop(backing.0.clear(&mut backing.0.lock()));
            // Return the memory to the device before lowering the lease's count, because another
            // segment of the same lease may back the freed bytes at once.
            drop(backing);
            self.lease.save(backed);
        } else {
            self.lease.defer_release(fence, Some(backing));
        }
    }
}
