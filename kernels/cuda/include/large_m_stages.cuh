// Stages of the GEMMs with many rows on Hopper: gemm_large_m.cu, gemm_large_m_e4m3.cu and
// experts_large_m_product.cuh.
#pragma once

#include "contract.cuh"
#include "hopper_pipeline.cuh"

using contract::gemm_large_m::BOX;                            // rows and columns of an out box
using contract::gemm_large_m::MULTIPLIERS;                    // warpgroups that multiply, 64 rows of the tile each
using contract::gemm_large_m::STAGES;
using contract::gemm_large_m::THREADS;
using contract::gemm_large_m::TILE_ROWS;                      // rows of x in a tile
using contract::gemm_large_m::TILE_WEIGHTS;                   // rows of the weight in a tile
constexpr uint32_t BLOCKS = contract::gemm_large_m::CLUSTER;  // blocks per cluster, stacked along the rows
// Number of rows of the weight that a block copies, and that one E4M3 product reads.
constexpr uint32_t HALF = TILE_WEIGHTS / 2;
constexpr uint32_t X_BYTES = TILE_ROWS * STEP_ROW_BYTES;      // 16 KiB per step
constexpr uint32_t HALF_BYTES = HALF * STEP_ROW_BYTES;        // 16 KiB
constexpr uint32_t STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr uint32_t BOX_BYTES = BOX * BOX * 2;
constexpr uint32_t STAGING_AT = STAGES * STAGE_BYTES;         // two boxes per multiplying warpgroup
static_assert(TILE_ROWS == 64 * MULTIPLIERS && BOX == 64 && TILE_WEIGHTS == 256,
              "the assignment of sums to threads assumes these sizes");
static_assert(THREADS == (1 + MULTIPLIERS) * WARPGROUP, "MULTIPLIERS and one copying warpgroup");
static_assert(contract::gemm_large_m::SHARED_BYTES == STAGING_AT + 2 * MULTIPLIERS * BOX_BYTES,
              "the host launches with this many bytes");

// A position in the ring.
using LargeMRing = FixedRing<STAGES, STAGE_BYTES, X_BYTES>;

// The pipeline without LEAD, BEGIN and RELEASE, which each kernel adds.
struct LargeMPipeline {
    using Ring = LargeMRing&;
    using Barriers = RingBarriers<STAGES>;
    static constexpr uint32_t X_BYTES = ::X_BYTES / MULTIPLIERS;
    static constexpr uint32_t BLOCKS = ::BLOCKS, CONSUMERS = MULTIPLIERS;
};

