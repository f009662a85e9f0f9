//! Qwen2-VL (arXiv 2409.12191): a vision tower with full attention, followed by a Qwen2 decoder
//! with multimodal rotary positions.

mod config;
mod shape;
mod vision;

pub use config::Config;

use super::vision_language_model::VisionLanguageModel;

pub type Model = VisionLanguageModel<vision::VisionTower>;
