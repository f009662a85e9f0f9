//! A mixture of experts: for each token, a router chooses a few of many gated MLPs, and their
//! results are summed with the router's weights (Shazeer et al. 2017, arXiv 1701.06538; without a
//! shared expert, as in Qwen3, arXiv 2505.09388).

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{
        rms_norm::RmsNorm,
        rms_norm_route::Router,
        route::{EXPERTS_MAX, Routing, TOP_MAX},
    },
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::config_error::{ConfigError, WIDTH_MAX};
use crate::weights::{WeightError, WeightMap};

/// The experts of a decoder, and which of its layers have them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MixtureConfig {
    #[serde(rename = "num_experts")]
    pub experts: usize,
    #[serde(rename = "num_experts_per_tok")]
    pub top: usize,
    #[serde(rename = "moe_intermediate_size")]
    pub intermediate: usize,
    /// Whether the weights of a token's experts add up to 1.
    #[serde(rename = "norm_topk_prob")]
    pub renormalised: bool,
    /// In each group of `step` layers, only the last layer has experts.
    #[serde(rename = "decoder_sparse_step")]
    pub step: usize,
    /// Layers that have no experts even if `step` selects them.
    #[serde(rename = "mlp_only_layers")]
    pub dense: Option<Vec<usize>>,
}

impl MixtureConfig {
    /// Reads the keys of a mixture, if `fields` has them. `num_local_experts` is accepted as
    /// another name of `num_experts`, as in transformers 5.17.
    pub(super) fn read(fields: &Map<String, Value>) -> Result<Option<Self>, ConfigError> {
        let Some(experts) = fields.get("num_local_experts").or_else(|| fields.get("num_experts")) else {
            return Ok(None);
        };
        let mut fields = fields.clone();
        fields.insert("num_experts".to_owned(), experts.clone());
        let mixture: MixtureConfig = serde_json::from_value(fields.into())?;
        ConfigError::check_size("num_experts", mixture.experts, EXPERTS_MAX)?;
        ConfigError::check_size("num_experts_per_tok", mixture.top, mixture.experts.min(TOP_MAX))?;
        ConfigError::check_size("moe_intermediate_size", mixture.intermediate, WIDTH_MAX)?;
        ConfigError::check_size("decoder_sparse_step", mixture.step, WIDTH_MAX)?;
        Ok(Some(mixture))
    }

    /// Whether this layer has experts.
    pub fn is_in(&self, layer: usize) -> bool {
        !self.dense.iter().flatten().any(|dense| *dense == layer) && (layer + 1).is_multiple_of(self.step)
    }
}

/// The router and the experts of a layer.
pub struct Mixture {
    router: Tensor<'static>,  // [experts, hidden]
    held: RankShard,          // the experts that this rank holds
    gate_up: Weight<'static>, // [held * 2 * intermediate, hidden]
    down: Weight<'static>,    // [held * hidden, intermediate]
    top: usize,
    renormalised: bool,
    loads: Tensor<'static>, // [experts] u32
}

/// The result of the first half of a mixture.
pub struct GatedRows<'s> {
    routing: Routing<'s>,
    rows: Activations<'s>, // [rows * top, intermediate]
}

impl Mixture {
    /// Claims `name.gate.weight`, which is the router, and the [experts](WeightMap::experts) `held`
    /// under `name.experts`. `loads` `[experts]` counts the choices of experts.
    ///
    /// # Errors
    /// See [`WeightMap::experts`].
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        hidden: usize,
        config: &MixtureConfig,
        held: RankShard,
        loads: Tensor<'static>,
    ) -> Result<Self, WeightError> {
        let &MixtureConfig { experts, top, renormalised, .. } = config;
        let router = map.router(&format!("{name}.gate.weight"), [experts, hidden], top)?;
        let [gate_up, down] = map.experts(&format!("{name}.experts"), held, (hidden, config.intermediate))?;
        Ok(Mixture { router, held, gate_up, down, top, renormalised, loads })
    }

    /// The activation format that the experts read directly, without rounding the rows first. The
    /// format includes unquantized rows for the router.
    pub fn reads(&self) -> ActivationFormat {
        ActivationFormat::of(self.gate_up.wants()).and_plain()
    }

    /// Normalizes `hidden` `[rows, hidden]` into `normed`, chooses the experts of each row, and
    /// computes the first half of each expert. `slots` `[rows]` are the KV cache slots of the
    /// rows, if the rows are all tokens of a step. The slots identify padding rows, whose
    /// choices are not counted.
    pub fn gate<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        hidden: &Tensor<'_>,
        norm: RmsNorm<'_>,
        normed: &mut Activations<'_>,
        slots: Option<&Tensor<'_>>,
    ) -> Result<GatedRows<'s>, KernelError> {
        let Mixture { top, renormalised, .. } = *self;
        let router = Router { weight: &self.router, top, renormalised, loads: &self.loads, slots };
        let routing = scope.rms_norm_route(hidden, norm, normed, router)?.held(self.held);
        let format = ActivationFormat::of(self.down.wants());
        let rows = scope.gated_experts_as(&*normed, &self.gate_up, &routing, format)?;
        Ok(GatedRows { routing, rows })
    }

    /// Computes the second half of each expert and adds the result to `hidden` `[rows, hidden]`. If
    /// `next` is given, the sum is also normalized with the norm of `next` and written to the
    /// tensor `[rows, hidden]` of `next`.
    pub fn add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        gated: &GatedRows<'_>,
        hidden: &mut Tensor<'_>,
        next: Option<(RmsNorm<'_>, &mut Activations<'_>)>,
    ) -> Result<(), KernelError> {
        let GatedRows { routing, rows } = gated;
        if self.held.is_whole() {
            return match next {
                Some((norm, normed)) => scope.add_experts_rms_norm(rows, &self.down, routing, hidden, norm, normed),
                None => scope.add_experts(rows, &self.down, routing, hidden),
            };
        }
        let scope = scope.scope();
        let mut partial = scope.empty([hidden.rows(), hidden.columns()])?;
        scope.experts_into(rows, &self.down, routing, &mut partial)?;
        match next {
            Some((norm, normed)) => scope.all_reduce_rms_norm(&partial, hidden, norm, normed),
            None => scope.all_reduce_add(&partial, hidden),
        }
    }
}
