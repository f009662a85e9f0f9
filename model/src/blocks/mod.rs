//! Layers that several families share. Each family passes the names of its weights.

mod axes_rule;
mod config_error;
pub mod config_keys;
pub mod decoder;
mod decoder_config;
pub mod decoder_shape;
mod decoder_share;
pub mod draft_head;
mod draft_sizes;
pub mod gated_delta_net;
pub mod gated_mlp;
pub mod hybrid;
mod kv_sizes;
mod layer;
pub mod layer_cache;
pub mod layer_norm;
mod mixed;
mod mixer;
pub mod mixture;
mod mlp_with_experts;
pub mod norm;
pub mod paged_attention;
pub mod per_layer_embeddings;
pub mod per_layer_embeddings_config;
pub mod rope_config;
pub mod rope_scaling;
mod ropes;
mod sliding_window;
pub mod step_inputs;
pub mod vision;

pub use axes_rule::AxesRule;
pub use config_error::{ConfigError, WIDTH_MAX};
pub use decoder_config::{
    AssistantConfig, Biases, ClusterConfig, DecoderConfig, DecoderDefaults, DraftHeadConfig, Eagle3Config, LayerKind,
    PictureMask,
};
pub use decoder_share::{DecoderShare, KvHeads};
pub use kv_sizes::KvSizes;
pub use sliding_window::{SlidingWindow, WindowRule};
