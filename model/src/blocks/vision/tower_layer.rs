//! A layer of a vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929): two norms, one
//! projection for queries, keys and values, and an MLP of two matrices. Towers differ in the kind
//! of norm, rotary positions, norms of queries and keys, and scales of the layer's outputs before
//! they are added to the residual stream (LayerScale, arXiv 2103.17239).

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{attention_packed::PackedSequences, gelu::Gelu, rotary::Rope},
};

use crate::{
    blocks::norm::{Norm, NormKind},
    weights::{Linear, WeightError, WeightMap},
};

/// The sizes of a tower's layers.
#[derive(Clone, Copy)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    pub heads: usize,
    /// Activation of the MLP.
    pub activation: Gelu,
    /// The kind of both norms.
    pub norm: NormKind,
    /// Epsilon that both norms add to the variance or to the mean square.
    pub epsilon: f32,
    /// Epsilon that the norms of queries and keys add to the mean square, if the
    /// layer has such norms.
    pub qk_epsilon: f32,
    /// Whether the projection of queries, keys and values has a bias.
    pub qkv_bias: bool,
}

/// Names of a layer's weights in a checkpoint, without the layer's prefix.
#[derive(Clone, Copy)]
pub struct LayerNames {
    /// The norm before attention.
    pub attention_norm: &'static str,
    /// Queries, keys and values: one matrix, or three.
    pub qkv: &'static [&'static str],
    /// Root-mean-square norms of queries and of keys over the whole width, if there are any.
    pub qk_norms: Option<[&'static str; 2]>,
    /// The output projection of attention.
    pub out: &'static str,
    /// The norm before the MLP.
    pub mlp_norm: &'static str,
    /// The matrices of the MLP.
    pub mlp: [&'static str; 2],
    /// The scales of the outputs of attention and of the MLP, if there are any.
    pub scales: Option<[&'static str; 2]>,
}

impl LayerNames {
    /// The names in timm's `vision_transformer.py`, without the optional weights.
    pub const TIMM: LayerNames = LayerNames {
        attention_norm: "norm1",
        qkv: &["attn.qkv"],
        qk_norms: None,
        out: "attn.proj",
        mlp_norm: "norm2",
        mlp: ["mlp.fc1", "mlp.fc2"],
        scales: None,
    };
}

pub struct TowerLayer {
    sizes: LayerSizes,
    attention_norm: Norm,
    qkv: Linear,                 // [3 * hidden, hidden]
    qk_norms: Option<[Norm; 2]>, // over the whole width
    out: Linear,                 // [hidden, hidden]
    mlp_norm: Norm,
    up: Linear,   // [intermediate, hidden]
    down: Linear, // [hidden, intermediate]
}

/// Rotary positions of a launch.
#[derive(Clone, Copy)]
pub struct Rotation<'r> {
    pub rope: &'r Rope<'r>,
    /// `[2, patches]` u32: row and column.
    pub positions: &'r Tensor<'r>,
}

impl TowerLayer {
    /// Claims the weights under `prefix`.
    pub fn claim(
        map: &mut WeightMap<'_>,
        sizes: LayerSizes,
        prefix: &str,
        names: &LayerNames,
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let LayerSizes { hidden, intermediate, epsilon, .. } = sizes;
        let attention_norm = Norm::claim(map, sizes.norm, &name(names.attention_norm), hidden, epsilon)?;
        let qkv: Vec<_> = names.qkv.iter().map(|part| name(part)).collect();
        let rows = 3 * hidden / qkv.len();
        let qkv: Vec<_> = qkv.iter().map(|name| (name.as_str(), rows)).collect();
        let qkv = map.fused_linear(&qkv, hidden, sizes.qkv_bias)?;
        let mut qk_norm = |part| Norm::claim(map, NormKind::RootMeanSquare, &name(part), hidden, sizes.qk_epsilon);
        let qk_norms = match names.qk_norms {
            Some([q, k]) => Some([qk_norm(q)?, qk_norm(k)?]),
            None => None,
        };
        let [attention_scale, mlp_scale] = names.scales.map_or([None; 2], |scales| scales.map(Some));
        let mut projection = |part, scale: Option<&str>, out_features, in_features| match scale {
            Some(scale) => map.scaled_linear(&name(part), &name(scale), out_features, in_features),
            None => map.linear(&name(part), out_features, in_features, true),
        };
        let out = projection(names.out, attention_scale, hidden, hidden)?;
        let up = projection(names.mlp[0], None, intermediate, hidden)?;
        let down = projection(names.mlp[1], mlp_scale, hidden, intermediate)?;
        let mlp_norm = Norm::claim(map, sizes.norm, &name(names.mlp_norm), hidden, epsilon)?;
        Ok(TowerLayer { sizes, attention_norm, qkv, qk_norms, out, mlp_norm, up, down })
    }

    /// Runs the layer on `hidden` `[patches, hidden]`, in place. A patch attends to the patches of
    /// its sequence in `seen`.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        rotation: Option<Rotation<'_>>,
        seen: &PackedSequences<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = self.attention_norm.forward(&scope, hidden)?; // [patches, hidden]
            let mut qkv = self.qkv.forward(&scope, &normed)?; // [patches, 3 * hidden]
            self.norm_queries_and_keys(&scope, &mut qkv)?;
            if let Some(Rotation { rope, positions }) = rotation {
                scope.rotary(&mut qkv, 2 * self.sizes.heads, None, positions, rope)?; // queries and keys
            }
            let attended = scope.attention_packed(&qkv, self.sizes.heads, seen)?; // [patches, hidden]
            self.out.forward_add(&scope, &attended, hidden)?;
        }
        let scope = scope.scope();
        let normed = self.mlp_norm.forward(&scope, hidden)?;
        let mut widened = self.up.forward(&scope, &normed)?; // [patches, intermediate]
        scope.gelu(&mut widened, self.sizes.activation)?;
        self.down.forward_add(&scope, &widened, hidden)
    }

    /// Normalizes the queries and the keys of `qkv` `[patches, 3 * hidden]` in place.
    fn norm_queries_and_keys<B: Backend>(&self, scope: &Scope<'_, B>, qkv: &mut Tensor<'_>) -> Result<(), KernelError> {
        let Some(norms) = &self.qk_norms else { return Ok(()) };
        let (scope, hidden) = (scope.scope(), self.sizes.hidden);
        let every: Vec<u32> = (0..qkv.rows() as u32).collect();
        let every = scope.upload([qkv.rows()], &every)?;
        for (part, norm) in norms.iter().enumerate() {
            let scope = scope.scope();
            let columns = part * hidden..(part + 1) * hidden;
            let normed = norm.forward(&scope, &qkv.column_range(columns.clone()))?; // [patches, hidden]
            scope.gather_rows_into(&normed, &every, &mut qkv.column_range_mut(columns))?;
        }
        Ok(())
    }
}
