//! Text of pictures and videos in a prompt: each picture is enclosed in two tokens, and each frame
//! of a video is a picture preceded by its number.

use crate::{flow::MediaGrid, text::PlaceholderTexts};

/// Placeholder of a picture, which is repeated for each of its embeddings.
pub const IMAGE: &str = "<IMG_CONTEXT>";
/// Placeholder of a video. Only the vocabularies of transformers' conversions have it.
const VIDEO: &str = "<video>";
const START: &str = "<img>";
const END: &str = "</img>";

/// Texts that templates write for pictures and videos.
pub const PLACEHOLDERS: PlaceholderTexts =
    PlaceholderTexts { image: IMAGE, video: Some(VIDEO), before: "", after: "\n" };

/// Maximum number of text tokens of a frame, for frame numbers up to 999. The text of `Frame999: `
/// has a token for each of the three digits, the word, the colon and the space. A new line and the
/// two tokens around the placeholder are added.
pub const STEP_TOKENS: usize = 9;

/// Writes each picture and video in place of its placeholder in `rendered`, as
/// `processing_internvl.py` of transformers 5.17 does. Returns `rendered` unchanged if the
/// placeholders and `visuals` differ in number or order. Laying out the prompt then fails.
pub fn write(rendered: String, visuals: &[MediaGrid]) -> String {
    write_all(&rendered, visuals).unwrap_or(rendered)
}

fn write_all(rendered: &str, visuals: &[MediaGrid]) -> Option<String> {
    let mut written = String::with_capacity(rendered.len());
    let mut rest = rendered;
    for visual in visuals {
        let (at, placeholder) = [IMAGE, VIDEO].into_iter().filter_map(|text| Some((rest.find(text)?, text))).min()?;
        let (expected, text) = match visual {
            MediaGrid::Video { steps, .. } => (VIDEO, frames(*steps)),
            MediaGrid::Image(_) | MediaGrid::Tiles { .. } => (IMAGE, picture()),
        };
        if placeholder != expected {
            return None;
        }
        written += &rest[..at];
        written += &text;
        rest = &rest[at + placeholder.len()..];
    }
    Some(written + rest)
}

fn picture() -> String {
    format!("{START}{IMAGE}{END}")
}

fn frames(count: usize) -> String {
    let frames: Vec<_> = (1..=count).map(|number| format!("Frame{number}: {}", picture())).collect();
    frames.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{Grid, Tiles};

    const TILE: Grid = Grid { t: 1, h: 2, w: 2 };
    const PICTURE: MediaGrid =
        MediaGrid::Tiles { tile: TILE, tiles: Tiles { columns: 1, rows: 1, has_thumbnail: false } };
    const VIDEO: MediaGrid = MediaGrid::Video { step: TILE, steps: 2, frames: 2, frames_per_second: 1.0 };

    #[test]
    fn pictures_get_their_tokens_and_frames_are_numbered() {
        let written = write("a <IMG_CONTEXT>\n<video>\nb".to_owned(), &[PICTURE, VIDEO]);
        let expected = "a <img><IMG_CONTEXT></img>\nFrame1: <img><IMG_CONTEXT></img>\n\
                        Frame2: <img><IMG_CONTEXT></img>\nb";
        assert_eq!(written, expected);
        assert_eq!(write("nothing".to_owned(), &[]), "nothing");
    }

    #[test]
    fn a_prompt_whose_placeholders_do_not_match_is_unchanged() {
        for (rendered, visuals) in [
            ("<IMG_CONTEXT>", &[PICTURE, PICTURE][..]),
            ("<video><IMG_CONTEXT>", &[PICTURE, VIDEO]),
            ("<IMG_CONTEXT>", &[VIDEO]),
        ] {
            assert_eq!(write(rendered.to_owned(), visuals), rendered);
        }
    }
}
