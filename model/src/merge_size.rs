//! Number of patches that make one token of a prompt.

/// Patches along a side of the square that the vision encoder merges into one embedding. An
/// embedding is one token of the prompt and one row of the vision cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeSize(usize);

impl MergeSize {
    /// A square of `side` by `side` patches.
    ///
    /// # Panics
    /// If `side` is 0. No valid setting of a checkpoint is 0.
    pub const fn new(side: usize) -> Self {
        assert!(side > 0, "a token has at least one patch");
        MergeSize(side)
    }

    /// Patches along a side of the square.
    pub const fn side(self) -> usize {
        self.0
    }

    /// Patches that make one token.
    pub const fn patches_per_token(self) -> usize {
        self.0 * self.0
    }

    /// Tokens that `patches` patches make. The number is exact for a resized picture, whose sides
    /// are multiples of [`side`](Self::side). A limit need not be a multiple of
    /// [`patches_per_token`](Self::patches_per_token), and its remaining patches make no token.
    pub const fn tokens(self, patches: usize) -> usize {
        patches / self.patches_per_token()
    }

    /// Patches that make `tokens` tokens.
    pub const fn patches(self, tokens: usize) -> usize {
        tokens * self.patches_per_token()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftover_patches_form_no_token() {
        let merge = MergeSize::new(2);
        assert_eq!([0, 3, 4, 7, 8].map(|patches| merge.tokens(patches)), [0, 0, 1, 1, 2]);
        assert_eq!((merge.patches_per_token(), merge.patches(3), merge.tokens(merge.patches(3))), (4, 12, 3));
    }
}
