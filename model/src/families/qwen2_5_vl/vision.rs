//! The vision tower: patches to embeddings.

use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{attention_packed::Stretches, rotary::Rope},
};

use super::{
    config::VisionConfig,
    windows::{WindowOrder, patch_places},
};
use crate::{
    blocks::{decoder::rope_frequencies, gated_mlp::GatedMlp},
    flow::{Grid, Patches},
    weights::{Linear, WeightError, WeightMap},
};

/// Added to the mean square in the tower's norms; fixed in the reference, not in the configuration.
const NORM_EPSILON: f32 = 1e-6;

/// Base of the tower's rotary frequencies; fixed likewise.
const ROPE_THETA: f64 = 10_000.0;

/// The tower's weights.
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

/// Pictures packed for one launch, in window order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PictureBatch {
    pixels: Vec<f32>,        // [patches, patch_features]
    positions: Vec<u32>,     // [2, patches]
    window_starts: Vec<u32>, // [windows + 1]
    frame_starts: Vec<u32>,  // [frames + 1]
    cache_rows: Vec<u32>,    // [merged patches]: where each embedding goes
}

impl PictureBatch {
    /// Patches over all pictures.
    pub fn patches(&self) -> usize {
        self.positions.len() / 2
    }

    /// Embeddings over all pictures.
    pub fn embeddings(&self) -> usize {
        self.cache_rows.len()
    }
}

impl VisionTower {
    /// Claims the tower's weights, named as the released checkpoints name them.
    pub fn claim(config: VisionConfig, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let (hidden, merged) = (config.hidden_size, config.merged_patches());
        let patch_embedding = map.linear("visual.patch_embed.proj", hidden, config.patch_features(), false)?;
        let layers = (0..config.depth).map(|index| Layer::claim(&config, index, map)).collect::<Result<_, _>>()?;
        let merger_norm = map.tensor("visual.merger.ln_q.weight", [hidden])?;
        let merger_up = map.linear("visual.merger.mlp.0", merged * hidden, merged * hidden, true)?;
        let merger_down = map.linear("visual.merger.mlp.2", config.out_hidden_size, merged * hidden, true)?;
        // Half of a head's pairs follow the row and half the column, with the same frequencies.
        let per_axis = rope_frequencies(ROPE_THETA, config.head_dim() / 2);
        let sections = vec![per_axis.len(); 2];
        let rope = Rope { frequencies: map.constant(&[per_axis.clone(), per_axis].concat()), sections };
        Ok(VisionTower { config, patch_embedding, layers, merger_norm, merger_up, merger_down, rope })
    }

    /// Embeddings that a picture of `grid` becomes.
    pub fn embeddings(&self, grid: Grid) -> usize {
        grid.patches() / self.config.merged_patches()
    }

    /// Packs pictures, each with the rows of the vision cache that its embeddings take.
    pub fn pack(&self, pictures: &[(&Patches, &[u32])]) -> PictureBatch {
        let mut batch = PictureBatch { window_starts: vec![0], frame_starts: vec![0], ..PictureBatch::default() };
        let mut places = Vec::new();
        for (patches, cache_rows) in pictures {
            self.push(&mut batch, &mut places, patches, cache_rows);
        }
        batch.positions = places.iter().map(|(row, _)| *row).chain(places.iter().map(|(_, column)| *column)).collect();
        batch
    }

    fn push(&self, batch: &mut PictureBatch, places: &mut Vec<(u32, u32)>, patches: &Patches, cache_rows: &[u32]) {
        let (merged, features) = (self.config.merged_patches(), self.config.patch_features());
        let grid = patches.grid;
        assert_eq!(patches.pixels.len(), grid.patches() * features, "pixels of another model's processor");
        assert_eq!(cache_rows.len(), self.embeddings(grid), "each embedding has a row");
        let order = WindowOrder::of(grid, self.config.spatial_merge_size, self.config.window_side());
        let frame_places: Vec<_> = patch_places(grid, self.config.spatial_merge_size).collect();
        for place in &order.merged {
            let first = place * merged;
            batch.pixels.extend_from_slice(&patches.pixels[first * features..(first + merged) * features]);
            places.extend((first..first + merged).map(|patch| frame_places[patch % frame_places.len()]));
            batch.cache_rows.push(cache_rows[*place]);
        }
        let extend = |starts: &mut Vec<u32>, length: usize| {
            let last = *starts.last().expect("the starts begin with zero");
            starts.push(last + length as u32);
        };
        for length in &order.lengths {
            extend(&mut batch.window_starts, length * merged);
        }
        for _ in 0..grid.t {
            extend(&mut batch.frame_starts, (grid.h * grid.w) as usize);
        }
    }

    /// Runs the tower over `batch` and writes the embeddings to their rows of `cache` `[rows, out_hidden]`.
    pub fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let patches = batch.patches();
        let mut hidden = scope.empty([patches, self.config.hidden_size])?; // [patches, hidden]
        {
            let scope = scope.scope();
            let pixels = scope.upload([patches, self.config.patch_features()], &batch.pixels)?;
            self.patch_embedding.forward_into(&scope, &pixels, &mut hidden)?;
        }
        self.run_layers(&scope, batch, &mut hidden)?;
        self.merge(&scope, batch, &hidden, cache)
    }

    fn run_layers<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let positions = scope.upload([2, batch.patches()], &batch.positions)?;
        let windows = stretches(&scope, &batch.window_starts)?;
        let frames = stretches(&scope, &batch.frame_starts)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let seen = if self.config.fullatt_block_indexes.contains(&index) { &frames } else { &windows };
            layer.forward(&scope, self.config.num_heads, &self.rope, &positions, seen, hidden)?;
        }
        Ok(())
    }

    /// Each square of patches becomes one embedding.
    fn merge<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        hidden: &Tensor<'_>,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let merged = self.config.merged_patches();
        let rows = scope.upload([batch.embeddings()], &batch.cache_rows)?;
        let normed = scope.rms_norm(hidden, &self.merger_norm, NORM_EPSILON)?; // [patches, hidden]
        let squares = normed.reshape([batch.embeddings(), merged * self.config.hidden_size]);
        let mut widened = self.merger_up.forward(&scope, &squares)?; // [embeddings, merged * hidden]
        scope.gelu(&mut widened)?;
        let embeddings = self.merger_down.forward(&scope, &widened)?; // [embeddings, out_hidden]
        scope.scatter_rows(&embeddings, &rows, cache)
    }
}

fn stretches<'s, B: Backend>(scope: &'s Scope<'_, B>, starts: &[u32]) -> Result<Stretches<'s>, KernelError> {
    let pairs = starts.windows(2).map(|pair| u64::from(pair[1] - pair[0]).pow(2)).sum();
    Ok(Stretches { starts: scope.upload([starts.len()], starts)?, query_key_pairs: pairs })
}

impl Layer {
    fn claim(config: &VisionConfig, index: usize, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("visual.blocks.{index}.{part}");
        let (hidden, intermediate) = (config.hidden_size, config.intermediate_size);
        Ok(Layer {
            attention_norm: map.tensor(&name("norm1.weight"), [hidden])?,
            qkv: map.linear(&name("attn.qkv"), 3 * hidden, hidden, true)?,
            out: map.linear(&name("attn.proj"), hidden, hidden, true)?,
            mlp_norm: map.tensor(&name("norm2.weight"), [hidden])?,
            mlp: GatedMlp {
                gate_up: map.fused_linear(
                    &[(&name("mlp.gate_proj"), intermediate), (&name("mlp.up_proj"), intermediate)],
                    hidden,
                    true,
                )?,
                down: map.linear(&name("mlp.down_proj"), hidden, intermediate, true)?,
            },
        })
    }

    fn forward<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        heads: usize,
        rope: &Rope<'_>,
        positions: &Tensor<'_>,
        seen: &Stretches<'_>,
        hidden: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        {
            let scope = scope.scope();
            let normed = scope.rms_norm(hidden, &self.attention_norm, NORM_EPSILON)?; // [patches, hidden]
            let mut qkv = self.qkv.forward(&scope, &normed)?; // [patches, 3 * hidden]
            scope.rotary(&mut qkv, 2 * heads, positions, rope)?; // queries and keys
            let attended = scope.attention_packed(&qkv, heads, seen)?; // [patches, hidden]
            self.out.forward_add(&scope, &attended, hidden)?;
        }
        let scope = scope.scope();
        let normed = scope.rms_norm(hidden, &self.mlp_norm, NORM_EPSILON)?;
        self.mlp.forward(&scope, &normed, hidden)
    }
}
