//! One rank's shard of a decoder.

use bursar_kernels::{Rank, RankShard};

use super::{decoder_config::DecoderConfig, gated_delta_net::DeltaHeads, mixture::MixtureShare};
use crate::weights::RanksError;

/// A rank's shard of each dimension that is divided among ranks (Shoeybi et
/// al. 2019, arXiv 1909.08053).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderShare {
    pub rank: Rank,
    pub heads: RankShard,
    /// Key and value heads. If there are fewer heads than ranks, adjacent ranks hold a copy
    /// of the same head.
    pub kv_heads: RankShard,
    /// Columns of a gated MLP.
    pub intermediate: RankShard,
    /// Heads of gated delta nets, if the decoder has them.
    pub delta: Option<DeltaHeads>,
    /// Experts of a mixture, and columns of its shared expert, if the decoder has a mixture.
    pub mixture: Option<MixtureShare>,
    /// Tokens of the vocabulary. If the vocabulary does not divide equally, the last ranks have
    /// fewer tokens.
    pub vocabulary: RankShard,
}

/// The largest number of ranks that an error suggests.
const SUGGESTED_MAX: usize = 8;

impl DecoderConfig {
    /// The shard of the decoder for `rank`.
    ///
    /// # Errors
    /// Heads, columns or experts cannot be divided equally among this many ranks.
    pub fn share(&self, rank: Rank) -> Result<DecoderShare, RanksError> {
        self.try_share(rank).map_err(|(what, count)| {
            let is_possible = |ranks: &usize| self.try_share(Rank::new(0, *ranks)).is_ok();
            RanksError { ranks: rank.of(), what, count, possible: (1..=SUGGESTED_MAX).filter(is_possible).collect() }
        })
    }

    /// Like [`share`](Self::share). The error has the name and the size of the dimension
    /// that cannot be divided.
    fn try_share(&self, rank: Rank) -> Result<DecoderShare, (&'static str, usize)> {
        let share = |what, count: usize| rank.share(count).ok_or((what, count));
        let mixture = self.mixture.as_ref().map(|mixture| {
            let shared = mixture.shared.map(|width| share("columns of the shared expert", width)).transpose()?;
            Ok(MixtureShare { experts: share("experts", mixture.experts)?, shared })
        });
        let mixture = mixture.transpose()?;
        let delta = self.gated_delta.as_ref().map(|delta| {
            let keys = share("key heads of gated delta nets", delta.key_heads)?;
            Ok(DeltaHeads { keys, values: share("value heads of gated delta nets", delta.value_heads)? })
        });
        let delta = delta.transpose()?;
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
            delta,
            mixture,
            vocabulary: rank.share_rounded_up(self.vocabulary),
        })
    }
}

impl DecoderShare {
    /// Number of tokens per rank, rounded up. The last ranks may have fewer tokens.
    pub fn tokens_of_each(&self) -> usize {
        self.vocabulary.whole.div_ceil(self.rank.of())
    }
}
