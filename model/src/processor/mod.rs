//! The processors of pictures and videos: encoded bytes -> RGB -> resized, as Hugging Face's do it. The device cuts the
//! result into patches and normalises it.
//!
//! Work is spread over the rayon pool of the calling thread. To use another pool, call from within
//! `rayon::ThreadPool::install`.

mod animation;
mod animation_blocks;
pub mod config;
pub mod decode;
mod decode_jpeg;
pub(crate) mod error;
mod frame_sampling;
mod gif_frame;
pub mod header;
pub mod image_processor;
mod own_limits;
pub mod resample;
pub mod smart_resize;
mod tiff_header;
pub mod tiling;
pub mod video_processor;
pub mod visual_plan;

pub use config::{CountedPixels, ImageProcessorConfig, Resample};
pub use frame_sampling::FrameSampling;
pub use header::{DecodeCost, ImageFormat, ImageHeader};
pub use image_processor::{ImageProcessor, PicturePlan, ProcessedPicture};
pub use smart_resize::{PixelBounds, Size, VideoLength, smart_resize, smart_resize_video};
pub use tiling::Tiling;
pub use video_processor::{VideoPlan, VideoProcessor};
pub use visual_plan::{VisualKey, VisualLimits, VisualPlan, VisualProcessors};
