//! The data types of the pipeline: image bytes -> patches -> embeddings -> step batch
//! -> logits -> token.
//!
//! Embeddings are rows of the vision cache, and logits are rows of a workspace. Neither has a type
//! here, because both stay on the device.

mod block_table;
mod cache_format;
mod cache_groups;
pub mod encoded_image;
mod further_drafts;
mod image_error;
mod logits_of;
mod prefix_key;
mod prompt_layout;
mod resize_limits;
pub mod resized_image;
pub mod rgb_image;
mod step_array;
mod step_batch;
mod step_layout;
mod tiles;
pub mod token;
pub mod video;

pub use block_table::BlockTable;
pub use cache_format::CacheFormat;
pub use cache_groups::{CacheGroup, CacheGroups, KvLocation, SegmentLayers};
pub use encoded_image::{EncodedImage, FileName, ImageLimits, PixelSize};
pub use further_drafts::{DraftPositions, FurtherDrafts};
pub use image_error::ImageError;
pub use logits_of::LogitsOf;
pub use prefix_key::{ContentSpan, PrefixKey, PrefixKeys};
pub use prompt_layout::{LayoutError, PlaceholderSpan, PromptLayout};
pub use resize_limits::ResizeLimits;
pub use resized_image::{Grid, Levels, PictureHash, ResizedImage};
pub use rgb_image::RgbImage;
pub use step_array::StepArray;
pub use step_batch::{
    DraftInputs, EmbeddingRows, NextToken, POSITION_AXES, SCORE_ROWS, SHORT_ROWS, SequencePart, StateSlots, StepBatch,
};
pub use step_layout::{StateCounts, StepFormat, StepLayout};
pub use tiles::Tiles;
pub use token::{LogProbabilities, LogProbability, Token};
pub use video::{Media, MediaGrid, Video};
