//! Prompt layout of models with one-dimensional positions: text tokens and picture tokens are
//! numbered consecutively.

use crate::{
    MergeSize,
    flow::{Grid, LayoutError, MediaGrid, PlaceholderSpan, PromptLayout},
};

/// Expands each `placeholder` of `tokens` to one token per embedding. The placeholders represent,
/// in order, the pictures (each with all its tiles) and the steps of the videos. A token's position
/// is its index, the same on all axes.
pub fn lay_out_in_line(
    tokens: &[u32],
    visuals: &[MediaGrid],
    placeholder: u32,
    merge: MergeSize,
) -> Result<PromptLayout, LayoutError> {
    lay_out_places(tokens, &visuals.iter().flat_map(places).collect::<Vec<_>>(), placeholder, merge)
}

/// Like [`lay_out_in_line`], with a placeholder for each tile of a picture.
pub fn lay_out_each_tile(
    tokens: &[u32],
    visuals: &[MediaGrid],
    placeholder: u32,
    merge: MergeSize,
) -> Result<PromptLayout, LayoutError> {
    let tiles = visuals.iter().flat_map(|visual| std::iter::repeat_n((visual.each(), 1), visual.pictures()));
    lay_out_places(tokens, &tiles.collect::<Vec<_>>(), placeholder, merge)
}

/// Expands each `placeholder` of `tokens`. Each of `places` has the grid and the number of the
/// pictures that replace its placeholder.
fn lay_out_places(
    tokens: &[u32],
    places: &[(Grid, usize)],
    placeholder: u32,
    merge: MergeSize,
) -> Result<PromptLayout, LayoutError> {
    let mut layout = PromptLayout::default();
    let (mut left, mut picture) = (places.iter(), 0);
    for token in tokens {
        if *token != placeholder {
            layout.tokens.push(*token);
            continue;
        }
        let (grid, pictures) = left.next().ok_or(LayoutError::MorePlaceholders { pictures: places.len() })?;
        for _ in 0..*pictures {
            let first = layout.tokens.len();
            layout.tokens.resize(first + grid.tokens(merge), placeholder);
            layout.pictures.push(PlaceholderSpan { picture, tokens: first..layout.tokens.len() });
            picture += 1;
        }
    }
    if left.len() > 0 {
        let placeholders = places.len() - left.len();
        return Err(LayoutError::FewerPlaceholders { placeholders, pictures: places.len() });
    }
    layout.use_sequential_positions();
    Ok(layout)
}

impl PromptLayout {
    /// Sets each token's position to its index on all axes.
    pub(crate) fn use_sequential_positions(&mut self) {
        self.positions = (0..self.tokens.len() as u32).map(|position| [position; 3]).collect();
        self.next_position = self.tokens.len() as u32;
    }
}

/// For each placeholder of a picture or video: a grid, and the number of pictures of that grid.
fn places(visual: &MediaGrid) -> impl Iterator<Item = (Grid, usize)> + use<> {
    let (places, pictures) = match visual {
        MediaGrid::Image(_) | MediaGrid::Tiles { .. } => (1, visual.pictures()),
        MediaGrid::Video { steps, .. } => (*steps, 1),
    };
    std::iter::repeat_n((visual.each(), pictures), places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Tiles;

    const PLACE: u32 = 99;
    const TILE: Grid = Grid { t: 1, h: 2, w: 4 }; // two tokens

    fn laid(tokens: &[u32], visuals: &[MediaGrid]) -> Result<PromptLayout, LayoutError> {
        lay_out_in_line(tokens, visuals, PLACE, MergeSize::new(2))
    }

    fn tiled(columns: u32) -> MediaGrid {
        MediaGrid::Tiles { tile: TILE, tiles: Tiles { columns, rows: 1, has_thumbnail: columns > 1 } }
    }

    #[test]
    fn tiles_follow_each_other_under_one_placeholder_and_every_token_counts_one() {
        let layout = laid(&[1, PLACE, 2, PLACE], &[tiled(2), tiled(1)]).expect("two pictures");
        assert_eq!(layout.tokens, [1, 99, 99, 99, 99, 99, 99, 2, 99, 99]);
        let spans = [1..3, 3..5, 5..7, 8..10].into_iter().enumerate();
        assert!(layout.pictures.iter().cloned().eq(spans.map(|(picture, tokens)| PlaceholderSpan { picture, tokens })));
        assert!(layout.positions.iter().enumerate().all(|(at, axes)| *axes == [at as u32; 3]));
        assert_eq!(layout.next_position, 10);
    }

    #[test]
    fn each_tile_may_have_a_placeholder() {
        let lay_out = |tokens: &[u32]| lay_out_each_tile(tokens, &[tiled(2)], PLACE, MergeSize::new(2));
        let layout = lay_out(&[PLACE, 1, PLACE, 2, PLACE]).expect("two tiles and a thumbnail");
        assert_eq!(layout.tokens, [99, 99, 1, 99, 99, 2, 99, 99]);
        assert_eq!(layout.pictures[2], PlaceholderSpan { picture: 2, tokens: 6..8 });
        assert_eq!(lay_out(&[PLACE]), Err(LayoutError::FewerPlaceholders { placeholders: 1, pictures: 3 }));
    }

    #[test]
    fn each_step_of_a_video_has_a_placeholder() {
        let video = MediaGrid::Video { step: TILE, steps: 2, frames: 2, frames_per_second: 1.0 };
        let layout = laid(&[PLACE, 7, PLACE, PLACE], &[video, tiled(1)]).expect("three places");
        assert_eq!(layout.tokens, [99, 99, 7, 99, 99, 99, 99]);
        assert_eq!(laid(&[PLACE], &[video]), Err(LayoutError::FewerPlaceholders { placeholders: 1, pictures: 2 }));
        assert_eq!(laid(&[PLACE; 3], &[video]), Err(LayoutError::MorePlaceholders { pictures: 2 }));
    }
}
