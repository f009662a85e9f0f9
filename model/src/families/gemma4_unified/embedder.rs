//! The embedder of pictures: a norm and a projection of each patch, learned positions, and a
//! projection to the decoder's width.

use bursar_kernels::{
    Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{patchify::PatchSize, rms_norm::RmsNorm},
};

use super::config::{Config, VisionConfig};
use crate::{
    Depth, MergeSize,
    blocks::{
        decoder::Decoder,
        layer_norm::LayerNorm,
        vision::{PackedImages, PatchPlaces},
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

/// Epsilon of the layer norms: the default of PyTorch.
const EPSILON: f32 = 1e-5;

pub struct VisionEmbedder {
    patch: PatchSize,
    positions: usize,
    patch_norm: LayerNorm,         // [values]
    patches: Weight<'static>,      // [hidden, values]
    patches_bias: Tensor<'static>, // [hidden]
    hidden_norm: LayerNorm,        // [hidden]
    columns: Weight<'static>,      // [positions, hidden]
    rows: Weight<'static>,         // [positions, hidden]
    position_norm: LayerNorm,      // [hidden]
    zeros: Tensor<'static>,        // [hidden]
    norm_epsilon: f32,
    projection: Weight<'static>, // [out, hidden]
}

impl Tower<Config> for VisionEmbedder {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let embedder = VisionEmbedder::claim(&config.vision, map)?;
        map.leave_unread("model.embed_audio");
        Ok((embedder, Decoder::claim(config.decoder, "model.language_model", map)?))
    }

    fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PackedImages {
        PackedImages::of(self.patch, MergeSize::new(1), pictures)
    }

    /// `depth` has no effect, because the embedder has no layers.
    fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PackedImages,
        cache: &mut Tensor<'_>,
        _depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let cache_rows = batch.cache_rows(&scope)?;
        let places = batch.places(&scope)?;
        let projected = self.project(&scope, batch, &places)?; // [patches, hidden]
        let hidden = self.add_positions(&scope, &projected, &places)?;
        let norm = RmsNorm { weight: &self.zeros, weight_offset: 1.0, epsilon: self.norm_epsilon };
        let normed = scope.rms_norm(&hidden, norm)?;
        let embeddings = scope.linear(&normed, &self.projection, None)?; // [patches, out]
        scope.scatter_rows(&embeddings, &cache_rows, cache)
    }
}

impl VisionEmbedder {
    fn claim(config: &VisionConfig, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        map.expect_plain_tower();
        let part = |name: &str| format!("model.vision_embedder.{name}");
        let &VisionConfig { hidden, positions, out, norm_epsilon, .. } = config;
        let patch = config.patch();
        let mut norm = |name: &str| LayerNorm::claim(map, &part(name), hidden, EPSILON);
        let (hidden_norm, position_norm) = (norm("patch_ln2")?, norm("pos_norm")?);
        let patch_norm = LayerNorm::claim_patches(map, &part("patch_ln1"), patch, EPSILON)?;
        let mut of_axis = |axis: usize| {
            // [positions, 2, hidden]
            let columns = RankShard { first: axis * hidden, count: hidden, whole: 2 * hidden };
            map.columns_of(&part("pos_embedding"), positions, columns).map(Weight::plain)
        };
        Ok(VisionEmbedder {
            patch,
            positions,
            patch_norm,
            hidden_norm,
            columns: of_axis(0)?,
            rows: of_axis(1)?,
            position_norm,
            patches: Weight::plain(map.patch_projection(&part("patch_dense.weight"), hidden, patch)?),
            patches_bias: map.tensor(&part("patch_dense.bias"), [hidden])?,
            zeros: map.zeros(hidden),
            norm_epsilon,
            projection: Weight::plain(map.tensor("model.embed_vision.embedding_projection.weight", [out, hidden])?),
        })
    }

    /// Normalizes and projects the patches. Returns `[patches, hidden]`.
    fn project<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &PackedImages,
        places: &PatchPlaces<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut projected = scope.empty([batch.patches(), self.patches.rows()])?;
        let scope = scope.scope();
        let mut patches = scope.empty([batch.patches(), self.patches.columns()])?;
        batch.cut(&scope, places, &mut patches)?;
        let normed = self.patch_norm.forward(&scope, &patches)?;
        scope.linear_into(&normed, &self.patches, Some(&self.patches_bias), &mut projected)?;
        Ok(projected)
    }

    /// Normalizes `projected` `[patches, hidden]`, adds the learned positions of the patches' columns
    /// and rows, and normalizes the sums. Returns `[patches, hidden]`.
    fn add_positions<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        projected: &Tensor<'_>,
        places: &PatchPlaces<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let mut hidden = self.hidden_norm.forward(scope, projected)?;
        {
            let (scope, count) = (scope.scope(), hidden.rows());
            let row_indices: Vec<u32> = (0..count as u32).collect();
            let row_indices = scope.upload([count], &row_indices)?;
            let (all, no_tokens) = (RankShard::all(self.positions), scope.empty_u32([0])?);
            // Rows of `places`: pictures, rows, columns.
            for (table, axis) in [(&self.columns, 2), (&self.rows, 1)] {
                let scope = scope.scope();
                let place = places.places.row_range(axis..axis + 1).into_shape([count]);
                let of_axis = scope.embed_share(table, all, &place, &no_tokens, 1.0)?;
                scope.add_rows(&of_axis, &row_indices, &row_indices, &mut hidden)?;
            }
        }
        self.position_norm.forward(scope, &hidden)
    }
}
