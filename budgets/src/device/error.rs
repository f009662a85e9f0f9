//! Errors of devices.

use super::address::Address;
use crate::{Bytes, Hint};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The device does not have enough free memory. A smaller request may succeed.
    #[error("the device refused {} ({asked}); {} ({free}) are free", asked.exact(), free.exact())]
    Refused { asked: Bytes, free: Bytes, hint: String },
    /// The device is lost. No lane, lease or address on it can be used any more. Recovery requires
    /// a new context, which driver 580 creates only in a new process.
    #[error("the device is lost: {reason}")]
    Lost { reason: String },
    /// The range is not made of whole pages of one reservation, or its pages are not in the state
    /// (backed or unbacked) that the call requires.
    #[error("{bytes} at {address} cannot be {verb}: {reason}", bytes = bytes.exact())]
    BadRange {
        address: Address,
        bytes: Bytes,
        /// The attempted operation: backed, unbacked, copied or released.
        verb: &'static str,
        reason: &'static str,
    },
    /// The operating system or the driver refused to reserve addresses. Reserving addresses takes
    /// no memory.
    #[error("{} of addresses cannot be reserved: {reason}", bytes.exact())]
    NoAddresses {
        bytes: Bytes,
        /// The message of the operating system or the driver.
        reason: String,
    },
    /// The host cannot provide memory of this size for copies. For a GPU, the memory is
    /// page-locked.
    #[error("the host refused to page-lock {}: {message}", asked.exact())]
    HostRefused { asked: Bytes, message: String },
    /// A call to one GPU of a [group](crate::DeviceGroup) failed.
    #[error("{card}: {source}")]
    OfCard { card: String, source: Box<DeviceError> },
    #[error("{reason}")]
    NoDevice { reason: String, hint: String },
    /// The device exists, but the device, its driver or a required library cannot be used in its
    /// current state.
    #[error("{reason}")]
    Unusable { reason: String, hint: String },
    /// A driver call failed for a reason other than memory or a lost device. This is
    /// a bug in Bursar.
    #[error("{call}: {message}")]
    Driver {
        /// The name of the driver's function.
        call: &'static str,
        message: String,
    },
    /// A host device cannot have this capacity.
    #[error("the capacity of the host device is {capacity}; expected {least} to {most}")]
    Capacity {
        capacity: Bytes,
        /// The minimum: one page.
        least: Bytes,
        /// The maximum: the memory of the machine.
        most: Bytes,
    },
    #[error("the page size is {}: {reason}", page.exact())]
    BadPage { page: Bytes, reason: String },
}

impl DeviceError {
    /// Whether the same call with fewer bytes may succeed.
    pub fn is_refused(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Refused { .. })
    }

    /// Whether this error reports that the device is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self.of_any_card(), DeviceError::Lost { .. })
    }

    /// The error without the GPU's label that a [group](crate::DeviceGroup) adds. Returns other
    /// errors unchanged.
    pub fn of_any_card(&self) -> &DeviceError {
        match self {
            DeviceError::OfCard { source, .. } => source.of_any_card(),
            error => error,
        }
    }

    /// The label of the GPU that caused this error, if the GPU belongs to a
    /// [group](crate::DeviceGroup).
    pub fn card(&self) -> Option<&str> {
        match self {
            DeviceError::OfCard { card, .. } => Some(card),
            _ => None,
        }
    }
}

impl Hint for DeviceError {
    type Text = Option<String>;

    fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Refused { hint, .. } => Some(hint.clone()),
            DeviceError::Lost { .. } => {
                Some("start the program again: a process that lost a GPU cannot create another context".into())
            }
            DeviceError::NoDevice { hint, .. } | DeviceError::Unusable { hint, .. } => Some(hint.clone()),
            DeviceError::HostRefused { .. } => {
                Some("free host memory, or raise the limit on locked memory (ulimit -l)".into())
            }
            DeviceError::OfCard { source, .. } => source.hint(),
            DeviceError::BadRange { .. } | DeviceError::Driver { .. } => None,
            DeviceError::NoAddresses { .. } => Some("raise the limit on address space (ulimit -v)".into()),
            DeviceError::Capacity { most, .. } => {
                Some(format!("set `capacity` to at most {most}, the memory of this machine"))
            }
            DeviceError::BadPage { .. } => {
                Some("use a power of two that is a multiple of the system's page size".into())
            }
        }
    }
}
