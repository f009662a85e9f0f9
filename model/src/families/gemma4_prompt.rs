//! Pictures and videos in the prompts of Gemma 4. Each frame of a video is a picture preceded by its
//! time.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    MergeSize,
    blocks::{
        ConfigError,
        vision::{PlaceholderTokens, Placeholders, VideoPlace, lay_out},
    },
    flow::{LayoutError, MediaGrid, PromptLayout},
    text::PlaceholderTexts,
};

/// The tokens of pictures and videos.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PictureTokens {
    pub placeholders: PlaceholderTokens,
    /// The tokens before and after the tokens of a picture.
    delimiters: [u32; 2],
}

impl PictureTokens {
    /// Reads the ids of the tokens, which must be less than `vocabulary`.
    pub fn read(config: &Map<String, Value>, vocabulary: usize) -> Result<Self, ConfigError> {
        let token = |key: &str, default: usize| {
            let token = config.get(key).map_or(Ok(None), Option::<usize>::deserialize)?.unwrap_or(default);
            ConfigError::check_token(key, token, vocabulary).map(|()| token as u32)
        };
        let placeholders = PlaceholderTokens::read_over([258_880, 258_884], config, vocabulary)?;
        let delimiters = [token("boi_token_id", 255_999)?, token("eoi_token_id", 258_882)?];
        Ok(PictureTokens { placeholders, delimiters })
    }

    /// Encloses each picture and frame in the tokens for a picture's beginning and end, as
    /// `processing_gemma4.py` of transformers 5.17 does, and expands its placeholder.
    pub fn lay_out(
        &self,
        tokens: Vec<u32>,
        visuals: &[MediaGrid],
        merge: MergeSize,
    ) -> Result<PromptLayout, LayoutError> {
        let &PictureTokens { placeholders, delimiters: [begin, end] } = self;
        let enclosed = |token: u32| {
            let is_picture = token == placeholders.image || Some(token) == placeholders.video;
            let ends = is_picture.then_some((begin, end)).unzip();
            ends.0.into_iter().chain([token]).chain(ends.1)
        };
        let tokens: Vec<_> = tokens.into_iter().flat_map(enclosed).collect();
        let placeholders = Placeholders { tokens: placeholders, merge, video: VideoPlace::Written };
        let mut layout = lay_out(&tokens, visuals, &placeholders)?;
        layout.use_sequential_positions();
        Ok(layout)
    }
}

/// Texts that templates write for pictures and videos.
pub const PLACEHOLDERS: PlaceholderTexts = PlaceholderTexts { image: IMAGE, video: Some(VIDEO), before: "", after: "" };

/// The placeholder of a picture in a chat template's output.
pub const IMAGE: &str = "<|image|>";
/// The placeholder of a video in a chat template's output.
pub const VIDEO: &str = "<|video|>";

/// Maximum number of text tokens of a video frame for times below 100 minutes: four digits, the colon,
/// two spaces, and the two tokens around the placeholder. The additional tokens of longer
/// videos are taken from the quarter of the context that is reserved for text.
pub const STEP_TOKENS: usize = 9;

/// Replaces the placeholder of each video in `rendered` with one placeholder per frame, each after
/// its time in minutes and seconds, as `processing_gemma4.py` of transformers 5.17 does.
pub fn write_videos(rendered: &str, visuals: &[MediaGrid]) -> String {
    let mut written = String::with_capacity(rendered.len());
    let mut rest = rendered;
    for visual in visuals {
        let MediaGrid::Video { steps, frames_per_second, .. } = *visual else { continue };
        let Some((before, after)) = rest.split_once(VIDEO) else { break };
        let frame = |frame: usize| {
            let seconds = (frame as f64 / frames_per_second) as u64;
            format!("{:02}:{:02} {VIDEO}", seconds / 60, seconds % 60)
        };
        written += before;
        written += &(0..steps).map(frame).collect::<Vec<_>>().join(" ");
        rest = after;
    }
    written + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Grid;

    const FRAME: Grid = Grid { t: 1, h: 3, w: 3 };

    fn video(frames: usize, frames_per_second: f64) -> MediaGrid {
        MediaGrid::Video { step: FRAME, steps: frames, frames, frames_per_second }
    }

    #[test]
    fn each_frame_is_preceded_by_its_time_in_whole_seconds() {
        let visuals = [MediaGrid::Image(FRAME), video(3, 2.0), video(2, 1.0 / 3599.0)];
        let written = write_videos("a <|image|><|video|> b <|video|>", &visuals);
        let expected = "a <|image|>00:00 <|video|> 00:00 <|video|> 00:01 <|video|> b 00:00 <|video|> 59:59 <|video|>";
        assert_eq!(written, expected);
        assert_eq!(write_videos("", &[video(1, 1.0)]), "");
        assert!(write_videos("<|video|>", &[video(2, 1.0 / 6000.0)]).ends_with("100:00 <|video|>"));
    }
}
