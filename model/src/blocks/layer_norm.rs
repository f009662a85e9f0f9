//! Layer normalization with its weights.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

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

    /// Normalizes the rows of `x` `[rows, width]`.
    pub fn forward<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, x: &Tensor<'_>) -> Result<Tensor<'s>, KernelError> {
        scope.layer_norm(x, &self.weight, &self.bias, self.epsilon)
    }
}
