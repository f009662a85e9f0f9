//! A layer norm or an RMS norm, for vision towers whose configuration selects the kind.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, ops::rms_norm::RmsNorm};

use super::layer_norm::LayerNorm;
use crate::weights::{WeightError, WeightMap};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Layer,
    RootMeanSquare,
}

/// A norm with its weights.
pub enum Norm {
    Layer(LayerNorm),
    RootMeanSquare {
        /// `[width]`
        weight: Tensor<'static>,
        /// Epsilon that is added to the mean square.
        epsilon: f32,
    },
}

impl Norm {
    /// Claims `name.weight` `[width]`, and `name.bias` `[width]` if the kind has one.
    pub fn claim(
        map: &mut WeightMap<'_>,
        kind: NormKind,
        name: &str,
        width: usize,
        epsilon: f32,
    ) -> Result<Self, WeightError> {
        Ok(match kind {
            NormKind::Layer => Norm::Layer(LayerNorm::claim(map, name, width, epsilon)?),
            NormKind::RootMeanSquare => {
                Norm::RootMeanSquare { weight: map.tensor(&format!("{name}.weight"), [width])?, epsilon }
            }
        })
    }

    /// Normalizes the rows of `x` `[rows, width]`.
    pub fn forward<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, x: &Tensor<'_>) -> Result<Tensor<'s>, KernelError> {
        match self {
            Norm::Layer(norm) => norm.forward(scope, x),
            Norm::RootMeanSquare { weight, epsilon } => scope.rms_norm(x, RmsNorm::new(weight, *epsilon)),
        }
    }
}
