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
    /// Key and value heads of full attention, if their sizes differ from those of other layers. No
    /// two ranks have the same head.
    pub full_kv_heads: Option<RankShard>,
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
        // If several ranks had a copy of a head, the widths of both kinds of layers would no longer
        // have the ratio on which the division of blocks is based.
        let full_kv_heads = self.full_attention.map(|full| share("key heads of full attention", full.kv_heads));
        let full_kv_heads = full_kv_heads.transpose()?;
        if full_kv_heads.is_some() {
            share("key heads", self.kv_heads)?;
        }
        let is_all_experts =
            (0..self.layers).all(|layer| self.mixture.as_ref().is_some_and(|it| it.is_in(layer) && !it.has_dense_mlp));
        Ok(DecoderShare {
            rank,
            heads: share("query heads", self.heads)?,
            kv_heads: rank.share_or_copy(self.kv_heads).ok_or(("key heads", self.kv_heads))?,
            full_kv_heads,
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

/// Key and value heads of one layer on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    pub kv_heads: RankShard,
    pub head_dim: usize,
    /// See [`KvSizes`](super::KvSizes).
    pub keys_are_values: bool,
}

impl DecoderShare {
    /// The heads of keys and values of a layer of `config`.
    pub fn attention(&self, config: &DecoderConfig, layer: usize) -> KvHeads {
        let sizes = config.attention(layer);
        let kv_heads = self.full_kv_heads.filter(|_| config.has_full_sizes(layer)).unwrap_or(self.kv_heads);
        KvHeads { kv_heads, head_dim: sizes.head_dim, keys_are_values: sizes.keys_are_values }
    }

    /// Columns of the MLP of a layer of `config`.
    pub fn mlp_columns(&self, config: &DecoderConfig, layer: usize) -> RankShard {
        let is_wide = config.double_wide_shared_mlp && (config.own_kv_layers..config.layers).contains(&layer);
        self.intermediate.times(if is_wide { 2 } else { 1 })
    }

    /// Number of tokens per rank, rounded up. The last ranks may have fewer tokens.
    pub fn tokens_of_each(&self) -> usize {
        self.vocabulary.whole.div_ceil(self.rank.of())
    }
}
