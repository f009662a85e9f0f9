//! What autotuning found on a device, in the form that a later start reads.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use super::{
    CudaKernels,
    blas::{Described, GemmAlgorithm, Product},
    linear_few::CUTS,
    target::CUDA_LINEAR_SCRATCH,
};

/// The fastest algorithm of each product measured on a device. It is valid for the same device code, device, driver and
/// [library](CudaKernels::library), and for any weights of the same shapes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    fastest: Vec<(Product, GemmAlgorithm)>,
    /// Ungated products of many rows for which our kernel is faster than cuBLASLt.
    ours: Vec<Product>,
}

impl Tuning {
    /// Number of products it has an algorithm for.
    pub fn products(&self) -> usize {
        self.fastest.len()
    }
}

/// What the ranks of a model compute each product with: as the first to measure it found. Ranks that each chose for
/// themselves would round the same product differently, and those of a mixture then choose different experts for a row.
#[derive(Default)]
pub(super) struct Agreement {
    algorithms: Mutex<BTreeMap<Product, GemmAlgorithm>>,
    /// Whether our kernel is faster.
    ours: Mutex<BTreeMap<Product, bool>>,
}

impl Agreement {
    /// The algorithm of `product`, of which a rank found `fastest`.
    pub(super) fn algorithm(&self, product: Product, fastest: GemmAlgorithm) -> GemmAlgorithm {
        first(&self.algorithms, product, fastest)
    }

    /// Whether our kernel is to compute `product`, of which a rank found whether it is faster.
    pub(super) fn is_ours(&self, product: Product, is_faster: bool) -> bool {
        first(&self.ours, product, is_faster)
    }

    fn forget(&self) {
        self.algorithms.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.ours.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// What was found first of `product`. A poisoned lock is safe to use: an entry is written in one assignment.
fn first<F: Copy>(found: &Mutex<BTreeMap<Product, F>>, product: Product, by_this_rank: F) -> F {
    *found.lock().unwrap_or_else(PoisonError::into_inner).entry(product).or_insert(by_this_rank)
}

impl CudaKernels {
    /// cuBLASLt with its version number. Algorithms are valid for one version only.
    pub fn library(&self) -> String {
        format!("cuBLASLt {}", self.blas.version())
    }

    /// The algorithms of everything measured so far, by all lanes.
    pub fn tuning(&self) -> Tuning {
        let fastest = self.blas.measured().iter().map(|(product, way)| (*product, *way)).collect();
        let ours = self.blas.ours().iter().copied().collect();
        Tuning { fastest, ours }
    }

    /// Replaces what was measured so far by `tuning`; products in it are not measured again. If any entry cannot run
    /// here, the whole of `tuning` is ignored and everything is measured. Ranks are all to be told, before any measures.
    pub fn tune(&self, tuning: &Tuning) {
        let Tuning { fastest, ours } = if self.takes(tuning) { tuning.clone() } else { Tuning::default() };
        *self.blas.measured() = fastest.into_iter().collect();
        *self.blas.ours() = ours.into_iter().collect();
        self.blas.agreement.forget();
    }

    /// Whether every entry can run here.
    pub fn takes(&self, tuning: &Tuning) -> bool {
        tuning.fastest.iter().all(|(product, way)| self.runs(*product, *way))
    }

    /// Whether `way` can compute `product`. Alignment and workspace size are checked again at each call.
    fn runs(&self, product: Product, way: GemmAlgorithm) -> bool {
        match way {
            GemmAlgorithm::Few(cut) => CUTS.contains(&cut),
            GemmAlgorithm::Library(algorithm) if !product.gates => {
                let described = Described::of(&self.blas, self.target.activation, product);
                let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
                described.is_ok_and(|product| product.is_served_by(&self.blas, &algorithm, workspace_bytes))
            }
            GemmAlgorithm::Library(_) => false,
            GemmAlgorithm::Many => product.gates || !product.numbers.is_plain(),
            GemmAlgorithm::Middle => product.gates && product.numbers.is_plain(),
            GemmAlgorithm::Apart => product.gates,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::blas::Numbers;

    #[test]
    fn ranks_take_what_the_first_found() {
        let product = |rows| Product {
            numbers: Numbers::Plain,
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
