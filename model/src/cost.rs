//! What a request takes of everything that is limited: the one price, for the worst cases that are stressed and for each
//! request that is let in.

use bursar_kernels::BLOCK_TOKENS;

use crate::Envelope;

/// What a picture, or a step of a video, takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PictureCost {
    /// Patches of a launch.
    pub patches: usize,
    /// Rows of the vision cache, each of which is a token of the prompt.
    pub rows: usize,
}

impl PictureCost {
    /// Of so many patches, of which `merged` make an embedding. Patches that make none are not counted.
    pub fn of(patches: usize, merged: usize) -> Self {
        let rows = patches / merged;
        PictureCost { patches: rows * merged, rows }
    }
}

/// What a request takes at most, from its first token to the last of the longest reply that it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestCost {
    /// Tokens of its sequence, prompt and reply.
    pub tokens: usize,
    /// Blocks of keys and values.
    pub blocks: usize,
    /// Patches of its largest picture, which one launch has to take.
    pub picture_patches: usize,
    /// Rows of the vision cache, held all at once.
    pub cache_rows: usize,
}

impl RequestCost {
    /// Of a sequence of so many tokens that shows these.
    pub fn of(tokens: usize, pictures: impl IntoIterator<Item = PictureCost>) -> Self {
        let nothing = RequestCost { tokens, blocks: tokens.div_ceil(BLOCK_TOKENS), picture_patches: 0, cache_rows: 0 };
        let all = pictures.into_iter().fold(nothing, |cost, picture| RequestCost {
            picture_patches: cost.picture_patches.max(picture.patches),
            cache_rows: cost.cache_rows + picture.rows,
            ..cost
        });
        // Each row is a token of its prompt.
        RequestCost { cache_rows: all.cache_rows.min(tokens), ..all }
    }

    /// Of the largest request that an envelope lets in, where `merged` patches make an embedding; none for a model that
    /// takes no pictures.
    pub fn largest(envelope: &Envelope, merged: Option<usize>) -> Self {
        let picture = merged.map(|merged| PictureCost::of(envelope.picture_patches, merged));
        let pictures = picture.into_iter().flat_map(|picture| std::iter::repeat_n(picture, envelope.pictures));
        RequestCost::of(envelope.context_tokens, pictures)
    }

    /// Whether it takes no more of anything.
    pub fn is_within(&self, limit: &RequestCost) -> bool {
        let RequestCost { tokens, blocks, picture_patches, cache_rows } = *self;
        tokens <= limit.tokens
            && blocks <= limit.blocks
            && picture_patches <= limit.picture_patches
            && cache_rows <= limit.cache_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_takes_its_largest_picture_of_a_launch_and_all_of_them_of_the_cache() {
        let pictures = [PictureCost::of(64, 4), PictureCost::of(19, 4)];
        let cost = RequestCost::of(100, pictures);
        assert_eq!(cost, RequestCost { tokens: 100, blocks: 7, picture_patches: 64, cache_rows: 20 });
        assert_eq!(RequestCost::of(12, pictures).cache_rows, 12, "no more than it has tokens");
    }

    #[test]
    fn the_largest_request_of_an_envelope_takes_at_least_as_much_as_any_that_it_lets_in() {
        let envelope = Envelope { context_tokens: 100, picture_patches: 67, pictures: 2, ..Envelope::small() };
        let largest = RequestCost::largest(&envelope, Some(4));
        assert_eq!(largest, RequestCost { tokens: 100, blocks: 7, picture_patches: 64, cache_rows: 32 });
        assert!(largest.is_within(&largest));
        for more in [
            RequestCost { tokens: 101, ..largest },
            RequestCost { blocks: 8, ..largest },
            RequestCost { picture_patches: 68, ..largest },
            RequestCost { cache_rows: 33, ..largest },
        ] {
            assert!(!more.is_within(&largest), "{more:?}");
        }
        assert_eq!(RequestCost::largest(&envelope, None).cache_rows, 0);
    }
}
