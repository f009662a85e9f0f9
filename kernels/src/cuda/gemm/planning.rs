//! The choice of a kernel for a GEMM of a lane.

use super::{
    super::{kernels::CudaKernels, lane::Cuda},
    algorithm::GemmAlgorithm,
    blas::BlasLane,
    plan::{GemmBackend, GemmPlan, Measurements, Planner},
    problem::{GemmOperands, GemmProblem},
    scale_scratch,
};
use crate::KernelError;

/// Chooses how a GEMM is computed. See [`Planner::plan`].
pub(super) fn plan(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<Option<GemmPlan>, KernelError> {
    planner(&mut OnDevice(cuda)).plan(problem, operands)
}

/// Whether two kernels can be compared for this GEMM. See [`Planner::can_compare_large_m`].
pub(super) fn can_compare_large_m(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
) -> Result<bool, KernelError> {
    planner(&mut OnDevice(cuda)).can_compare_large_m(problem, operands)
}

fn planner<'m, 'c>(measurements: &'m mut OnDevice<'c>) -> Planner<'m, OnDevice<'c>> {
    let Cuda { gemm, kernels, .. } = measurements.0;
    Planner { gpu: gemm.gpu, backend: gemm.backend, activation: kernels.target.activation, measurements }
}

/// Returns the library and the stream of the lane.
pub(super) fn blas_lane(cuda: &Cuda) -> BlasLane<'_> {
    let CudaKernels { blas, tuned, target, .. } = &*cuda.kernels;
    BlasLane { blas, tuned, stream: &cuda.stream, activation: target.activation }
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
        Ok(unsafe { gemm.library.borrow_mut().has(blas_lane(self.0), asked, (autotunes, may_guess))? })
    }
}
