//! The processors: encoded bytes -> RGB -> resized, as Hugging Face's do it, for pictures and for videos. What they give
//! is cut into patches and normalised where the encoder runs.
//!
//! Work is spread over the rayon pool of the calling thread; callers who want a pool of their own use
//! `rayon::ThreadPool::install`.

pub mod config;
pub mod decode;
mod decode_jpeg;
pub(crate) mod error;
mod gif_frame;
pub mod header;
pub mod image_processor;
pub mod resample;
pub mod smart_resize;
mod tiff_header;
pub mod video_processor;
pub mod visual_plan;

pub use config::{ImageProcessorConfig, Resample};
pub use header::{DecodeCost, ImageFormat, ImageHeader};
pub use image_processor::{ImageProcessor, PicturePlan, ProcessedPicture};
pub use smart_resize::{PixelBounds, Size, smart_resize};
pub use video_processor::{VideoPlan, VideoProcessor};
pub use visual_plan::{VisualKey, VisualLimits, VisualPlan, VisualProcessors};
