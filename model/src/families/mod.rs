//! Model families. Each folder contains everything that only its family needs. No family imports
//! another family.

mod deepstack;
pub mod draft_models;
mod gemma;
pub mod gemma3;
pub mod gemma3_text;
pub mod gemma4;
mod gemma4_assistant;
mod gemma4_decoder;
mod gemma4_prompt;
pub mod gemma4_text;
pub mod gemma4_unified;
pub mod internvl;
pub mod llama;
mod mrope;
pub mod qwen2;
pub mod qwen2_5_vl;
pub mod qwen2_vl;
pub mod qwen3;
pub mod qwen3_5;
pub mod qwen3_5_text;
pub mod qwen3_vl;
mod row;
mod vision_language_model;

pub use row::{Files, ReadText, ReleasedShape, Settings, VisionSettings, Weights};
