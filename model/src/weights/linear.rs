//! A projection: a matrix with or without a bias.

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, Scope, Tensor, Weight,
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm},
};

/// `x @ weight^T + bias`.
pub struct Linear {
    /// `[out_features, in_features]`
    pub weight: Weight<'static>,
    /// `[out_features]`, added to each row of the product.
    pub bias: Option<Tensor<'static>>,
    /// Whether other ranks hold the rest of `in_features`, so that the result is a
    /// partial sum over ranks.
    pub is_partial: bool,
}

impl Linear {
    /// The activation format that the projection reads directly, without rounding the activations
    /// first.
    pub fn reads(&self) -> ActivationFormat {
        ActivationFormat::of(self.weight.wants())
    }

    /// Applies the projection to `x` `[rows, in_features]` and returns `[rows, out_features]`.
    pub fn forward<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        x: impl Into<Activations<'a>>,
    ) -> Result<Tensor<'s>, KernelError> {
        scope.linear(x, &self.weight, self.bias.as_ref())
    }

    /// For a weight with the rows of gate followed by the rows of up: returns
    /// `activation(gate(x)) * up(x)`, `[rows, out_features / 2]`, in `format`.
    pub fn forward_gated<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        activation: GateActivation,
        format: ActivationFormat,
    ) -> Result<Activations<'s>, KernelError> {
        scope.gated_linear_as(x, &self.weight, self.bias.as_ref(), activation, format)
    }

    /// Like [`forward`](Linear::forward), with the result in `out` `[rows, out_features]`.
    pub fn forward_into<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        out: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        scope.linear_into(x, &self.weight, self.bias.as_ref(), out)
    }

    /// Like [`forward`](Linear::forward), but adds the result to `sum` `[rows, out_features]`. A
    /// partial result is first summed over all ranks, which makes this a collective.
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

    /// Like [`forward_add`](Linear::forward_add), but adds the norm of the result, and multiplies the
    /// sum by `factor` `[1]` f32.
    pub fn forward_norm_add<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        norm: RmsNorm<'_>,
        factor: Option<&Tensor<'_>>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let whole = self.forward_all_reduced(&scope, x)?;
        scope.rms_norm_add(&whole, norm, factor, sum)
    }

    /// Like [`forward`](Linear::forward), but sums a partial result over all ranks.
    pub fn forward_all_reduced<'s, 'a, B: Backend>(
        &'a self,
        scope: &'s Scope<'_, B>,
        x: impl Into<Activations<'a>>,
    ) -> Result<Tensor<'s>, KernelError> {
        let out = self.forward(scope, x)?;
        if !self.is_partial {
            return Ok(out);
        }
        let mut whole = scope.empty([out.rows(), out.columns()])?;
        scope.all_reduce_into(&out, &mut whole)?;
        Ok(whole)
    }

    /// Like [`forward_add`](Linear::forward_add) for a partial result, but also writes the norm of
    /// the sum to `normed` `[rows, out_features]`.
    pub fn forward_add_normed<'a, B: Backend>(
        &'a self,
        scope: &Scope<'_, B>,
        x: impl Into<Activations<'a>>,
        sum: &mut Tensor<'_>,
        norm: RmsNorm<'_>,
        normed: &mut Activations<'_>,
    ) -> Result<(), KernelError> {
        assert!(self.is_partial, "the result is a partial sum over ranks");
        let scope = scope.scope();
        scope.all_reduce_rms_norm(&self.forward(&scope, x)?, sum, norm, normed)
    }
}
