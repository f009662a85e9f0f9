//! Control of a host device by tests and drills.

use super::{
    HostDevice,
    testing::{HostControl, HostCounts, Script},
};
use crate::Bytes;

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
