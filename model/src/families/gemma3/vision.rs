//! The vision tower (SigLIP, Zhai et al. 2023, arXiv 2303.15343) and the projector, which pools
//! patches to tokens.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor, Weight,
    ops::{gelu::Gelu, rms_norm::RmsNorm},
};

use super::config::{Config, VisionConfig};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        layer_norm::LayerNorm,
        norm::NormKind,
        vision::{LayerNames, LayerSizes, PackedImages, PatchEmbedding, TowerLayer},
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

const LAYER: LayerNames = LayerNames {
    attention_norm: "layer_norm1",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    qk_norms: None,
    out: "self_attn.out_proj",
    mlp_norm: "layer_norm2",
    mlp: ["mlp.fc1", "mlp.fc2"],
    scales: None,
};

pub struct VisionTower {
    config: VisionConfig,
    embedding: PatchEmbedding,
    layers: Vec<TowerLayer>,
    norm: LayerNorm,              // of patches
    pooled_norm: Tensor<'static>, // [hidden], of tokens
    projection: Weight<'static>,  // [out, hidden]
}

/// Prefixes of the weights' names.
struct Names {
    tower: &'static str,
    projector: &'static str,
    decoder: &'static str,
}

impl Names {
    /// Prefixes in this checkpoint: the released names, or one of the two layouts that transformers
    /// has written since version 4.52.
    fn of(map: &WeightMap<'_>) -> Self {
        let has_tower = |tower: &&str| map.has(&format!("{tower}.embeddings.patch_embedding.weight"));
        let towers = ["model.vision_tower.vision_model", "model.vision_tower", "vision_tower"];
        let tower = towers.into_iter().find(has_tower).unwrap_or("vision_tower.vision_model");
        let is_saved = tower.starts_with("model.");
        Names {
            tower,
            projector: if is_saved { "model.multi_modal_projector" } else { "multi_modal_projector" },
            decoder: if is_saved { "model.language_model" } else { "language_model.model" },
        }
    }
}

impl Tower<Config> for VisionTower {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let names = Names::of(map);
        let vision = VisionTower::claim(config.vision, &names, map)?;
        let head = if names.decoder.starts_with("model.") { "lm_head.weight" } else { "language_model.lm_head.weight" };
        Ok((vision, Decoder::claim_with_head(config.decoder, names.decoder, head, map)?))
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedImages {
        PackedImages::of(self.config.patch(), self.config.merge, pictures)
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedImages,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let cache_rows = batch.cache_rows(&scope)?;
        let seen = batch.frames(&scope)?;
        let mut hidden = {
            let places = batch.places(&scope)?;
            self.embedding.forward(&scope, batch, &places)? // [patches, hidden]
        };
        for layer in &self.layers[..depth.of(self.layers.len())] {
            layer.forward(&scope, None, &seen, &mut hidden)?;
        }
        let normed = self.norm.forward(&scope, &hidden)?;
        // The patches of a token are consecutive rows.
        let pooled = scope.mean_rows(&normed, self.config.merge.patches_per_token())?; // [tokens, hidden]
        let norm = RmsNorm { weight: &self.pooled_norm, weight_offset: 1.0, epsilon: self.config.norm_epsilon };
        let normed = scope.rms_norm(&pooled, norm)?;
        let embeddings = scope.linear(&normed, &self.projection, None)?; // [tokens, out]
        scope.scatter_rows(&embeddings, &cache_rows, cache)
    }
}

impl VisionTower {
    /// Claims the weights of the tower and the projector.
    fn claim(config: VisionConfig, names: &Names, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        map.expect_plain_tower();
        let part = |name: &str| format!("{}.{name}", names.tower);
        let VisionConfig { hidden, norm_epsilon: epsilon, .. } = config;
        let (patches, values) = (config.grid().patches(), config.patch().values());
        let projection = map.patch_embedding(&part("embeddings.patch_embedding"), hidden, values, true)?;
        let table = map.tensor(&part("embeddings.position_embedding.weight"), [patches, hidden])?;
        let embedding = PatchEmbedding { projection, table, others: 0, side: config.grid().h as usize };
        let sizes = LayerSizes {
            hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            activation: Gelu::Tanh,
            norm: NormKind::Layer,
            epsilon,
            qk_epsilon: epsilon,
            qkv_bias: true,
        };
        let layer = |index| TowerLayer::claim(map, sizes, &part(&format!("encoder.layers.{index}")), &LAYER);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let norm = LayerNorm::claim(map, &part("post_layernorm"), hidden, epsilon)?;
        // The model does not use SigLIP's pooling head.
        map.leave_unread(&part("head"));
        let pooled_norm = map.tensor(&format!("{}.mm_soft_emb_norm.weight", names.projector), [hidden])?;
        let projection =
            map.transposed(&format!("{}.mm_input_projection_weight", names.projector), [config.out, hidden])?;
        Ok(VisionTower { config, embedding, layers, norm, pooled_norm, projection: Weight::plain(projection) })
    }
}
