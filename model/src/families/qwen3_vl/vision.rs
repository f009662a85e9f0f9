//! The vision tower, which encodes patches to rows of the vision cache.

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
            LayerNames, LayerSizes, Merger, MergerSizes, NORM_EPSILON, Normed, PackedImages, PatchEmbedding, Rotation,
            TowerLayer, tower_rope,
        },
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

pub struct VisionTower {
    config: VisionConfig,
    embedding: PatchEmbedding,
    layers: Vec<TowerLayer>,
    merger: Merger,
    part_mergers: Vec<Merger>, // one for each of `deepstack_visual_indexes`
    rope: Rope<'static>,
}

impl Tower for VisionTower {
    type Config = Config;

    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let vision = VisionTower::claim(config.vision, "model.visual", map)?;
        Ok((vision, Decoder::claim(config.decoder, "model.language_model", map)?))
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
        let mut hidden = self.embedding.forward(&scope, batch, &places)?;
        let (row, positions) = (self.config.row(), places.positions());
        let rotation = Rotation { rope: &self.rope, positions: &positions };
        for (index, layer) in self.layers[..depth.of(self.layers.len())].iter().enumerate() {
            layer.forward(&scope, Some(rotation), &seen, &mut hidden)?;
            let part = self.config.deepstack_visual_indexes.iter().position(|taken| *taken == index);
            if let Some(part) = part {
                self.part_mergers[part].scatter(&scope, &hidden, &rows, &mut cache.column_range_mut(row.part(part)))?;
            }
        }
        self.merger.scatter(&scope, &hidden, &rows, &mut cache.column_range_mut(row.embedding()))
    }
}

impl VisionTower {
    /// Claims the tower's weights under `prefix` followed by a dot. After the prefix, the names are
    /// the same as in the released checkpoints.
    fn claim(config: VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let hidden = config.hidden_size;
        let projection = map.patch_embedding(&name("patch_embed.proj"), hidden, config.tower.patch().values(), true)?;
        let table = map.tensor(&name("pos_embed.weight"), [config.num_position_embeddings, hidden])?;
        let embedding = PatchEmbedding { projection, table, others: 0, side: config.grid_side() };
        let (intermediate, heads) = (config.intermediate_size, config.tower.num_heads);
        let sizes = LayerSizes {
            hidden,
            intermediate,
            heads,
            activation: Gelu::Tanh,
            norm: NormKind::Layer,
            epsilon: NORM_EPSILON,
            qk_epsilon: NORM_EPSILON,
            qkv_bias: true,
        };
        let names = LayerNames { mlp: ["mlp.linear_fc1", "mlp.linear_fc2"], ..LayerNames::TIMM };
        let layers = (0..config.tower.depth)
            .map(|index| TowerLayer::claim(map, sizes, &name(&format!("blocks.{index}")), &names))
            .collect::<Result<_, _>>()?;
        let merger = claim_merger(map, &config, &name("merger"), Normed::Patches)?;
        let part = |part| claim_merger(map, &config, &name(&format!("deepstack_merger_list.{part}")), Normed::Squares);
        let part_mergers = (0..config.row().parts).map(part).collect::<Result<_, _>>()?;
        let rope = tower_rope::rope(map, hidden / heads);
        Ok(VisionTower { config, embedding, layers, merger, part_mergers, rope })
    }
}

fn claim_merger(
    map: &mut WeightMap<'_>,
    config: &VisionConfig,
    prefix: &str,
    normed: Normed,
) -> Result<Merger, WeightError> {
    let sizes = MergerSizes {
        hidden: config.hidden_size,
        merge: config.tower.merge(),
        middle: config.tower.merge().patches(config.hidden_size),
        out: config.out_hidden_size,
        epsilon: NORM_EPSILON,
        normed,
    };
    let names = ["norm", "linear_fc1", "linear_fc2"].map(|part| format!("{prefix}.{part}"));
    Merger::claim(map, sizes, names.each_ref().map(String::as_str))
}
