//! A layer of the vision tower, and its projections.

use bursar_kernels::{
    Backend, KernelError, RankShard, Scope, Tensor,
    ops::{attention_packed::PackedSequences, gate_mul::GateActivation, rms_norm::RmsNorm, rotary::Rope},
};

use super::config::VisionConfig;
use crate::{
    blocks::vision::Rotation,
    weights::{Linear, WeightError, WeightMap},
};

/// Projections of the same rows. In some models, the inputs and outputs of each projection are
/// clamped.
#[expect(clippy::large_enum_variant, reason = "there are four values per layer, so the size does not matter")]
enum Projections {
    /// A single matrix with the rows of all projections.
    Fused(Linear),
    Clipped(Vec<Clipped>),
}

/// A projection whose inputs and outputs are clamped to bounds `[2]` f32.
struct Clipped {
    linear: Linear,
    inputs: Tensor<'static>,
    outputs: Tensor<'static>,
}

/// Claims `parts` of [`Projections::claim`] as one matrix.
fn fused(
    map: &mut WeightMap<'_>,
    parts: &[(String, Vec<RankShard>)],
    in_features: usize,
) -> Result<Linear, WeightError> {
    let named = |(name, rows): &(String, Vec<RankShard>)| {
        let name = format!("{name}.linear");
        rows.iter().map(|rows| (name.clone(), *rows)).collect::<Vec<_>>()
    };
    let rows: Vec<_> = parts.iter().flat_map(named).collect();
    let rows: Vec<_> = rows.iter().map(|(name, rows)| (name.as_str(), *rows)).collect();
    map.fused_linear(&rows, in_features, false)
}

impl Projections {
    /// Claims the projections of `parts`: the name of a module, and the ranges of its rows in the
    /// order in which they are stored.
    fn claim(
        map: &mut WeightMap<'_>,
        config: &VisionConfig,
        parts: &[(String, Vec<RankShard>)],
        in_features: usize,
    ) -> Result<Self, WeightError> {
        if !config.clips {
            return Ok(Projections::Fused(fused(map, parts, in_features)?));
        }
        let mut clipped = Vec::new();
        for part in parts {
            let linear = fused(map, std::slice::from_ref(part), in_features)?;
            let mut bounds = |what: &str| map.bounds(["min", "max"].map(|end| format!("{}.{what}_{end}", part.0)));
            clipped.push(Clipped { linear, inputs: bounds("input")?, outputs: bounds("output")? });
        }
        Ok(Projections::Clipped(clipped))
    }

    /// Projects `x` `[rows, in_features]`. Returns the results side by side.
    fn forward<'s, B: Backend>(&self, scope: &'s Scope<'_, B>, x: &Tensor<'_>) -> Result<Tensor<'s>, KernelError> {
        let parts = match self {
            Projections::Fused(linear) => return linear.forward(scope, x),
            Projections::Clipped(parts) => parts,
        };
        let columns: usize = parts.iter().map(|part| part.linear.weight.rows()).sum();
        let mut all = scope.empty([x.rows(), columns])?;
        let mut first = 0;
        for Clipped { linear, inputs, outputs } in parts {
            let scope = scope.scope();
            let clamped = scope.clamp(x, inputs)?;
            let mut out = all.column_range_mut(first..first + linear.weight.rows());
            linear.forward_into(&scope, &clamped, &mut out)?;
            scope.clamp_in_place(&mut out, outputs)?;
            first += linear.weight.rows();
        }
        Ok(all)
    }

    /// Adds the norm of the projection of `x` to `sum`.
    fn forward_norm_add<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        x: &Tensor<'_>,
        norm: RmsNorm<'_>,
        sum: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        scope.rms_norm_add(&self.forward(&scope, x)?, norm, None, sum)
    }
}

/// A layer with four norms. Queries and keys are normalized and rotated, values are normalized.
pub struct TowerLayer {
    input_norm: Tensor<'static>,     // [hidden]
    qkv: Projections,                // 3 * hidden
    qk_norms: [Tensor<'static>; 2],  // [head_dim]
    out: Projections,                // hidden
    attention_norm: Tensor<'static>, // [hidden], of the result of attention
    mlp_norm: Tensor<'static>,       // [hidden]
    gate_up: Projections,            // 2 * intermediate
    down: Projections,               // hidden
    mlp_out_norm: Tensor<'static>,   // [hidden], of the MLP's result
    epsilon: f32,
    heads: usize,
}

/// Inputs that all layers share in one encoder batch.
pub struct LayerInputs<'a> {
    /// The rotation of queries and keys.
    pub rotation: Rotation<'a>,
    /// All frequencies are 0, so the rotary kernel normalizes values without rotating them.
    pub zero_rope: &'a Rope<'a>,
    /// `[head_dim]`: the weight of a norm that only divides by the root mean square, with an offset
    /// of 1.
    pub zeros: &'a Tensor<'a>,
    /// The patches of each picture.
    pub sequences: &'a PackedSequences<'a>,
}

/// Starts of the four quarters of a head in the checkpoint, in the order in which they are stored
/// here. In the checkpoint, quarters 0 and 1 have the pairs that are rotated by the column, and
/// quarters 2 and 3 the pairs that are rotated by the row. The rotary kernel pairs elements half a
/// head apart and expects the row's pairs first.
fn quarter_starts(head_dim: usize) -> [usize; 4] {
    let quarter = head_dim / 4;
    [2, 0, 3, 1].map(|part| part * quarter)
}

/// Ranges of the rows of a projection with `heads` heads.
fn reordered(heads: usize, head_dim: usize) -> Vec<RankShard> {
    let range = move |head: usize, first: usize| RankShard {
        first: head * head_dim + first,
        count: head_dim / 4,
        whole: heads * head_dim,
    };
    (0..heads).flat_map(|head| quarter_starts(head_dim).map(|first| range(head, first))).collect()
}

impl TowerLayer {
    /// Claims the weights under `prefix`.
    pub fn claim(map: &mut WeightMap<'_>, config: &VisionConfig, prefix: &str) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let VisionConfig { hidden, intermediate, heads, norm_epsilon: epsilon, .. } = *config;
        let head_dim = config.head_dim();
        let mut norm = |part: &str| map.tensor(&name(&format!("{part}_layernorm.weight")), [hidden]);
        let [input_norm, attention_norm, mlp_norm, mlp_out_norm] =
            [norm("input")?, norm("post_attention")?, norm("pre_feedforward")?, norm("post_feedforward")?];
        let head_ranges = reordered(1, head_dim);
        let mut head_norm = |part: &str| map.vector_of_parts(&name(part), &head_ranges);
        let qk_norms = [head_norm("self_attn.q_norm.weight")?, head_norm("self_attn.k_norm.weight")?];
        let all = |part: &str, rows: usize| (name(part), vec![RankShard::all(rows)]);
        let reordered_rows = |part: &str| (name(part), reordered(heads, head_dim));
        let qkv =
            [reordered_rows("self_attn.q_proj"), reordered_rows("self_attn.k_proj"), all("self_attn.v_proj", hidden)];
        let gate_up = [all("mlp.gate_proj", intermediate), all("mlp.up_proj", intermediate)];
        Ok(TowerLayer {
            input_norm,
            qkv: Projections::claim(map, config, &qkv, hidden)?,
            qk_norms,
            out: Projections::claim(map, config, &[all("self_attn.o_proj", hidden)], hidden)?,
            attention_norm,
            mlp_norm,
            gate_up: Projections::claim(map, config, &gate_up, hidden)?,
            down: Projections::claim(map, config, &[all("mlp.down_proj", hidden)], intermediate)?,
            mlp_out_norm,
            epsilon,
            heads,
        })
    }

    /// Runs the layer on `hidden` `[patches, hidden]`, in place.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        shared: &LayerInputs<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let width = hidden.columns();
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(hidden, self.norm(&self.input_norm))?;
            let mut qkv = self.qkv.forward(&scope, &normed)?; // [patches, 3 * hidden]
            let Rotation { rope, positions } = shared.rotation;
            let values = RmsNorm { weight: shared.zeros, weight_offset: 1.0, epsilon: self.epsilon };
            let [queries, keys] = self.qk_norms.each_ref().map(|weight| self.norm(weight));
            for (part, norm, rope) in [(0, queries, rope), (1, keys, rope), (2, values, shared.zero_rope)] {
                let mut heads = qkv.column_range_mut(part * width..(part + 1) * width);
                scope.rotary(&mut heads, self.heads, Some(norm), positions, rope)?;
            }
            let attended = scope.attention_packed_scaled(&qkv, self.heads, shared.sequences, 1.0)?;
            self.out.forward_norm_add(&scope, &attended, self.norm(&self.attention_norm), hidden)?;
        }
        let scope = scope.scope();
        let normed = scope.rms_norm(hidden, self.norm(&self.mlp_norm))?;
        let gate_up = self.gate_up.forward(&scope, &normed)?; // [patches, 2 * intermediate]
        let half = gate_up.columns() / 2;
        let (gate, up) = (gate_up.column_range(0..half), gate_up.column_range(half..2 * half));
        let gated = scope.gate_mul(&gate, &up, GateActivation::GeluTanh)?;
        self.down.forward_norm_add(&scope, &gated, self.norm(&self.mlp_out_norm), hidden)
    }

    fn norm<'w>(&self, weight: &'w Tensor<'w>) -> RmsNorm<'w> {
        RmsNorm::new(weight, self.epsilon)
    }
}
