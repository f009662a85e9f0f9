//! Qwen2.5-VL (arXiv 2502.13923): a vision tower with windowed and full attention, followed by a
//! Qwen2.5 decoder with multimodal rotary positions.

mod config;
mod shape;
mod vision;
mod windows;

pub use config::Config;

use super::vision_language_model::VisionLanguageModel;

pub type Model = VisionLanguageModel<vision::VisionTower>;
