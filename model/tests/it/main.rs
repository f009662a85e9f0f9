//! Results of models compared with recorded references, oracles and their own plans. Tests that
//! count the heap or need a GPU are separate test programs.

#[path = "../bench/mod.rs"]
mod bench;

mod animations;
mod cache_files;
mod candle_oracle;
mod captured_steps;
mod checkpoints;
mod common;
mod copy;
mod draft_heads;
mod forced_calls;
mod fp4_weights;
mod fp8_cache;
mod fp8_experts;
mod fp8_schemes;
mod fp8_weights;
mod gemma3;
mod gemma4;
mod gguf;
mod gguf_blocks;
mod gguf_gemma;
mod gguf_hybrids;
mod golden_fp8;
mod golden_processor;

mod golden_qwen2_5_vl;
mod golden_text;
mod golden_text_families;
mod golden_tiles;
mod golden_videos;
mod golden_vision_families;
mod hostile_pictures;
mod hybrids;
mod int4_weights;
mod long_texts;
mod packed_experts;
mod packed_weights;
mod picture_kinds;
mod prompts;
mod pytorch;
mod random_checkpoints;
mod ranks;
mod real_gguf;
mod replies;
mod reply_parts;
mod rule_5_plan_equals_measurement;
mod sampling;
mod sampling_distributions;
mod sampling_where_the_logits_are;
mod schema_refusals;
mod sliding_windows;
mod structured_output;
mod variants;
mod videos;
mod weights;
