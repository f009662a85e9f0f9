//! Image and video processing: encoded bytes to RGB to resized pixels, with the results of the
//! Hugging Face processors. The device cuts the pixels into patches and normalizes them.
//!
//! Work runs on the rayon pool of the calling thread. To use another pool, call from within
//! `rayon::ThreadPool::install`.
//!
//! The stages that a picture or video of a request passes:
//!
//! | stage | type |
//! |---|---|
//! | as sent: a file, or pixels | [`EncodedImage`](crate::flow::EncodedImage); [`Media`](crate::flow::Media) is an image or a [`Video`](crate::flow::Video) |
//! | header read, limits checked | [`ImageHeader`] |
//! | sizes after processing | [`ResizePlan`], [`VideoPlan`]; [`MediaPlan`] is either, with its [`MediaKey`] |
//! | patches along time, height and width | [`MediaGrid`](crate::flow::MediaGrid) |
//! | decoded | [`RgbImage`](crate::flow::RgbImage) |
//! | resized | [`ResizedImage`](crate::flow::ResizedImage) |
//! | ready for the vision encoder | [`EncoderInput`], cached by its [`PictureHash`](crate::flow::PictureHash) |
//! | packed for one encoder batch | `PackedImages` in `blocks/vision` |
//! | in the prompt | [`PlaceholderSpan`](crate::flow::PlaceholderSpan), [`ContentSpan`](crate::flow::ContentSpan) |
//! | embeddings in a step | [`EmbeddingRows`](crate::flow::EmbeddingRows) |

mod animation;
mod animation_blocks;
mod bmp_file;
pub mod config;
pub mod decode;
pub(crate) mod error;
mod exif;
mod fax_rows;
mod file_decoder;
mod frame_sampling;
mod gif_file;
pub mod header;
pub mod image_processor;
mod jpeg_file;
mod levels;
pub mod media_plan;
mod own_limits;
mod png_file;
pub mod resample;
pub mod smart_resize;
mod tiff_colors;
mod tiff_directory;
mod tiff_file;
mod tiff_pieces;
pub mod tiling;
mod token_limit;
pub mod video_processor;
mod webp_file;

pub use config::{CountedPixels, ImageProcessorConfig};
pub use frame_sampling::FrameSampling;
pub use header::{DecodeCost, ImageFormat, ImageHeader};
pub use image_processor::{EncoderInput, ImageProcessor, ResizePlan};
pub use media_plan::{MediaKey, MediaLimits, MediaPlan, MediaProcessors};
pub use resample::Resample;
pub use smart_resize::{PixelBounds, Size, Sizing, VideoLength, largest_size, smart_resize, smart_resize_video};
pub use tiling::{CropRule, TileCut, Tiling};
pub use video_processor::{VideoPlan, VideoProcessor};
