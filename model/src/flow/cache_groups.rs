//! Pure: cache groups, the sets of attention layers that share block tables.
//!
//! A layer with a window reads only the last tokens of a sequence, so the sequence may release
//! earlier blocks. A sequence therefore has one block table for each group of layers with the same
//! window. All groups take their blocks from one pool, so all groups have the same number of
//! layers, and any group can reuse a block that another group released. The method is that of
//! vLLM's hybrid KV cache manager (`v1/core/kv_cache_coordinator.py`) and of Jenga
//! (arXiv 2503.18292).

use std::collections::BTreeMap;

use bursar_kernels::BLOCK_TOKENS;

/// There is at most one padding layer for every `PADDING_PART` attention layers, unless that limit
/// would result in more than [`GROUPS_MAX`] groups. A group with fewer layers than the other groups
/// is filled up with padding.
const PADDING_PART: usize = 16;

/// Maximum number of groups, unless the layers have more different windows. Each group costs a
/// block table per sequence.
const GROUPS_MAX: usize = 8;

/// Attention layers with the same window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// The number of latest tokens that a token attends to, including itself. `None` means all.
    pub window: Option<usize>,
    /// The layers, at most [`layers_each`](CacheGroups::layers_each).
    pub layers: Vec<usize>,
}

impl CacheGroup {
    /// Upper bound on the blocks that a sequence of `tokens` tokens holds in this group, in steps
    /// of at most `step_tokens` tokens. Blocks are released only when a step ends. Until then, the
    /// sequence holds the blocks of the window and of up to two steps, one running and one planned.
    fn blocks_for(&self, tokens: usize, step_tokens: usize) -> usize {
        let all = tokens.div_ceil(BLOCK_TOKENS);
        // The held range is two steps and the `window - 1` tokens before them. A range of `n`
        // tokens that starts anywhere in a block touches at most
        // `(n - 1).div_ceil(BLOCK_TOKENS) + 1` blocks.
        let within = |window: usize| (window + 2 * step_tokens - 2).div_ceil(BLOCK_TOKENS) + 1;
        self.window.map_or(all, |window| all.min(within(window)))
    }
}

/// The attention layers of a decoder, in groups. Groups with full attention are first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroups {
    groups: Vec<CacheGroup>,
    layers_each: usize,
}

impl Default for CacheGroups {
    /// One group with full attention.
    fn default() -> Self {
        CacheGroups::new([(0, None)])
    }
}

impl CacheGroups {
    /// Groups attention layers by window. If all layers have the same window, they form one group.
    /// Otherwise, the group size is the largest one for which padding layers are at most 1 /
    /// `PADDING_PART` of the attention layers. If that size results in more than `GROUPS_MAX`
    /// groups, the size with the least padding among those with at most `GROUPS_MAX` groups is
    /// used. If there are no layers, the result is one empty group.
    pub fn new(layers: impl IntoIterator<Item = (usize, Option<usize>)>) -> Self {
        let mut kinds: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        layers.into_iter().for_each(|(layer, window)| kinds.entry(window).or_default().push(layer));
        let most = kinds.values().map(Vec::len).max().unwrap_or(1);
        let all: usize = kinds.values().map(Vec::len).sum();
        let padding =
            |each: usize| -> usize { kinds.values().map(|kind| kind.len().next_multiple_of(each) - kind.len()).sum() };
        let is_dense = |each: &usize| padding(*each) * PADDING_PART <= all;
        let groups = |each: usize| kinds.values().map(|kind| kind.len().div_ceil(each)).sum::<usize>();
        let is_few = |each: &usize| groups(*each) <= GROUPS_MAX.max(kinds.len());
        let dense = (1..=most).rev().find(is_dense).filter(is_few);
        let sparse = || (1..=most).rev().filter(is_few).min_by_key(|each| padding(*each));
        let layers_each = dense.or_else(sparse).unwrap_or(1);
        let of_kind = |(window, layers): (Option<usize>, Vec<usize>)| {
            let group = |layers: &[usize]| CacheGroup { window, layers: layers.to_vec() };
            layers.chunks(layers_each).map(group).collect::<Vec<_>>()
        };
        let mut groups: Vec<_> = kinds.into_iter().flat_map(of_kind).collect();
        if groups.is_empty() {
            groups.push(CacheGroup { window: None, layers: Vec::new() });
        }
        CacheGroups { groups, layers_each }
    }

    pub fn as_slice(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// The number of groups, at least 1.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Number of layers in a block, the same for all groups. The last group of each window size may
    /// have fewer layers; the rest of its blocks is padding.
    pub fn layers_each(&self) -> usize {
        self.layers_each
    }

    /// The group of an attention layer, and the layer's index in the blocks of that group.
    pub fn place(&self, layer: usize) -> Option<(usize, usize)> {
        let in_group = |group: &CacheGroup| group.layers.iter().position(|other| *other == layer);
        self.groups.iter().enumerate().find_map(|(index, group)| Some((index, in_group(group)?)))
    }

    /// Number of groups with full attention, which precede all other groups.
    pub fn full(&self) -> usize {
        self.groups.iter().take_while(|group| group.window.is_none()).count()
    }

    /// Index of the first block of a sequence that the token at position `tokens` reads in `group`.
    pub fn first_read(&self, group: usize, tokens: usize) -> usize {
        self.groups[group].window.map_or(0, |window| (tokens + 1).saturating_sub(window) / BLOCK_TOKENS)
    }

    /// Upper bound on the blocks that a sequence of `tokens` tokens holds, if steps have at most
    /// `step_tokens` tokens.
    pub fn blocks_for(&self, tokens: usize, step_tokens: usize) -> usize {
        self.groups.iter().map(|group| group.blocks_for(tokens, step_tokens)).sum()
    }

    /// Like [`blocks_for`](Self::blocks_for), but counts only the groups with a window.
    pub fn windowed_blocks_for(&self, tokens: usize, step_tokens: usize) -> usize {
        self.groups[self.full()..].iter().map(|group| group.blocks_for(tokens, step_tokens)).sum()
    }

    /// Upper bound on the blocks that `sequences` sequences of `tokens` tokens each hold at once,
    /// in steps of at most `step_tokens` tokens. All sequences share a step's tokens, so the blocks
    /// of the two unfinished steps are counted once and not per sequence.
    pub fn blocks_together(&self, sequences: usize, tokens: usize, step_tokens: usize) -> usize {
        let of_steps = (self.count() - self.full()) * (2 * step_tokens).div_ceil(BLOCK_TOKENS);
        let between_steps = sequences * self.blocks_for(tokens, 1) + of_steps;
        between_steps.min(sequences * self.blocks_for(tokens, step_tokens))
    }

    /// Maximum number of sequences of `tokens` tokens that fit in `blocks` blocks at once; see
    /// [`blocks_together`](Self::blocks_together).
    pub fn sequences_in(&self, blocks: usize, tokens: usize, step_tokens: usize) -> usize {
        let of_steps = (self.count() - self.full()) * (2 * step_tokens).div_ceil(BLOCK_TOKENS);
        let tokens = tokens.max(1);
        let between_steps = blocks.saturating_sub(of_steps) / self.blocks_for(tokens, 1);
        between_steps.max(blocks / self.blocks_for(tokens, step_tokens))
    }

    /// The longest sequence, in tokens, that always fits in `blocks` blocks. `usize::MAX` if a
    /// sequence of any length fits, because all groups have windows.
    pub fn tokens_in(&self, blocks: usize, step_tokens: usize) -> usize {
        let fits = |each: usize| self.blocks_for(each.saturating_mul(BLOCK_TOKENS), step_tokens) <= blocks;
        // A sequence of `blocks + 1` blocks fits only if every group has a window that limits its
        // blocks. Longer sequences then need no more blocks.
        if fits(blocks + 1) {
            return usize::MAX;
        }
        let (mut low, mut high) = (0, blocks + 1);
        while low + 1 < high {
            let middle = low.midpoint(high);
            if fits(middle) { low = middle } else { high = middle }
        }
        low * BLOCK_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Groups of layers with these windows, in order.
    fn of(windows: &[Option<usize>]) -> CacheGroups {
        CacheGroups::new(windows.iter().copied().enumerate())
    }

    /// The windows of the groups, and the layers of each.
    fn shape(groups: &CacheGroups) -> (Vec<(Option<usize>, usize)>, usize) {
        let shown = groups.as_slice().iter().map(|group| (group.window, group.layers.len())).collect();
        (shown, groups.layers_each())
    }

    #[test]
    fn equal_layers_are_one_group() {
        for window in [None, Some(32)] {
            let groups = of(&[window; 28]);
            assert_eq!(shape(&groups), (vec![(window, 28)], 28));
            assert_eq!((groups.place(27), groups.place(28)), (Some((0, 27)), None));
        }
        assert_eq!(shape(&CacheGroups::default()), (vec![(None, 1)], 1));
        assert_eq!(shape(&of(&[])), (vec![(None, 0)], 1), "a decoder without attention");
    }

    #[test]
    fn groups_are_as_large_as_the_padding_limit_allows() {
        let mixed = |full: usize, windowed: usize| of(&[vec![None; full], vec![Some(64); windowed]].concat());
        assert_eq!(shape(&mixed(14, 14)), (vec![(None, 14), (Some(64), 14)], 14));
        assert_eq!(shape(&mixed(21, 7)), (vec![(None, 7), (None, 7), (None, 7), (Some(64), 7)], 7));
        let (groups, each) = shape(&mixed(8, 40));
        assert_eq!((groups.len(), each), (5, 10), "two of 48 layers are padding");
        assert_eq!(shape(&mixed(16, 15)), (vec![(None, 16), (Some(64), 15)], 16), "one layer of padding");
        assert_eq!(shape(&mixed(5, 3)).1, 1, "a layer of padding would be an eighth");
    }

    #[test]
    fn more_padding_is_allowed_if_there_would_be_many_groups() {
        let mixed = |full: usize, windowed: usize| of(&[vec![None; full], vec![Some(64); windowed]].concat());
        let size = |full, windowed| (mixed(full, windowed).count(), mixed(full, windowed).layers_each());
        assert_eq!(size(13, 15), (2, 15), "two layers of padding");
        assert_eq!(size(5, 23), (5, 6), "two layers of padding");
        assert_eq!(size(27, 1), (8, 4), "four layers of padding");
        let kinds = of(&(1..=20).map(Some).collect::<Vec<_>>());
        assert_eq!((kinds.count(), kinds.layers_each()), (20, 1), "each kind needs a group");
    }

    #[test]
    fn groups_with_full_attention_come_first() {
        let groups = of(&[Some(9), None, Some(9), None]);
        assert_eq!(groups.full(), 1);
        assert_eq!([1, 3, 0, 2].map(|layer| groups.place(layer).expect("a group")), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    }

    #[test]
    fn the_next_token_reads_its_window_and_no_block_before() {
        let first = |window, tokens| of(&[Some(window)]).first_read(0, tokens);
        assert_eq!([0, 16, 32, 47, 48].map(|tokens| first(17, tokens)), [0, 0, 1, 1, 2]);
        assert_eq!(first(1, 32), 2, "a token that sees only itself needs no earlier block");
        assert_eq!(of(&[None]).first_read(0, 1000), 0);
    }

    #[test]
    fn a_pool_holds_any_length_if_all_layers_have_windows() {
        let groups = of(&[Some(32)]);
        // The window and two steps of 16 tokens lie in at most five blocks.
        assert_eq!([5, 4].map(|blocks| groups.tokens_in(blocks, 16)), [usize::MAX, 64]);
        assert_eq!(of(&[None]).tokens_in(5, 16), 80);
        assert_eq!(of(&[None, Some(32)]).tokens_in(14, 16), 9 * 16, "nine blocks, and five in the window");
    }

    proptest! {
        /// Runs a sequence in two overlapping steps at a time, as the scheduler does.
        #[test]
        fn no_sequence_ever_holds_more_than_its_bound(
            window in 1usize..80,
            steps in proptest::collection::vec(1usize..40, 1..30),
        ) {
            let groups = of(&[Some(window)]);
            let step_tokens = steps.iter().copied().max().expect("there is a step");
            let (mut ended, mut running) = (0, 0);
            let tokens: usize = steps.iter().sum();
            for step in steps {
                let planned = ended + running + step;
                let held = planned.div_ceil(BLOCK_TOKENS) - groups.first_read(0, ended);
                prop_assert!(held <= groups.blocks_for(tokens, step_tokens));
                (ended, running) = (ended + running, step);
            }
        }

        #[test]
        fn the_longest_sequence_in_a_pool_is_exact(
            windows in proptest::collection::vec(proptest::option::of(1usize..80), 1..5),
            blocks in 0usize..60,
            step_tokens in 1usize..40,
        ) {
            let groups = of(&windows);
            let tokens = groups.tokens_in(blocks, step_tokens);
            let far = tokens.min(100_000);
            prop_assert!(groups.blocks_for(far, step_tokens) <= blocks);
            prop_assert!(tokens == usize::MAX || groups.blocks_for(tokens + 1, step_tokens) > blocks);
        }
    }
}
