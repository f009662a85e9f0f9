//! Pure: cache groups, the sets of attention layers that share block tables.
//!
//! A layer with a window reads only the last tokens of a sequence, so the sequence may release
//! earlier blocks. A sequence therefore has one block table for each group of layers with the same
//! window. All groups take their blocks from one pool, so that any group can reuse a block that
//! another group released. A block has the same number of segments for all groups. If layers with
//! full attention have wider or narrower keys than layers with a window, a segment of a block has
//! several of the narrower layers. The method is that of vLLM's hybrid KV cache manager
//! (`v1/core/kv_cache_coordinator.py`) and of Jenga (arXiv 2503.18292).

use std::collections::BTreeMap;

use bursar_kernels::BLOCK_TOKENS;

/// Padding takes at most 1 / `PADDING_PART` of the bytes of attention layers, unless that limit would
/// result in more than [`GROUPS_MAX`] groups. A group with fewer layers than fit in its blocks is
/// filled up with padding.
const PADDING_PART: usize = 16;

/// Maximum number of groups, unless the layers have more different windows. Each group costs a
/// block table per sequence.
const GROUPS_MAX: usize = 8;

/// Like [`GROUPS_MAX`], for models whose layers have two key widths. With few groups, most of the
/// blocks of the narrower layers would be padding.
const MIXED_GROUPS_MAX: usize = 12;

/// Weight of padding in groups with full attention. Such a group has blocks for the whole context,
/// which is several times longer than a window.
const FULL_PADDING_WEIGHT: usize = 4;

/// The number of layers in a segment of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SegmentLayers {
    /// Layers with full attention.
    pub full: usize,
    /// Layers with a window.
    pub windowed: usize,
}

impl SegmentLayers {
    /// Segments of one layer, for layers of equal width.
    pub const ONE: SegmentLayers = SegmentLayers { full: 1, windowed: 1 };

    /// The smallest segment that whole layers of either kind fill exactly. Widths are key elements
    /// per token of a full-attention layer and of a sliding-window layer.
    ///
    /// # Panics
    /// If a width is 0.
    pub fn of_widths(full: usize, windowed: usize) -> Self {
        let (mut divisor, mut rest) = (full, windowed);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        SegmentLayers { full: windowed / divisor, windowed: full / divisor }
    }

    fn of(self, window: Option<usize>) -> usize {
        if window.is_none() { self.full } else { self.windowed }
    }
}

/// Location of a layer's keys and values in the blocks of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLocation {
    pub group: usize,
    /// Index of the segment within a block.
    pub segment: usize,
    /// Index among the layers of the segment.
    pub index: usize,
}

/// Attention layers with the same window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// The number of latest tokens that a token attends to, including itself. `None` means all.
    pub window: Option<usize>,
    /// The layers, at most as many as fit in the segments of a block.
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
    segments: usize,
    layers: SegmentLayers,
}

impl Default for CacheGroups {
    /// One group with full attention.
    fn default() -> Self {
        CacheGroups::new([(0, None)])
    }
}

impl CacheGroups {
    /// Groups attention layers of equal width by window.
    pub fn new(layers: impl IntoIterator<Item = (usize, Option<usize>)>) -> Self {
        CacheGroups::of_segments(layers, SegmentLayers::ONE)
    }

    /// Groups attention layers by window, with `of_segment` layers in each segment of a block. If
    /// all layers have the same window, they form one group. Otherwise, a block has the largest
    /// number of segments for which padding is at most 1 / `PADDING_PART` of the attention layers.
    /// If that results in too many groups, the number of segments with the least padding that stays
    /// within the maximum is used. If there are no layers, the result is one empty group.
    pub fn of_segments(layers: impl IntoIterator<Item = (usize, Option<usize>)>, of_segment: SegmentLayers) -> Self {
        let mut kinds: BTreeMap<Option<usize>, Vec<usize>> = BTreeMap::new();
        layers.into_iter().for_each(|(layer, window)| kinds.entry(window).or_default().push(layer));
        // Lengths are in the largest unit that divides the length of a layer of either kind.
        let unit = of_segment.full * of_segment.windowed;
        let length = |window: Option<usize>, layers: usize| layers * (unit / of_segment.of(window));
        let most = kinds.iter().map(|(window, kind)| kind.len().div_ceil(of_segment.of(*window))).max().unwrap_or(1);
        let all: usize = kinds.iter().map(|(window, kind)| length(*window, kind.len())).sum();
        let of_group = |window: Option<usize>, segments: usize| segments * of_segment.of(window);
        let padding = |segments: usize, full_weight: usize| -> usize {
            let of_kind = |(window, kind): (&Option<usize>, &Vec<usize>)| {
                let layers = kind.len().next_multiple_of(of_group(*window, segments)) - kind.len();
                length(*window, layers) * if window.is_none() { full_weight } else { 1 }
            };
            kinds.iter().map(of_kind).sum()
        };
        let is_dense = |segments: &usize| padding(*segments, 1) * PADDING_PART <= all;
        let groups = |segments: usize| -> usize {
            kinds.iter().map(|(window, kind)| kind.len().div_ceil(of_group(*window, segments))).sum()
        };
        let groups_max = if of_segment == SegmentLayers::ONE { GROUPS_MAX } else { MIXED_GROUPS_MAX };
        let is_few = |segments: &usize| groups(*segments) <= groups_max.max(kinds.len());
        let dense = (1..=most).rev().find(is_dense).filter(is_few);
        let sparse = || (1..=most).rev().filter(is_few).min_by_key(|segments| padding(*segments, FULL_PADDING_WEIGHT));
        let segments = dense.or_else(sparse).unwrap_or(1);
        let of_kind = |(window, layers): (Option<usize>, Vec<usize>)| {
            let group = |layers: &[usize]| CacheGroup { window, layers: layers.to_vec() };
            layers.chunks(of_group(window, segments)).map(group).collect::<Vec<_>>()
        };
        let mut groups: Vec<_> = kinds.into_iter().flat_map(of_kind).collect();
        if groups.is_empty() {
            groups.push(CacheGroup { window: None, layers: Vec::new() });
        }
        CacheGroups { groups, segments, layers: of_segment }
    }

    pub fn as_slice(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// The number of groups, at least 1.
    pub fn count(&self) -> usize {
        self.groups.len()
    }

    /// Number of segments of a block, the same for all groups. The last group of each window size
    /// may have fewer layers than fit; the rest of its blocks is padding.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Number of layers in each segment.
    pub fn segment_layers(&self) -> SegmentLayers {
        self.layers
    }

    /// Location of a layer's keys and values. `None` if the layer has no keys and values.
    pub fn location(&self, layer: usize) -> Option<KvLocation> {
        let in_group = |group: &CacheGroup| group.layers.iter().position(|other| *other == layer);
        self.groups.iter().enumerate().find_map(|(index, group)| {
            let (place, of_segment) = (in_group(group)?, self.layers.of(group.window));
            Some(KvLocation { group: index, segment: place / of_segment, index: place % of_segment })
        })
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
        (shown, groups.segments())
    }

    #[test]
    fn equal_layers_are_one_group() {
        for window in [None, Some(32)] {
            let groups = of(&[window; 28]);
            assert_eq!(shape(&groups), (vec![(window, 28)], 28));
            let last = KvLocation { group: 0, segment: 27, index: 0 };
            assert_eq!((groups.location(27), groups.location(28)), (Some(last), None));
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
        let size = |full, windowed| (mixed(full, windowed).count(), mixed(full, windowed).segments());
        assert_eq!(size(13, 15), (2, 15), "two layers of padding");
        assert_eq!(size(5, 23), (6, 5), "two layers of padding, none of them with full attention");
        assert_eq!(size(27, 1), (8, 4), "four layers of padding");
        let kinds = of(&(1..=20).map(Some).collect::<Vec<_>>());
        assert_eq!((kinds.count(), kinds.segments()), (20, 1), "each kind needs a group");
    }

    #[test]
    fn groups_with_full_attention_come_first() {
        let groups = of(&[Some(9), None, Some(9), None]);
        assert_eq!(groups.full(), 1);
        let place = |layer| groups.location(layer).map(|place| (place.group, place.segment)).expect("a group");
        assert_eq!([1, 3, 0, 2].map(place), [(0, 0), (0, 1), (1, 0), (1, 1)]);
    }

    /// Blocks of the released sizes of Gemma 4.
    #[test]
    fn narrow_layers_share_a_segment() {
        // Every sixth layer has full attention (every fifth in the smallest model).
        let groups = |layers: usize, every: usize, full: usize, windowed: usize| {
            let window = |layer: usize| Some(1024).filter(|_| !(layer + 1).is_multiple_of(every));
            let layers = (0..layers).map(|layer| (layer, window(layer)));
            CacheGroups::of_segments(layers, SegmentLayers::of_widths(full, windowed))
        };
        let large = groups(60, 6, 4 * 512, 16 * 256);
        assert_eq!(large.segment_layers(), SegmentLayers { full: 2, windowed: 1 });
        assert_eq!((large.count(), large.full(), large.segments()), (11, 1, 5), "no padding");
        assert_eq!(large.location(5), Some(KvLocation { group: 0, segment: 0, index: 0 }));
        assert_eq!(large.location(11), Some(KvLocation { group: 0, segment: 0, index: 1 }));
        assert_eq!(large.location(59), Some(KvLocation { group: 0, segment: 4, index: 1 }));
        assert_eq!(large.location(6), Some(KvLocation { group: 2, segment: 0, index: 0 }));
        let unified = groups(48, 6, 512, 8 * 256);
        assert_eq!(unified.segment_layers(), SegmentLayers { full: 4, windowed: 1 });
        assert_eq!((unified.count(), unified.full(), unified.segments()), (11, 1, 4), "8 of 16 layers are padding");
        // The layers that other layers read.
        let small = groups(15, 5, 512, 256);
        assert_eq!(small.segment_layers(), SegmentLayers { full: 1, windowed: 2 });
        assert_eq!((small.count(), small.full(), small.segments()), (3, 1, 3), "no padding");
        assert_eq!(SegmentLayers::of_widths(96, 64), SegmentLayers { full: 2, windowed: 3 });
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
