//! Text of videos in a prompt: each time step is a separate picture, preceded by its time.

use crate::flow::MediaGrid;

const VIDEO: &str = "<|video_pad|>";
const START: &str = "<|vision_start|>";
const END: &str = "<|vision_end|>";

/// Maximum number of text tokens of a step, for times up to `<99999.9 seconds>` (about a day).
/// There is one token for each of the six digits and three signs, one for the word, and the two
/// tokens around the placeholder. The additional tokens of longer videos are taken from the quarter
/// of the context that is reserved for text.
pub const STEP_TOKENS: usize = 12;

/// Replaces the placeholder of each video in `rendered`, and the two tokens around it if both are
/// there, with the steps of the video. A step has `temporal` frames.
///
/// The model was released with this prompt (transformers 4.57, `processing_qwen3_vl.py`, by the
/// model's authors), and vLLM produces the same prompt. transformers 5.17 additionally keeps the
/// two tokens around all steps.
pub fn write(rendered: &str, visuals: &[MediaGrid], temporal: usize) -> String {
    let mut written = String::with_capacity(rendered.len());
    let mut rest = rendered;
    for visual in visuals {
        let MediaGrid::Video { steps, frames, frames_per_second, .. } = *visual else { continue };
        let Some(at) = rest.find(VIDEO) else { break };
        let (before, behind) = (&rest[..at], &rest[at + VIDEO.len()..]);
        let (before, behind) = match (before.strip_suffix(START), behind.strip_prefix(END)) {
            (Some(before), Some(behind)) => (before, behind),
            _ => (before, behind),
        };
        written += before;
        for step in 0..steps {
            let seconds = seconds(step, temporal, frames, frames_per_second);
            written += &format!("<{seconds:.1} seconds>{START}{VIDEO}{END}");
        }
        rest = behind;
    }
    written + rest
}

/// Time of a step: the mean of the times of its first and last frame. A step that lacks frames
/// repeats the last frame of the video.
fn seconds(step: usize, temporal: usize, frames: usize, frames_per_second: f64) -> f64 {
    let time = |frame: usize| frame.min(frames.saturating_sub(1)) as f64 / frames_per_second;
    (time(step * temporal) + time(step * temporal + temporal - 1)) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Grid;

    fn video(frames: usize, frames_per_second: f64) -> MediaGrid {
        let step = Grid { t: 1, h: 2, w: 2 };
        MediaGrid::Video { step, steps: frames.div_ceil(2), frames, frames_per_second }
    }

    #[test]
    fn each_step_has_its_time_in_front_and_its_own_pair_of_tokens() {
        let rendered = "a <|vision_start|><|video_pad|><|vision_end|> b";
        let picture = MediaGrid::Image(Grid { t: 1, h: 2, w: 2 });
        // 0.25 and 0.75 lie halfway between two tenths and round to the even digit, as in Python.
        // The last frame is repeated.
        let expected = "a <0.2 seconds><|vision_start|><|video_pad|><|vision_end|>\
                        <1.0 seconds><|vision_start|><|video_pad|><|vision_end|> b";
        assert_eq!(write(rendered, &[picture, video(3, 2.0)], 2), expected);
        assert!(write(rendered, &[video(4, 1.0)], 2).contains("<0.5 seconds>"));
        assert!(
            write(rendered, &[video(4, 10.0 / 3.0)], 2).contains("<0.8 seconds>"),
            "0.75 rounds to the even digit, 0.8"
        );
    }

    #[test]
    fn videos_are_written_in_order_and_a_placeholder_without_its_pair_alone() {
        let rendered = "<|video_pad|>x<|vision_start|><|video_pad|><|vision_end|><|video_pad|>";
        let written = write(rendered, &[video(2, 1.0), video(2, 2.0)], 2);
        let step = |seconds: &str| format!("<{seconds} seconds><|vision_start|><|video_pad|><|vision_end|>");
        // The third placeholder has no video, so `lay_out` refuses it.
        assert_eq!(written, format!("{}x{}<|video_pad|>", step("0.5"), step("0.2")));
        assert_eq!(write("nothing to see", &[video(2, 1.0)], 2), "nothing to see");
    }
}
