//! Errors of pictures, videos and processor settings.

use bursar_budgets::Hint;
use thiserror::Error;

use crate::flow::{FileName, ImageError};

/// A video that was refused, before or while decoding it.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum VideoError {
    /// The checkpoint has no settings of a processor of videos.
    #[error(
        "the model's checkpoint takes no videos: it has neither video_preprocessor_config.json nor the part \
         `video_processor` of processor_config.json"
    )]
    NoProcessor,
    /// It has no frame.
    #[error("the video has no frames")]
    NoFrames,
    /// What should be an animation is another kind of file.
    #[error("it is neither an animated GIF nor an animated WebP")]
    NoAnimation,
    /// So much would have to be decoded of an animation, up to the last frame that is wanted; nothing was decoded.
    #[error("its first {frames} frames have {pixels} pixels together; the limit is {limit}")]
    TooManyPixels {
        /// Frames up to the last one that is wanted.
        frames: usize,
        /// Their pixels together.
        pixels: u64,
        /// Their limit.
        limit: u64,
    },
    /// This model's videos have a step of time at least.
    #[error("it has {frames} frames; expected at least {least}, the frames of a step")]
    TooFewFrames {
        /// Frames of the video.
        frames: usize,
        /// Frames of a step.
        least: usize,
    },
    /// Its rate is 0, negative, infinite or not a number, or so low that the video lasts for more than half a year.
    #[error(
        "the video has {frames_per_second:?} frames per second; expected a finite number above 0 and at least its \
         frames / 16777216 seconds"
    )]
    FrameRate {
        /// The rate that was given.
        frames_per_second: f64,
    },
    /// The request's videos have more frames together than the limit.
    #[error("the videos have {frames} frames together; the limit is {limit}")]
    TooManyFrames {
        /// Frames of all videos of the request.
        frames: usize,
        /// The envelope's limit.
        limit: usize,
    },
    /// A frame is broken or outside the limits of pictures.
    #[error("frame {frame}{file}: {source}")]
    Frame {
        /// The index of the frame, from 0.
        frame: usize,
        /// Its file, if it has one.
        file: FileName,
        /// What is wrong with it.
        source: ImageError,
    },
    /// A frame has another size than the first.
    #[error("frame {frame} is {width} x {height} pixels, but the first is {first_width} x {first_height}")]
    FrameSize {
        /// The index of the frame, from 0.
        frame: usize,
        /// Its pixels in a row.
        width: u32,
        /// Its rows.
        height: u32,
        /// The first frame's pixels in a row.
        first_width: u32,
        /// The first frame's rows.
        first_height: u32,
    },
    /// The request's pictures leave fewer patches for a step of the video than its smallest size takes.
    #[error("a step of the video takes {patches} patches after resizing, but only {limit} are left for it")]
    TooLarge {
        /// Patches of a step at its smallest size.
        patches: usize,
        /// Patches left for each step, shared evenly by all steps of the request's videos.
        limit: usize,
    },
}

impl Hint for VideoError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            VideoError::NoProcessor => {
                "add the release's video_preprocessor_config.json to the checkpoint and load it again, or show single \
                 frames as pictures"
                    .into()
            }
            VideoError::NoFrames => "give the video at least one frame".into(),
            VideoError::NoAnimation => "send an animated GIF or WebP, or decode the video and send its frames".into(),
            VideoError::TooManyPixels { .. } => "send a smaller or shorter animation".into(),
            VideoError::TooFewFrames { .. } => "show a single frame as a picture".into(),
            VideoError::FrameRate { .. } => "give the number of frames per second, for example 2.0".into(),
            VideoError::TooManyFrames { limit, .. } => {
                format!("pick at most {limit} frames, at a lower rate, or raise `video_frames`")
            }
            VideoError::Frame { source, .. } => source.hint(),
            VideoError::FrameSize { .. } => {
                "split the video where its size changes, or scale its frames to one size".into()
            }
            VideoError::TooLarge { .. } => {
                "send fewer frames or pictures, crop very wide or tall frames, or raise `pictures` or `picture_patches`"
                    .into()
            }
        }
    }
}

/// A request's picture or video that was refused.
#[derive(Debug, Error, PartialEq)]
pub enum MediaError {
    /// The request has more pictures than it may have.
    #[error("the chat has {pictures} pictures; the limit is {limit}")]
    TooManyPictures {
        /// Pictures of the request.
        pictures: usize,
        /// The envelope's limit.
        limit: usize,
    },
    /// The pictures have more tokens together than they may have.
    #[error("the pictures have {tokens} tokens together; the limit is {limit}")]
    PicturesTooLarge {
        /// Tokens of all pictures of the request.
        tokens: usize,
        /// Tokens of [`Envelope::largest_pictures`](crate::Envelope::largest_pictures) pictures of the largest size.
        limit: usize,
    },
    /// A picture is broken or outside the limits.
    #[error("picture {index}{file}: {source}")]
    Picture {
        /// Which picture of the request, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// What is wrong with it.
        source: ImageError,
    },
    /// A picture exceeds the envelope even after resizing, because it is very thin.
    #[error("picture {index}{file} takes {patches} patches after resizing; the limit is {limit}")]
    PictureTooLarge {
        /// Which picture of the request, from 0.
        index: usize,
        /// Its file, if it has one.
        file: FileName,
        /// Patches after resizing.
        patches: usize,
        /// The envelope's limit.
        limit: usize,
    },
    /// A video is broken or outside the limits.
    #[error("video {index}: {source}")]
    Video {
        /// Which video of the request, from 0.
        index: usize,
        /// What is wrong with it.
        source: VideoError,
    },
}

impl Hint for MediaError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            MediaError::TooManyPictures { limit, .. } => format!("send at most {limit} pictures, or raise `pictures`"),
            MediaError::PicturesTooLarge { .. } => {
                "send fewer or smaller pictures, or set `pictures` to how many of the largest size a request needs"
                    .to_owned()
            }
            MediaError::Picture { source, .. } => source.hint(),
            MediaError::PictureTooLarge { .. } => {
                "crop the picture so that it is less wide or tall, or raise `picture_patches`".into()
            }
            MediaError::Video { source, .. } => source.hint(),
        }
    }
}

/// Settings in `preprocessor_config.json` or `video_preprocessor_config.json` that cannot be followed.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ProcessorError {
    /// The file is not the JSON that is expected.
    #[error("the processor's settings are not valid at line {line}, column {column}")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// The processor is another model family's.
    #[error("the processor {found} is not supported; expected one of {known}")]
    UnknownProcessor {
        /// The type in the file.
        found: String,
        /// The types that are implemented.
        known: String,
    },
    /// The resampling filter is not implemented.
    #[error("`resample` is {resample}; expected 2 (bilinear) or 3 (bicubic)")]
    UnknownResample {
        /// PIL's number of the filter.
        resample: i64,
    },
    /// A setting is outside its range.
    #[error("`{setting}` is {value}; expected {range}")]
    OutOfRange {
        /// The setting's name in the file.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The values that are allowed.
        range: &'static str,
    },
}

impl Hint for ProcessorError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ProcessorError::Malformed { .. } => {
                "download preprocessor_config.json (and video_preprocessor_config.json) again".into()
            }
            ProcessorError::UnknownProcessor { known, .. } => {
                format!("load a checkpoint whose processor is {known}; this checkpoint's family is not supported")
            }
            ProcessorError::UnknownResample { .. } => {
                "set `resample` to 3 if the model was trained with bicubic".into()
            }
            ProcessorError::OutOfRange { setting, range, .. } => {
                format!("correct `{setting}` in preprocessor_config.json: {range}")
            }
        }
    }
}
