//! The arithmetic of sizing: pure.

use std::time::Duration;

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, KvShape};
use serde::Serialize;

use crate::{compute::memory::KvMemory, pace::MeasuredCosts, supervise::Intensity};

/// The most attempts: the first, and three smaller ones.
pub const ATTEMPTS_MAX: u32 = 4;

/// Attempts that die are retried as often as those refused memory, but after a wait. A model that has served for an
/// hour since may be refused again.
pub const ATTEMPTS: Intensity = Intensity {
    restarts_max: ATTEMPTS_MAX as usize - 1,
    within: Duration::from_secs(3600),
    back_off: Duration::from_millis(10),
};

/// What is left of a target after an attempt was refused memory, in per cent.
pub const SHRINK_PER_CENT: u64 = 95;

/// The target after `shrinks` refused attempts: `blocks` times 0.95 to that power, in whole blocks.
pub fn shrunk(blocks: usize, shrinks: u32) -> usize {
    // 100 to the eighth power still leaves room in a u128 for more blocks than any device has.
    let at_once = shrinks.min(8);
    let (of, parts) = (u128::from(SHRINK_PER_CENT).pow(at_once), 100u128.pow(at_once));
    let left = (blocks as u128 * of / parts) as usize;
    if shrinks > at_once { shrunk(left, shrinks - at_once) } else { left }
}

/// What serving may do at once: what was stressed, and nothing more. It is the only source of permits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProfileRecord {
    /// Sequences in a step.
    pub sequences: usize,
    /// Tokens in a step.
    pub step_tokens: usize,
    /// Patches in a launch.
    pub launch_patches: usize,
    /// Rows of the vision cache. Each holds the embedding of one prompt token.
    pub cache_rows: usize,
    /// Blocks of keys and values, each of 16 tokens over all layers.
    pub kv_blocks: usize,
    /// Each worst case with the peak of its workspace, equal in plan and measurement.
    pub peaks: Vec<(&'static str, Bytes)>,
    /// What steps and launches took.
    pub costs: MeasuredCosts,
}

impl ProfileRecord {
    /// Tokens that the blocks hold.
    pub fn kv_tokens(&self) -> usize {
        self.kv_blocks * BLOCK_TOKENS
    }
}

/// How much of the remaining memory keys and values take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvShare {
    /// This share of it, above 0 and up to 1: the user's, or a polite one on a host that others use.
    Fraction(f64),
    /// All but this many bytes, which stay free for what is later taken outside leases.
    AllBut(Bytes),
    /// At most this many bytes.
    UpTo(Bytes),
}

/// The most bytes kept free of a GPU, besides the canary; see [`KvShare::expected_of`].
pub const RESERVE_MAX: Bytes = Bytes::gib(1);

impl KvShare {
    /// The default for a device.
    ///
    /// On a host device nine tenths: other programs share its memory, and the user set its capacity aside. On a GPU all
    /// but a 64th of the card, at most [`RESERVE_MAX`].
    ///
    /// Workspaces, graphs and overhead are measured by then. The reserve is for what comes after READY outside any
    /// lease: the stream of a restarted lane, a library kernel loaded late, and, by far the largest, the context of
    /// another process that only looks (524 MiB on an H200 with driver 580). The driver needs nothing: a card filled to
    /// its last page launches, replays and loads. What exceeds the reserve comes from the canary.
    pub fn expected_of(is_host: bool, total: Bytes) -> Self {
        if is_host { KvShare::Fraction(0.9) } else { KvShare::AllBut(RESERVE_MAX.min(total / 64)) }
    }

    /// What a fraction of the whole device leaves for keys and values, if everything of ours must stay within it.
    /// `beside` is what we hold besides keys and values. vLLM calls this `gpu_memory_utilization`.
    pub fn of_whole(fraction: f64, total: Bytes, beside: Bytes) -> Self {
        KvShare::UpTo(total.share(fraction).saturating_sub(beside))
    }

    fn of(self, left: Bytes) -> Bytes {
        match self {
            KvShare::Fraction(fraction) => left.share(fraction),
            KvShare::AllBut(reserve) => left.saturating_sub(reserve),
            KvShare::UpTo(bytes) => left.min(bytes),
        }
    }

    /// The minimum, given the `probe` that is there already. A reserve gives way to the probe, which was stressed: a
    /// nearly full card should serve a few requests rather than none.
    fn least(self, probe: Bytes) -> Bytes {
        match self {
            KvShare::Fraction(_) | KvShare::UpTo(_) => Bytes::ZERO,
            KvShare::AllBut(_) => probe,
        }
    }
}

/// What determines the size of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Sizing {
    /// Bytes that the ledger could grant now.
    pub available: Bytes,
    /// Bytes that the probe's lease already holds.
    pub probe: Bytes,
    /// How much of both the cache takes.
    pub share: KvShare,
    /// The size that the user fixed, in tokens.
    pub pinned_tokens: Option<usize>,
}

impl Sizing {
    /// The blocks to settle on if nothing was refused before: the share of `available + probe`, in whole pages for each
    /// layer, or the size that the user fixed.
    pub fn blocks(&self, shape: KvShape, page: Bytes) -> usize {
        if let Some(tokens) = self.pinned_tokens {
            return tokens.div_ceil(BLOCK_TOKENS);
        }
        let target = self.share.of(self.available + self.probe);
        KvMemory::blocks_in(shape, target.max(self.share.least(self.probe)), page)
    }
}

/// The shortest useful context: room for a chat's template, a question and a word of a reply.
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
    fn a_gpu_keeps_a_stated_reserve_and_nothing_else() {
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
        assert!(rest >= RESERVE_MAX && rest < RESERVE_MAX + page * 28, "whole pages a layer: {rest} are left");
        let more = Sizing { share: KvShare::Fraction(1.0), ..expected };
        assert!(KvMemory::bytes(seven, more.blocks(seven, page), page) > taken, "who says so takes the reserve too");
    }

    #[test]
    fn a_reserve_beyond_the_rest_leaves_the_probes_size() {
        let scarce = Sizing { share: KvShare::AllBut(Bytes::gib(1)), ..sizing() };
        assert_eq!(scarce.blocks(SHAPE, PAGE), 10 * 1024 * 1024 / 4 / 65536 * 8);
        let none = Sizing { probe: Bytes::ZERO, ..scarce };
        assert_eq!(none.blocks(SHAPE, PAGE), 0);
    }

    #[test]
    fn each_refused_attempt_asks_five_percent_less_in_whole_blocks() {
        let targets: Vec<_> = (0..4).map(|shrinks| shrunk(1447, shrinks)).collect();
        assert_eq!(targets, [1447, 1374, 1305, 1240]);
        assert_eq!(shrunk(100, 1), 95, "no block is lost to rounding where none need be");
        assert_eq!((shrunk(0, 3), shrunk(1, 1), shrunk(usize::MAX >> 8, 1) > 0), (0, 0, true));
        let (often, exact) = (shrunk(1_000_000, 20), 1e6 * 0.95f64.powi(20));
        assert!((often as f64 - exact).abs() <= 1.0, "{often} of {exact}");
    }

    #[test]
    fn a_pinned_size_is_used_unchanged() {
        let pinned = Sizing { pinned_tokens: Some(100), ..sizing() };
        assert_eq!(pinned.blocks(SHAPE, PAGE), 7);
    }

    #[test]
    fn a_records_blocks_hold_sixteen_tokens_each() {
        let (sequences, step_tokens, launch_patches, cache_rows) = (1, 16, 0, 0);
        let (peaks, costs) = (Vec::new(), MeasuredCosts::default());
        let record = ProfileRecord { sequences, step_tokens, launch_patches, cache_rows, kv_blocks: 3, peaks, costs };
        assert_eq!(record.kv_tokens(), 48);
    }
}
