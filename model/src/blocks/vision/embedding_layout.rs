//! The layout of a row of the vision cache. Each row is the encoder's output for one merged patch.

use std::ops::Range;

/// The columns of a row of the vision cache. The first columns are the embedding, which replaces
/// the embedding of the placeholder token. The parts follow: part `k` is added to the token's
/// hidden state after layer `k` of the decoder (DeepStack, Meng et al. 2024, arXiv 2406.04334).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingLayout {
    /// Width of the decoder, and therefore of the embedding and of each part.
    pub hidden: usize,
    /// Number of parts after the embedding. Part `k` is added after layer `k`.
    pub parts: usize,
}

impl EmbeddingLayout {
    /// The layout for a family whose tower produces only embeddings.
    pub const fn plain(hidden: usize) -> Self {
        EmbeddingLayout { hidden, parts: 0 }
    }

    /// The layout of a row of `width` columns for a decoder of width `hidden`.
    ///
    /// # Panics
    /// If `width` is not a positive multiple of `hidden`, which would be a bug in Bursar.
    pub fn of_width(width: usize, hidden: usize) -> Self {
        assert!(
            width >= hidden && width.is_multiple_of(hidden),
            "a row has {width} columns; expected a positive multiple of {hidden}"
        );
        EmbeddingLayout { hidden, parts: width / hidden - 1 }
    }

    /// Columns of the row.
    pub const fn width(self) -> usize {
        (1 + self.parts) * self.hidden
    }

    /// The columns of the embedding.
    pub const fn embedding(self) -> Range<usize> {
        0..self.hidden
    }

    /// The columns of part `part`.
    pub const fn part(self, part: usize) -> Range<usize> {
        (1 + part) * self.hidden..(2 + part) * self.hidden
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedding_and_the_parts_share_a_row_without_a_gap() {
        let row = EmbeddingLayout { hidden: 5, parts: 3 };
        assert_eq!((row.embedding(), row.part(0), row.part(2), row.width()), (0..5, 5..10, 15..20, 20));
        assert_eq!(EmbeddingLayout::of_width(20, 5), row);
        assert_eq!(EmbeddingLayout::of_width(5, 5), EmbeddingLayout::plain(5));
    }
}
