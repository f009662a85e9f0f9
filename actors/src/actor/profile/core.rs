//! Pure: arithmetic of sizing.

use std::time::Duration;

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, KvShape};
use serde::Serialize;

use crate::{compute::memory::KvMemory, supervise::Intensity, token_interval::MeasuredCosts};

/// Maximum number of attempts within an hour: the first attempt and three retries.
pub const ATTEMPTS_MAX: u32 = 4;

/// Limit on retries, shared by deaths and memory refusals. A retry after a death starts only after
/// a wait. Because of the one-hour window, a model that has served for an hour has all its attempts
/// again.
pub const ATTEMPTS: Intensity = Intensity {
    restarts_max: ATTEMPTS_MAX as usize - 1,
    within: Duration::from_secs(3600),
    back_off: Duration::from_millis(10),
};

/// Per cent of the previous target that the next attempt asks for after memory was refused.
pub const SHRINK_PER_CENT: u64 = 95;

/// Returns the target after `shrinks` refused attempts: `blocks` times 0.95 to the power of
/// `shrinks`, in whole blocks.
pub fn shrunk(blocks: usize, shrinks: u32) -> usize {
    // At most eight shrinks are computed at once: the product of 100^8 and the number of blocks of
    // any device fits in a `u128`.
    let at_once = shrinks.min(8);
    let (of, parts) = (u128::from(SHRINK_PER_CENT).pow(at_once), 100u128.pow(at_once));
    let left = (blocks as u128 * of / parts) as usize;
    if shrinks > at_once { shrunk(left, shrinks - at_once) } else { left }
}

/// Limits for serving: exactly the sizes that were stressed. This record is the only source of
/// permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProfileRecord {
    pub sequences: usize,
    pub step_tokens: usize,
    /// Drafted tokens of a sequence in a step.
    pub draft_tokens: usize,
    /// Patches in a vision encoder batch.
    pub launch_patches: usize,
    /// Rows of the encoder cache. Each row holds the embedding of one prompt token.
    pub cache_rows: usize,
    /// KV cache blocks, each for 16 tokens over all layers.
    pub kv_blocks: usize,
    /// Peak workspace of each worst case. Plan and measurement are equal.
    pub peaks: Vec<(&'static str, Bytes)>,
    /// Measured times of steps and encoder batches.
    pub costs: MeasuredCosts,
}

impl ProfileRecord {
    /// Returns the number of tokens that the KV blocks hold.
    pub fn kv_tokens(&self) -> usize {
        self.kv_blocks * BLOCK_TOKENS
    }
}

/// Limit on the size of the KV cache, relative to the remaining memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvShare {
    /// A fraction of the remaining memory, above 0 and up to 1. It is set by the user, or is the
    /// default on a host, where other programs use the same memory.
    Fraction(f64),
    /// All but this many bytes, which stay free for memory that is later taken outside leases.
    AllBut(Bytes),
    /// At most this many bytes.
    UpTo(Bytes),
}

/// Upper limit of the reserve on a GPU, in addition to the canary; see [`KvShare::expected_of`].
pub const RESERVE_MAX: Bytes = Bytes::gib(1);

impl KvShare {
    /// Returns the default for a device.
    ///
    /// On a host device, the KV cache takes nine tenths, because other programs share the memory
    /// and the user has chosen the device's capacity. On a GPU, the KV cache takes all but a
    /// reserve of one 64th of the GPU's memory, at most [`RESERVE_MAX`].
    ///
    /// Workspaces, graphs and overhead have been measured before the KV cache is sized. The reserve
    /// is for memory that is allocated outside leases after READY: the stream of a restarted lane,
    /// a library kernel that is loaded late and, by far the largest, the context of another process
    /// that only queries the GPU (524 MiB on an H200 with driver 580). The driver itself needs no
    /// reserve: a GPU filled to its last page still launches kernels, replays graphs and loads
    /// modules. Demand beyond the reserve is met by the canary.
    pub fn expected_of(is_host: bool, total: Bytes) -> Self {
        if is_host { KvShare::Fraction(0.9) } else { KvShare::AllBut(RESERVE_MAX.min(total / 64)) }
    }

    /// Returns the bytes that remain for the KV cache if all memory of this process must stay
    /// within a fraction of the whole device. `outside_pool` is the memory that this process holds
    /// in addition to the KV cache. vLLM calls this fraction `gpu_memory_utilization`.
    pub fn of_whole(fraction: f64, total: Bytes, outside_pool: Bytes) -> Self {
        KvShare::UpTo(total.share(fraction).saturating_sub(outside_pool))
    }

    fn of(self, left: Bytes) -> Bytes {
        match self {
            KvShare::Fraction(fraction) => left.share(fraction),
            KvShare::AllBut(reserve) => left.saturating_sub(reserve),
            KvShare::UpTo(bytes) => left.min(bytes),
        }
    }

    /// Returns the minimum size of the KV cache, given the `probe` bytes that are already backed.
    /// The reserve shrinks in favor of the probe, which was stressed: a nearly full GPU should
    /// serve a few requests rather than none.
    fn least(self, probe: Bytes) -> Bytes {
        match self {
            KvShare::Fraction(_) | KvShare::UpTo(_) => Bytes::ZERO,
            KvShare::AllBut(_) => probe,
        }
    }
}

/// Inputs that determine the size of the KV cache.
#[derive(Clone, Copy, Debug)]
pub struct Sizing {
    /// Bytes that the ledger could grant now.
    pub available: Bytes,
    /// Bytes that the probe's lease already holds.
    pub probe: Bytes,
    /// Limit on the size of the KV cache, relative to `available + probe`.
    pub share: KvShare,
    /// The size that the user fixed, in tokens.
    pub pinned_tokens: Option<usize>,
}

impl Sizing {
    /// Returns the number of KV blocks if no attempt was refused memory before: the share of
    /// `available + probe`, in whole pages for each layer, or the size that the user fixed.
    pub fn blocks(&self, shape: KvShape, page: Bytes) -> usize {
        if let Some(tokens) = self.pinned_tokens {
            return tokens.div_ceil(BLOCK_TOKENS);
        }
        let target = self.share.of(self.available + self.probe);
        KvMemory::blocks_in(shape, target.max(self.share.least(self.probe)), page)
    }
}

/// The shortest useful context: enough for a chat template, a question and a word of a reply.
pub const CONTEXT_TOKENS_LEAST: usize = 64;

#[cfg(test)]
mod tests {
    use bursar_kernels::DType;

    use super::*;

    const SHAPE: KvShape = KvShape { layers: 4, kv_heads: 2, head_dim: 32, dtype: DType::F32 };
    const PAGE: Bytes = Bytes(64 << 10);

    fn sizing() -> Sizing {
        Sizing { available: Bytes::mib(90), probe: Bytes::mib(10), share: KvShare::Fraction(0.9), pinned_tokens: None }
    }

    #[test]
    fn the_target_is_rounded_to_whole_pages() {
        let blocks = sizing().blocks(SHAPE, PAGE);
        assert_eq!(SHAPE.block_bytes(), Bytes(8192));
        assert_eq!(blocks, 90 * 1024 * 1024 / 4 / 65536 * 8);
        assert!(KvMemory::bytes(SHAPE, blocks, PAGE) <= Bytes::mib(90));
    }

    #[test]
    fn a_gpu_keeps_only_the_documented_reserve() {
        let (card, left) = (Bytes::mib(143_155), Bytes::gib(121));
        assert_eq!(KvShare::expected_of(false, card), KvShare::AllBut(RESERVE_MAX));
        assert_eq!(
            KvShare::expected_of(false, Bytes::gib(8)),
            KvShare::AllBut(Bytes::mib(128)),
            "a small card keeps less"
        );
        assert_eq!(KvShare::expected_of(true, card), KvShare::Fraction(0.9));
        // As in Qwen2.5-VL-7B: 57,344 bytes per token.
        let seven = KvShape { layers: 28, kv_heads: 4, head_dim: 128, dtype: DType::BF16 };
        let page = Bytes::mib(2);
        let expected =
            Sizing { available: left, probe: Bytes::ZERO, share: KvShare::expected_of(false, card), ..sizing() };
        let taken = KvMemory::bytes(seven, expected.blocks(seven, page), page);
        let rest = left.saturating_sub(taken);
        assert!(
            rest >= RESERVE_MAX && rest < RESERVE_MAX + page * 28,
            "whole pages per layer are taken; {rest} are left"
        );
        let more = Sizing { share: KvShare::Fraction(1.0), ..expected };
        assert!(
            KvMemory::bytes(seven, more.blocks(seven, page), page) > taken,
            "an explicit choice may use the reserve too"
        );
    }

    #[test]
    fn a_reserve_larger_than_available_memory_keeps_the_probes_size() {
        let scarce = Sizing { share: KvShare::AllBut(Bytes::gib(1)), ..sizing() };
        assert_eq!(scarce.blocks(SHAPE, PAGE), 10 * 1024 * 1024 / 4 / 65536 * 8);
        let none = Sizing { probe: Bytes::ZERO, ..scarce };
        assert_eq!(none.blocks(SHAPE, PAGE), 0);
    }

    #[test]
    fn each_refused_attempt_requests_five_percent_fewer_whole_blocks() {
        let targets: Vec<_> = (0..4).map(|shrinks| shrunk(1447, shrinks)).collect();
        assert_eq!(targets, [1447, 1374, 1305, 1240]);
        assert_eq!(shrunk(100, 1), 95, "five percent of 100 blocks are exactly 5");
        assert_eq!((shrunk(0, 3), shrunk(1, 1), shrunk(usize::MAX >> 8, 1) > 0), (0, 0, true));
        let (often, exact) = (shrunk(1_000_000, 20), 1e6 * 0.95f64.powi(20));
        assert!((often as f64 - exact).abs() <= 1.0, "{often} attempts; expected about {exact}");
    }

    #[test]
    fn a_pinned_size_is_used_unchanged() {
        let pinned = Sizing { pinned_tokens: Some(100), ..sizing() };
        assert_eq!(pinned.blocks(SHAPE, PAGE), 7);
    }

    #[test]
    fn a_records_blocks_hold_sixteen_tokens_each() {
        let (sequences, step_tokens, draft_tokens) = (1, 16, 0);
        let (launch_patches, cache_rows) = (0, 0);
        let (peaks, costs) = (Vec::new(), MeasuredCosts::default());
        let record = ProfileRecord {
            sequences,
            step_tokens,
            draft_tokens,
            launch_patches,
            cache_rows,
            kv_blocks: 3,
            peaks,
            costs,
        };
        assert_eq!(record.kv_tokens(), 48);
    }
}
