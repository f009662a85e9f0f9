//! Copies of device memory on the host.

use std::{any::Any, fmt};

use super::{address::Address, error::DeviceError};
use crate::Bytes;

/// A copy of a device's memory on the host, which only the same kind of device can read.
pub struct HostCopy(Box<dyn Any + Send + Sync>);

impl HostCopy {
    /// Wraps a copy, whose type the device chooses.
    pub fn new(copy: impl Any + Send + Sync) -> Self {
        HostCopy(Box::new(copy))
    }

    /// The copy as the type `C`, which the device chose.
    ///
    /// # Errors
    /// [`DeviceError::BadRange`] at `address`, the destination, if the copy has another type
    /// because another kind of device made it.
    pub fn get<C: Any>(&self, address: Address) -> Result<&C, DeviceError> {
        self.0.downcast_ref().ok_or_else(|| HostCopy::by_another_device(address))
    }

    /// The error if a copy is copied to `address` of a device that cannot read it: a device of
    /// another kind, or a group with another number of ranks.
    pub(super) fn by_another_device(address: Address) -> DeviceError {
        let reason = "the copy was made by another device";
        DeviceError::BadRange { address, bytes: Bytes::ZERO, verb: "copied", reason }
    }
}

impl fmt::Debug for HostCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostCopy")
    }
}
