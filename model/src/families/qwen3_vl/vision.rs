//! The vision tower: patches to rows of the vision cache.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{gelu::Gelu, rotary::Rope},
};

use super::config::VisionConfig;
use crate::{
    Depth,
    blocks::vision::{LayerSizes, Merger, MergerSizes, Normed, PackedPictures, PatchPlaces, TowerLayer, tower_rope},
    weights::{Linear, WeightError, WeightMap},
};

/// The tower's weights.
pub struct VisionTower {
    config: VisionConfig,
    patch_embedding: Linear,        // [hidden, patch_features]
    position_grid: Tensor<'static>, // [side * side, hidden]
    layers: Vec<TowerLayer>,
    merger: Merger,
    part_mergers: Vec<Merger>, // one for each of `deepstack_visual_indexes`
    rope: Rope<'static>,
}

impl VisionTower {
    /// Claims the tower's weights: `prefix`, a dot, and the names of the released checkpoints.
    pub fn claim(config: VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let hidden = config.hidden_size;
        let patch_embedding = map.linear(&name("patch_embed.proj"), hidden, config.patch().values(), true)?;
        let position_grid = map.tensor(&name("pos_embed.weight"), [config.num_position_embeddings, hidden])?;
        let (intermediate, heads) = (config.intermediate_size, config.num_heads);
        let sizes = LayerSizes { hidden, intermediate, heads, activation: Gelu::Tanh };
        let layers = (0..config.depth)
            .map(|index| TowerLayer::claim(map, sizes, &name(&format!("blocks.{index}")), ["linear_fc1", "linear_fc2"]))
            .collect::<Result<_, _>>()?;
        let merger = claim_merger(map, &config, &name("merger"), Normed::Patches)?;
        let part = |part| claim_merger(map, &config, &name(&format!("deepstack_merger_list.{part}")), Normed::Squares);
        let part_mergers = (0..config.row().parts).map(part).collect::<Result<_, _>>()?;
        let rope = tower_rope::rope(map, hidden / heads);
        Ok(VisionTower { config, patch_embedding, position_grid, layers, merger, part_mergers, rope })
    }

    /// The settings it was built from.
    pub fn config(&self) -> &VisionConfig {
        &self.config
    }

    /// Runs the tower over `batch`, through the layers of `depth`, and writes the embeddings and the parts to their
    /// rows of `cache` `[rows, width]`.
    pub fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedPictures,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let places = batch.places(&scope)?;
        let rows = batch.cache_rows(&scope)?;
        let seen = batch.frames(&scope)?;
        let mut hidden = self.embed(&scope, batch, &places)?;
        let row = self.config.row();
        for (index, layer) in self.layers[..depth.of(self.layers.len())].iter().enumerate() {
            layer.forward(&scope, &self.rope, &places.positions(), &seen, &mut hidden)?;
            let part = self.config.deepstack_visual_indexes.iter().position(|taken| *taken == index);
            if let Some(part) = part {
                self.part_mergers[part].scatter(&scope, &hidden, &rows, &mut cache.column_range_mut(row.part(part)))?;
            }
        }
        self.merger.scatter(&scope, &hidden, &rows, &mut cache.column_range_mut(row.embedding()))
    }

    /// Cuts patches and embeds them where they are, `[patches, hidden]`: the table of positions is stretched over each
    /// picture, and the projected patches are added.
    fn embed<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &PackedPictures,
        places: &PatchPlaces<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut hidden = scope.empty([batch.patches(), self.config.hidden_size])?;
        let side = self.config.grid_side();
        scope.position_grid(&self.position_grid, side, &places.places, &places.layout, &mut hidden)?;
        let inner = scope.scope();
        let mut patches = inner.empty([batch.patches(), self.config.patch().values()])?;
        batch.cut(&inner, places, &mut patches)?;
        self.patch_embedding.forward_add(&inner, &patches, &mut hidden)?;
        drop(inner);
        Ok(hidden)
    }
}

fn claim_merger(
    map: &mut WeightMap<'_>,
    config: &VisionConfig,
    prefix: &str,
    normed: Normed,
) -> Result<Merger, WeightError> {
    let sizes = MergerSizes { hidden: config.hidden_size, merge: config.merge(), out: config.out_hidden_size, normed };
    let names = ["norm", "linear_fc1", "linear_fc2"].map(|part| format!("{prefix}.{part}"));
    Merger::claim(map, sizes, names.each_ref().map(String::as_str))
}
