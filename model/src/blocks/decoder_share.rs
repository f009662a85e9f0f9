//! What a rank has of a decoder.

use bursar_kernels::{Rank, RankShard};

use super::decoder::DecoderConfig;
use crate::weights::RanksError;

/// A rank's share of each number of a decoder that ranks share out (Shoeybi et al. 2019, arXiv 1909.08053).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderShare {
    /// Whose it is.
    pub rank: Rank,
    /// Query heads.
    pub heads: RankShard,
    /// Key and value heads. Where there are fewer than ranks, neighbours have the same one.
    pub kv_heads: RankShard,
    /// Columns of a gated MLP.
    pub intermediate: RankShard,
    /// Experts of a mixture, if the decoder has one.
    pub experts: Option<RankShard>,
    /// Tokens. The last ranks have fewer of them if they do not divide.
    pub vocabulary: RankShard,
}

/// The most ranks that an error suggests.
const SUGGESTED_MAX: usize = 8;

impl DecoderConfig {
    /// What `rank` has of it.
    ///
    /// # Errors
    /// Heads, columns or experts do not divide among so many ranks.
    pub fn share(&self, rank: Rank) -> Result<DecoderShare, RanksError> {
        self.try_share(rank).map_err(|(what, count)| {
            let is_possible = |ranks: &usize| self.try_share(Rank::new(0, *ranks)).is_ok();
            RanksError { ranks: rank.of(), what, count, possible: (1..=SUGGESTED_MAX).filter(is_possible).collect() }
        })
    }

    /// As [`share`](Self::share), or what does not divide.
    fn try_share(&self, rank: Rank) -> Result<DecoderShare, (&'static str, usize)> {
        let share = |what, count: usize| rank.share(count).ok_or((what, count));
        let experts = self.mixture.as_ref().map(|mixture| share("experts", mixture.experts)).transpose()?;
        let is_all_experts = (0..self.layers).all(|layer| self.mixture.as_ref().is_some_and(|it| it.is_in(layer)));
        Ok(DecoderShare {
            rank,
            heads: share("query heads", self.heads)?,
            kv_heads: rank.share_or_copy(self.kv_heads).ok_or(("key heads", self.kv_heads))?,
            intermediate: if is_all_experts {
                self.intermediate.into()
            } else {
                share("columns of the MLP", self.intermediate)?
            },
            experts,
            vocabulary: rank.share_rounded_up(self.vocabulary),
        })
    }
}

impl DecoderShare {
    /// Tokens of each rank, of which the last may have fewer.
    pub fn tokens_of_each(&self) -> usize {
        self.vocabulary.whole.div_ceil(self.rank.of())
    }
}
