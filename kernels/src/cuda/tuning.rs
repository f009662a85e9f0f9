//! The results of autotuning on a device, in a form that a later start can read.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use super::{
    CudaKernels,
    blas::{Described, GemmAlgorithm, GemmProblem},
    linear_few::CUTS,
    target::CUDA_LINEAR_SCRATCH,
};

/// The fastest algorithm of each GEMM measured on a device. A tuning is valid for the
/// same device code, device, driver and [library](CudaKernels::library), and for any
/// weights of the same shapes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    fastest: Vec<(GemmProblem, GemmAlgorithm)>,
    /// Ungated GEMMs of many rows for which this project's kernel is faster than cuBLASLt.
    ours: Vec<GemmProblem>,
}

impl Tuning {
    /// Returns the number of GEMMs with an algorithm.
    pub fn products(&self) -> usize {
        self.fastest.len()
    }
}

/// The results that all ranks of a model use: for each GEMM, the result of the first rank that
/// measured it. If each rank chose separately, ranks would round the same GEMM differently, and the
/// ranks of a mixture of experts would then choose different experts for a row.
#[derive(Default)]
pub(super) struct Agreement {
    algorithms: Mutex<BTreeMap<GemmProblem, GemmAlgorithm>>,
    /// For each GEMM, `true` if this project's kernel computes it.
    ours: Mutex<BTreeMap<GemmProblem, bool>>,
}

impl Agreement {
    /// Returns the algorithm that all ranks use for `product`. `fastest` is the algorithm that the
    /// calling rank measured to be fastest.
    pub(super) fn algorithm(&self, product: GemmProblem, fastest: GemmAlgorithm) -> GemmAlgorithm {
        first(&self.algorithms, product, fastest)
    }

    /// Returns `true` if all ranks use this project's kernel for `product`. `is_faster` is the
    /// result that the calling rank measured.
    pub(super) fn is_ours(&self, product: GemmProblem, is_faster: bool) -> bool {
        first(&self.ours, product, is_faster)
    }

    fn forget(&self) {
        self.algorithms.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.ours.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Returns the value that was recorded first for `product`, which may be `by_this_rank`. A poisoned
/// lock is safe to use: an entry is written in one assignment.
fn first<F: Copy>(found: &Mutex<BTreeMap<GemmProblem, F>>, product: GemmProblem, by_this_rank: F) -> F {
    *found.lock().unwrap_or_else(PoisonError::into_inner).entry(product).or_insert(by_this_rank)
}

impl CudaKernels {
    /// Returns the name of cuBLASLt with its version number. Algorithms are valid
    /// for one version only.
    pub fn library(&self) -> String {
        format!("cuBLASLt {}", self.blas.version())
    }

    /// Returns the algorithms of all GEMMs that any lane has measured so far.
    pub fn tuning(&self) -> Tuning {
        let fastest = self.blas.measured().iter().map(|(product, way)| (*product, *way)).collect();
        let ours = self.blas.ours().iter().copied().collect();
        Tuning { fastest, ours }
    }

    /// Replaces the results measured so far by `tuning`. GEMMs in `tuning` are not measured again.
    /// If any entry cannot run on this device, all of `tuning` is ignored, and all GEMMs are
    /// measured. Call this on all ranks before any rank measures.
    pub fn tune(&self, tuning: &Tuning) {
        let Tuning { fastest, ours } = if self.takes(tuning) { tuning.clone() } else { Tuning::default() };
        *self.blas.measured() = fastest.into_iter().collect();
        *self.blas.ours() = ours.into_iter().collect();
        self.blas.agreement.forget();
    }

    /// Returns `true` if every entry of `tuning` can run on this device.
    pub fn takes(&self, tuning: &Tuning) -> bool {
        tuning.fastest.iter().all(|(product, way)| self.runs(*product, *way))
    }

    /// Returns `true` if `way` can compute `product`. Alignment and workspace size are checked
    /// again at each call.
    fn runs(&self, product: GemmProblem, way: GemmAlgorithm) -> bool {
        match way {
            GemmAlgorithm::Few(cut) => CUTS.contains(&cut),
            GemmAlgorithm::Library(algorithm) if !product.gates => {
                let described = Described::of(&self.blas, self.target.activation, product);
                let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
                described.is_ok_and(|product| product.is_served_by(&self.blas, &algorithm, workspace_bytes))
            }
            GemmAlgorithm::Library(_) => false,
            GemmAlgorithm::Many => product.gates || !product.scheme.is_unquantized(),
            GemmAlgorithm::Middle => product.gates && product.scheme.is_unquantized(),
            GemmAlgorithm::Apart => product.gates,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::blas::QuantScheme;

    #[test]
    fn ranks_take_what_the_first_found() {
        let product = |rows| GemmProblem {
            scheme: QuantScheme::Unquantized,
            gates: false,
            out_features: 128,
            in_features: 2048,
            out_pitch: 128,
            x_pitch: 2048,
            out_is_f32: true,
            has_bias: false,
            accumulates: false,
            rows,
        };
        let agreement = Agreement::default();
        let found = |rows, way| agreement.algorithm(product(rows), way);
        assert_eq!(found(64, GemmAlgorithm::Many), GemmAlgorithm::Many);
        assert_eq!(found(64, GemmAlgorithm::Middle), GemmAlgorithm::Many, "by another rank, later");
        assert_eq!(found(65, GemmAlgorithm::Middle), GemmAlgorithm::Middle, "of another size");
        assert!(!agreement.is_ours(product(300), false) && !agreement.is_ours(product(300), true));
        agreement.forget();
        assert_eq!(found(64, GemmAlgorithm::Middle), GemmAlgorithm::Middle);
        assert!(agreement.is_ours(product(300), true));
    }
}
