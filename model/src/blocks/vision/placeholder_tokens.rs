//! The placeholder tokens of a `config.json`.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::blocks::ConfigError;

/// The placeholder tokens of pictures and videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceholderTokens {
    /// The placeholder of one merged patch of a picture.
    pub image: u32,
    /// The placeholder of one merged patch of a video step; `None` if the checkpoint
    /// has no such token.
    pub video: Option<u32>,
}

impl PlaceholderTokens {
    /// Default ids of pictures and videos in Qwen's configuration classes before Qwen3.5.
    pub const DEFAULTS: [u32; 2] = [151_655, 151_656];

    /// Reads `image_token_id` and `video_token_id`. Both must be less than `vocabulary`.
    pub fn read(config: &Map<String, Value>, vocabulary: usize) -> Result<Self, ConfigError> {
        PlaceholderTokens::read_over(Self::DEFAULTS, config, vocabulary)
    }

    /// Like [`read`](Self::read), with other default ids of pictures and videos.
    pub fn read_over(
        [image_default, video_default]: [u32; 2],
        config: &Map<String, Value>,
        vocabulary: usize,
    ) -> Result<Self, ConfigError> {
        let token = |field: &str| config.get(field).map_or(Ok(None), Option::<u32>::deserialize);
        let image = token("image_token_id")?.unwrap_or(image_default);
        let default = Some(video_default).filter(|token| (*token as usize) < vocabulary);
        let video = token("video_token_id")?.or(default);
        for (field, token) in [("image_token_id", Some(image)), ("video_token_id", video)] {
            token.map_or(Ok(()), |token| ConfigError::check_token(field, token as usize, vocabulary))?;
        }
        if video == Some(image) {
            let text = format!("image_token_id and video_token_id are both {image}");
            return Err(ConfigError::Contradiction(text));
        }
        Ok(PlaceholderTokens { image, video })
    }
}
