//! Where pictures stand in a prompt: one placeholder token a merged patch, and positions in three axes.

use crate::flow::{Grid, LayoutError, PictureSpan, PromptLayout};

/// Lets each single image token of `tokens` grow to as many as its picture has embeddings, and gives every token its
/// position: text moves along all axes at once; a picture spans rows and columns, and text goes on after its largest
/// position (arXiv 2409.12191, section 2.1).
pub fn lay_out(tokens: &[u32], grids: &[Grid], image_token: u32, merge: usize) -> Result<PromptLayout, LayoutError> {
    let mut layout = PromptLayout::default();
    let mut next = 0u32;
    let mut pictures = grids.iter();
    for token in tokens {
        if *token != image_token {
            layout.tokens.push(*token);
            layout.positions.push([next; 3]);
            next += 1;
            continue;
        }
        let picture = layout.pictures.len();
        let grid = pictures.next().ok_or(LayoutError::MorePlaceholders { pictures: grids.len() })?;
        let (rows, columns) = (grid.h as usize / merge, grid.w as usize / merge);
        let first = layout.tokens.len();
        for place in 0..grid.t as usize * rows * columns {
            let (frame, row, column) = (place / (rows * columns), place / columns % rows, place % columns);
            layout.tokens.push(image_token);
            layout.positions.push([frame, row, column].map(|offset| next + offset as u32));
        }
        layout.pictures.push(PictureSpan { picture, tokens: first..layout.tokens.len() });
        next += grid.t.max(rows as u32).max(columns as u32);
    }
    if layout.pictures.len() != grids.len() {
        return Err(LayoutError::FewerPlaceholders { placeholders: layout.pictures.len(), pictures: grids.len() });
    }
    layout.next_position = next;
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: u32 = 99;

    #[test]
    fn text_goes_on_after_the_largest_position_of_a_picture() {
        let grid = Grid { t: 1, h: 4, w: 6 }; // 2 x 3 embeddings
        let layout = lay_out(&[1, IMAGE, 2], &[grid], IMAGE, 2).unwrap();
        assert_eq!(layout.tokens, [1, 99, 99, 99, 99, 99, 99, 2]);
        assert_eq!(layout.pictures, [PictureSpan { picture: 0, tokens: 1..7 }]);
        assert_eq!(layout.positions[1..7], [[1, 1, 1], [1, 1, 2], [1, 1, 3], [1, 2, 1], [1, 2, 2], [1, 2, 3]]);
        assert_eq!((layout.positions[7], layout.next_position), ([4, 4, 4], 5));
    }

    #[test]
    fn placeholders_and_pictures_must_match() {
        let grid = Grid { t: 1, h: 2, w: 2 };
        assert!(matches!(
            lay_out(&[IMAGE, IMAGE], &[grid], IMAGE, 2),
            Err(LayoutError::MorePlaceholders { pictures: 1 })
        ));
        assert!(matches!(
            lay_out(&[1], &[grid], IMAGE, 2),
            Err(LayoutError::FewerPlaceholders { placeholders: 0, pictures: 1 })
        ));
    }
}
