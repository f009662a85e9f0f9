//! Patches: a picture as the vision encoder reads it, with the grid they were cut on and the hash they are cached by.

use std::fmt;

/// Patches along time, height and width; a still picture has one step of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid {
    /// Steps of time.
    pub t: u32,
    /// Patches from top to bottom.
    pub h: u32,
    /// Patches from left to right.
    pub w: u32,
}

impl Grid {
    /// All patches.
    pub fn patches(&self) -> usize {
        self.t as usize * self.h as usize * self.w as usize
    }

    /// Tokens in the prompt: `merge_size x merge_size` patches make one.
    pub fn tokens(&self, merge_size: u32) -> usize {
        self.patches() / (merge_size as usize * merge_size as usize)
    }
}

/// One picture's pixel values, ready for the encoder.
#[derive(Clone, PartialEq)]
pub struct Patches {
    /// `[patches, channels * temporal * patch * patch]` f32, normalised. Rows run over merge groups, then inside them.
    pub pixels: Vec<f32>,
    /// The grid that the rows come from.
    pub grid: Grid,
}

impl Patches {
    /// Values in a row.
    pub fn row_values(&self) -> usize {
        self.pixels.len() / self.grid.patches().max(1)
    }
}

impl fmt::Debug for Patches {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Patches").field("grid", &self.grid).field("values", &self.pixels.len()).finish()
    }
}

/// BLAKE3 over everything that decides a picture's patches: the resized pixels, the grid and the processor's settings.
///
/// Equal hashes mean equal encoder input, so embeddings and prompt prefixes are shared by it. It is cryptographic
/// (256 bits) because a collision that someone can construct would show them the answer about another user's picture.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PictureHash(pub [u8; 32]);

impl fmt::Debug for PictureHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(formatter, "PictureHash({a:02x}{b:02x}{c:02x}{d:02x}..)")
    }
}
