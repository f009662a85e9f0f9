//! Errors of pictures, videos and processor settings.

use bursar_budgets::Hint;
use thiserror::Error;

use crate::flow::{FileName, ImageError};

/// A video that was refused before or during decoding.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum VideoError {
    /// The model takes no videos, or its checkpoint has no settings for a video processor.
    #[error(
        "the model takes no videos, or its checkpoint lacks the settings: video_preprocessor_config.json, or the part \
         `video_processor` of processor_config.json"
    )]
    NoProcessor,
    #[error("the video has no frames")]
    NoFrames,
    /// A file that was passed as an animation has another format.
    #[error("the video is neither an animated GIF nor an animated WebP")]
    NoAnimation,
    /// Decoding the animation up to the last wanted frame would exceed the pixel
    /// limit. Nothing was decoded.
    #[error("the first {frames} frames have {pixels} pixels together; the limit is {limit}")]
    TooManyPixels {
        /// Number of frames up to the last wanted frame.
        frames: usize,
        /// Pixels of these frames together.
        pixels: u64,
        limit: u64,
    },
    /// The video has fewer frames than one time step of this model.
    #[error("the video has {frames} frames; expected at least {least}, the number of frames per time step")]
    TooFewFrames {
        frames: usize,
        /// Frames per time step.
        least: usize,
    },
    /// The frame rate is 0, negative, infinite or not a number, or so low that the video lasts more
    /// than half a year.
    #[error(
        "the video has {frames_per_second:?} frames per second; expected a finite number above 0 and at least its \
         frames / 16777216 seconds"
    )]
    FrameRate { frames_per_second: f64 },
    /// The videos of the request have more frames together than the limit.
    #[error("the videos have {frames} frames together; the limit is {limit}")]
    TooManyFrames {
        /// Frames of all videos of the request.
        frames: usize,
        limit: usize,
    },
    /// A frame is broken or outside the picture limits.
    #[error("frame {frame}{file}: {source}")]
    Frame {
        /// Index of the frame, from 0.
        frame: usize,
        /// File name of the frame, if there is one.
        file: FileName,
        source: ImageError,
    },
    /// A frame differs in size from the first frame.
    #[error("frame {frame} is {width} x {height} pixels, but the first is {first_width} x {first_height}")]
    FrameSize {
        /// Index of the frame, from 0.
        frame: usize,
        /// Width of the frame in pixels.
        width: u32,
        /// Height of the frame in pixels.
        height: u32,
        /// Width of the first frame in pixels.
        first_width: u32,
        /// Height of the first frame in pixels.
        first_height: u32,
    },
    /// A time step needs more patches, even at its smallest size, than the envelope and the
    /// request's pictures leave for each step.
    #[error("a step of the video takes {patches} patches after resizing, but only {limit} are left for it")]
    TooLarge {
        /// Patches of a step at its smallest size.
        patches: usize,
        /// Patches left for each step. All steps of the request's videos get the same number.
        limit: usize,
    },
}

impl Hint for VideoError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            VideoError::NoProcessor => {
                "if the model's release has a video_preprocessor_config.json, add it to the checkpoint and load it \
                 again; otherwise show single frames as pictures"
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

/// A picture or video of a request that was refused.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum MediaError {
    /// The request has more pictures than the limit.
    #[error("the chat has {pictures} pictures; the limit is {limit}")]
    TooManyPictures { pictures: usize, limit: usize },
    /// The pictures have more tokens together than the limit.
    #[error("the pictures have {tokens} tokens together; the limit is {limit}")]
    PicturesTooLarge {
        /// Tokens of all pictures of the request.
        tokens: usize,
        /// Tokens of [`Envelope::largest_pictures`](crate::Envelope::largest_pictures) pictures
        /// of the largest size.
        limit: usize,
    },
    /// A picture is broken or outside the limits.
    #[error("picture {index}{file}: {source}")]
    Picture {
        /// Index of the picture in the request, from 0.
        index: usize,
        /// File name of the picture, if there is one.
        file: FileName,
        source: ImageError,
    },
    /// A picture exceeds the envelope even after resizing, because it is very thin.
    #[error("picture {index}{file} takes {patches} patches after resizing; the limit is {limit}")]
    PictureTooLarge {
        /// Index of the picture in the request, from 0.
        index: usize,
        /// File name of the picture, if there is one.
        file: FileName,
        patches: usize,
        limit: usize,
    },
    /// A video is broken or outside the limits.
    #[error("video {index}: {source}")]
    Video {
        /// Index of the video in the request, from 0.
        index: usize,
        source: VideoError,
    },
}

impl Hint for MediaError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            MediaError::TooManyPictures { limit, .. } => format!("send at most {limit} pictures, or raise `pictures`"),
            MediaError::PicturesTooLarge { .. } => {
                "send fewer or smaller pictures, or set `pictures` to the number of pictures of the largest size that \
                 a request needs"
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

/// Settings of the picture or video processor that are invalid or not supported.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ProcessorError {
    /// The file does not have the expected JSON.
    #[error("the processor's settings are not valid at line {line}, column {column}")]
    Malformed {
        /// Line, counted from 1.
        line: usize,
        /// Column, counted from 1.
        column: usize,
    },
    /// The processor belongs to a model family that is not supported.
    #[error("the processor {found} is not supported; expected one of {known}")]
    UnknownProcessor {
        /// The processor type in the file.
        found: String,
        /// The implemented types, separated by commas.
        known: String,
    },
    #[error("`resample` is {resample}; expected 2 (bilinear) or 3 (bicubic)")]
    UnknownResample {
        /// PIL's number of the filter.
        resample: i64,
    },
    #[error("`{setting}` is {value}; expected {range}")]
    OutOfRange {
        /// Name of the setting in the file.
        setting: &'static str,
        value: String,
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
                "set `resample` to 3 if the model was trained with bicubic resampling".into()
            }
            ProcessorError::OutOfRange { setting, range, .. } => {
                format!("correct `{setting}` in preprocessor_config.json: {range}")
            }
        }
    }
}
