//! What a model gives, against recorded references, oracles and its own plan. Whoever counts the heap or wants a GPU is a
//! program of its own.

#[path = "../bench/mod.rs"]
mod bench;

mod cache_files;
mod captured_steps;
mod checkpoints;
mod common;
mod copy;
mod golden_processor;
mod golden_qwen2;
mod golden_qwen2_5_vl;
mod golden_text;
mod golden_videos;
mod hostile_pictures;
mod prompts;
mod random_checkpoints;
mod replies;
mod rule_5_plan_equals_measurement;
mod sampling;
mod sampling_distributions;
mod sampling_where_the_logits_are;
mod schema_refusals;
mod structured_output;
mod variants;
mod videos;
mod weights;
