//! Components that several vision towers use: pictures packed for a launch, and the layout of
//! pictures in a prompt and in the vision cache.

mod deepstack_tower;
mod embedding_layout;
mod merger;
mod packed_images;
mod patch_embedding;
mod picture_shares;
mod placeholder;
mod placeholder_tokens;
mod prefixes;
mod released_processor;
mod text_line;
mod tower_config;
mod tower_input;
mod tower_layer;
pub mod tower_rope;
pub mod video_text;

pub use deepstack_tower::{DeepstackConfig, DeepstackTower};
pub use embedding_layout::EmbeddingLayout;
pub use merger::{Merger, MergerSizes, Normed};
pub use packed_images::{PackedImages, PatchPlaces, packed_sequences};
pub use patch_embedding::PatchEmbedding;
pub use picture_shares::{exchange_rows, most_of_a_rank, share_out};
pub use placeholder::{Placeholders, QWEN_PLACEHOLDERS, VideoPlace, lay_out};
pub use placeholder_tokens::PlaceholderTokens;
pub use prefixes::Prefixes;
pub use released_processor::{released_processor, released_video_processors};
pub use text_line::{lay_out_each_tile, lay_out_in_line};
pub use tower_config::TowerConfig;
pub use tower_input::TowerInput;
pub use tower_layer::{LayerNames, LayerSizes, Rotation, TowerLayer};

/// Epsilon that the norms of Qwen's towers add to the variance or to the mean square. The reference
/// implementation has this value as a constant, not as a configuration key.
pub const NORM_EPSILON: f32 = 1e-6;
