//! The mapping of a segment, which outlives the segment while the device still uses its memory.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use crate::{Address, Bytes, Device, DeviceError};

/// The memory of a segment. Dropping the last `Backing` of a segment unbacks the memory
/// and releases the addresses.
pub struct Backing(pub(crate) Arc<Mapping>);

/// A handle that unbacks a segment's memory, even while the segment still exists. The budget uses
/// the handle to reclaim the memory of a dead owner. The addresses stay reserved until the segment
/// drops, so a late access faults instead of reading or writing other memory.
#[derive(Clone)]
pub struct RevokeHandle(pub(crate) Weak<Mapping>);

pub(crate) struct Mapping {
    pub(crate) device: Arc<dyn Device>,
    /// The start address on each rank of a group, or one address for a single device.
    pub(crate) addresses: Vec<Address>,
    pub(crate) reserved: Bytes,
    extent: Mutex<Extent>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Extent {
    pub(crate) backed: Bytes,
    pub(crate) revoked: bool,
}

impl RevokeHandle {
    /// Unbacks everything now. The device must be past the last use of the memory.
    /// [`crate::FenceWatch`] waits for the lease's fence before it makes this call. Does nothing if
    /// the segment is gone or was already revoked.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn revoke(&self) -> Result<(), DeviceError> {
        let Some(mapping) = self.0.upgrade() else { return Ok(()) };
        let mut extent = mapping.lock();
        extent.revoked = true;
        mapping.clear(&mut extent)
    }

    /// Whether the segment was dropped and its memory returned.
    pub fn is_dropped(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl Mapping {
    pub(crate) fn new(device: Arc<dyn Device>, addresses: Vec<Address>, reserved: Bytes) -> Self {
        Mapping { device, addresses, reserved, extent: Mutex::default() }
    }

    pub(crate) fn address(&self) -> Address {
        self.addresses[0]
    }

    pub(crate) fn clear(&self, extent: &mut Extent) -> Result<(), DeviceError> {
        if !extent.backed.is_zero() {
            self.device.unback(self.address(), extent.backed)?;
            extent.backed = Bytes::ZERO;
        }
        Ok(())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Extent> {
        // Each field of an extent changes in one assignment, and `backed` changes only after the
        // device call has succeeded. So a poisoned lock guards a valid extent.
        self.extent.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The release fails only on a lost device, whose memory is lost too, and no caller could
        // handle the error.
        let _ = self.device.release_reservation(self.address());
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} backed at {}", self.lock().backed, self.reserved, self.address())
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for RevokeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revoker of {:?}", self.0.upgrade())
    }
}
