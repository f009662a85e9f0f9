//! A backend with injected faults.

use std::cell::Cell;

use bursar_budgets::DeviceError;

use crate::{Backend, Graph, KernelError, Rank, Target, backend::each_operation, calls};

/// A backend whose operations can be made to fail, as if the device had refused their
/// launches. Only the passes that contain a failed operation fail. All other operations
/// compute as the wrapped backend does.
pub struct FaultyBackend<B> {
    backend: B,
    /// The number of operations that still succeed, and the number of operations
    /// after them that fail.
    faults: Cell<(usize, usize)>,
}

impl<B> FaultyBackend<B> {
    /// Wraps `backend`, without faults.
    pub fn over(backend: B) -> Self {
        FaultyBackend { backend, faults: Cell::default() }
    }

    /// Lets the next `after` operations succeed and the `count` operations after them fail. Copies
    /// and replays of graphs are not counted.
    pub fn fail_launches(&self, after: usize, count: usize) {
        self.faults.set((after, count));
    }

    fn launch(&self) -> Result<&B, KernelError> {
        match self.faults.get() {
            (_, 0) => Ok(&self.backend),
            (0, count) => {
                self.faults.set((0, count - 1));
                Err(DeviceError::Driver { call: "a launch", message: "this error was injected by a drill".to_owned() }
                    .into())
            }
            (after, count) => {
                self.faults.set((after - 1, count));
                Ok(&self.backend)
            }
        }
    }
}

macro_rules! launches {
    ($($op:ident: $call:ty,)*) => {
        $(fn $op(&self, call: $call) -> Result<(), KernelError> { self.launch()?.$op(call) })*
    };
}

impl<B: Backend> Backend for FaultyBackend<B> {
    const COMPUTES: bool = B::COMPUTES;

    fn target(&self) -> &Target {
        self.backend.target()
    }

    fn rank(&self) -> Rank {
        self.backend.rank()
    }

    fn chooses_among_ranks(&self) -> bool {
        self.backend.chooses_among_ranks()
    }

    fn autotune(&self, on: bool) {
        self.backend.autotune(on);
    }

    fn measure(&self, call: calls::Measure<'_>) -> Result<(), KernelError> {
        self.backend.measure(call)
    }

    fn capture(&self, run: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Option<Box<dyn Graph>>, KernelError> {
        self.backend.capture(run)
    }

    fn abort_collectives(&self) {
        self.backend.abort_collectives();
    }

    fn wait_for_all(&self) -> Result<(), KernelError> {
        self.backend.wait_for_all()
    }

    fn upload(&self, call: calls::Upload<'_>) -> Result<(), KernelError> {
        self.backend.upload(call)
    }

    fn download(&self, call: calls::Download<'_>) -> Result<(), KernelError> {
        self.backend.download(call)
    }

    fn download_later(&self, call: calls::DownloadLater<'_>) -> Result<Box<dyn calls::Arrival>, KernelError> {
        self.backend.download_later(call)
    }

    fn copy_blocks(&self, call: calls::CopyBlocks<'_>) -> Result<Box<dyn calls::Copying>, KernelError> {
        self.backend.copy_blocks(call)
    }

    launches! {
        gated_linear: calls::GatedLinear<'_>,
        add_experts_rms_norm: calls::AddExpertsRmsNorm<'_>,
        rms_norm_route: calls::RmsNormRoute<'_>,
        all_reduce: calls::AllReduce<'_>,
        all_reduce_rms_norm: calls::AllReduceRmsNorm<'_>,
        all_gather: calls::AllGather<'_>,
        best_of_ranks: calls::BestOfRanks<'_>,
    }
    each_operation!(launches);
}
