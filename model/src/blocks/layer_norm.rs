//! Layer normalization with its weights.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::patchify::PatchSize};

use crate::weights::{WeightError, WeightMap};

/// `(x - mean) / deviation * weight + bias`, row by row.
pub struct LayerNorm {
    weight: Tensor<'static>, // [width]
    bias: Tensor<'static>,   // [width]
    epsilon: f32,
}

impl LayerNorm {
    /// Claims `name.weight` and `name.bias`, `[width]` each. `epsilon` is added to the variance.
    pub fn claim(map: &mut WeightMap<'_>, name: &str, width: usize, epsilon: f32) -> Result<Self, WeightError> {
        let weight = map.tensor(&format!("{name}.weight"), [width])?;
        Ok(LayerNorm { weight, bias: map.tensor(&format!("{name}.bias"), [width])?, epsilon })
    }

    /// Like [`claim`](LayerNorm::claim), for rows of patches; see [`WeightMap::patch_vector`].
    pub fn claim_patches(
        map: &mut WeightMap<'_>,
        name: &str,
        patch: PatchSize,
        epsilon: f32,
    ) -> Result<Self, WeightError> {
        let weight = map.patch_vector(&format!("{name}.weight"), patch)?;
        Ok(LayerNorm { weight, bias: map.patch_vector(&format!("{name}.bias"), patch)?, epsilon })
    }

    /// Normalizes the rows of `x` `[rows, width]`.
    pub fn forward<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, x: &Tensor<'_>) -> Result<Tensor<'s>, KernelError> {
        scope.layer_norm(x, &self.weight, &self.bias, self.epsilon)
    }
}
