//! The video processor. It turns frames into one picture per time step, as transformers'
//! `Qwen2VLVideoProcessor`, `Qwen3VLVideoProcessor` and `Gemma4VideoProcessor` do. The user has
//! already picked the frames, so the sampling settings of those processors (`fps`, `min_frames`, `max_frames`,
//! `num_frames`, `do_sample_frames`) are not read.
//!
//! A step takes `temporal_patch_size` frames. If the last step has fewer frames, its last frame
//! is repeated. The vision tower never attends from one step to another, so the tower and all later
//! stages treat a step as a picture whose frames differ.

use bursar_budgets::Bytes;

use super::config::{CountedPixels, ImageProcessorConfig};
use super::error::{ProcessorError, VideoError};
use super::image_processor::{EncoderInput, ImageProcessor, ResizePlan};
use super::resample::resize_bytes;
use super::smart_resize::{Size, VideoLength, smart_resize_video};
use crate::flow::ImageError;
use crate::flow::{ImageLimits, MediaGrid, RgbImage, Video};

/// Duration limit of a video, in seconds. f32 represents every whole second up to this limit, and a
/// time in a prompt has few digits.
const SECONDS_MAX: f64 = (1u32 << 24) as f64;

/// Resizes the frames of videos for the encoder.
#[derive(Clone, Debug)]
pub struct VideoProcessor {
    frames: ImageProcessor,
}

/// Sizes of a processed video, computed only from the headers of its frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VideoPlan {
    /// Plan of each step, which is a picture of the frames' size.
    pub step: ResizePlan,
    pub frames: usize,
    /// Number of time steps.
    pub steps: usize,
    pub frames_per_second: f64,
    /// Maximum host bytes that decoding and resizing one frame takes.
    pub decoding_bytes: Bytes,
}

impl VideoPlan {
    /// The grid that the video's placeholder expands to.
    pub fn grid(&self) -> MediaGrid {
        let VideoPlan { step, steps, frames, frames_per_second, .. } = *self;
        MediaGrid::Video { step: step.grid, steps, frames, frames_per_second }
    }

    /// Bytes of all resized frames, which remain after processing.
    pub fn patches_bytes(&self) -> Bytes {
        self.step.patches_bytes() * self.frames as u64
    }
}

impl VideoProcessor {
    /// # Errors
    /// [`ProcessorError::OutOfRange`] for settings that were built by hand and not by
    /// `from_video_json`.
    pub fn new(config: ImageProcessorConfig) -> Result<Self, ProcessorError> {
        Ok(VideoProcessor { frames: ImageProcessor::new(config)? })
    }

    /// The same processor with bounds that apply to all frames together, and no limit per frame.
    pub(crate) fn counting_all_frames(&self) -> Self {
        VideoProcessor { frames: self.frames.counting(CountedPixels::Video { tokens_max: None }) }
    }

    pub fn config(&self) -> &ImageProcessorConfig {
        self.frames.config()
    }

    /// Number of time steps of `frames` frames.
    pub fn steps(&self, frames: usize) -> usize {
        frames.div_ceil(self.config().temporal_patch_size as usize)
    }

    /// Sizes, steps and host bytes of a video. A step has at most `step_patches_max` patches, or
    /// the processor's own limit if that is lower. Reads headers and decodes nothing.
    ///
    /// # Errors
    /// [`VideoError::FrameRate`], [`VideoError::NoFrames`], [`VideoError::Frame`],
    /// [`VideoError::FrameSize`], [`VideoError::TooFewFrames`] and [`VideoError::TooLarge`].
    pub fn plan(&self, video: &Video, limits: &ImageLimits, step_patches_max: usize) -> Result<VideoPlan, VideoError> {
        let frames_per_second = video.frames_per_second();
        let lasts = video.frames().len() as f64 / frames_per_second;
        if !(frames_per_second.is_finite() && frames_per_second > 0.0 && lasts <= SECONDS_MAX) {
            return Err(VideoError::FrameRate { frames_per_second });
        }
        let of_frame = |frame: usize| {
            let file = video.frames()[frame].file_name();
            move |source: ImageError| VideoError::Frame { frame, file, source }
        };
        let (mut first, mut costs) = (None, Vec::with_capacity(video.frames().len()));
        for (frame, bytes) in video.frames().iter().enumerate() {
            if let Some(limit) = bytes.own_limits().first() {
                let reason = "the frames of a video have one size";
                return Err(of_frame(frame)(ImageError::OwnLimitIdle { limit, reason }));
            }
            let header = bytes.probe(limits).map_err(of_frame(frame))?;
            check_size(frame, Size { width: header.width, height: header.height }, &mut first)?;
            costs.push(header.cost);
        }
        let source = first.ok_or(VideoError::NoFrames)?;
        let frames = video.frames().len();
        let patch_pixels = u64::from(self.config().patch_size).pow(2);
        let pixels_max = (step_patches_max as u64).saturating_mul(patch_pixels);
        let step = match self.config().counted {
            CountedPixels::Picture => self.frames.plan_within(source.width, source.height, pixels_max),
            CountedPixels::Video { tokens_max } => self.plan_whole(source, frames, tokens_max, pixels_max)?,
        };
        let step = step.map_err(of_frame(0))?;
        // Resizing can leave a very thin frame larger than the limit.
        if step.patches > step_patches_max {
            return Err(VideoError::TooLarge { patches: step.patches, limit: step_patches_max });
        }
        let resizing = resize_bytes(source, step.resized);
        let decoding = costs.iter().map(|cost| cost.peak_bytes().max(cost.rgb_bytes + resizing));
        let decoding_bytes = decoding.max().unwrap_or_default();
        Ok(VideoPlan { step, frames, steps: self.steps(frames), frames_per_second, decoding_bytes })
    }

    /// Plan of a step if the bounds apply to all frames together. Each frame has at most
    /// `pixels_max` pixels.
    fn plan_whole(
        &self,
        source: Size,
        frames: usize,
        tokens_max: Option<u64>,
        pixels_max: u64,
    ) -> Result<Result<ResizePlan, ImageError>, VideoError> {
        let config = self.config();
        let temporal = config.temporal_patch_size as usize;
        if frames < temporal {
            return Err(VideoError::TooFewFrames { frames, least: temporal });
        }
        let (mut bounds, group) = (config.pixel_bounds, u64::from(config.factor()).pow(2));
        if let Some(tokens) = tokens_max {
            let of_frame = tokens.saturating_mul(group).min(bounds.max / frames as u64);
            bounds.max = of_frame.max((bounds.min as f64 * 1.05) as u64).saturating_mul(frames as u64);
        }
        let length = VideoLength { frames, temporal };
        let most = pixels_max.max(group).saturating_mul(frames.min(length.rounded()) as u64);
        let bounds = bounds.within(most);
        Ok(self.frames.plan_by(source, |size, factor| smart_resize_video(size, length, factor, bounds)))
    }

    /// Decodes, resizes and hashes the frames, one at a time, and returns one picture per step.
    ///
    /// # Errors
    /// [`VideoError::Frame`] if a frame is damaged after its header; [`VideoError::FrameSize`] if
    /// the size of a frame differs from the plan.
    pub fn process(
        &self,
        video: &Video,
        plan: &VideoPlan,
        limits: &ImageLimits,
    ) -> Result<Vec<EncoderInput>, VideoError> {
        let temporal = self.config().temporal_patch_size as usize;
        let mut planned = Some(plan.step.source);
        let mut resized = |(frame, bytes): (usize, &crate::flow::EncodedImage)| {
            let failed = |source| VideoError::Frame { frame, file: bytes.file_name(), source };
            let decoded: RgbImage = bytes.decode(limits).map_err(failed)?;
            check_size(frame, Size { width: decoded.width(), height: decoded.height() }, &mut planned)?;
            Ok(self.frames.resize_to(&decoded, plan.step.resized))
        };
        let frames: Vec<_> = video.frames().iter().enumerate().collect();
        let steps = frames.chunks(temporal).map(|step| {
            let step = step.iter().copied().map(&mut resized).collect::<Result<Vec<_>, VideoError>>()?;
            Ok(self.frames.process_step(step, &plan.step))
        });
        steps.collect()
    }
}

/// Checks the size of a frame against `first`, or stores it in `first` if this frame is the first.
fn check_size(frame: usize, Size { width, height }: Size, first: &mut Option<Size>) -> Result<(), VideoError> {
    let Size { width: first_width, height: first_height } = *first.get_or_insert(Size { width, height });
    if (width, height) == (first_width, first_height) {
        return Ok(());
    }
    Err(VideoError::FrameSize { frame, width, height, first_width, first_height })
}
