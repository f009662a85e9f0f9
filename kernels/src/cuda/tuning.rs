//! What autotuning found on a device, in the form that a later start reads.

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

impl CudaKernels {
    /// cuBLASLt with its version number. Algorithms are valid for one version only.
    pub fn library(&self) -> String {
        format!("cuBLASLt {}", self.blas.version())
    }

    /// Everything measured so far, by all lanes.
    pub fn tuning(&self) -> Tuning {
        let fastest = self.blas.measured().iter().map(|(product, way)| (*product, *way)).collect();
        let ours = self.blas.ours().iter().copied().collect();
        Tuning { fastest, ours }
    }

    /// Replaces what was measured so far by `tuning`; products in it are not measured again. If any entry cannot run
    /// here, the whole of `tuning` is ignored and everything is measured.
    pub fn tune(&self, tuning: &Tuning) {
        let is_ours = tuning.fastest.iter().all(|(product, way)| self.runs(*product, *way));
        let Tuning { fastest, ours } = if is_ours { tuning.clone() } else { Tuning::default() };
        *self.blas.measured() = fastest.into_iter().collect();
        *self.blas.ours() = ours.into_iter().collect();
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
