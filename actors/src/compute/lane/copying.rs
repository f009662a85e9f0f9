//! Copies of blocks that a lane has under way beside its other jobs.

use std::time::Duration;

use bursar_kernels::{
    Backend, KernelError,
    ops::copy_blocks::{self, Copying},
};

use super::{
    ModelRunner,
    job::{CopyJob, LaneError},
};

/// A copy job and what it has begun.
pub(super) struct CopyBegun {
    job: Box<CopyJob>,
    copying: Result<Box<dyn Copying>, LaneError>,
}

impl CopyBegun {
    /// Whether [`finish`](CopyBegun::finish) would return without waiting.
    pub(super) fn has_come(&self) -> bool {
        self.copying.as_ref().map_or(true, |copying| copying.has_come())
    }

    /// Waits until the device is past the copies. Returns the call that answers the job, to be made once the job counts
    /// as finished.
    pub(super) fn finish<B: Backend>(self, runner: &ModelRunner<B>) -> Box<dyn FnOnce()> {
        let outcome = runner.past(self.copying.and_then(|copying| Ok(copying.wait()?)));
        let outcome = outcome.and_then(|took| runner.unless_lost(took));
        Box::new(move || self.job.answer.give(outcome))
    }
}

impl<B: Backend> ModelRunner<B> {
    /// Whether this lane may be asked for copies of blocks.
    pub(super) fn copies_blocks(&self) -> bool {
        self.memory.host_kv.is_some()
    }

    /// Begins copies, and returns without waiting for them.
    pub(super) fn begin_copies(&self, job: Box<CopyJob>) -> CopyBegun {
        let copying = self.unless_refused(|| {
            let host = self.memory.host_kv.as_ref().expect("who asks for copies has host memory for blocks");
            let (layers, slots) = (self.memory.kv.layers(self.rank()), host.slots(self.rank()));
            Ok(copy_blocks::copy_blocks(&self.backend, &layers, &slots, &job.to_host, &job.to_device)?)
        });
        CopyBegun { job, copying }
    }

    /// What was copied on a device that was lost in the meantime is worthless.
    fn unless_lost(&self, took: Duration) -> Result<Duration, LaneError> {
        let device = self.workspace.segment().map(|segment| segment.device().check());
        device.unwrap_or(Ok(())).map_err(KernelError::Device)?;
        Ok(took)
    }
}
