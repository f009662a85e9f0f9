//! Cost of a request in each limited resource. The stressed worst cases and the admission of
//! requests use the same cost.

use crate::{Envelope, MergeSize};

/// Patches and rows of one picture, or of one step of a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderCost {
    /// Patches that the picture adds to a launch of the vision encoder.
    pub patches: usize,
    /// Rows of the vision cache. Each row is one token of the prompt.
    pub rows: usize,
}

impl EncoderCost {
    /// The cost of at most `patches` patches. Patches that do not form a whole token are not
    /// counted.
    pub fn of(patches: usize, merge: MergeSize) -> Self {
        let rows = merge.tokens(patches);
        EncoderCost { patches: merge.patches(rows), rows }
    }
}

/// Upper bound for the cost of a request, from its first token to the end of its longest possible
/// reply. The number of its KV cache blocks follows from its tokens; see
/// [`CacheGroups::blocks_for`](crate::flow::CacheGroups::blocks_for).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestCost {
    /// Tokens of the sequence: prompt and reply.
    pub tokens: usize,
    /// Patches of the request's largest picture. One launch must encode all of these patches.
    pub picture_patches: usize,
    /// Rows of the vision cache, all in use at once.
    pub cache_rows: usize,
}

impl RequestCost {
    /// The cost of a sequence of `tokens` tokens that shows `pictures`.
    pub fn of(tokens: usize, pictures: impl IntoIterator<Item = EncoderCost>) -> Self {
        let nothing = RequestCost { tokens, picture_patches: 0, cache_rows: 0 };
        let all = pictures.into_iter().fold(nothing, |cost, picture| RequestCost {
            picture_patches: cost.picture_patches.max(picture.patches),
            cache_rows: cost.cache_rows + picture.rows,
            ..cost
        });
        // Each row is a token of the prompt, so there are no more rows than tokens.
        RequestCost { cache_rows: all.cache_rows.min(tokens), ..all }
    }

    /// The cost of the largest request that an envelope admits. `merge` is `None` for a model
    /// that takes no pictures.
    pub fn largest(envelope: &Envelope, merge: Option<MergeSize>) -> Self {
        let picture = merge.map(|merge| EncoderCost::of(envelope.picture_patches, merge));
        let pictures = picture.into_iter().flat_map(|picture| std::iter::repeat_n(picture, envelope.largest_pictures));
        RequestCost::of(envelope.context_tokens, pictures)
    }

    /// Whether this cost is at most `limit` in every resource.
    pub fn is_within(&self, limit: &RequestCost) -> bool {
        let RequestCost { tokens, picture_patches, cache_rows } = *self;
        tokens <= limit.tokens && picture_patches <= limit.picture_patches && cache_rows <= limit.cache_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_costs_its_largest_picture_and_all_cache_rows() {
        let pictures = [64, 19].map(|patches| EncoderCost::of(patches, MergeSize::new(2)));
        let cost = RequestCost::of(100, pictures);
        assert_eq!(cost, RequestCost { tokens: 100, picture_patches: 64, cache_rows: 20 });
        assert_eq!(RequestCost::of(12, pictures).cache_rows, 12, "cache rows do not exceed the number of tokens");
    }

    #[test]
    fn the_largest_request_of_an_envelope_bounds_every_admitted_request() {
        let envelope = Envelope { context_tokens: 100, picture_patches: 67, largest_pictures: 2, ..Envelope::small() };
        let largest = RequestCost::largest(&envelope, Some(MergeSize::new(2)));
        assert_eq!(largest, RequestCost { tokens: 100, picture_patches: 64, cache_rows: 32 });
        assert!(largest.is_within(&largest));
        for more in [
            RequestCost { tokens: 101, ..largest },
            RequestCost { picture_patches: 68, ..largest },
            RequestCost { cache_rows: 33, ..largest },
        ] {
            assert!(!more.is_within(&largest), "{more:?}");
        }
        assert_eq!(RequestCost::largest(&envelope, None).cache_rows, 0);
    }
}
