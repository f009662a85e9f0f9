//! The vision tower: patches to embeddings.

use std::sync::Arc;

use bursar_budgets::Bytes;
use bursar_kernels::{
    Backend, KernelError, Scope, Tensor,
    ops::{
        attention_packed::Stretches,
        gelu::Gelu,
        patchify::{LAYOUT_NUMBERS, LEVEL_NUMBERS, PatchSize, Pixels},
        rotary::{PairAxes, Rope},
    },
};

use super::{
    config::{ROPE_THETA, VisionConfig},
    windows::{WindowOrder, patch_places},
};
use crate::{
    Depth,
    blocks::{gated_mlp::GatedMlp, rope_scaling::RopeScaling},
    flow::{Grid, ResizedImage, RgbImage},
    weights::{Linear, WeightError, WeightMap},
};

/// Added to the mean square in the tower's norms. The reference has it as a constant; the configuration does not.
const NORM_EPSILON: f32 = 1e-6;

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

/// Pictures packed for one launch: their frames, uncopied, and the order in which patches are cut from them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PictureBatch {
    frames: Vec<Arc<[RgbImage]>>,       // [pictures]
    layout: Vec<[u32; LAYOUT_NUMBERS]>, // [pictures]
    levels: Vec<[f32; LEVEL_NUMBERS]>,  // [pictures]
    places: [Vec<u32>; 3],              // [picture, row, column], [patches] each, in window order
    window_starts: Vec<u32>,            // [windows + 1]
    frame_starts: Vec<u32>,             // [frames + 1]
    cache_rows: Vec<u32>,               // [merged patches]: where each embedding goes
}

impl PictureBatch {
    /// Patches over all pictures.
    pub fn patches(&self) -> usize {
        self.places[0].len()
    }

    /// Embeddings over all pictures.
    pub fn embeddings(&self) -> usize {
        self.cache_rows.len()
    }
}

impl VisionTower {
    /// Claims the tower's weights: `prefix`, a dot, and the names of the released checkpoints.
    pub fn claim(config: VisionConfig, prefix: &str, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        let name = |part: &str| format!("{prefix}.{part}");
        let (hidden, merged) = (config.hidden_size, config.merge().patches_per_token());
        let patch_embedding = map.linear(&name("patch_embed.proj"), hidden, config.patch().values(), false)?;
        let layer = |index| Layer::claim(&config, &name(&format!("blocks.{index}")), map);
        let layers = (0..config.depth).map(layer).collect::<Result<_, _>>()?;
        let merger_norm = map.tensor(&name("merger.ln_q.weight"), [hidden])?;
        let merger_up = map.linear(&name("merger.mlp.0"), merged * hidden, merged * hidden, true)?;
        let merger_down = map.linear(&name("merger.mlp.2"), config.out_hidden_size, merged * hidden, true)?;
        // Half of a head's pairs rotate with the row and half with the column, at the same frequencies.
        let per_axis = RopeScaling::Plain.frequencies(ROPE_THETA, config.head_dim() / 2);
        let axes = PairAxes::Sections(vec![per_axis.len(); 2]);
        let rope = Rope { frequencies: map.constant(&[per_axis.clone(), per_axis].concat()), axes };
        Ok(VisionTower { config, patch_embedding, layers, merger_norm, merger_up, merger_down, rope })
    }

    /// Number of embeddings of a picture of `grid`.
    pub fn embeddings(&self, grid: Grid) -> usize {
        grid.tokens(self.config.merge())
    }

    /// Packs pictures, each with the vision cache rows for its embeddings. No pixel is copied.
    ///
    /// # Panics
    /// If another model's processor resized a picture, or its rows and embeddings differ in number: our own bug.
    pub fn pack(&self, pictures: &[(&ResizedImage, &[u32])]) -> PictureBatch {
        let mut batch = PictureBatch { window_starts: vec![0], frame_starts: vec![0], ..PictureBatch::default() };
        let mut first_byte = Bytes::ZERO;
        for (patches, cache_rows) in pictures {
            self.push(&mut batch, first_byte, patches, cache_rows);
            first_byte += patches.bytes();
        }
        batch
    }

    fn push(&self, batch: &mut PictureBatch, first_byte: Bytes, patches: &ResizedImage, cache_rows: &[u32]) {
        let (merge, PatchSize { side, frames }) = (self.config.merge(), self.config.patch());
        let ResizedImage { frames: given, grid, levels } = patches;
        let is_of_grid =
            |frame: &RgbImage| [frame.width(), frame.height()] == [grid.w, grid.h].map(|patches| patches * side as u32);
        assert!(grid.t == 1 && given.iter().all(is_of_grid), "pixels of another model's processor: {patches:?}");
        assert!((1..=frames).contains(&given.len()), "a step has up to {frames} frames: {patches:?}");
        assert_eq!(cache_rows.len(), self.embeddings(*grid), "each embedding has a row");
        // `patchify` refuses a launch of more bytes than a u32 counts before it reads a layout.
        batch.layout.push([first_byte.0 as u32, grid.h, grid.w, given.len() as u32]);
        batch.levels.push(levels.numbers());
        let order = WindowOrder::of(*grid, merge, self.config.window_side());
        let in_order: Vec<_> = patch_places(*grid, merge).collect();
        let [pictures, rows, columns] = &mut batch.places;
        for place in &order.merged {
            for (row, column) in &in_order[merge.patches(*place)..merge.patches(place + 1)] {
                pictures.push(batch.frames.len() as u32);
                rows.push(*row);
                columns.push(*column);
            }
            batch.cache_rows.push(cache_rows[*place]);
        }
        batch.frames.push(given.clone());
        let extend = |starts: &mut Vec<u32>, length: usize| {
            let last = *starts.last().expect("the starts begin with zero");
            starts.push(last + length as u32);
        };
        for length in &order.lengths {
            extend(&mut batch.window_starts, merge.patches(*length));
        }
        extend(&mut batch.frame_starts, grid.patches());
    }

    /// Runs the tower over `batch`, through the layers of `depth`, and writes the embeddings to their rows of `cache`
    /// `[rows, out_hidden]`.
    pub fn encode<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        cache: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let rows = batch.patches();
        let [pictures, down, across] = &batch.places;
        let places = scope.upload_parts(&[pictures, down, across])?;
        let places = places.reshape([3, rows]);
        let mut hidden = scope.empty([rows, self.config.hidden_size])?; // [patches, hidden]
        {
            let scope = scope.scope();
            let mut patches = scope.empty([rows, self.config.patch().values()])?;
            self.cut(&scope, batch, &places, &mut patches)?;
            self.patch_embedding.forward_into(&scope, &patches, &mut hidden)?;
        }
        self.run_layers(&scope, batch, &places.row_range(1..3), &mut hidden, depth)?;
        self.merge(&scope, batch, &hidden, cache)
    }

    /// Uploads the frames and cuts them into `patches`. The uploaded bytes are freed on return.
    fn cut<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        places: &Tensor<'_>,
        patches: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let frames: Vec<&[u8]> = batch.frames.iter().flat_map(|frames| frames.iter().map(RgbImage::data)).collect();
        let count = batch.frames.len();
        let pixels = Pixels {
            bytes: scope.upload_parts(&frames)?,
            layout: scope.upload([count, LAYOUT_NUMBERS], batch.layout.as_flattened())?,
            levels: scope.upload([count, LEVEL_NUMBERS], batch.levels.as_flattened())?,
            places: places.row_range(0..3),
        };
        scope.patchify(&pixels, self.config.patch(), patches)
    }

    fn run_layers<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        positions: &Tensor<'_>, // [2, patches]
        hidden: &mut Tensor<'_>,
        depth: Depth,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let windows = stretches(&scope, &batch.window_starts)?;
        let frames = stretches(&scope, &batch.frame_starts)?;
        for (index, layer) in self.layers[..depth.of(self.layers.len())].iter().enumerate() {
            let seen = if self.config.fullatt_block_indexes.contains(&index) { &frames } else { &windows };
            layer.forward(&scope, self.config.num_heads, &self.rope, positions, seen, hidden)?;
        }
        Ok(())
    }

    /// Merges each square of patches into one embedding.
    fn merge<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        batch: &PictureBatch,
        hidden: &Tensor<'_>,
        cache: &mut Tensor<'_>,
    ) -> Result<(), KernelError> {
        let scope = scope.scope();
        let merged = self.config.merge().patches_per_token();
        let rows = scope.upload([batch.embeddings()], &batch.cache_rows)?;
        let normed = scope.rms_norm(hidden, &self.merger_norm, NORM_EPSILON)?; // [patches, hidden]
        let squares = normed.reshape([batch.embeddings(), merged * self.config.hidden_size]);
        let mut widened = self.merger_up.forward(&scope, &squares)?; // [embeddings, merged * hidden]
        scope.gelu(&mut widened, Gelu::Erf)?;
        let embeddings = self.merger_down.forward(&scope, &widened)?; // [embeddings, out_hidden]
        scope.scatter_rows(&embeddings, &rows, cache)
    }
}

fn stretches<'s, B: Backend>(scope: &'s Scope<'_, B>, starts: &[u32]) -> Result<Stretches<'s>, KernelError> {
    let lengths = starts.windows(2).map(|pair| pair[1] - pair[0]);
    let query_key_pairs = lengths.clone().map(|length| u64::from(length).pow(2)).sum();
    let longest = lengths.max().unwrap_or(0) as usize;
    Ok(Stretches { starts: scope.upload([starts.len()], starts)?, longest, query_key_pairs })
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
                (hidden, intermediate),
                true,
            )?,
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
