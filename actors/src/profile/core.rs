//! The arithmetic of sizing: pure.

use std::time::Duration;

use bursar_budgets::Bytes;
use bursar_kernels::{BLOCK_TOKENS, KvShape};

use crate::{memory::KvMemory, supervise::Intensity};

/// Attempts in all: the first and three smaller ones.
pub const ATTEMPTS_MAX: u32 = 4;

/// Attempts that die are begun again as often as those that are refused memory, but after a wait.
pub const ATTEMPTS: Intensity =
    Intensity { restarts_max: ATTEMPTS_MAX as usize - 1, within: Duration::MAX, back_off: Duration::from_millis(10) };

/// What a refused target is multiplied by for the next attempt.
pub const SHRINK: f64 = 0.95;

/// What serving may do at once: what was stressed, and nothing more. Permits are made from this, nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileRecord {
    /// Sequences in a step.
    pub sequences: usize,
    /// Tokens in a step.
    pub step_tokens: usize,
    /// Patches in a launch.
    pub launch_patches: usize,
    /// Rows of the vision cache: embeddings, each of which stands for a token of a prompt.
    pub cache_rows: usize,
    /// Blocks of keys and values, each of 16 tokens over all layers.
    pub kv_blocks: usize,
    /// Each corner with its workspace's peak, by plan and by measurement alike.
    pub peaks: Vec<(&'static str, Bytes)>,
}

impl ProfileRecord {
    /// Tokens that the blocks hold.
    pub fn kv_tokens(&self) -> usize {
        self.kv_blocks * BLOCK_TOKENS
    }
}

/// What the size of the cache follows from.
#[derive(Clone, Copy, Debug)]
pub struct Sizing {
    /// What the ledger could grant now.
    pub available: Bytes,
    /// What the probe's lease holds already.
    pub probe: Bytes,
    /// The share of both that the cache takes.
    pub memory_fraction: f64,
    /// Attempts before this one that were refused memory.
    pub shrinks: u32,
    /// A size fixed by the user, in tokens.
    pub pinned_tokens: Option<usize>,
}

impl Sizing {
    /// The blocks to settle on: `floor((available + probe) * fraction / bytes of a block)` in whole pages a layer, five
    /// per cent less for each attempt that was refused; or what the user has fixed.
    pub fn blocks(&self, shape: KvShape, page: Bytes) -> usize {
        if let Some(tokens) = self.pinned_tokens {
            return tokens.div_ceil(BLOCK_TOKENS);
        }
        let share = self.memory_fraction * SHRINK.powi(self.shrinks as i32);
        let bytes = Bytes(((self.available + self.probe).0 as f64 * share) as u64);
        KvMemory::blocks_in(shape, bytes, page)
    }
}

#[cfg(test)]
mod tests {
    use bursar_kernels::DType;

    use super::*;

    const SHAPE: KvShape = KvShape { layers: 4, kv_heads: 2, head_dim: 32, dtype: DType::F32 };
    const PAGE: Bytes = Bytes(64 << 10);

    fn sizing() -> Sizing {
        Sizing {
            available: Bytes::mib(90),
            probe: Bytes::mib(10),
            memory_fraction: 0.9,
            shrinks: 0,
            pinned_tokens: None,
        }
    }

    #[test]
    fn the_target_is_paid_for_in_whole_pages() {
        let blocks = sizing().blocks(SHAPE, PAGE);
        assert_eq!(SHAPE.block_bytes(), Bytes(8192));
        assert_eq!(blocks, 90 * 1024 * 1024 / 4 / 65536 * 8);
        assert!(KvMemory::bytes(SHAPE, blocks, PAGE) <= Bytes::mib(90));
    }

    #[test]
    fn each_refused_attempt_asks_for_five_per_cent_less() {
        let first = sizing().blocks(SHAPE, PAGE) as f64;
        let third = Sizing { shrinks: 2, ..sizing() }.blocks(SHAPE, PAGE) as f64;
        assert!((third / first - 0.95 * 0.95).abs() < 0.01, "{third} of {first}");
    }

    #[test]
    fn a_pinned_size_is_not_sized() {
        let pinned = Sizing { pinned_tokens: Some(100), shrinks: 3, ..sizing() };
        assert_eq!(pinned.blocks(SHAPE, PAGE), 7);
    }
}
