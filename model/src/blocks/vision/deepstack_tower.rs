//! The vision tower of Qwen3-VL (arXiv 2511.21631) and later models: full attention and a learned
//! grid of positions. Intermediate outputs may be kept for the decoder's first layers (DeepStack,
//! arXiv 2406.04334).

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{gelu::Gelu, rotary::Rope},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    EmbeddingLayout, LayerNames, LayerSizes, Merger, MergerSizes, NORM_EPSILON, Normed, PackedImages, PatchEmbedding,
    Rotation, TowerConfig, TowerLayer, tower_rope,
};
use crate::{
    Depth,
    blocks::{ConfigError, DecoderConfig, WIDTH_MAX, norm::NormKind},
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

/// Sizes and settings of the tower.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct DeepstackConfig {
    /// Settings shared with the towers of other families.
    #[serde(flatten)]
    pub tower: TowerConfig,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Rows of the position table, which is a square grid.
    pub num_position_embeddings: usize,
    /// Tower layers whose output becomes a DeepStack part, in ascending order. Each part is added
    /// after one of the decoder's first layers.
    pub deepstack_visual_indexes: Vec<usize>,
    /// Width of the decoder.
    pub out_hidden_size: usize,
}

impl DeepstackConfig {
    /// Reads `vision_config` on top of the defaults of `Qwen3VLVisionConfig` (transformers 5.17,
    /// `configuration_qwen3_vl.py`), with `parts` as the default DeepStack layers.
    pub fn read(given: &Map<String, Value>, parts: &[usize]) -> Result<Self, ConfigError> {
        let defaults = json!({
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": parts,
            "out_hidden_size": 3584,
            "rope_theta": tower_rope::THETA,
        });
        TowerConfig::read(given, &defaults, &["deepstack_visual_indexes"])
    }

    /// Positions along a side of the table's grid.
    pub fn grid_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }

    /// Layout of the vision cache row that the tower writes for each token.
    pub fn row(&self) -> EmbeddingLayout {
        EmbeddingLayout { hidden: self.out_hidden_size, parts: self.deepstack_visual_indexes.len() }
    }

    /// Checks the tower against the decoder that reads its rows.
    pub fn check(&self, decoder: &DecoderConfig) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        self.check_sizes()?;
        self.tower.check(self.hidden_size, "gelu_pytorch_tanh")?;
        if self.grid_side().pow(2) != self.num_position_embeddings {
            let rows = self.num_position_embeddings;
            return contradiction(format!("vision_config.num_position_embeddings {rows} is not a square number"));
        }
        if self.out_hidden_size != decoder.hidden {
            let (out, hidden) = (self.out_hidden_size, decoder.hidden);
            return contradiction(format!("vision_config.out_hidden_size {out} is not hidden_size {hidden}"));
        }
        self.check_parts(decoder.layers)
    }

    /// Checks that each DeepStack part is taken from a different tower layer, and that there is a
    /// decoder layer after which the part is added.
    fn check_parts(&self, decoder_layers: usize) -> Result<(), ConfigError> {
        const KEY: &str = "vision_config.deepstack_visual_indexes";
        let (taken, depth) = (&self.deepstack_visual_indexes, self.tower.depth);
        let text = if let Some(index) = taken.iter().find(|index| **index >= depth) {
            format!("{KEY} names layer {index}, but the tower's depth is {depth}")
        } else if !taken.is_sorted_by(|one, next| one < next) {
            format!("{KEY} {taken:?} does not name layers in ascending order, each once")
        } else if taken.len() > decoder_layers {
            format!("{KEY} has {} parts for {decoder_layers} layers of the decoder", taken.len())
        } else {
            return Ok(());
        };
        Err(ConfigError::Contradiction(text))
    }

    fn check_sizes(&self) -> Result<(), ConfigError> {
        ConfigError::check_size("vision_config.hidden_size", self.hidden_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.intermediate_size", self.intermediate_size, WIDTH_MAX)?;
        ConfigError::check_size("vision_config.num_position_embeddings", self.num_position_embeddings, WIDTH_MAX)
    }
}

pub struct DeepstackTower {
    config: DeepstackConfig,
    embedding: PatchEmbedding,
    layers: Vec<TowerLayer>,
    merger: Merger,
    part_mergers: Vec<Merger>, // one for each of `deepstack_visual_indexes`
    rope: Rope<'static>,
}

impl DeepstackTower {
    /// Packs pictures, each with the rows of the vision cache for its embeddings. No pixel is
    /// copied.
    pub fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedImages {
        PackedImages::of(self.config.tower.patch(), self.config.tower.merge(), pictures)
    }

    /// Runs the layers of `depth` on `batch`. Writes the embeddings and the DeepStack parts to the
    /// batch's rows of `cache` `[rows, width]`, which are laid out as in [`EmbeddingLayout`].
    pub fn encode<B: Backend>(
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

    /// Claims the tower's weights under `prefix` followed by a dot. After the prefix, the names are
    /// the same as in the released checkpoints.
    pub fn claim(config: DeepstackConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
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
        Ok(DeepstackTower { config, embedding, layers, merger, part_mergers, rope })
    }
}

fn claim_merger(
    map: &mut WeightMap<'_>,
    config: &DeepstackConfig,
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
