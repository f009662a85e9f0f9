//! A prompt as the decoder takes it: tokens, their positions, and where pictures and videos stand.

use std::ops::Range;

use thiserror::Error;

use super::POSITION_AXES;

/// Tokens with their positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptLayout {
    /// One entry a token; a picture has one placeholder an embedding.
    pub tokens: Vec<u32>,
    /// Time, height, width of each token.
    pub positions: Vec<[u32; POSITION_AXES]>,
    /// The placeholders of each picture and of each step of a video, in order.
    pub pictures: Vec<PictureSpan>,
    /// The position of the first token of the answer, on all axes.
    pub next_position: u32,
}

/// The placeholders of one picture, or of one step of a video.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PictureSpan {
    /// Which of the pictures that the vision encoder is asked for: a request's visuals in order, a video as many as it has
    /// steps.
    pub picture: usize,
    /// Which tokens.
    pub tokens: Range<usize>,
}

/// Placeholders that do not match the pictures and videos.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// A placeholder is left without a picture.
    #[error("the prompt has more picture placeholders than its {pictures} pictures")]
    MorePlaceholders {
        /// Pictures of the request.
        pictures: usize,
    },
    /// A picture is left without a placeholder.
    #[error("the prompt has {placeholders} placeholders for {pictures} pictures")]
    FewerPlaceholders {
        /// Placeholders in the rendered prompt.
        placeholders: usize,
        /// Pictures of the request.
        pictures: usize,
    },
    /// The same with videos.
    #[error("the prompt has {placeholders} placeholders for videos, the request has {videos} videos")]
    VideoPlaceholders {
        /// Placeholders in the rendered prompt.
        placeholders: usize,
        /// Videos of the request.
        videos: usize,
    },
    /// The model reads text only.
    #[error("this model takes no pictures or videos, the request has {pictures}")]
    TextOnly {
        /// Pictures and videos of the request.
        pictures: usize,
    },
    /// The model takes pictures, but its configuration names no token for videos.
    #[error("this model takes no videos, the request has {videos}")]
    NoVideos {
        /// Videos of the request.
        videos: usize,
    },
}
