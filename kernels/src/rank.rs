//! Ranks: devices that compute one model together (tensor parallelism), and each rank's shard.

use std::ops::Range;

/// A device's index among the devices that compute one model together, and the number of these
/// devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    index: usize,
    of: usize,
}

/// A rank's shard of rows or columns that are divided among all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankShard {
    /// Index of the first item of this shard.
    pub first: usize,
    /// Number of items in this shard.
    pub count: usize,
    /// Number of items of all ranks together.
    pub whole: usize,
}

impl Rank {
    /// The rank of a device that computes a model by itself.
    pub const ALONE: Rank = Rank { index: 0, of: 1 };

    /// Creates rank `index` of `of` ranks.
    ///
    /// # Panics
    /// If `index` is not below `of`.
    pub fn new(index: usize, of: usize) -> Self {
        assert!(index < of, "rank {index} is not below {of}");
        Rank { index, of }
    }

    /// Returns all ranks of a group of `of` ranks.
    pub fn all(of: usize) -> impl ExactSizeIterator<Item = Rank> {
        (0..of).map(move |index| Rank { index, of })
    }

    /// Returns the index of this rank, counted from 0.
    pub fn index(self) -> usize {
        self.index
    }

    /// Returns the number of ranks in the group.
    pub fn of(self) -> usize {
        self.of
    }

    /// Returns `true` if this is the only rank.
    pub fn is_alone(self) -> bool {
        self.of == 1
    }

    /// Returns this rank's shard of `whole` items that are divided equally. Returns `None` if
    /// `whole` is not a multiple of the number of ranks.
    pub fn share(self, whole: usize) -> Option<RankShard> {
        let count = whole / self.of;
        whole.is_multiple_of(self.of).then_some(RankShard { first: self.index * count, count, whole })
    }

    /// Returns this rank's shard of `whole` items, where each rank has the same number of items,
    /// rounded up. If `whole` does not divide equally, the last ranks have fewer items, possibly
    /// zero.
    pub fn share_rounded_up(self, whole: usize) -> RankShard {
        let each = whole.div_ceil(self.of);
        let first = (self.index * each).min(whole);
        RankShard { first, count: each.min(whole - first), whole }
    }

    /// Like [`share`](Rank::share), but if there are fewer items than ranks, each item is copied to
    /// the same number of adjacent ranks. Returns `None` if the number of ranks is not a multiple
    /// of `whole`.
    pub fn share_or_copy(self, whole: usize) -> Option<RankShard> {
        if whole == 0 || whole >= self.of {
            return self.share(whole);
        }
        self.of.is_multiple_of(whole).then(|| RankShard { first: self.index / (self.of / whole), count: 1, whole })
    }
}

impl RankShard {
    pub fn all(whole: usize) -> Self {
        RankShard { first: 0, count: whole, whole }
    }

    pub fn is_whole(self) -> bool {
        self.count == self.whole
    }

    /// Returns the range of this shard among the items of all ranks.
    pub fn range(self) -> Range<usize> {
        self.first..self.first + self.count
    }

    /// Returns the same shard, counted in parts, if each item consists of `parts` parts.
    pub fn times(self, parts: usize) -> Self {
        RankShard { first: self.first * parts, count: self.count * parts, whole: self.whole * parts }
    }
}

/// The shard of a single rank: all items.
impl From<usize> for RankShard {
    fn from(whole: usize) -> Self {
        RankShard::all(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_shares_cover_every_index_once() {
        for of in [1, 2, 3, 4, 8] {
            let shares: Vec<_> =
                Rank::all(of).map(|rank| rank.share(24).expect("24 divides among the ranks")).collect();
            let all: Vec<usize> = shares.iter().flat_map(|share| share.range()).collect();
            assert_eq!(all, (0..24).collect::<Vec<_>>(), "{of} ranks");
        }
        assert_eq!(Rank::new(1, 4).share(6), None);
        assert_eq!(Rank::new(2, 4).share(8).map(|share| share.times(3).range()), Some(12..18));
    }

    #[test]
    fn the_last_ranks_have_smaller_shares_after_rounding_up() {
        let shares = |whole: usize| Rank::all(4).map(|rank| rank.share_rounded_up(whole).range()).collect::<Vec<_>>();
        assert_eq!(shares(8), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(shares(10), [0..3, 3..6, 6..9, 9..10]);
        assert_eq!(shares(5), [0..2, 2..4, 4..5, 5..5]);
    }

    #[test]
    fn adjacent_ranks_copy_a_share_with_fewer_items_than_ranks() {
        let firsts = |whole: usize| -> Option<Vec<usize>> {
            Rank::all(8).map(|rank| rank.share_or_copy(whole).map(|share| share.first)).collect()
        };
        assert_eq!(firsts(2), Some(vec![0, 0, 0, 0, 1, 1, 1, 1]));
        assert_eq!(firsts(1), Some(vec![0; 8]));
        assert_eq!(firsts(16), Some(vec![0, 2, 4, 6, 8, 10, 12, 14]));
        assert_eq!((firsts(3), firsts(12)), (None, None));
    }
}
