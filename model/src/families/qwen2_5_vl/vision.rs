//! The vision tower, which encodes patches to embeddings.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{attention_packed::PackedSequences, gate_mul::GateActivation, gelu::Gelu, rms_norm::RmsNorm, rotary::Rope},
};

use super::{
    config::{Config, VisionConfig},
    windows::WindowOrder,
};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        gated_mlp::GatedMlp,
        vision::{NORM_EPSILON, PackedImages, Prefixes, packed_sequences, tower_rope},
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{Linear, WeightError, WeightMap},
};

pub struct VisionTower {
    config: VisionConfig,
    patch_embedding: Linear, // [hidden, patch_features]
    layers: Vec<Layer>,
    merger_norm: Tensor<'static>, // [hidden]
    merger_up: Linear,            // [merged * hidden, merged * hidden]
    merger_down: Linear,          // [out_hidden, merged * hidden]
    rope: Rope<'static>,
}

struct Layer {
    attention_norm: Tensor<'static>, // [hidden]
    qkv: Linear,                     // [3 * hidden, hidden]
    out: Linear,                     // [hidden, hidden]
    mlp_norm: Tensor<'static>,       // [hidden]
    mlp: GatedMlp,
}

/// Pictures packed for one launch, with their patches in window order.
#[derive(Clone, Debug, PartialEq)]
pub struct WindowedBatch {
    packed: PackedImages,
    window_starts: Vec<u32>, // [windows + 1]
}

impl AsRef<PackedImages> for WindowedBatch {
    fn as_ref(&self) -> &PackedImages {
        &self.packed
    }
}

impl Tower<Config> for VisionTower {
    type Batch = WindowedBatch;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let Prefixes { tower, decoder } = Prefixes::of(map);
        let vision = VisionTower::claim(config.vision, tower, map)?;
        Ok((vision, Decoder::claim(config.decoder, decoder, map)?))
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> WindowedBatch {
        let merge = self.config.tower.merge();
        let mut batch =
            WindowedBatch { packed: PackedImages::new(self.config.tower.patch(), merge), window_starts: vec![0] };
        for (image, cache_rows) in pictures {
            let order = WindowOrder::of(image.grid, merge, self.config.window_side());
            batch.packed.push(image, cache_rows, order.merged);
            for length in order.lengths {
                let last = *batch.window_starts.last().expect("the list of window starts begins with zero");
                batch.window_starts.push(last + merge.patches(length) as u32);
            }
        }
        batch
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &WindowedBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let rows = batch.packed.patches();
        let places = batch.packed.places(&scope)?;
        let mut hidden = scope.empty([rows, self.config.hidden_size])?; // [patches, hidden]
        {
            let scope = scope.scope();
            let mut patches = scope.empty([rows, self.config.tower.patch().values()])?;
            batch.packed.cut(&scope, &places, &mut patches)?;
            self.patch_embedding.forward_into(&scope, &patches, &mut hidden)?;
        }
        self.run_layers(&scope, batch, &places.positions(), &mut hidden, depth)?;
        self.merge(&scope, batch, &hidden, cache)
    }
}

impl VisionTower {
    /// Claims the tower's weights under `prefix` followed by a dot. After the prefix, the names are
    /// the same as in the released checkpoints.
    fn claim(config: VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, merged) = (config.hidden_size, config.tower.merge().patches_per_token());
        let patch_embedding =
            map.patch_embedding(&name("patch_embed.proj"), hidden, config.tower.patch().values(), false)?;
        let layer = |index| Layer::claim(&config, &name(&format!("blocks.{index}")), map);
        let layers = (0..config.tower.depth).map(layer).collect::<Result<_, _>>()?;
        let merger_norm = map.tensor(&name("merger.ln_q.weight"), [hidden])?;
        let merger_up = map.linear(&name("merger.mlp.0"), merged * hidden, merged * hidden, true)?;
        let merger_down = map.linear(&name("merger.mlp.2"), config.out_hidden_size, merged * hidden, true)?;
        let rope = tower_rope::rope(map, config.head_dim());
        Ok(VisionTower { config, patch_embedding, layers, merger_norm, merger_up, merger_down, rope })
    }

    fn run_layers<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &WindowedBatch,
        positions: &Tensor<'_>, // [2, patches]
        hidden: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let windows = packed_sequences(&scope, &batch.window_starts)?;
        let frames = batch.packed.frames(&scope)?;
        for (index, layer) in self.layers[..depth.of(self.layers.len())].iter().enumerate() {
            let seen = if self.config.fullatt_block_indexes.contains(&index) { &frames } else { &windows };
            layer.forward(&scope, self.config.tower.num_heads, &self.rope, positions, seen, hidden)?;
        }
        Ok(())
    }

    /// Merges each square of patches into one embedding.
    fn merge<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &WindowedBatch,
        hidden: &Tensor<'_>,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let merged = self.config.tower.merge().patches_per_token();
        let rows = batch.packed.cache_rows(&scope)?;
        let normed = scope.rms_norm(hidden, RmsNorm::new(&self.merger_norm, NORM_EPSILON))?; // [patches, hidden]
        let squares = normed.reshape([batch.packed.embeddings(), merged * self.config.hidden_size]);
        let mut widened = self.merger_up.forward(&scope, &squares)?; // [embeddings, merged * hidden]
        scope.gelu(&mut widened, Gelu::Erf)?;
        let embeddings = self.merger_down.forward(&scope, &widened)?; // [embeddings, out_hidden]
        scope.scatter_rows(&embeddings, &rows, cache)
    }
}

impl Layer {
    fn claim(config: &VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        Ok(Layer {
            attention_norm: map.tensor(&name("norm1.weight"), [hidden])?,
            qkv: map.linear(&name("attn.qkv"), 3 * hidden, hidden, true)?,
            out: map.linear(&name("attn.proj"), hidden, hidden, true)?,
            mlp_norm: map.tensor(&name("norm2.weight"), [hidden])?,
            mlp: GatedMlp::claim(
                map,
                ["gate", "up", "down"].map(|part| name(&format!("mlp.{part}_proj"))).each_ref().map(String::as_str),
                (hidden, intermediate.into()),
                true,
                GateActivation::Silu,
            )?,
        })
    }

    fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        heads: usize,
        rope: &Rope<'_>,
        positions: &Tensor<'_>,
        seen: &PackedSequences<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(hidden, RmsNorm::new(&self.attention_norm, NORM_EPSILON))?; // [patches, hidden]
            let mut qkv = self.qkv.forward(&scope, &normed)?; // [patches, 3 * hidden]
            scope.rotary(&mut qkv, 2 * heads, None, positions, rope)?; // queries and keys
            let attended = scope.attention_packed(&qkv, heads, seen)?; // [patches, hidden]
            self.out.forward_add(&scope, &attended, hidden)?;
        }
        let scope = scope.scope();
        let normed = scope.rms_norm(hidden, RmsNorm::new(&self.mlp_norm, NORM_EPSILON))?;
        self.mlp.forward(&scope, &normed, hidden)
    }
}
