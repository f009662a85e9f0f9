//! The vision tower, which encodes patches of tiles to rows of the vision cache.

use std::ops::Range;

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{attention_packed::PackedSequences, gelu::Gelu},
};

use super::{
    config::{Config, VisionConfig},
    names::Names,
};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        vision::{LayerSizes, Merger, MergerSizes, Normed, PackedImages, PatchEmbedding, TowerLayer, packed_sequences},
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

/// Epsilon that the merger's norm adds to the variance. This is torch's default, because no
/// configuration file has a key for this value.
const MERGER_EPSILON: f32 = 1e-5;

pub struct VisionTower {
    config: VisionConfig,
    class: Tensor<'static>,    // [1, hidden]
    embedding: PatchEmbedding, // the position table begins with the class token
    layers: Vec<TowerLayer>,
    merger: Merger,
}

/// Rows of a launch. In the rows of each tile, the class token comes before the patches.
struct Rows {
    pictures: usize,
    of_tile: usize,
}

impl Rows {
    fn all(&self) -> usize {
        self.pictures * self.of_tile
    }

    fn each_tile(&self) -> impl Iterator<Item = Range<u32>> {
        let of_tile = self.of_tile as u32;
        (0..self.pictures as u32).map(move |tile| tile * of_tile..(tile + 1) * of_tile)
    }

    fn of_classes(&self) -> Vec<u32> {
        self.each_tile().map(|rows| rows.start).collect()
    }

    fn of_patches(&self) -> Vec<u32> {
        self.each_tile().flat_map(|rows| rows.skip(1)).collect()
    }

    /// Uploads the ranges of rows that attend to each other: one range per tile.
    fn seen<'s, B: Backend>(&self, scope: &'s Scope<'_, B>) -> Result<PackedSequences<'s>, KernelError> {
        let starts: Vec<u32> = (0..=self.pictures).map(|tile| (tile * self.of_tile) as u32).collect();
        packed_sequences(scope, &starts)
    }
}

impl Tower<Config> for VisionTower {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let names = Names::of(&config, map);
        let vision = VisionTower::claim(config.vision, &names, map)?;
        Ok((vision, Decoder::claim_with_head(config.decoder, names.decoder, names.head, map)?))
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
        let rows = Rows { pictures: batch.pictures(), of_tile: 1 + self.config.tile().patches() };
        let cache_rows = batch.cache_rows(&scope)?;
        let patch_rows = scope.upload([batch.patches()], &rows.of_patches())?;
        let seen = rows.seen(&scope)?;
        let mut hidden = scope.empty([rows.all(), self.config.hidden])?;
        self.embed(&scope, batch, &rows, &patch_rows, &mut hidden)?;
        for layer in &self.layers[..depth.of(self.layers.len())] {
            layer.forward(&scope, None, &seen, &mut hidden)?;
        }
        let patches = scope.gather_rows(&hidden, &patch_rows)?; // class tokens are no longer needed
        self.merger.scatter(&scope, &patches, &cache_rows, cache)
    }
}

impl VisionTower {
    /// Claims the weights of the tower and the merger.
    fn claim(config: VisionConfig, names: &Names, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        map.expect_plain_tower();
        let (hidden, patches) = (config.hidden, config.tile().patches());
        let class = map.tensor(&names.class, [1, hidden])?;
        let table = map.tensor(&names.positions, [1, (1 + patches) * hidden])?.into_shape([1 + patches, hidden]);
        let projection = map.patch_embedding(&names.patch, hidden, config.patch().values(), true)?;
        let embedding = PatchEmbedding { projection, table, others: 1, side: config.tile().h as usize };
        let sizes = LayerSizes {
            hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            activation: Gelu::Erf,
            norm: config.norm,
            epsilon: config.norm_epsilon,
            qk_epsilon: config.qk_norm_epsilon,
            qkv_bias: config.has_qkv_bias,
        };
        let layer = |index| TowerLayer::claim(map, sizes, &format!("{}.{index}", names.layers), &names.layer);
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let sizes = MergerSizes {
            hidden,
            merge: config.merge,
            middle: config.out,
            out: config.out,
            epsilon: MERGER_EPSILON,
            normed: Normed::Squares,
        };
        let merger = Merger::claim(map, sizes, names.merger.each_ref().map(String::as_str))?;
        Ok(VisionTower { config, class, embedding, layers, merger })
    }

    /// Writes class tokens and embedded patches to `hidden`.
    fn embed<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedImages,
        rows: &Rows,
        patch_rows: &Tensor<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let places = batch.places(&scope)?;
        let patches = self.embedding.forward(&scope, batch, &places)?;
        scope.scatter_rows(&patches, patch_rows, hidden)?;
        let pictures = [rows.pictures];
        let first = scope.upload(pictures, &vec![0u32; rows.pictures])?;
        let every = scope.upload(pictures, &(0..rows.pictures as u32).collect::<Vec<_>>())?;
        let class_rows = scope.upload(pictures, &rows.of_classes())?;
        let mut classes = scope.embed(&self.class, &first, &first)?;
        let positions = scope.embed(&self.embedding.table.row_range(0..1), &first, &first)?;
        scope.add_rows(&positions, &every, &every, &mut classes)?;
        scope.scatter_rows(&classes, &class_rows, hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_row_of_each_tile_comes_first() {
        let rows = Rows { pictures: 2, of_tile: 4 };
        assert_eq!((rows.all(), rows.of_classes(), rows.of_patches()), (8, vec![0, 4], vec![1, 2, 3, 5, 6, 7]));
    }
}
