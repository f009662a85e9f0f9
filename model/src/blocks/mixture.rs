//! A mixture of experts: for each token, a router chooses a few of many gated MLPs, and their
//! results are summed with the router's weights (Shazeer et al. 2017, arXiv 1701.06538). Some
//! models add a shared expert, which every token uses (Qwen3.5).

use bursar_kernels::{
    ActivationFormat, Activations, Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{
        gate_mul::GateActivation,
        rms_norm::RmsNorm,
        rms_norm_route::Router,
        route::{EXPERTS_MAX, Routing, RoutingRule, TOP_MAX},
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
    /// Whether layers with experts also have a dense MLP (Gemma 4).
    #[serde(skip)]
    pub has_dense_mlp: bool,
}

/// The keys of Gemma 4's mixture.
#[derive(Deserialize)]
struct Gemma4Fields {
    enable_moe_block: Option<bool>,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    /// An earlier name of `moe_intermediate_size`, which vLLM also reads.
    expert_intermediate_size: Option<usize>,
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

    /// Reads the keys of Gemma 4, all of whose layers have experts if `enable_moe_block` is set.
    pub(super) fn read_gemma4(fields: &Map<String, Value>) -> Result<Option<Self>, ConfigError> {
        let fields = Gemma4Fields::deserialize(fields)?;
        if fields.enable_moe_block != Some(true) {
            return Ok(None);
        }
        let size = |key: &'static str, size: Option<usize>, most: usize| {
            let size = size
                .ok_or_else(|| ConfigError::Contradiction(format!("{key} is missing; enable_moe_block requires it")))?;
            ConfigError::check_size(key, size, most).map(|()| size)
        };
        let experts = size("num_experts", fields.num_experts, EXPERTS_MAX)?;
        Ok(Some(MixtureConfig {
            experts,
            top: size("top_k_experts", fields.top_k_experts, experts.min(TOP_MAX))?,
            intermediate: size(
                "moe_intermediate_size",
                fields.moe_intermediate_size.or(fields.expert_intermediate_size),
                WIDTH_MAX,
            )?,
            renormalized: true,
            step: 1,
            dense: None,
            shared: None,
            has_dense_mlp: true,
        }))
    }

    /// Whether this layer has experts.
    pub fn is_in(&self, layer: usize) -> bool {
        !self.dense.iter().flatten().any(|dense| *dense == layer) && (layer + 1).is_multiple_of(self.step)
    }
}

/// The router and the experts of a layer.
pub struct Mixture {
    router: Tensor<'static>, // [experts, hidden]
    router_scales: Option<RouterScales>,
    held: RankShard,          // the experts that this rank holds
    gate_up: Weight<'static>, // [held * 2 * intermediate, hidden]
    down: Weight<'static>,    // [held * hidden, intermediate]
    activation: GateActivation,
    top: usize,
    renormalized: bool,
    loads: Tensor<'static>, // [experts] u32
    shared: Option<SharedExpert>,
}

/// Gemma 4's additions to a router: the router's input has a separate norm, and the logits are divided
/// by the square root of the hidden size.
struct RouterScales {
    norm: Tensor<'static>,    // [hidden]
    experts: Tensor<'static>, // [experts] f32, factors of the experts' weights
    logits: f32,
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
    /// Claims the router and the [experts](WeightMap::experts) of `share` in the layer `name`. A
    /// mixture that replaces the MLP has `name.mlp.gate.weight`, `name.mlp.experts` and, if the model
    /// has a shared expert, `name.mlp.shared_expert` and `name.mlp.shared_expert_gate`. A mixture
    /// with a dense MLP has `name.router` and `name.experts`. `loads` `[experts]` counts how often
    /// each expert is chosen.
    ///
    /// # Errors
    /// See [`WeightMap::experts`].
    pub fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        (hidden, activation): (usize, GateActivation),
        config: &MixtureConfig,
        share: MixtureShare,
        loads: Tensor<'static>,
    ) -> Result<Self, WeightError> {
        let &MixtureConfig { experts, top, renormalized, has_dense_mlp, .. } = config;
        let of_mlp = format!("{name}.mlp");
        let (place, router) = if has_dense_mlp { (name, "router.proj") } else { (of_mlp.as_str(), "gate") };
        let router = map.router(&format!("{place}.{router}.weight"), [experts, hidden], top)?;
        let router_scales =
            has_dense_mlp.then(|| RouterScales::claim(map, &format!("{name}.router"), hidden, experts)).transpose()?;
        let held = share.experts;
        let [gate_up, down] = map.experts(&format!("{place}.experts"), held, (hidden, config.intermediate))?;
        let shared =
            share.shared.map(|width| SharedExpert::claim(map, place, (hidden, activation), width)).transpose()?;
        Ok(Mixture { router, router_scales, held, gate_up, down, activation, top, renormalized, loads, shared })
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
        let Mixture { top, renormalized, activation, .. } = *self;
        let rule = RoutingRule { renormalized, ..RoutingRule::softmax(top) };
        let router = Router { weight: &self.router, rule, loads: &self.loads, slots };
        let routing = match &self.router_scales {
            None => scope.rms_norm_route(hidden, norm, normed, router)?,
            Some(scales) => {
                let rule = RoutingRule { logit_scale: scales.logits, expert_scales: Some(&scales.experts), ..rule };
                let norm_of_router = RmsNorm { weight: &scales.norm, weight_offset: 0.0, ..norm };
                // The router's normalized rows are not needed after the routing, so the experts'
                // normalized rows overwrite them.
                let mut of_router = Activations::of_plain(normed.plain_mut());
                let router = Router { rule, ..router };
                let routing = scope.rms_norm_route(hidden, norm_of_router, &mut of_router, router)?;
                scope.rms_norm_into(hidden, norm, normed)?;
                routing
            }
        };
        let routing = routing.held(self.held);
        let format = ActivationFormat::of(self.down.wants());
        let rows = scope.gated_experts_as(&*normed, &self.gate_up, &routing, activation, format)?;
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

    /// Computes the second half of each expert and sums the results, also over the experts of other
    /// ranks. A shared expert is not included. Returns `[rows, hidden]`.
    pub fn sum_experts<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        gated: &GatedRows<'_>,
        hidden: usize,
    ) -> Result<Tensor<'s>, KernelError> {
        let GatedRows { routing, rows, .. } = gated;
        let shape = [routing.rows(), hidden];
        let mut sum = scope.empty(shape)?;
        if self.held.is_whole() {
            scope.experts_into(rows, &self.down, routing, &mut sum)?;
        } else {
            let scope = scope.scope();
            let mut partial = scope.empty(shape)?;
            scope.experts_into(rows, &self.down, routing, &mut partial)?;
            scope.all_reduce_into(&partial, &mut sum)?;
        }
        Ok(sum)
    }
}

impl RouterScales {
    /// Claims `name.scale` and `name.per_expert_scale`.
    fn claim(map: &mut WeightMap<'_>, name: &str, hidden: usize, experts: usize) -> Result<Self, WeightError> {
        Ok(RouterScales {
            norm: map.tensor(&format!("{name}.scale"), [hidden])?,
            experts: map.tensor_f32(&format!("{name}.per_expert_scale"), experts)?,
            logits: (hidden as f32).powf(-0.5),
        })
    }
}

impl SharedExpert {
    /// Claims `name.shared_expert` with the columns `width` of this rank, and
    /// `name.shared_expert_gate`.
    fn claim(
        map: &mut WeightMap<'_>,
        name: &str,
        (hidden, activation): (usize, GateActivation),
        width: RankShard,
    ) -> Result<Self, WeightError> {
        let names = ["gate", "up", "down"].map(|part| format!("{name}.shared_expert.{part}_proj"));
        let names = names.each_ref().map(String::as_str);
        let mlp = GatedMlp::claim(map, names, (hidden, width), false, activation)?;
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
