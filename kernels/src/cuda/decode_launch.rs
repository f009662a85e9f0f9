//! Distribution of a decode step over a GPU: warps per thread block, thread blocks, and the pieces
//! that runs of keys are cut into.
//!
//! A run is the keys of one sequence and one KV head, read for up to `TILE_QUERIES` query heads. A
//! KV head with more query heads has several runs. If the number of runs is close to the number of
//! thread blocks of eight, four, two or one warps that fit on the device, each thread block
//! processes a whole run, and no results are merged between thread blocks. If there are few runs,
//! each run is cut into short pieces. Otherwise the runs are split into equal shares for thread
//! blocks of four warps. The thresholds were measured on an H200 (`benches/h200.md`).

use super::contract::{HeadDim, attention_decode};

/// Warps that fit on a Hopper SM; each warp has a ring of cache blocks in shared memory.
const WARPS: usize = attention_decode::WARPS_MAX;

/// Warps per thread block when runs are split into equal shares.
const SHARED_WARPS: usize = 4;

/// Up to this many runs are cut into short pieces, each for a thread block of eight warps. The
/// device is then far from full, and latency dominates.
const FEW_RUNS: usize = 32;

/// Minimum length of a piece, in cache blocks, if there are few runs.
const SHORT_PIECE: u32 = 8;
/// Minimum length of a piece, in cache blocks, if there are many runs.
const PIECE: u32 = 20;

/// The thread blocks of one launch, and how they split runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DecodeLaunch {
    /// Warps per thread block.
    pub warps: usize,
    /// Number of thread blocks.
    pub workers: usize,
    /// Minimum length of a piece of a run, in cache blocks.
    pub piece: u32,
}

impl DecodeLaunch {
    /// Returns the launch for `sequences` sequences of one row each, on a device with Hopper's
    /// shared memory per SM.
    pub(super) fn of(sequences: usize, heads: usize, kv_heads: usize, sms: usize) -> Self {
        let runs = sequences * kv_heads * (heads / kv_heads).div_ceil(attention_decode::TILE_QUERIES);
        let of_warps = |warps, piece| DecodeLaunch { warps, workers: sms * WARPS / warps, piece };
        if runs <= FEW_RUNS {
            return of_warps(8, SHORT_PIECE);
        }
        if 3 * runs <= sms * WARPS / SHARED_WARPS {
            return of_warps(SHARED_WARPS, SHORT_PIECE);
        }
        // `percent` is the minimum percentage of thread blocks that have a run. It is higher for
        // fewer warps per thread block, where idle thread blocks reduce the read bandwidth.
        let fills = |warps: usize, percent: usize| {
            let blocks = sms * WARPS / warps;
            runs <= blocks && 100 * runs >= percent * blocks
        };
        let whole = [(8, 70), (2, 85), (1, 90)].into_iter().find(|(warps, percent)| fills(*warps, *percent));
        of_warps(whole.map_or(SHARED_WARPS, |(warps, _)| warps), PIECE)
    }

    /// Limits this launch to `shared` bytes of shared memory per thread block, if the ring
    /// of a warp has `ring` bytes. A launch that does not fit gets fewer warps, and one
    /// thread block per SM.
    pub(super) fn within(self, shared: usize, ring: usize, sms: usize) -> Self {
        if WARPS * ring <= shared {
            return self;
        }
        // With one thread block per SM, not every run can have its own thread block. Thread blocks
        // therefore have at least as many warps as when runs are split into equal shares.
        DecodeLaunch { warps: self.warps.max(SHARED_WARPS).min(shared / ring), workers: sms, piece: self.piece }
    }

    /// Returns the number of f32 values in all partial results that thread blocks leave for other
    /// thread blocks to merge.
    pub(super) fn part_numbers(&self, head_dim: HeadDim) -> usize {
        self.workers * attention_decode::PARTS * attention_decode::part_numbers(head_dim)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(sequences: usize) -> (usize, usize, u32) {
        let DecodeLaunch { warps, workers, piece } = DecodeLaunch::of(sequences, 28, 4, 132);
        (warps, workers, piece)
    }

    #[test]
    fn decode_runs_stay_whole_when_they_fill_the_gpu() {
        for (sequences, warps) in [(33, 8), (64, 4), (66, 4), (132, 2), (128, 2), (264, 1), (256, 1)] {
            assert_eq!(launch(sequences), (warps, 132 * 8 / warps, 20), "{sequences} sequences");
        }
    }

    #[test]
    fn decode_runs_that_do_not_fill_the_gpu_evenly_are_split() {
        assert_eq!(launch(1), (8, 132, 8));
        assert_eq!(launch(8), (8, 132, 8));
        for sequences in [9, 16, 22] {
            assert_eq!(launch(sequences), (4, 264, 8), "{sequences} sequences");
        }
        for sequences in [23, 40, 96, 192, 224, 265, 1024] {
            assert_eq!(launch(sequences), (4, 264, 20), "{sequences} sequences");
        }
    }

    #[test]
    fn groups_of_more_than_eight_heads_become_several_runs() {
        assert_eq!(DecodeLaunch::of(64, 32, 4, 132), DecodeLaunch::of(64, 28, 4, 132));
        assert_eq!(DecodeLaunch::of(64, 36, 4, 132), DecodeLaunch::of(128, 28, 4, 132));
    }

    #[test]
    fn little_shared_memory_means_fewer_warps_and_blocks() {
        let wide = DecodeLaunch::of(64, 28, 4, 80);
        assert_eq!(wide.within(232_448, 24_576, 80), wide);
        let narrow = DecodeLaunch::of(1, 28, 4, 80).within(65_536, 24_576, 80);
        assert_eq!(narrow, DecodeLaunch { warps: 2, workers: 80, piece: 8 });
        // On an A100, whole runs would use thread blocks of one warp.
        assert_eq!(DecodeLaunch::of(208, 28, 4, 108).warps, 1);
        let shared = DecodeLaunch::of(208, 28, 4, 108).within(166_912, 24_576, 108);
        assert_eq!(shared, DecodeLaunch { warps: 4, workers: 108, piece: 20 });
    }
}
