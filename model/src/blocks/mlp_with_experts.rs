//! Gemma 4's MLP with experts: a dense MLP and a mixture of experts read differently normalized
//! copies of the same rows, and their normalized results are added.

use bursar_kernels::{ActivationFormat, ActivationScratch, Activations, Backend, KernelError, Scope, Tensor};

use super::{
    decoder_config::DecoderConfig,
    gated_mlp::GatedMlp,
    mixture::{Mixture, MixtureConfig, MixtureShare},
};
use crate::weights::{WeightError, WeightMap};

/// The weights of a dense MLP and of the experts of the same layer.
pub struct MlpWithExperts {
    mlp: GatedMlp,
    mixture: Mixture,
    experts_norm: Tensor<'static>,        // [hidden], of the experts' input
    mlp_result_norm: Tensor<'static>,     // [hidden]
    experts_result_norm: Tensor<'static>, // [hidden]
}

impl MlpWithExperts {
    /// Claims the norms and the [mixture](Mixture::claim) of the layer `name`, to which `mlp`
    /// belongs.
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        config: &DecoderConfig,
        (mixture, share): (&MixtureConfig, MixtureShare),
        mlp: GatedMlp,
        loads: Tensor<'static>,
    ) -> Result<Self, WeightError> {
        let hidden = config.hidden;
        let mut norm = |part: &str| map.tensor(&format!("{name}.{part}.weight"), [hidden]);
        Ok(MlpWithExperts {
            mlp,
            experts_norm: norm("pre_feedforward_layernorm_2")?,
            mlp_result_norm: norm("post_feedforward_layernorm_1")?,
            experts_result_norm: norm("post_feedforward_layernorm_2")?,
            mixture: Mixture::claim(map, name, (hidden, config.activation), mixture, share, loads)?,
        })
    }

    /// The activation formats that the MLP and the experts read.
    pub fn reads(&self) -> [ActivationFormat; 2] {
        [self.mlp.reads(), self.mixture.reads()]
    }

    /// Runs the MLP on the normalized rows in `scratch`. Then normalizes `hidden` `[rows, hidden]` for
    /// the experts, which overwrites `scratch`, and runs the experts. Returns the sum of both
    /// normalized results, `[rows, hidden]`. For `slots`, see [`gate`](Mixture::gate).
    pub fn forward<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        config: &DecoderConfig,
        hidden: &Tensor<'_>,
        scratch: &mut ActivationScratch<'_>,
        slots: Option<&Tensor<'_>>,
    ) -> Result<Tensor<'s>, KernelError> {
        let [rows, columns] = [hidden.rows(), hidden.columns()];
        let mut sum = Activations::of_plain(scope.empty([rows, columns])?);
        {
            let (scope, normed) = (scope.scope(), scratch.place(self.mlp.reads(), rows));
            let gated = self.mlp.gate(&scope, &normed)?;
            let of_mlp = self.mlp.down.forward_all_reduced(&scope, &gated)?;
            scope.rms_norm_into(&of_mlp, config.norm(&self.mlp_result_norm), &mut sum)?;
        }
        let mut sum = sum.plain.expect("the sum was created unquantized");
        let (scope, mut normed) = (scope.scope(), scratch.place(self.mixture.reads(), rows));
        let gated = self.mixture.gate(&scope, hidden, config.norm(&self.experts_norm), &mut normed, slots)?;
        let of_experts = self.mixture.sum_experts(&scope, &gated, columns)?;
        scope.rms_norm_add(&of_experts, config.norm(&self.experts_result_norm), None, &mut sum)?;
        Ok(sum)
    }
}
