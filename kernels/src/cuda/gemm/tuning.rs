//! The results of autotuning on a device, in a form that a later start can read.

use serde::{Deserialize, Serialize};

use super::{
    super::{CudaKernels, target::CUDA_LINEAR_SCRATCH},
    algorithm::GemmAlgorithm,
    blas::Described,
    problem::GemmProblem,
    tiles::Cut,
};

/// The fastest algorithm of each GEMM measured on a device. A tuning is valid for the
/// same device code, device, driver and [library](CudaKernels::library), and for any
/// weights of the same shapes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    fastest: Vec<(GemmProblem, GemmAlgorithm)>,
    /// Ungated GEMMs of many rows for which the large-m kernel is faster than cuBLASLt.
    large_m: Vec<GemmProblem>,
}

impl Tuning {
    /// Returns the number of GEMMs with an algorithm.
    pub fn products(&self) -> usize {
        self.fastest.len()
    }
}

impl CudaKernels {
    /// Returns the name of cuBLASLt with its version number. Algorithms are valid
    /// for one version only.
    pub fn library(&self) -> String {
        format!("cuBLASLt {}", self.blas.version())
    }

    /// Returns the algorithms of all GEMMs that any lane has measured so far.
    pub fn tuning(&self) -> Tuning {
        Tuning {
            fastest: self.tuned.measured().iter().map(|(problem, algorithm)| (*problem, *algorithm)).collect(),
            large_m: self.tuned.large_m().iter().copied().collect(),
        }
    }

    /// Replaces the results measured so far by `tuning`. GEMMs in `tuning` are not measured again.
    /// If any entry cannot run on this device, all of `tuning` is ignored, and all GEMMs are
    /// measured. Call this on all ranks before any rank measures.
    pub fn tune(&self, tuning: &Tuning) {
        let Tuning { fastest, large_m } = if self.takes(tuning) { tuning.clone() } else { Tuning::default() };
        *self.tuned.measured() = fastest.into_iter().collect();
        *self.tuned.large_m() = large_m.into_iter().collect();
        self.tuned.forget_agreement();
    }

    /// Returns `true` if every algorithm in `tuning.fastest` can run on this device.
    pub fn takes(&self, tuning: &Tuning) -> bool {
        tuning.fastest.iter().all(|(problem, algorithm)| self.runs(*problem, *algorithm))
    }

    /// Returns `true` if `algorithm` can compute `problem`. Alignment and workspace size are
    /// checked again at each call.
    fn runs(&self, problem: GemmProblem, algorithm: GemmAlgorithm) -> bool {
        let (is_gated, is_unquantized) = (problem.gates, problem.is_unquantized());
        match algorithm {
            GemmAlgorithm::SmallM(cut) => Cut::ALL.contains(&cut),
            GemmAlgorithm::Library(algorithm) if !is_gated => {
                let described = Described::of(&self.blas, self.target.activation, problem);
                let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
                described.is_ok_and(|described| described.is_served_by(&self.blas, &algorithm, workspace_bytes))
            }
            GemmAlgorithm::Library(_) => false,
            GemmAlgorithm::LargeM => is_gated || problem.quantizes_x(),
            GemmAlgorithm::Int4 => problem.is_int4(),
            GemmAlgorithm::MediumM => is_gated && is_unquantized,
            GemmAlgorithm::Unfused => is_gated,
        }
    }
}
