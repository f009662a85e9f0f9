//! A prompt as the decoder takes it: tokens, their positions, and where pictures stand.

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
    /// The placeholders of each picture, in order.
    pub pictures: Vec<PictureSpan>,
    /// The position of the first token of the answer, on all axes.
    pub next_position: u32,
}

/// The placeholders of one picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PictureSpan {
    /// Which of the request's pictures.
    pub picture: usize,
    /// Which tokens.
    pub tokens: Range<usize>,
}

/// Placeholders and pictures that do not match.
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
    /// The model reads text only.
    #[error("this model takes no pictures, the request has {pictures}")]
    TextOnly {
        /// Pictures of the request.
        pictures: usize,
    },
}
