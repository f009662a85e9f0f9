//! Pure: the division of a GEMM into tiles and thread blocks, by this project's kernels for Hopper
//! and by the streaming kernel for 4-bit integers.

use bursar_budgets::Bytes;
use serde::{Deserialize, Serialize};

use super::{
    super::contract::{
        GATED_WIDTHS, SmallMRows, gemm_int4, gemm_large_m, gemm_medium_m,
        gemm_small_m::{GATE_ROWS, STEP_COLUMNS, STREAM_COUNTERS, TEAM, TILE_ROWS, part_numbers},
    },
    problem::GemmProblem,
};
use crate::{DType, int4::BLOCK_ROWS};

/// Number of thread blocks of the small-m kernel that share a tile, if the device has enough. A
/// larger number makes taller tiles, up to 128 rows, and more partial sums between thread blocks.
/// With two, the sums stay within a cluster (`TEAM`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Cut(usize);

impl Cut {
    /// The cuts that autotuning chooses from; `tools/gpu/products.py` times the same cuts. The last
    /// cut makes as few tiles as possible.
    pub(super) const ALL: [Cut; 4] = [Cut(2), Cut(1), Cut(4), Cut(132)];
    /// The cut of a GEMM that was not measured.
    pub(super) const DEFAULT: Cut = Cut::ALL[0];
}

/// The tiles and thread blocks of a GEMM that the small-m kernel computes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SmallMTiles {
    pub blocks: usize,
    pub tiles: usize,
    /// Weight rows of the tallest tile. In a gated GEMM, this includes the up rows.
    pub tile_rows: usize,
    pub steps: usize,
}

impl SmallMTiles {
    pub(super) fn of(problem: GemmProblem, cut: Cut, sms: usize) -> Self {
        let steps = problem.in_features.div_ceil(STEP_COLUMNS * DType::F16.bits() / problem.x_type(DType::F16).bits());
        // Tiles are cut between features. In a gated GEMM, tiles are cut between groups of eight
        // features with their gates, and in a GEMM with 4-bit integers between blocks.
        let (groups, most, rows) = if problem.gates {
            (problem.out_features / 2 / GATE_ROWS, TILE_ROWS / 2 / GATE_ROWS, 2 * GATE_ROWS)
        } else if problem.is_int4() {
            (problem.out_features / BLOCK_ROWS, TILE_ROWS / BLOCK_ROWS, BLOCK_ROWS)
        } else {
            (problem.out_features, TILE_ROWS, 1)
        };
        let blocks = (sms / TEAM * TEAM).min(groups * cut.0);
        // Every thread block, or every group of thread blocks that share tiles, gets the same
        // number of tiles. The number is chosen so that no tile is too tall.
        let at_once = (blocks / cut.0).max(1);
        let tiles = at_once * groups.div_ceil(at_once * most);
        SmallMTiles {
            blocks: blocks.min(tiles * steps).next_multiple_of(TEAM),
            tiles,
            tile_rows: groups.div_ceil(tiles) * rows,
            steps,
        }
    }

    /// Returns the bytes that thread blocks need for the partial sums of shared tiles.
    fn part_bytes(&self, kernel_rows: SmallMRows) -> Bytes {
        DType::F32.bytes(2 * self.blocks * part_numbers(kernel_rows))
    }

    /// Returns `true` if, with every cut, the workspace has space for the partial sums and there is
    /// a counter for each tile.
    pub(super) fn all_fit(problem: GemmProblem, sms: usize, workspace_bytes: usize) -> bool {
        let Some(kernel_rows) = SmallMRows::holding(problem.small_m_sizes(), problem.rows) else { return false };
        Cut::ALL.iter().all(|cut| {
            let tiles = SmallMTiles::of(problem, *cut, sms);
            tiles.part_bytes(kernel_rows).as_usize() <= workspace_bytes && tiles.tiles <= STREAM_COUNTERS
        })
    }
}

/// The units of work and thread blocks of a launch of the streaming kernel for weights of 4-bit
/// integers (`gemm_int4.cu`).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Int4Tiles {
    pub tiles: usize,
    pub blocks: usize,
    /// Units of each thread block. A unit is one step of one tile.
    pub units: usize,
}

impl Int4Tiles {
    /// Divides the units equally among the thread blocks that the device runs at once. If there are
    /// few units, an SM gets fewer thread blocks, because thread blocks with few units add up many
    /// partial sums.
    pub(super) fn of(problem: GemmProblem, kernel_rows: SmallMRows, sms: usize) -> Self {
        /// An SM gets more than half of its possible thread blocks only if each thread block has at
        /// least this many units.
        const UNITS: usize = 3;
        use gemm_int4::{STEP_COLUMNS, TILE_ROWS, blocks};
        let across = TILE_ROWS / problem.rows_per_feature();
        let tiles = problem.features().div_ceil(across);
        let total = tiles * problem.in_features.div_ceil(STEP_COLUMNS);
        let most = blocks(kernel_rows);
        let of_sm = (total / (sms * UNITS)).clamp(most.div_ceil(2), most);
        let units = total.div_ceil(sms * of_sm).max(1);
        Int4Tiles { tiles, blocks: total.div_ceil(units), units }
    }

    /// Returns `true` if the workspace has space for the partial sums of a launch of up to
    /// `ROWS_MAX` rows, and there is a counter for each tile.
    pub(super) fn fit(problem: GemmProblem, sms: usize, workspace_bytes: usize) -> bool {
        let rows = problem.rows.min(gemm_int4::ROWS_MAX);
        let Some(kernel_rows) = SmallMRows::holding(&SmallMRows::UP_TO_64, rows) else { return false };
        let tiles = Int4Tiles::of(problem, kernel_rows, sms);
        let parts = DType::F32.bytes(2 * tiles.blocks * gemm_int4::part_numbers(kernel_rows));
        parts.as_usize() <= workspace_bytes && tiles.tiles <= gemm_int4::STREAM_COUNTERS
    }
}

/// The tiles and thread blocks of a GEMM that the medium-m kernel computes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MediumMTiles {
    /// Index in [`GATED_WIDTHS`] of the number of features per tile.
    pub width: usize,
    pub blocks: usize,
}

impl MediumMTiles {
    /// Chooses the width that leaves the busiest cluster the fewest features. If several widths are
    /// equal in this respect, the largest of them is chosen, because x is then read least often.
    /// The number of thread blocks is at most the number of tiles, and at most the number that the
    /// device runs at once.
    pub(super) fn of(problem: GemmProblem, sms: usize) -> Self {
        use gemm_medium_m::{BLOCK_ROWS, CLUSTER};
        let clusters = (sms / CLUSTER).max(1);
        let tiles = |width: usize| {
            problem.rows.div_ceil(CLUSTER * BLOCK_ROWS) * problem.features().div_ceil(GATED_WIDTHS[width])
        };
        let busiest = |&width: &usize| tiles(width).div_ceil(clusters) * GATED_WIDTHS[width];
        let width = (0..GATED_WIDTHS.len()).rev().min_by_key(busiest).expect("the list of widths is not empty");
        MediumMTiles { width, blocks: CLUSTER * tiles(width).min(clusters) }
    }
}

/// Returns the number of thread blocks per launch of the large-m kernels. This number is at most
/// the number of tiles, and at most the number that the device runs at once.
pub(super) fn large_m_blocks(problem: GemmProblem, sms: usize) -> usize {
    use gemm_large_m::{CLUSTER, TILE_ROWS, TILE_WEIGHTS};
    let across = TILE_WEIGHTS / problem.rows_per_feature();
    let tiles = problem.rows.div_ceil(CLUSTER * TILE_ROWS) * problem.features().div_ceil(across);
    CLUSTER * tiles.min(sms / CLUSTER)
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            super::contract::gemm_small_m::shared_bytes,
            problem::testing::{gated, problem},
        },
        *,
    };

    #[test]
    fn small_m_tiles_cover_all_features_within_the_limits_of_the_kernel() {
        let ungated = [3584, 152_064, 1, 77].map(|features| problem(1, features, 3584));
        for problem in ungated.into_iter().chain([gated(1, 18_944, 3584), gated(1, 8, 3584)]) {
            for cut in Cut::ALL {
                let tiles = SmallMTiles::of(problem, cut, 132);
                let what = format!("{problem:?}, {cut:?}: {tiles:?}");
                assert!(tiles.tiles * tiles.tile_rows >= problem.out_features, "{what}");
                assert!((1..=TILE_ROWS).contains(&tiles.tile_rows), "{what}");
                assert!((1..=132).contains(&tiles.blocks) && tiles.tiles <= STREAM_COUNTERS, "{what}");
                assert!(tiles.blocks.is_multiple_of(TEAM), "{what}");
            }
        }
        let shared = SmallMTiles::of(problem(1, 3584, 3584), Cut(2), 132);
        assert_eq!(shared, SmallMTiles { blocks: 132, tiles: 66, tile_rows: 55, steps: 28 });
        let both = SmallMTiles::of(gated(1, 18_944, 3584), Cut(1), 132);
        assert_eq!((both.tiles, both.tile_rows), (396, 96), "tiles of 48 gate and 48 up features");
        assert_eq!(SmallMTiles::of(problem(1, 4608, 3584), Cut(132), 132).tiles, 36, "the tile count is minimal");
    }

    #[test]
    fn a_small_m_thread_block_takes_more_than_half_of_the_shared_memory_of_an_sm() {
        for rows in SmallMRows::ALL {
            assert!((114 * 1024..=213 * 1024).contains(&shared_bytes(rows)), "{rows:?}: {}", shared_bytes(rows));
        }
        let kernel_rows =
            [0, 1, 8, 9, 64, 65].map(|rows| SmallMRows::holding(&SmallMRows::UP_TO_64, rows).map(SmallMRows::rows));
        assert_eq!(kernel_rows, [None, Some(8), Some(8), Some(16), Some(64), None]);
        assert_eq!(SmallMRows::holding(&SmallMRows::ALL, 65), Some(SmallMRows::R128));
    }

    #[test]
    fn thread_blocks_have_all_units_of_a_weight_of_4_bit_integers() {
        use super::super::problem::testing::int4;
        let ungated = [16, 80, 3584, 152_064].map(|out_features| GemmProblem { out_features, ..int4(8, 128) });
        let gated =
            [16, 80, 18_944].map(|features| GemmProblem { scheme: int4(8, 128).scheme, ..gated(8, features, 3584) });
        for problem in ungated.into_iter().chain(gated) {
            for (rows, most) in [(SmallMRows::R8, 4), (SmallMRows::R64, 2)] {
                let tiles = Int4Tiles::of(problem, rows, 132);
                assert!((1..=132 * most).contains(&tiles.blocks), "{problem:?}: {tiles:?}");
                let total = tiles.tiles * 28;
                assert!(tiles.blocks * tiles.units >= total && (tiles.blocks - 1) * tiles.units < total);
                assert!(Int4Tiles::fit(problem, 132, 32 << 20));
            }
        }
        let down = GemmProblem { in_features: 18_944, x_pitch: 18_944, out_features: 3584, ..int4(1, 128) };
        assert_eq!(Int4Tiles::of(down, SmallMRows::R8, 132), Int4Tiles { tiles: 28, blocks: 518, units: 8 });
        let few = GemmProblem { out_features: 3584, ..int4(1, 128) };
        assert_eq!(Int4Tiles::of(few, SmallMRows::R8, 132), Int4Tiles { tiles: 28, blocks: 262, units: 3 });
        assert!(!Int4Tiles::fit(GemmProblem { rows: 0, ..down }, 132, 32 << 20));
    }

    #[test]
    fn medium_m_tiles_are_as_wide_as_lets_the_busiest_cluster_finish_first() {
        let width = |features: usize| GATED_WIDTHS[MediumMTiles::of(gated(256, features, 3584), 132).width];
        assert_eq!(width(18_944), 96, "7B: three rounds of 66 tiles");
        assert_eq!(width(14_784), 112, "half of 72B: two rounds; a width of 96 would need three");
        assert_eq!(width(14_336), 112, "two rounds, as with 14,784 features");
        assert_eq!(width(8_960), 80, "1.5B: two rounds of the narrowest tiles");
        assert_eq!(width(12_288), 96);
        assert!(
            GATED_WIDTHS.iter().all(|width| width.is_multiple_of(16)),
            "each width holds whole pairs of eight features"
        );
        let one_sm = MediumMTiles::of(gated(256, 64, 3584), 1);
        assert_eq!((GATED_WIDTHS[one_sm.width], one_sm.blocks), (80, 2), "a device with fewer SMs than a cluster");
    }

    #[test]
    fn launches_have_pairs_of_thread_blocks_and_no_more_than_tiles_or_sms() {
        let medium = |rows, features, sms| MediumMTiles::of(gated(rows, features, 3584), sms).blocks;
        assert_eq!(medium(256, 18_944, 132), 132, "three tiles per block");
        assert_eq!(medium(65, 194, 132), 6, "one pair of row tiles, three column tiles of 80 gates");
        assert_eq!(medium(256, 18_944, 79), 78, "the last SM has no partner");
        assert_eq!(large_m_blocks(gated(8192, 18_944, 3584), 132), 132);
        assert_eq!(large_m_blocks(gated(257, 136, 3584), 132), 8, "two pairs of row tiles, two tiles of 128 gates");
        assert_eq!(large_m_blocks(problem(256, 256, 3584), 132), 2);
        assert_eq!(large_m_blocks(problem(8192, 4608, 3584), 79), 78, "the last SM has no partner");
    }
}
