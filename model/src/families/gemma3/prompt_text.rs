//! Text of pictures in a prompt: each picture is written between two tokens, with two line breaks
//! on both sides. Crops of a picture (pan and scan) follow it, with text that explains them.

use crate::{flow::MediaGrid, text::PlaceholderTexts};

/// Placeholder of a picture, which is repeated for each of its embeddings.
pub const IMAGE: &str = "<image_soft_token>";
/// The token before the embeddings of a picture. Templates write this token for the picture.
pub const START: &str = "<start_of_image>";
pub const END: &str = "<end_of_image>";

/// Texts that templates write for pictures.
pub const PLACEHOLDERS: PlaceholderTexts = PlaceholderTexts { image: START, video: None, before: "", after: "" };

/// Writes each picture in place of its placeholder in `rendered`, as `processing_gemma3.py` of
/// transformers 5.17 does. Returns `rendered` unchanged if it has more or fewer placeholders than
/// pictures. Laying out the prompt then fails.
pub fn write(rendered: String, visuals: &[MediaGrid]) -> String {
    let parts: Vec<_> = rendered.split(START).collect();
    if parts.len() != visuals.len() + 1 {
        return rendered;
    }
    let pictures = visuals.iter().map(|visual| of_pictures(visual.pictures())).chain([String::new()]);
    parts.iter().zip(pictures).flat_map(|(text, picture)| [(*text).to_owned(), picture]).collect()
}

/// The text of a picture that the encoder processes as `count` pictures: the whole picture and its
/// crops.
fn of_pictures(count: usize) -> String {
    let picture = format!("\n\n{START}{IMAGE}{END}\n\n");
    if count == 1 {
        return picture;
    }
    let crops = vec![picture.as_str(); count - 1].join(" ");
    format!("Here is the original image {picture} and here are some crops to help you see better {crops}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{Grid, Tiles};

    const fn tiled(columns: u32) -> MediaGrid {
        let tiles = Tiles { columns, rows: 1, has_thumbnail: columns > 1 };
        MediaGrid::Tiles { tile: Grid { t: 1, h: 2, w: 2 }, tiles }
    }

    const ONE: &str = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n";

    #[test]
    fn a_picture_is_enclosed_and_crops_follow_it() {
        let written = write("a <start_of_image>b<start_of_image>".to_owned(), &[tiled(1), tiled(2)]);
        let crops = "Here is the original image {} and here are some crops to help you see better {} {}";
        assert_eq!(written, format!("a {ONE}b{}", crops.replace("{}", ONE)));
        assert_eq!(write("nothing".to_owned(), &[]), "nothing");
    }

    #[test]
    fn a_prompt_without_a_placeholder_for_each_picture_is_unchanged() {
        for (rendered, visuals) in [("a<start_of_image>", &[tiled(1), tiled(1)][..]), ("b<start_of_image>", &[])] {
            assert_eq!(write(rendered.to_owned(), visuals), rendered);
        }
    }
}
