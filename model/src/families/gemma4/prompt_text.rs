//! Text of videos in a prompt: each frame is a picture preceded by its time.

use crate::{flow::MediaGrid, text::PlaceholderTexts};

/// Texts that templates write for pictures and videos.
pub const PLACEHOLDERS: PlaceholderTexts =
    PlaceholderTexts { image: "<|image|>", video: Some(VIDEO), before: "", after: "" };

const VIDEO: &str = "<|video|>";

/// Maximum number of text tokens of a frame, for times below 100 minutes: one token for each of the
/// four digits, the colon, and the spaces around the time, and the two tokens around the placeholder.
/// The additional tokens of longer videos are taken from the quarter of the context that is reserved
/// for text.
pub const STEP_TOKENS: usize = 9;

/// Replaces the placeholder of each video in `rendered` with one placeholder per frame, each after
/// its time in minutes and seconds, as `processing_gemma4.py` of transformers 5.17 does.
pub fn write(rendered: &str, visuals: &[MediaGrid]) -> String {
    let mut written = String::with_capacity(rendered.len());
    let mut rest = rendered;
    for visual in visuals {
        let MediaGrid::Video { steps, frames_per_second, .. } = *visual else { continue };
        let Some((before, behind)) = rest.split_once(VIDEO) else { break };
        let frame = |frame: usize| {
            let seconds = (frame as f64 / frames_per_second) as u64;
            format!("{:02}:{:02} {VIDEO}", seconds / 60, seconds % 60)
        };
        written += before;
        written += &(0..steps).map(frame).collect::<Vec<_>>().join(" ");
        rest = behind;
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
    fn each_frame_has_its_time_in_whole_seconds_in_front() {
        let visuals = [MediaGrid::Image(FRAME), video(3, 2.0), video(2, 1.0 / 3599.0)];
        let written = write("a <|image|><|video|> b <|video|>", &visuals);
        let expected = "a <|image|>00:00 <|video|> 00:00 <|video|> 00:01 <|video|> b 00:00 <|video|> 59:59 <|video|>";
        assert_eq!(written, expected);
        assert_eq!(write("", &[video(1, 1.0)]), "");
        assert!(write("<|video|>", &[video(2, 1.0 / 6000.0)]).ends_with("100:00 <|video|>"));
    }
}
