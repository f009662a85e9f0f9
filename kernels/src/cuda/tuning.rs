//! What autotuning has found on a device, as a later start takes it over.

use serde::{Deserialize, Serialize};

use super::{
    CudaKernels,
    blas::{Described, GemmAlgorithm, Product},
    linear_few::CUTS,
    target::CUDA_LINEAR_SCRATCH,
};

/// The fastest algorithm of each product that was measured on a device. It holds for the same device code, device, driver
/// and [library](CudaKernels::library), and for any weights of the same shapes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    fastest: Vec<(Product, GemmAlgorithm)>,
    /// Products of many rows without a gate that our kernel is faster for.
    ours: Vec<Product>,
}

impl Tuning {
    /// Products that it knows.
    pub fn products(&self) -> usize {
        self.fastest.len()
    }
}

impl CudaKernels {
    /// cuBLASLt with its version: algorithms are of one version of it.
    pub fn library(&self) -> String {
        format!("cuBLASLt {}", self.blas.version())
    }

    /// What was measured so far, by all lanes.
    pub fn tuning(&self) -> Tuning {
        let fastest = self.blas.measured().iter().map(|(product, way)| (*product, *way)).collect();
        let ours = self.blas.ours().iter().copied().collect();
        Tuning { fastest, ours }
    }

    /// Puts `tuning` in place of what was measured so far: the products that it knows are not measured again. One that
    /// names what nothing here computes was written by somebody else: none of it is taken, and all is measured.
    pub fn tune(&self, tuning: &Tuning) {
        let is_ours = tuning.fastest.iter().all(|(product, way)| self.runs(*product, *way));
        let Tuning { fastest, ours } = if is_ours { tuning.clone() } else { Tuning::default() };
        *self.blas.measured() = fastest.into_iter().collect();
        *self.blas.ours() = ours.into_iter().collect();
    }

    /// Whether `way` may be asked for `product`. That its memory is aligned, and has room, is asked again for each product.
    fn runs(&self, product: Product, way: GemmAlgorithm) -> bool {
        match way {
            GemmAlgorithm::Few(cut) => CUTS.contains(&cut),
            GemmAlgorithm::Library(algorithm) if !product.gates => {
                let described = Described::of(&self.blas, self.target.activation, product);
                let workspace_bytes = CUDA_LINEAR_SCRATCH.as_usize();
                described.is_ok_and(|product| product.is_served_by(&self.blas, &algorithm, workspace_bytes))
            }
            GemmAlgorithm::Library(_) => false,
            GemmAlgorithm::Middle | GemmAlgorithm::Many | GemmAlgorithm::Apart => product.gates,
        }
    }
}
