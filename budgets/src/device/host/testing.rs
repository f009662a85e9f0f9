//! Hooks for testing with a host device: scripted faults, simulated processes,
//! held calls, and counters.

use serde::Serialize;

use crate::Bytes;

/// Scripted faults, selected by the number of the call. The first call after the device is created
/// has number 1. Some faults count only calls to `back`, and others count all calls that take
/// addresses or memory.
///
/// ```
/// use bursar_budgets::{*, testing::*};
/// let device = HostDevice::new(HostConfig::small(Bytes::mib(1)))?;
/// device.play(Script::new().refuse_back(1));
/// let address = device.reserve(Bytes::mib(1))?;
/// assert!(device.back(address, device.page()).unwrap_err().is_refused());
/// assert!(device.back(address, device.page()).is_ok());
/// # Ok::<(), DeviceError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    pub(super) refused_backs: Vec<u64>,
    pub(super) refused_calls: Vec<u64>,
    pub(super) foreign_takes: Vec<(u64, Bytes)>,
    pub(super) lost_at: Option<u64>,
}

impl Script {
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses the `nth` call to `back`, no matter how much memory is free.
    pub fn refuse_back(mut self, nth: u64) -> Self {
        self.refused_backs.push(nth);
        self
    }

    /// Refuses the `nth` call that takes addresses (`reserve`), device memory (`back`) or host
    /// memory (`copy_out`).
    pub fn refuse_call(mut self, nth: u64) -> Self {
        self.refused_calls.push(nth);
        self
    }

    /// Lets another process take up to this many bytes just before the `nth` call to `back`.
    pub fn foreign_takes_before_back(mut self, nth: u64, bytes: Bytes) -> Self {
        self.foreign_takes.push((nth, bytes));
        self
    }

    /// Loses the device permanently at the `nth` call to `back`.
    pub fn lose_at_back(mut self, nth: u64) -> Self {
        self.lost_at = Some(nth);
        self
    }
}

/// Counters since the device was created, for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostCounts {
    /// Calls to `reserve`, `back` and `copy_out`, including refused calls.
    pub calls: u64,
    /// Calls to `back`, including refused calls.
    pub backs: u64,
    pub unbacks: u64,
    /// Reservations that have not been released.
    pub reservations: u64,
    pub backed: Bytes,
    /// The maximum number of bytes backed at once.
    pub high_water: Bytes,
    /// Bytes held by other processes.
    pub foreign: Bytes,
    /// Calls that [`HostControl::hold_calls`] is blocking now.
    pub held_calls: u64,
}

/// Control of a [`HostDevice`](super::HostDevice) by tests and drills.
pub trait HostControl {
    /// Replaces the scripted faults.
    fn play(&self, script: Script);

    fn counts(&self) -> HostCounts;

    /// Resets the high-water mark to the bytes backed now.
    fn reset_high_water(&self);

    /// Lets another process take up to this many bytes now. Returns the number of bytes taken,
    /// because the process can only take free memory.
    fn foreign_takes(&self, bytes: Bytes) -> Bytes;

    /// Lets another process return up to this many bytes now. Returns the number of bytes returned.
    fn foreign_gives_back(&self, bytes: Bytes) -> Bytes;

    /// Lets this process take up to this many bytes that no lease can cover, as loading a module
    /// would. Returns the number of bytes taken.
    fn overhead_grows(&self, bytes: Bytes) -> Bytes;

    /// Lets this process take up to this many bytes that neither leases nor overhead count. This
    /// simulates a bug that shows as drift. Returns the number of bytes taken.
    fn drifts(&self, bytes: Bytes) -> Bytes;

    /// Keeps fences from passing until [`let_fences_pass`](HostControl::let_fences_pass).
    fn hold_fences(&self);

    /// Lets fences pass that [`hold_fences`](HostControl::hold_fences) has kept from passing.
    fn let_fences_pass(&self);

    /// Makes calls that back, unback or copy block until
    /// [`let_calls_pass`](HostControl::let_calls_pass). This simulates the third of a second that
    /// such a call takes for a whole GPU. Other calls do not block.
    fn hold_calls(&self);

    /// Lets one blocked call finish, or the next call if no call is blocked. Later calls still
    /// block.
    fn let_one_call_pass(&self);

    /// Ends [`hold_calls`](HostControl::hold_calls): blocked calls finish, and later
    /// calls do not block.
    fn let_calls_pass(&self);

    /// Marks the device as lost, permanently and with this reason.
    fn lose(&self, reason: &str);
}
