//! The vision tower. Its patches are pooled to tokens, which are projected to the decoder's width.

use bursar_kernels::{
    Backend, KernelError, RankShard, Scope, Tensor, Weight,
    ops::{
        rms_norm::RmsNorm,
        rotary::{PairAxes, Rope},
    },
};

use super::{
    config::{Config, VisionConfig},
    layer::{LayerInputs, TowerLayer},
};
use crate::{
    Depth,
    blocks::{
        decoder::Decoder,
        rope_scaling::RopeScaling,
        vision::{PackedImages, PatchPlaces, Rotation},
    },
    families::vision_language_model::Tower,
    flow::ResizedImage,
    weights::{WeightError, WeightMap},
};

const TOWER: &str = "model.vision_tower";

pub struct VisionTower {
    config: VisionConfig,
    patches: Weight<'static>, // [hidden, values]
    columns: Weight<'static>, // [positions, hidden]
    rows: Weight<'static>,    // [positions, hidden]
    layers: Vec<TowerLayer>,
    rope: Rope<'static>,
    zero_rope: Rope<'static>,
    zeros: Tensor<'static>, // [head_dim]
    standardization: Option<Standardization>,
    pooled_zeros: Tensor<'static>, // [hidden]
    projection: Weight<'static>,   // [out, hidden]
}

/// Shift and scale of pooled patches from the checkpoint, `[hidden]` f32.
struct Standardization {
    shift: Tensor<'static>,
    scale: Tensor<'static>,
}

impl Tower<Config> for VisionTower {
    type Batch = PackedImages;

    fn claim_model(config: Config, map: &mut WeightMap<'_>) -> Result<(Self, Decoder), WeightError> {
        let vision = VisionTower::claim(config.vision, map)?;
        // The audio encoder is not used.
        ["model.audio_tower", "model.embed_audio"].iter().for_each(|module| map.leave_unread(module));
        Ok((vision, Decoder::claim(config.decoder, "model.language_model", map)?))
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
        let sequences = batch.frames(&scope)?;
        let places = batch.places(&scope)?;
        let mut hidden = self.embed(&scope, batch, &places)?; // [patches, hidden]
        let positions = places.positions();
        let rotation = Rotation { rope: &self.rope, positions: &positions };
        let shared = LayerInputs { rotation, zero_rope: &self.zero_rope, zeros: &self.zeros, sequences: &sequences };
        for layer in &self.layers[..depth.of(self.layers.len())] {
            layer.forward(&scope, &shared, &mut hidden)?;
        }
        // The patches of a token are consecutive rows.
        let mut pooled = scope.mean_rows(&hidden, self.config.merge.patches_per_token())?; // [tokens, hidden]
        let (width, mut epsilon) = (self.config.hidden as f32, self.config.norm_epsilon);
        match &self.standardization {
            Some(Standardization { shift, scale }) => scope.standardize(&mut pooled, width.sqrt(), shift, scale)?,
            // The reference multiplies by `sqrt(width)`. The norm cancels that factor if epsilon is
            // divided by `width`.
            None => epsilon /= width,
        }
        let norm = RmsNorm { weight: &self.pooled_zeros, weight_offset: 1.0, epsilon };
        let normed = scope.rms_norm(&pooled, norm)?;
        let embeddings = scope.linear(&normed, &self.projection, None)?; // [tokens, out]
        scope.scatter_rows(&embeddings, &cache_rows, cache)
    }
}

impl VisionTower {
    /// Claims the weights of the tower and the projection.
    fn claim(config: VisionConfig, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        map.expect_plain_tower();
        let part = |name: &str| format!("{TOWER}.{name}");
        let VisionConfig { hidden, positions, .. } = config;
        let patches = map.patch_projection(&part("patch_embedder.input_proj.weight"), hidden, config.patch())?;
        let table = part("patch_embedder.position_embedding_table"); // [2, positions, hidden]
        let mut axis =
            |index| map.matrix_of(&table, RankShard { first: index, count: 1, whole: 2 }, [positions, hidden]);
        let (columns, rows) = (axis(0)?, axis(1)?);
        let layer = |index| TowerLayer::claim(map, &config, &part(&format!("encoder.layers.{index}")));
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let standardization = if config.standardizes {
            let shift = map.tensor_f32(&part("std_bias"), hidden)?;
            Some(Standardization { shift, scale: map.tensor_f32(&part("std_scale"), hidden)? })
        } else {
            None
        };
        let projection = map.tensor("model.embed_vision.embedding_projection.weight", [config.out, hidden])?;
        let head_dim = config.head_dim();
        let of_axis = RopeScaling::Plain.frequencies(config.rope_theta, head_dim / 2);
        let rope = Rope {
            frequencies: map.constant(&[of_axis.clone(), of_axis.clone()].concat()),
            axes: PairAxes::Sections(vec![of_axis.len(); 2]),
        };
        let zero_rope = Rope {
            frequencies: map.constant(&vec![0.0; head_dim / 2]),
            axes: PairAxes::Sections(vec![of_axis.len(); 2]),
        };
        Ok(VisionTower {
            patches: Weight::plain(patches),
            columns: Weight::plain(columns),
            rows: Weight::plain(rows),
            layers,
            rope,
            zero_rope,
            zeros: map.zeros(head_dim),
            standardization,
            pooled_zeros: map.zeros(hidden),
            projection: Weight::plain(projection),
            config,
        })
    }

    /// Projects the patches, and adds the learned positions of their columns and rows. Returns
    /// `[patches, hidden]`.
    fn embed<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        batch: &PackedImages,
        places: &PatchPlaces<'_>,
    ) -> Result<Tensor<'s>, KernelError> {
        let count = batch.patches();
        let every: Vec<u32> = (0..count as u32).collect();
        // Rows of `places`: pictures, rows, columns.
        let place = |row: usize| places.places.row_range(row..row + 1).into_shape([count]);
        let all = RankShard::all(self.config.positions);
        let no_tokens = scope.empty_u32([0])?;
        let mut hidden = scope.embed_share(&self.columns, all, &place(2), &no_tokens, 1.0)?;
        let scope = scope.scope();
        {
            let scope = scope.scope();
            let rows = scope.embed_share(&self.rows, all, &place(1), &no_tokens, 1.0)?;
            let every = scope.upload([count], &every)?;
            scope.add_rows(&rows, &every, &every, &mut hidden)?;
        }
        let mut patches = scope.empty([count, self.patches.columns()])?;
        batch.cut(&scope, places, &mut patches)?;
        scope.linear_add(&patches, &self.patches, None, &mut hidden)?;
        Ok(hidden)
    }
}
