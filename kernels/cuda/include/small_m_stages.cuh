// Work distribution of small_m_product.cuh: shared memory and its stages, the ranges of units that
// blocks take, the features of a tile, and the warp that keeps the stages full.
#pragma once

#include "contract.cuh"
#include "element.cuh"
#include "small_m_formats.cuh"
#include "small_m_scales.cuh"
#include "small_m_int4.cuh"
#include "hopper_cluster.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"

using contract::gemm_small_m::ADD_TO_OUT;
using contract::gemm_small_m::CHUNK_COLUMNS;
using contract::gemm_small_m::GATE_ROWS;
using contract::gemm_small_m::MULTIPLIERS;
using contract::gemm_small_m::IS_GELU;
using contract::gemm_small_m::OUT_IS_F32;
using contract::gemm_small_m::STAGES_MAX;
using contract::gemm_small_m::TEAM;
constexpr uint32_t CHUNKS = contract::gemm_small_m::STEP_COLUMNS / CHUNK_COLUMNS;  // chunks of a step
constexpr uint32_t ROW_BYTES = CHUNK_COLUMNS * 2;                                // bytes of a row in a chunk
// CHUNK is the number of columns of a chunk, COLUMNS the number of columns of a step. Both are
// twice as large with one-byte elements.
template <typename Format>
constexpr uint32_t CHUNK = ROW_BYTES / sizeof(typename Format::Operand);
template <typename Format>
constexpr uint32_t COLUMNS = CHUNKS * CHUNK<Format>;
constexpr uint32_t HALF_ROWS = contract::gemm_small_m::TILE_ROWS / 2;  // half of the tallest tile: the rows of one wgmma
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t COPIER = MULTIPLIERS;  // first thread of the copying warp; one more warp writes
static_assert(HALF_ROWS == 64 && MULTIPLIERS == 2 * WARPGROUP, "each warpgroup multiplies one half of the tallest tile");
static_assert(contract::gemm_small_m::THREADS == COPIER + 2 * 32, "MULTIPLIERS, the copying warp and the writing warp");

// IDs of named barriers for a part of the block; 0 is the barrier of all threads.
constexpr uint32_t MULTIPLIERS_MEET = 1;
constexpr uint32_t TILE_TO_WRITE = 2;
constexpr uint32_t WRITER_IS_FREE = 3;

// Shared memory: the stages, then the sums that warps pass to each other, barriers, and a word for
// the whole block. This is more than half of a multiprocessor's 228 KiB, so that no two blocks run
// on the same multiprocessor. Some shared memory is left free, so that small kernels between two of
// these launches in the stream fit next to a block.
template <uint32_t ROWS>
struct Shared {
    // Space for the sums of a tall tile, or for the sums that three other warpgroups send to each
    // warpgroup.
    static constexpr uint32_t SUMS_BYTES = contract::gemm_small_m::SUMS_BYTES<ROWS>;
    static constexpr uint32_t SUMS_AT = contract::gemm_small_m::STAGES_BYTES<ROWS>;
    static constexpr uint32_t FULL_AT = SUMS_AT + SUMS_BYTES;
    static constexpr uint32_t EMPTY_AT = FULL_AT + 8 * STAGES_MAX;
    static constexpr uint32_t WORD_AT = EMPTY_AT + 8 * STAGES_MAX;
    static constexpr uint32_t SUMS_ALL_AT = WORD_AT + 16;  // barriers, one per warpgroup
    static constexpr uint32_t BYTES = WORD_AT + 64;
    static_assert(BYTES == contract::gemm_small_m::SHARED_BYTES<ROWS>, "the host launches with this many bytes");

    // Start of the sums that this warpgroup receives.
    static __device__ __forceinline__ uint32_t sums_at(uint32_t warpgroup) {
        return SUMS_AT + warpgroup * (SUMS_BYTES / 2);
    }
};

template <typename Format>
struct Arguments {
    void* out;
    const typename Format::Element* bias;
    float* parts;
    uint32_t* counters;
    uint32_t out_pitch;
    uint32_t rows;
    uint32_t features;
    uint32_t steps;
    uint32_t tiles;
    uint32_t tile_rows;
    uint32_t flags;
    typename Format::Scales scales;
};

// True if the copying warp copies scales along with each step.
template <typename Format>
constexpr bool COPIES_SCALES = Format::BY_BLOCKS || Format::IS_INT4;

// Layout of a stage: a step's chunks of a tile's rows of the weight, then its chunks of x. If
// chunks have scales, the scales of all stages follow the last stage.
struct Stages {
    uint32_t chunk_bytes;  // bytes of a chunk of the weight, rounded up to eight rows
    uint32_t weight_bytes;
    uint32_t bytes;
    uint32_t count;
    uint32_t copied;  // bytes that TMA copies to a stage
    uint32_t scales_at;

    template <typename Format, uint32_t ROWS>
    static __device__ __forceinline__ Stages of(const Arguments<Format>& arguments) {
        const uint32_t tile_rows = arguments.tile_rows;
        Stages stages;
        uint32_t scale_bytes;  // of a stage
        if constexpr (Format::IS_INT4) {
            const uint32_t copied = tile_rows / BLOCK_ROWS * PIECE_BYTES;
            stages.chunk_bytes = 0;  // not used: a step of the weight is one piece
            stages.weight_bytes = (copied + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES;
            stages.copied = copied + CHUNKS * ROWS * ROW_BYTES;
            scale_bytes = Int4Scales<typename Format::Element>(arguments.scales, tile_rows).bytes();
        } else {
            stages.chunk_bytes = (tile_rows + 7) / 8 * 8 * ROW_BYTES;
            stages.weight_bytes = CHUNKS * stages.chunk_bytes;
            stages.copied = CHUNKS * (tile_rows + ROWS) * ROW_BYTES;
            scale_bytes = Format::BY_BLOCKS ? StepScales<ROWS, CHUNKS>::BYTES : 0;
        }
        stages.bytes = stages.weight_bytes + CHUNKS * ROWS * ROW_BYTES;
        // wgmma always reads 64 rows (128 rows for tall tiles), even if the tile has fewer. After
        // the last stage, these excess reads touch the scales and the sums that warps pass to each
        // other.
        static_assert(Shared<ROWS>::SUMS_BYTES >= HALF_ROWS * ROW_BYTES, "the excess reads end within these sums");
        stages.count = min(STAGES_MAX, Shared<ROWS>::SUMS_AT / (stages.bytes + scale_bytes));
        // With 4-bit integers, the two warpgroups of a low tile take alternate units. With an even
        // number of stages, a stage always has units of the same warpgroup. With an odd number, the
        // units of a stage would alternate between the warpgroups. A warpgroup could then reach a
        // stage before the other warpgroup's unit has arrived there. The stage's barrier would
        // still report the phase of the unit before that, which has the same parity as the phase
        // that the warpgroup waits for, so the warpgroup would read the stage too early.
        if (Format::IS_INT4 && tile_rows <= HALF_ROWS) {
            stages.count &= ~1u;
        }
        stages.scales_at = stages.count * stages.bytes;
        return stages;
    }
};

// A position in the ring of stages.
struct StageCursor {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(const Stages& stages) {
        if (++stage == stages.count) {
            stage = 0;
            parity ^= 1;
        }
    }
    // Advances by `units` units, at most the number of stages.
    __device__ __forceinline__ void advance(const Stages& stages, uint32_t units) {
        stage += units;
        if (stage >= stages.count) {
            stage -= stages.count;
            parity ^= 1;
        }
    }
};

// The contiguous range of units of each block. A unit is one step of one tile.
struct UnitRanges {
    uint32_t units;
    uint32_t blocks;

    __device__ __forceinline__ uint32_t start(uint32_t block) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(units) * block / blocks);
    }
    __device__ __forceinline__ uint32_t block_of(uint32_t unit) const {
        return static_cast<uint32_t>(((static_cast<uint64_t>(unit) + 1) * blocks - 1) / units);
    }
};

// The first feature of a tile. Heights of tiles are as equal as possible. A tile has whole groups
// of eight features if it is gated or consists of blocks.
template <typename Format, bool GATED>
__device__ __forceinline__ uint32_t first_feature(const Arguments<Format>& arguments, uint32_t tile) {
    constexpr uint32_t GROUP = GATED || Format::IS_INT4 ? GATE_ROWS : 1;
    const uint64_t groups = arguments.features / GROUP;
    return static_cast<uint32_t>(groups * tile / arguments.tiles) * GROUP;
}

// The features of a tile. Rows from `end` on belong to another tile or do not exist.
struct Features {
    uint32_t first;
    uint32_t end;
};

template <typename Format, bool GATED>
__device__ __forceinline__ Features features_of(const Arguments<Format>& arguments, uint32_t tile) {
    return {first_feature<Format, GATED>(arguments, tile), first_feature<Format, GATED>(arguments, tile + 1)};
}

// The position in the weight of the next copy. If gated, the tensor map puts eight rows of up after
// the same eight rows of gate, so that one thread has both sums of a feature.
template <typename Format, bool GATED>
struct WeightCursor {
    const TensorMap& weight;
    const Arguments<Format>& arguments;
    uint32_t tile;
    uint32_t column;
    uint32_t row;  // first row of the tile; if gated or in blocks, its first group of eight rows
    uint32_t scales_row, scales_rows;  // the tile's scale rows, if each group of columns has scales

    __device__ __forceinline__ WeightCursor(const TensorMap& weight, const Arguments<Format>& arguments, uint32_t unit)
        : weight(weight), arguments(arguments) {
        tile = unit / arguments.steps;
        column = unit % arguments.steps * COLUMNS<Format>;
        find_row();
    }
    __device__ __forceinline__ void find_row() {
        row = first_feature<Format, GATED>(arguments, tile) / (GATED || Format::IS_INT4 ? GATE_ROWS : 1);
        static_assert(!GATED || !Format::BY_BLOCKS, "`row` is the index of a feature only without a gate");
        if constexpr (Format::BY_BLOCKS) {
            const uint32_t end = first_feature<Format, GATED>(arguments, tile + 1);
            scales_row = row / arguments.scales.height;
            scales_rows = (end - 1) / arguments.scales.height + 1 - scales_row;
        }
    }
    __device__ __forceinline__ void copy(const Stages& stages, uint32_t stage, uint32_t barrier) const {
        if constexpr (Format::IS_INT4) {
            // A word of the map is eight columns of a row, and a block has eight rows.
            if (GATED) {
                copy_box_once(stage, weight, barrier, column, row, 0);
            } else {
                copy_box_once(stage, weight, barrier, column, row);
            }
        } else {
#pragma unroll
            for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                const uint32_t at = stage + chunk * stages.chunk_bytes, from = column + chunk * CHUNK<Format>;
                if (GATED) {
                    copy_box_once(at, weight, barrier, from, 0, 0, row);
                } else {
                    copy_box_once(at, weight, barrier, from, row);
                }
            }
        }
    }
    __device__ __forceinline__ void advance() {
        column += COLUMNS<Format>;
        if (column == arguments.steps * COLUMNS<Format>) {
            column = 0;
            tile += 1;
            find_row();
        }
    }
};

// Copies a step of x from this column on.
template <typename Format, uint32_t ROWS>
__device__ __forceinline__ void copy_x(const TensorMap& x, uint32_t at, uint32_t barrier, uint32_t column) {
#pragma unroll
    for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
        copy_box(at + chunk * ROWS * ROW_BYTES, x, barrier, column + chunk * CHUNK<Format>, 0);
    }
}

// Keeps the stages full. The thread with `leads` copies weights and x. If groups of columns have
// scales, the whole warp of that thread calls this function and copies scales (COPIES_SCALES).
template <typename Format, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void copy(const TensorMap& weight, const TensorMap& x, const Arguments<Format>& arguments,
                                     const Stages& stages, uint32_t shared, uint32_t first, uint32_t last, bool leads) {
    using Copies = StepScales<ROWS, CHUNKS>;
    WeightCursor<Format, GATED> place(weight, arguments, first);
    const uint32_t held = min(stages.count, last - first);
    const auto full = [&](uint32_t stage) { return shared + Shared<ROWS>::FULL_AT + 8 * stage; };
    const auto scales_at = [&](uint32_t stage) {
        if constexpr (Format::IS_INT4) {
            const Int4Scales<typename Format::Element> scales(arguments.scales, arguments.tile_rows);
            return shared + stages.scales_at + stage * scales.bytes();
        }
        return shared + stages.scales_at + stage * Copies::BYTES;
    };
    const auto copy_of_weight = [&](uint32_t stage) {
        if (leads) {
            barrier_arrive_expecting(full(stage), stages.copied);
            place.copy(stages, shared + stage * stages.bytes, full(stage));
        }
        if constexpr (Format::BY_BLOCKS) {
            Copies::copy_weight(scales_at(stage), arguments.scales, place.scales_row, place.scales_rows,
                                place.column / GROUP);
        }
        if constexpr (Format::IS_INT4) {
            const Int4Scales<typename Format::Element> scales(arguments.scales, arguments.tile_rows);
            scales.template copy<GATED>(scales_at(stage), place.row, arguments.features / GATE_ROWS, place.column);
            barrier_arrive_after_copies(full(stage));
        }
    };
    const auto copy_of_x = [&](uint32_t stage, uint32_t column) {
        if (leads) {
            copy_x<Format, ROWS>(x, shared + stage * stages.bytes + stages.weight_bytes, full(stage), column);
        }
    };
    const auto copy_scales_of_x = [&](uint32_t stage, uint32_t column) {
        if constexpr (Format::BY_BLOCKS) {
            Copies::copy_x(scales_at(stage), arguments.scales, arguments.rows, column / GROUP);
            barrier_arrive_after_copies(full(stage));
        }
    };
    const uint32_t first_column = place.column;
    const auto each_held = [&](auto copy) {
        uint32_t column = first_column;
        for (uint32_t stage = 0; stage < held; ++stage) {
            copy(stage, column);
            column = column + COLUMNS<Format> == arguments.steps * COLUMNS<Format> ? 0 : column + COLUMNS<Format>;
        }
    };
    for (uint32_t stage = 0; stage < held; ++stage) {
        copy_of_weight(stage);
        place.advance();
    }
    wait_for_previous_kernel();
    each_held(copy_of_x);
    each_held(copy_scales_of_x);
    StageCursor to;
#pragma unroll 1
    for (uint32_t unit = first + held; unit < last; ++unit) {
        barrier_wait(shared + Shared<ROWS>::EMPTY_AT + 8 * to.stage, to.parity);
        copy_of_weight(to.stage);
        copy_of_x(to.stage, place.column);
        copy_scales_of_x(to.stage, place.column);
        place.advance();
        to.advance(stages);
    }
}
