//! A projection: a matrix with or without a bias.

use bursar_kernels::{Backend, KernelError, Scope, Tensor};

/// `x @ weight^T + bias`.
pub struct Linear {
    /// `[out_features, in_features]`
    pub weight: Tensor<'static>,
    /// `[out_features]`
    pub bias: Option<Tensor<'static>>,
}

impl Linear {
    /// Applies it to `x` `[rows, in_features]` and returns `[rows, out_features]`.
    pub fn forward<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, x: &Tensor<'_>) -> Result<Tensor<'s>, KernelError> {
        scope.linear(x, &self.weight, self.bias.as_ref())
    }

    /// For a weight of gate, then up: returns `silu(gate(x)) * up(x)`, `[rows, out_features / 2]`.
    pub fn forward_gated<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        x: &Tensor<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        scope.gated_linear(x, &self.weight, self.bias.as_ref())
    }

    /// As [`forward`](Linear::forward), into `out` `[rows, out_features]`.
    pub fn forward_into<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        x: &Tensor<'_>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        scope.linear_into(x, &self.weight, self.bias.as_ref(), out)
    }

    /// As [`forward`](Linear::forward), added to `sum` `[rows, out_features]`.
    pub fn forward_add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        x: &Tensor<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        scope.linear_add(x, &self.weight, self.bias.as_ref(), sum)
    }
}
