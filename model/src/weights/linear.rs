//! A projection: a matrix with or without a bias.

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Weight, ops::rms_norm::RmsNorm,
};

/// `x @ weight^T + bias`.
pub struct Linear {
    /// `[out_features, in_features]`
    pub weight: Weight<'static>,
    /// `[out_features]`
    pub bias: Option<Tensor<'static>>,
    /// Other ranks have the rest of `in_features`, so what it makes is part of a sum.
    pub is_partial: bool,
}

impl Linear {
    /// The format of activations that it reads without rounding them itself.
    pub fn reads(&self) -> ActivationFormat {
        ActivationFormat::of(self.weight.wants())
    }

    /// Applies it to `x` `[rows, in_features]` and returns `[rows, out_features]`.
    pub fn forward<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        x: impl Into<Activations<'a>>,
    ) -> Result<Tensor<'s>, KernelError> {
        scope.linear(x, &self.weight, self.bias.as_ref())
    }

    /// For a weight of gate, then up: returns `silu(gate(x)) * up(x)`, `[rows, out_features / 2]`, in `format`.
    pub fn forward_gated<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        format: ActivationFormat,
    ) -> Result<Activations<'s>, KernelError> {
        scope.gated_linear_as(x, &self.weight, self.bias.as_ref(), format)
    }

    /// As [`forward`](Linear::forward), into `out` `[rows, out_features]`.
    pub fn forward_into<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        scope.linear_into(x, &self.weight, self.bias.as_ref(), out)
    }

    /// As [`forward`](Linear::forward), added to `sum` `[rows, out_features]`. Of a partial result the sum over all ranks is
    /// added, which meet in this operation.
    pub fn forward_add<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        if !self.is_partial {
            return scope.linear_add(x, &self.weight, self.bias.as_ref(), sum);
        }
        let scope = scope.scope();
        scope.all_reduce_add(&self.forward(&scope, x)?, sum)
    }
    /// As [`forward_add`](Linear::forward_add) of a partial result, and writes the norm of the sum to `normed`
    /// `[rows, out_features]`.
    pub fn forward_add_normed<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        sum: &mut Tensor<'_>,
        norm: RmsNorm<'_>,
        normed: &mut Activations<'_>,
    ) -> Result<(), KernelError> {
        assert!(self.is_partial, "a whole result is added by the product");
        let scope = scope.scope();
        scope.all_reduce_rms_norm(&self.forward(&scope, x)?, sum, norm, normed)
    }
}
