//! Hooks into a host device: scripted faults, simulated processes, held calls, and counters.

use serde::Serialize;

use super::HostDevice;
use crate::Bytes;

/// Faults to come, by the number of the call. Calls to `back`, or all calls that take something, are counted from 1
/// since the device was made.
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
    /// No faults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Refuses the `nth` back, however much is free.
    pub fn refuse_back(mut self, nth: u64) -> Self {
        self.refused_backs.push(nth);
        self
    }

    /// Refuses the `nth` call that takes addresses (`reserve`) or memory (`back`).
    pub fn refuse_call(mut self, nth: u64) -> Self {
        self.refused_calls.push(nth);
        self
    }

    /// Another process takes up to this much just before the `nth` back.
    pub fn foreign_takes_before_back(mut self, nth: u64, bytes: Bytes) -> Self {
        self.foreign_takes.push((nth, bytes));
        self
    }

    /// Loses the device at the `nth` back, for good.
    pub fn lose_at_back(mut self, nth: u64) -> Self {
        self.lost_at = Some(nth);
        self
    }
}

/// What the device did so far, for tests and metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostCounts {
    /// Calls to `reserve` and `back`, with refused ones.
    pub calls: u64,
    /// Calls to `back`, with refused ones.
    pub backs: u64,
    /// Calls to `unback`.
    pub unbacks: u64,
    /// Reservations not yet released.
    pub reservations: u64,
    /// Bytes backed now.
    pub backed: Bytes,
    /// The most bytes ever backed at once.
    pub high_water: Bytes,
    /// What other processes hold.
    pub foreign: Bytes,
    /// Calls blocked now by [`HostControl::hold_calls`].
    pub held_calls: u64,
}

/// What tests and drills do to a [`HostDevice`] that no program does to a device.
pub trait HostControl {
    /// Replaces the scripted faults.
    fn play(&self, script: Script);

    /// What the device did so far.
    fn counts(&self) -> HostCounts;

    /// Sets the high-water mark to what is backed now.
    fn reset_high_water(&self);

    /// Another process takes up to this much now. Returns what it got, since it can only take what is free.
    fn foreign_takes(&self, bytes: Bytes) -> Bytes;

    /// Another process gives back up to this much now. Returns how much.
    fn foreign_gives_back(&self, bytes: Bytes) -> Bytes;

    /// Our process now takes up to this much that no lease can hold, as loading a module would. Returns how much.
    fn overhead_grows(&self, bytes: Bytes) -> Bytes;

    /// Our process now takes up to this much that neither leases nor overhead count: a bug that shows as drift. Returns
    /// how much.
    fn drifts(&self, bytes: Bytes) -> Bytes;

    /// From now on, no fence passes.
    fn hold_fences(&self);

    /// Fences pass again.
    fn let_fences_pass(&self);

    /// From now on, calls that back or unback block until [`let_calls_pass`](HostControl::let_calls_pass), like the
    /// third of a second that a whole card takes. Other calls do not.
    fn hold_calls(&self);

    /// Lets one blocked call end, or the next one if none is blocked. Later calls block.
    fn let_one_call_pass(&self);

    /// Lets all blocked calls end, and blocks no more.
    fn let_calls_pass(&self);

    /// Loses the device from now on.
    fn lose(&self, reason: &str);
}

impl HostControl for HostDevice {
    fn play(&self, script: Script) {
        self.lock().script = script;
    }

    fn counts(&self) -> HostCounts {
        let state = self.lock();
        HostCounts { reservations: state.reservations.len() as u64, ..state.counts }
    }

    fn reset_high_water(&self) {
        let counts = &mut self.lock().counts;
        counts.high_water = counts.backed;
    }

    fn foreign_takes(&self, bytes: Bytes) -> Bytes {
        self.lock().foreign_takes(&self.config, bytes)
    }

    fn foreign_gives_back(&self, bytes: Bytes) -> Bytes {
        let counts = &mut self.lock().counts;
        let given = bytes.min(counts.foreign);
        counts.foreign -= given;
        given
    }

    fn overhead_grows(&self, bytes: Bytes) -> Bytes {
        let mut state = self.lock();
        let taken = bytes.min(state.free(&self.config));
        state.overhead += taken;
        taken
    }

    fn drifts(&self, bytes: Bytes) -> Bytes {
        let mut state = self.lock();
        let taken = bytes.min(state.free(&self.config));
        state.drift += taken;
        taken
    }

    fn hold_fences(&self) {
        self.timelines.hold();
    }

    fn let_fences_pass(&self) {
        self.timelines.let_pass();
    }

    fn hold_calls(&self) {
        self.lock().holds_calls = true;
    }

    fn let_one_call_pass(&self) {
        self.lock().passes += 1;
        self.let_pass.notify_one();
    }

    fn let_calls_pass(&self) {
        let mut state = self.lock();
        (state.holds_calls, state.passes) = (false, 0);
        self.let_pass.notify_all();
    }

    fn lose(&self, reason: &str) {
        self.lock().lost = Some(reason.into());
    }
}
