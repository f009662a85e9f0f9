//! Copies of blocks and rows that run concurrently with a lane's other jobs.

use std::time::Duration;

use bursar_kernels::{
    Backend, KernelError,
    ops::copy_blocks::{self, Copying},
};

use super::{
    ModelRunner,
    job::{Copied, CopyJob, LaneError},
};

/// A copy job and its running copies.
pub(super) struct CopyBegun {
    job: Box<CopyJob>,
    copying: Result<Box<dyn Copying>, LaneError>,
}

impl CopyBegun {
    /// Whether [`finish`](CopyBegun::finish) would return without waiting.
    pub(super) fn has_come(&self) -> bool {
        self.copying.as_ref().map_or(true, |copying| copying.has_come())
    }

    /// Waits until the device has completed the copies. Returns the closure that answers the job.
    /// The caller runs it once the job counts as finished.
    pub(super) fn finish<B: Backend>(self, runner: &ModelRunner<B>) -> Box<dyn FnOnce()> {
        let outcome = runner.past(self.copying.and_then(|copying| Ok(copying.wait()?)));
        let outcome = outcome.and_then(|took| runner.unless_lost(took));
        Box::new(move || self.job.answer.give(outcome))
    }
}

impl<B: Backend> ModelRunner<B> {
    /// Whether this lane may get copy jobs.
    pub(super) fn copies(&self) -> bool {
        self.memory.host_kv.is_some() || self.memory.host_pictures.is_some()
    }

    /// Starts copies without waiting for them.
    pub(super) fn begin_copies(&self, job: Box<CopyJob>) -> CopyBegun {
        let copying = self.unless_refused(|| {
            let (backend, rank, CopyJob { to_host, to_device, .. }) = (&self.backend, self.rank(), &*job);
            let expected = "who asks for copies has host memory for them";
            Ok(match job.of {
                Copied::Blocks => {
                    let slots = self.memory.host_kv.as_ref().expect(expected).slots(rank);
                    copy_blocks::copy_blocks(backend, &self.memory.kv.layers(rank), &slots, to_host, to_device)?
                }
                Copied::Rows => {
                    let slots = self.memory.host_pictures.as_ref().expect(expected).slots(rank);
                    let cache = self
                        .memory
                        .vision_cache
                        .as_ref()
                        .expect("a lane with host memory for pictures has an encoder cache");
                    copy_blocks::copy_rows(backend, &cache.tensor(rank), &slots, to_host, to_device)?
                }
            })
        });
        CopyBegun { job, copying }
    }

    /// Fails if the device was lost in the meantime, because then the copied data is worthless.
    fn unless_lost(&self, took: Duration) -> Result<Duration, LaneError> {
        let device = self.workspace.segment().map(|segment| segment.device().check());
        device.unwrap_or(Ok(())).map_err(KernelError::Device)?;
        Ok(took)
    }
}
