//! The processors of pictures and videos: encoded bytes -> RGB -> resized, as Hugging Face's do it. The device cuts the
//! result into patches and normalises it.
//!
//! Work is spread over the rayon pool of the calling thread. To use another pool, call from within
//! `rayon::ThreadPool::install`.

mod animation;
mod animation_blocks;
mod bmp_file;
pub mod config;
pub mod decode;
pub(crate) mod error;
mod exif;
mod fax_rows;
mod frame_sampling;
mod gif_file;
pub mod header;
pub mod image_processor;
mod jpeg_file;
mod levels;
mod own_limits;
mod picture_file;
mod png_file;
pub mod resample;
pub mod smart_resize;
mod tiff_colours;
mod tiff_directory;
mod tiff_file;
mod tiff_pieces;
pub mod tiling;
pub mod video_processor;
pub mod visual_plan;
mod webp_file;

pub use config::{CountedPixels, ImageProcessorConfig, Resample};
pub use frame_sampling::FrameSampling;
pub use header::{DecodeCost, ImageFormat, ImageHeader};
pub use image_processor::{ImageProcessor, PicturePlan, ProcessedPicture};
pub use smart_resize::{PixelBounds, Size, VideoLength, smart_resize, smart_resize_video};
pub use tiling::Tiling;
pub use video_processor::{VideoPlan, VideoProcessor};
pub use visual_plan::{VisualKey, VisualLimits, VisualPlan, VisualProcessors};
