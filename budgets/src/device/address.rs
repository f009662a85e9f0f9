//! Device addresses.

use std::fmt;

use crate::Bytes;

/// An address on a device. Only the device's own code may convert an address to a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    pub fn offset(self, bytes: Bytes) -> Address {
        Address(self.0.checked_add(bytes.0).expect("the address stays within u64"))
    }

    /// Rounds up to a multiple of `bytes`.
    pub(crate) fn round_up(self, bytes: Bytes) -> Address {
        Address(self.0.next_multiple_of(bytes.0))
    }

    pub fn is_multiple_of(self, bytes: Bytes) -> bool {
        self.0.is_multiple_of(bytes.0)
    }

    /// The distance from `start`, which must not be after this address.
    pub fn distance_from(self, start: Address) -> Bytes {
        Bytes(self.0) - Bytes(start.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
