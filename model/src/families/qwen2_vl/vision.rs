//! The vision tower, which encodes patches to embeddings.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{gelu::Gelu, rotary::Rope},
};

use super::config::{Config, VisionConfig};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        norm::NormKind,
        vision::{
            LayerNames, LayerSizes, Merger, MergerSizes, NORM_EPSILON, Normed, PackedImages, Prefixes, Rotation,
            TowerLayer, tower_rope,
        },
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{Linear, WeightError, WeightMap},
};

pub struct VisionTower {
    config: VisionConfig,
    patch_embedding: Linear, // [embed_dim, patch_features]
    layers: Vec<TowerLayer>,
    merger: Merger,
    rope: Rope<'static>,
}

impl Tower<Config> for VisionTower {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let Prefixes { tower, decoder } = Prefixes::of(map);
        let vision = VisionTower::claim(config.vision, tower, map)?;
        Ok((vision, Decoder::claim(config.decoder, decoder, map)?))
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedImages {
        PackedImages::of(self.config.tower.patch(), self.config.tower.merge(), pictures)
    }

    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedImages,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let places = batch.places(&scope)?;
        let rows = batch.cache_rows(&scope)?;
        let seen = batch.frames(&scope)?;
        let mut hidden = scope.empty([batch.patches(), self.config.embed_dim])?;
        {
            let scope = scope.scope();
            let mut patches = scope.empty([batch.patches(), self.config.tower.patch().values()])?;
            batch.cut(&scope, &places, &mut patches)?;
            self.patch_embedding.forward_into(&scope, &patches, &mut hidden)?;
        }
        let positions = places.positions();
        let rotation = Rotation { rope: &self.rope, positions: &positions };
        for layer in &self.layers[..depth.of(self.layers.len())] {
            layer.forward(&scope, Some(rotation), &seen, &mut hidden)?;
        }
        self.merger.scatter(&scope, &hidden, &rows, cache)
    }
}

impl VisionTower {
    /// Claims the tower's weights under `prefix` followed by a dot. After the prefix, the names are
    /// the same as in the released checkpoints.
    fn claim(config: VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, heads) = (config.embed_dim, config.tower.num_heads);
        let patch_embedding =
            map.patch_embedding(&name("patch_embed.proj"), hidden, config.tower.patch().values(), false)?;
        let sizes = LayerSizes {
            hidden,
            intermediate: config.mlp_ratio * hidden,
            heads,
            activation: Gelu::Quick,
            norm: NormKind::Layer,
            epsilon: NORM_EPSILON,
            qk_epsilon: NORM_EPSILON,
            qkv_bias: true,
        };
        let layers = (0..config.tower.depth)
            .map(|index| TowerLayer::claim(map, sizes, &name(&format!("blocks.{index}")), &LayerNames::TIMM))
            .collect::<Result<_, _>>()?;
        let sizes = MergerSizes {
            hidden,
            merge: config.tower.merge(),
            middle: config.tower.merge().patches(hidden),
            out: config.hidden_size,
            epsilon: NORM_EPSILON,
            normed: Normed::Patches,
        };
        let names = ["ln_q", "mlp.0", "mlp.2"].map(|part| name(&format!("merger.{part}")));
        let merger = Merger::claim(map, sizes, names.each_ref().map(String::as_str))?;
        let rope = tower_rope::rope(map, hidden / heads);
        Ok(VisionTower { config, patch_embedding, layers, merger, rope })
    }
}
