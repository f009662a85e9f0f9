//! A layer of a vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) with rotary positions: layer norms, one
//! projection for queries, keys and values, and an MLP of two matrices.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{attention_packed::Stretches, gelu::Gelu, rotary::Rope},
};

use super::NORM_EPSILON;
use crate::{
    blocks::layer_norm::LayerNorm,
    weights::{Linear, WeightError, WeightMap},
};

/// The sizes of a tower's layers.
#[derive(Clone, Copy)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Attention heads.
    pub heads: usize,
    /// Activation of the MLP.
    pub activation: Gelu,
}

/// One layer's weights.
pub struct TowerLayer {
    sizes: LayerSizes,
    attention_norm: LayerNorm,
    qkv: Linear, // [3 * hidden, hidden]
    out: Linear, // [hidden, hidden]
    mlp_norm: LayerNorm,
    up: Linear,   // [intermediate, hidden]
    down: Linear, // [hidden, intermediate]
}

impl TowerLayer {
    /// Claims the weights under `prefix`. `mlp` has the names of the two matrices of the MLP.
    pub fn claim(
        map: &mut WeightMap<'_>,
        sizes: LayerSizes,
        prefix: &str,
        mlp: [&str; 2],
    ) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let LayerSizes { hidden, intermediate, .. } = sizes;
        let [up, down] = mlp.map(|part| name(&format!("mlp.{part}")));
        Ok(TowerLayer {
            sizes,
            attention_norm: LayerNorm::claim(map, &name("norm1"), hidden, NORM_EPSILON)?,
            qkv: map.linear(&name("attn.qkv"), 3 * hidden, hidden, true)?,
            out: map.linear(&name("attn.proj"), hidden, hidden, true)?,
            mlp_norm: LayerNorm::claim(map, &name("norm2"), hidden, NORM_EPSILON)?,
            up: map.linear(&up, intermediate, hidden, true)?,
            down: map.linear(&down, hidden, intermediate, true)?,
        })
    }

    /// Runs the layer on `hidden` `[patches, hidden]`, in place. Patches of a stretch of `seen` attend to each other.
    pub fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        rope: &Rope<'_>,
        positions: &Tensor<'_>, // [2, patches]
        seen: &Stretches<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = self.attention_norm.forward(&scope, hidden)?; // [patches, hidden]
            let mut qkv = self.qkv.forward(&scope, &normed)?; // [patches, 3 * hidden]
            scope.rotary(&mut qkv, 2 * self.sizes.heads, positions, rope)?; // queries and keys
            let attended = scope.attention_packed(&qkv, self.sizes.heads, seen)?; // [patches, hidden]
            self.out.forward_add(&scope, &attended, hidden)?;
        }
        let scope = scope.scope();
        let normed = self.mlp_norm.forward(&scope, hidden)?;
        let mut widened = self.up.forward(&scope, &normed)?; // [patches, intermediate]
        scope.gelu(&mut widened, self.sizes.activation)?;
        self.down.forward_add(&scope, &widened, hidden)
    }
}
