//! Copies of blocks, states and rows that run concurrently with a lane's other jobs.

use std::time::Duration;

use bursar_kernels::{
    Backend, KernelError,
    ops::copy_blocks::{self, Copying},
};

use super::{
    super::memory::HostTier,
    ModelRunner,
    job::{Copied, CopyJob, LaneError},
};

/// A copy job and its running copies.
pub(super) struct CopyBegun {
    job: Box<CopyJob>,
    /// The copies of each kind of content, in the order in which they run.
    copying: Result<Vec<Box<dyn Copying>>, LaneError>,
}

impl CopyBegun {
    /// Whether [`finish`](CopyBegun::finish) would return without waiting.
    pub(super) fn is_ready(&self) -> bool {
        self.copying.as_ref().map_or(true, |copying| copying.iter().all(|kind| kind.is_ready()))
    }

    /// Waits until the device has completed the copies. Returns the closure that answers the job.
    /// The caller runs it once the job counts as finished.
    pub(super) fn finish<B: Backend>(self, runner: &ModelRunner<B>) -> Box<dyn FnOnce()> {
        let outcome = runner.past(self.copying.and_then(|copying| {
            let took: Result<Vec<Duration>, KernelError> = copying.into_iter().map(|kind| kind.wait()).collect();
            Ok(took?.into_iter().sum())
        }));
        let outcome = outcome.and_then(|took| runner.unless_lost(took));
        Box::new(move || self.job.answer.give(outcome))
    }
}

impl<B: Backend> ModelRunner<B> {
    /// Starts copies without waiting for them.
    pub(super) fn begin_copies(&self, job: Box<CopyJob>) -> CopyBegun {
        let copying = self.unless_refused(|| {
            let (backend, rank, memory) = (&self.backend, self.rank(), &self.memory);
            let expected = "a job's copies have memory on the device and on the host";
            let store = |tier: &Option<HostTier>| tier.as_ref().expect(expected).store(rank);
            let mut begun = Vec::new();
            match &job.copied {
                Copied::Cache { blocks, states } => {
                    if !blocks.is_empty() {
                        let (layers, host) = (memory.kv.layers(rank), store(&memory.host_kv));
                        begun.push(copy_blocks::copy_blocks(backend, &layers, &host, blocks)?);
                    }
                    if !states.is_empty() {
                        let layers: Vec<_> = memory.states.as_ref().expect(expected).layers(rank).collect();
                        begun.push(copy_blocks::copy_states(backend, &layers, &store(&memory.host_states), states)?);
                    }
                }
                Copied::Rows(rows) => {
                    let cache = memory.vision_cache.as_ref().expect(expected).tensor(rank);
                    begun.push(copy_blocks::copy_rows(backend, &cache, &store(&memory.host_pictures), rows)?);
                }
            }
            Ok(begun)
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
