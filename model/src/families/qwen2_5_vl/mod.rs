//! Qwen2.5-VL (arXiv 2502.13923): a vision tower of windowed and full attention before a Qwen2.5 decoder with
//! multimodal rotary positions.

mod config;
mod placeholder;
mod shape;
mod vision;
mod windows;

pub use config::Config;
pub use placeholder::{Placeholders, lay_out};
pub use shape::{SHAPES, Shape, processor};
pub use vision::{PictureBatch, VisionTower};

use crate::{
    blocks::decoder::Decoder,
    weights::{WeightError, WeightMap},
    workload::Workload,
};

/// `architectures` entries that this family serves.
pub const ARCHITECTURES: &[&str] = &["Qwen2_5_VLForConditionalGeneration"];

/// The `model_type` of its configurations.
pub const MODEL_TYPE: &str = "qwen2_5_vl";

/// Every kind of work. The encoder sees a video as pictures, so videos add none.
pub const WORKLOADS: &[Workload] =
    &[Workload::Encode, Workload::Merge, Workload::Prefill, Workload::Decode, Workload::Score, Workload::Choose];

/// The family's weights.
pub struct Model {
    /// Turns pictures into embeddings.
    pub vision: VisionTower,
    /// Turns embeddings and text into logits.
    pub decoder: Decoder,
}

impl Model {
    /// Claims the weights of tower and decoder.
    pub fn claim(config: Config, map: &mut WeightMap<'_>) -> Result<Self, WeightError> {
        // Tensor names changed with transformers 4.52. As transformers does, this reads both (5.17,
        // `conversion_mapping.py`, under `Qwen2VLForConditionalGeneration`).
        let tower = if map.has("model.visual.patch_embed.proj.weight") { "model.visual" } else { "visual" };
        let text = if map.has("model.language_model.norm.weight") { "model.language_model" } else { "model" };
        let vision = VisionTower::claim(config.vision, tower, map)?;
        Ok(Model { vision, decoder: Decoder::claim(config.decoder, text, map)? })
    }
}
