//! A picture cut into tiles of one size.

/// How many tiles a picture has, and how they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Tiles from left to right.
    pub columns: u32,
    /// Tiles from top to bottom.
    pub rows: u32,
    /// Whether the whole picture follows as one more tile.
    pub has_thumbnail: bool,
}

impl Tiles {
    /// All tiles. The vision encoder sees each as a picture of its own: row by
    /// row, then the thumbnail.
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
