//! A mixture of experts: for each token, a router chooses a few of many gated MLPs, and their
//! results are summed with the router's weights (Shazeer et al. 2017, arXiv 1701.06538). Some
//! models add a shared expert, which every token uses (Qwen3.5).

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{
        gate_mul::GateActivation,
        rms_norm::RmsNorm,
        rms_norm_route::Router,
        route::{EXPERTS_MAX, Routing, TOP_MAX},
    },
};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    config_error::{ConfigError, WIDTH_MAX},
    gated_mlp::GatedMlp,
};
use crate::weights::{Linear, WeightError, WeightMap};

/// The experts of a decoder, and which of its layers have them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MixtureConfig {
    #[serde(rename = "num_experts")]
    pub experts: usize,
    #[serde(rename = "num_experts_per_tok")]
    pub top: usize,
    #[serde(rename = "moe_intermediate_size")]
    pub intermediate: usize,
    /// Whether the router's weights of a token's chosen experts are scaled to add up to 1.
    #[serde(rename = "norm_topk_prob")]
    pub renormalized: bool,
    /// In each group of `step` layers, only the last layer has experts.
    #[serde(rename = "decoder_sparse_step")]
    pub step: usize,
    /// Layers that have no experts even if `step` selects them.
    #[serde(rename = "mlp_only_layers")]
    pub dense: Option<Vec<usize>>,
    /// Width of the shared expert, which every token uses, if the layers have one.
    #[serde(rename = "shared_expert_intermediate_size")]
    pub shared: Option<usize>,
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
        if let Some(shared) = mixture.shared {
            ConfigError::check_size("shared_expert_intermediate_size", shared, WIDTH_MAX)?;
        }
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
    renormalized: bool,
    loads: Tensor<'static>, // [experts] u32
    shared: Option<SharedExpert>,
}

/// An expert that every token uses. Its result is multiplied by the sigmoid of a gate.
struct SharedExpert {
    mlp: GatedMlp,
    gate: Linear, // [1, hidden]
}

/// The result of the first half of a mixture.
pub struct GatedRows<'s> {
    routing: Routing<'s>,
    rows: Activations<'s>,      // [rows * top, intermediate]
    shared: Option<Tensor<'s>>, // [rows, width of the shared expert], already gated
}

/// The parts of a mixture that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixtureShare {
    pub experts: RankShard,
    /// Columns of the shared expert, if there is one.
    pub shared: Option<RankShard>,
}

impl Mixture {
    /// Claims the router `name.gate.weight` and the [experts](WeightMap::experts) of `share` under
    /// `name.experts`. If the model has a shared expert, also claims `name.shared_expert` and
    /// `name.shared_expert_gate`. `loads` `[experts]` counts how often each expert is chosen.
    ///
    /// # Errors
    /// See [`WeightMap::experts`].
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        hidden: usize,
        config: &MixtureConfig,
        share: MixtureShare,
        loads: Tensor<'static>,
    ) -> Result<Self, WeightError> {
        let &MixtureConfig { experts, top, renormalized, .. } = config;
        let router = map.router(&format!("{name}.gate.weight"), [experts, hidden], top)?;
        let held = share.experts;
        let [gate_up, down] = map.experts(&format!("{name}.experts"), held, (hidden, config.intermediate))?;
        let shared = share.shared.map(|width| SharedExpert::claim(map, name, hidden, width)).transpose()?;
        Ok(Mixture { router, held, gate_up, down, top, renormalized, loads, shared })
    }

    /// The activation format that the experts read directly, without quantizing the rows first. The
    /// format includes unquantized rows for the router.
    pub fn reads(&self) -> ActivationFormat {
        let shared = self.shared.as_ref().map_or(ActivationFormat::PLAIN, |shared| shared.mlp.reads());
        ActivationFormat::of(self.gate_up.wants()).and(shared).and_plain()
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
        let Mixture { top, renormalized, .. } = *self;
        let router = Router { weight: &self.router, top, renormalized, loads: &self.loads, slots };
        let routing = scope.rms_norm_route(hidden, norm, normed, router)?.held(self.held);
        let format = ActivationFormat::of(self.down.wants());
        let rows = scope.gated_experts_as(&*normed, &self.gate_up, &routing, format)?;
        let shared = self.shared.as_ref().map(|shared| shared.gate(scope, normed)).transpose()?;
        Ok(GatedRows { routing, rows, shared })
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
        let GatedRows { routing, rows, shared } = gated;
        let shared = self.shared.as_ref().zip(shared.as_ref());
        if self.held.is_whole() {
            // The experts are summed last, because the summing operation also computes the norm.
            if let Some((shared, gated)) = shared {
                shared.mlp.down.forward_add(scope, gated, hidden)?;
            }
            return match next {
                Some((norm, normed)) => scope.add_experts_rms_norm(rows, &self.down, routing, hidden, norm, normed),
                None => scope.add_experts(rows, &self.down, routing, hidden),
            };
        }
        let scope = scope.scope();
        let mut partial = scope.empty([hidden.rows(), hidden.columns()])?;
        scope.experts_into(rows, &self.down, routing, &mut partial)?;
        if let Some((shared, gated)) = shared {
            scope.linear_add(gated, &shared.mlp.down.weight, None, &mut partial)?;
        }
        match next {
            Some((norm, normed)) => scope.all_reduce_rms_norm(&partial, hidden, norm, normed),
            None => scope.all_reduce_add(&partial, hidden),
        }
    }
}

impl SharedExpert {
    /// Claims `name.shared_expert` with the columns `width` of this rank, and
    /// `name.shared_expert_gate`.
    fn claim(map: &mut WeightMap<'_>, name: &str, hidden: usize, width: RankShard) -> Result<Self, WeightError> {
        let names = ["gate", "up", "down"].map(|part| format!("{name}.shared_expert.{part}_proj"));
        let names = names.each_ref().map(String::as_str);
        let mlp = GatedMlp::claim(map, names, (hidden, width), false, GateActivation::Silu)?;
        let gate = map.unquantized_linear(&[(&format!("{name}.shared_expert_gate"), 1.into())], hidden)?;
        Ok(SharedExpert { mlp, gate })
    }

    /// The first half of the expert for `normed` `[rows, hidden]`, multiplied by the sigmoid of the
    /// gate. Scaling here is the same as scaling the result, because the second half is linear.
    /// Returns `[rows, width]`.
    fn gate<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let gated = self.mlp.gate_as(scope, normed, ActivationFormat::PLAIN)?;
        let mut gated = gated.plain.expect("the plain format was requested");
        let scope = scope.scope();
        let gate = self.gate.forward(&scope, normed)?; // [rows, 1]
        scope.sigmoid_mul(&mut gated, &gate)?;
        Ok(gated)
    }
}
