//! A picture cut into tiles of one size.

/// The number and arrangement of a picture's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Tiles from left to right.
    pub columns: u32,
    /// Tiles from top to bottom.
    pub rows: u32,
    /// Whether the whole picture, resized to one tile, follows as one more tile.
    pub has_thumbnail: bool,
}

impl Tiles {
    /// Number of tiles, including the thumbnail. The vision encoder processes each tile as a
    /// separate picture: row by row, then the thumbnail.
    pub fn count(self) -> usize {
        self.columns as usize * self.rows as usize + usize::from(self.has_thumbnail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thumbnail_counts_as_a_tile() {
        let tiles = |has_thumbnail| Tiles { columns: 3, rows: 2, has_thumbnail }.count();
        assert_eq!((tiles(false), tiles(true)), (6, 7));
    }
}
