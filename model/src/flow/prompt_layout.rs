//! A prompt as input of the decoder: tokens, their positions, and the spans of pictures and videos.

use std::ops::Range;

use thiserror::Error;

use super::POSITION_AXES;

/// Tokens with their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptLayout {
    /// `[tokens]`. A picture has one placeholder per embedding.
    pub tokens: Vec<u32>,
    /// `[tokens]`: time, height and width.
    pub positions: Vec<[u32; POSITION_AXES]>,
    /// The placeholders of each picture and of each step of a video, in order.
    pub pictures: Vec<PlaceholderSpan>,
    /// The position of the reply's first token, the same on all axes.
    pub next_position: u32,
}

/// The placeholders of one picture, or of one step of a video.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceholderSpan {
    /// Index among the pictures that the vision encoder processes: the request's pictures and
    /// videos in order, where a video counts once per step.
    pub picture: usize,
    /// Range in [`PromptLayout::tokens`].
    pub tokens: Range<usize>,
}

/// Placeholders that do not match the pictures and videos.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A placeholder has no picture.
    #[error("the prompt has more picture placeholders than its {pictures} pictures")]
    MorePlaceholders { pictures: usize },
    /// A picture has no placeholder.
    #[error("the prompt has {placeholders} placeholders for {pictures} pictures")]
    FewerPlaceholders { placeholders: usize, pictures: usize },
    /// The number of video placeholders differs from the number of videos.
    #[error("the prompt has {placeholders} placeholders for videos, but the request has {videos} videos")]
    VideoPlaceholders { placeholders: usize, videos: usize },
    /// The number of video placeholders differs from the number of steps of all videos, in a model
    /// family where each step has its own placeholder.
    #[error(
        "the prompt has {placeholders} placeholders for steps of videos, but the request's videos have {steps} steps"
    )]
    StepPlaceholders {
        placeholders: usize,
        /// Time steps of all videos together.
        steps: usize,
    },
    /// The model reads text only.
    #[error("this model takes no pictures or videos, but the request has {pictures}")]
    TextOnly {
        /// Pictures and videos of the request.
        pictures: usize,
    },
    /// The model takes pictures, but its configuration has no placeholder token for videos.
    #[error("this model takes no videos, but the request has {videos}")]
    NoVideos { videos: usize },
}
