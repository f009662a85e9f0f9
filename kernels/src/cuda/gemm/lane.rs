//! The state that one lane keeps for its GEMMs.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use bursar_budgets::Overhead;

use super::{
    super::{
        error::OpenError,
        kernels::CudaKernels,
        lane::Cuda,
        stream::{Clock, Stream},
    },
    algorithm::GemmAlgorithm,
    blas::{BlasLane, LaneGemms},
    counters::Counters,
    met::MetGemms,
    plan::{GemmBackend, GemmPlan, Measurements, Planner},
    problem::{GemmOperands, GemmProblem},
    scale_scratch,
    table::Gpu,
};
use crate::KernelError;

/// The state that one lane keeps for its GEMMs.
pub(in super::super) struct GemmLane {
    /// `None` if the device has no small-m kernel, or if too many lanes have counters.
    pub(super) counters: Option<Counters>,
    pub(super) gpu: Gpu,
    pub(in super::super) backend: GemmBackend,
    pub(super) library: RefCell<LaneGemms>,
    /// True while results are discarded, so that GEMMs may be measured.
    pub(super) autotunes: Cell<bool>,
    pub(super) met: RefCell<MetGemms>,
    pub(super) clock: Clock,
}

impl GemmLane {
    pub(in super::super) fn new(kernels: &CudaKernels, stream: &Arc<Overhead<Stream>>) -> Result<Self, OpenError> {
        let counters = Counters::take(&kernels.functions, &kernels.counter_sets, stream)?;
        let entry_points = kernels.functions.entry_points();
        let gpu = Gpu {
            is_hopper: entry_points.hopper.is_some(),
            has_counters: counters.is_some(),
            has_tiled: entry_points.linear_e4m3.is_some(),
            sms: kernels.target.sms,
            library_version: kernels.blas.version(),
        };
        Ok(GemmLane {
            counters,
            gpu,
            backend: GemmBackend::default(),
            library: RefCell::new(LaneGemms::new(&kernels.device)?),
            autotunes: Cell::new(false),
            met: RefCell::default(),
            clock: Clock::new(&kernels.device)?,
        })
    }

    /// Starts or ends autotuning.
    pub(in super::super) fn autotune(&self, on: bool) {
        self.autotunes.set(on);
        self.library.borrow_mut().forget_refusals();
        // The recorded weight addresses are valid only while autotuning is on.
        self.met.take();
    }

    /// Number of GEMMs met for the first time outside autotuning.
    pub(in super::super) fn guesses(&self) -> usize {
        self.library.borrow().guesses()
    }

    /// Chooses how a GEMM is computed. See [`Planner::plan`].
    pub(super) fn plan(
        &self,
        cuda: &Cuda,
        problem: GemmProblem,
        operands: GemmOperands,
    ) -> Result<Option<GemmPlan>, KernelError> {
        self.planner(&mut OnDevice(cuda)).plan(problem, operands)
    }

    /// See [`Planner::can_compare_large_m`].
    pub(super) fn can_compare_large_m(
        &self,
        cuda: &Cuda,
        problem: GemmProblem,
        operands: GemmOperands,
    ) -> Result<bool, KernelError> {
        self.planner(&mut OnDevice(cuda)).can_compare_large_m(problem, operands)
    }

    fn planner<'m, 'c>(&self, measurements: &'m mut OnDevice<'c>) -> Planner<'m, OnDevice<'c>> {
        let activation = measurements.0.kernels.target.activation;
        Planner { gpu: self.gpu, backend: self.backend, activation, measurements }
    }

    pub(super) fn blas_lane<'c>(&self, cuda: &'c Cuda) -> BlasLane<'c> {
        let CudaKernels { blas, tuned, target, .. } = &*cuda.kernels;
        BlasLane { blas, tuned, stream: &cuda.stream, activation: target.activation }
    }
}

/// Results of autotuning on the lane's device.
struct OnDevice<'c>(&'c Cuda);

impl Measurements for OnDevice<'_> {
    fn fastest(&self, problem: GemmProblem) -> Option<GemmAlgorithm> {
        self.0.kernels.tuned.fastest(problem)
    }

    fn is_large_m_faster(&self, problem: GemmProblem) -> bool {
        self.0.kernels.tuned.is_large_m_faster(problem)
    }

    fn library_has(&mut self, problem: GemmProblem, operands: GemmOperands) -> Result<bool, KernelError> {
        let gemm = &self.0.gemm;
        let autotunes = gemm.autotunes.get();
        let may_guess = autotunes || gemm.backend == GemmBackend::Library;
        let asked = (problem, scale_scratch::for_library(problem, operands));
        // SAFETY: the op layer has checked the shapes, and the creators of the tensors guarantee
        // that their memory is valid.
        Ok(unsafe { gemm.library.borrow_mut().has(gemm.blas_lane(self.0), asked, (autotunes, may_guess))? })
    }
}
