// Tiles of GEMMs with many rows on Hopper: their copies, biases, previous contents and output.
// Shared by gemm_large_m.cu and gemm_large_m_e4m3.cu.
#pragma once

#include "element.cuh"
#include "hopper_store.cuh"
#include "kernel_order.cuh"
#include "large_m_stages.cuh"

// IDs of named barriers: BEGIN for the start of the second multiplying warpgroup, ALONE + w for the
// threads of warpgroup w only.
constexpr uint32_t BEGIN = 1;
constexpr uint32_t ALONE = 2;

enum class Kind { GATED, PLAIN, ADDED };

struct Arguments {
    uint32_t rows;
    uint32_t columns;
    uint32_t in_features;
    uint32_t group;
    uint32_t activation;  // of gates: a value of contract::gate; not used by the kernels for E4M3
};

// Columns of the output in a tile.
template <Kind KIND>
constexpr uint32_t TILE_COLUMNS = KIND == Kind::GATED ? TILE_WEIGHTS / 2 : TILE_WEIGHTS;

// The tiles of a cluster, in steps of DEPTH columns of x and weight. All clusters share one list of
// tiles, which covers `group` pairs of row tiles before it continues with the next columns. The
// region that the clusters process at one time is thus about square, and its operands stay in the
// L2 cache.
template <Kind KIND, uint32_t DEPTH>
struct Tiles {
    static constexpr uint32_t COLUMNS = TILE_COLUMNS<KIND>;
    const uint32_t pairs, across, group, steps;
    uint32_t next;
    uint32_t row = 0, column = 0;  // start of this block's tile

    __device__ __forceinline__ explicit Tiles(const Arguments& arguments)
        : pairs((arguments.rows + BLOCKS * TILE_ROWS - 1) / (BLOCKS * TILE_ROWS)),
          across((arguments.columns + COLUMNS - 1) / COLUMNS),
          group(min(arguments.group, pairs)),
          steps((arguments.in_features + DEPTH - 1) / DEPTH),
          next(blockIdx.x / BLOCKS) {}

    __device__ __forceinline__ bool advance(uint32_t rank) {
        if (next >= pairs * across) {
            return false;
        }
        const uint32_t first = next / (group * across) * group;
        const uint32_t within = next - first * across;
        const uint32_t height = min(group, pairs - first);
        row = ((first + within % height) * BLOCKS + rank) * TILE_ROWS;
        column = within / height * COLUMNS;
        next += gridDim.x / BLOCKS;
        return true;
    }
};

// The biases for the 256 sums per row of a tile. They are loaded when the tile begins, so that
// nothing waits for them when the tile ends. Each warp has all 256 biases: lane i has the pairs i,
// i + 32, i + 64 and i + 96.
template <Kind KIND, typename T>
struct Biases {
    uint32_t pairs[4];

    __device__ __forceinline__ void load(const T* bias, uint32_t column, uint32_t columns) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t at = column + threadIdx.x % 32 * 2 + (KIND == Kind::GATED ? i % 2 : i) * 64;
            const uint32_t skipped = KIND == Kind::GATED ? i / 2 * columns : 0;
            pairs[i] = at < columns ? __ldg(reinterpret_cast<const uint32_t*>(bias + skipped + at)) : 0;
        }
    }

    __device__ __forceinline__ void add(float (&sums)[32][4]) const {
#pragma unroll
        for (uint32_t tile = 0; tile < 32; ++tile) {
            const float2 two = pair_to_floats<T>(
                __shfl_sync(0xffffffffu, pairs[tile / 8], tile % 8 * 4 + threadIdx.x % 4));
            sums[tile][0] += two.x;
            sums[tile][1] += two.y;
            sums[tile][2] += two.x;
            sums[tile][3] += two.y;
        }
    }
};

// Writes one warpgroup's part of a tile through shared memory, two boxes at a time. 
// gated(gate, up) is activation(gate) * up.
template <Kind KIND, typename T, typename Gated>
__device__ __forceinline__ void write_out(const float (&sums)[32][4], const TensorMap& out, uint32_t staging,
                                          uint32_t row, uint32_t column, uint32_t warpgroup, const Gated& gated) {
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t lane = threadIdx.x % 32;
    // Destination of the row that this lane provides to store_quarters, which stores 16 rows and 16
    // columns at once: the upper and the lower eight rows of eight columns, then the same rows of
    // the next eight columns.
    const uint32_t to_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t to_piece = lane / 16;
#pragma unroll
    for (uint32_t first = 0; first < TILE_COLUMNS<KIND>; first += 128) {
        if (thread == 0) {
            stores_read<0>();
        }
        part_sync(ALONE + warpgroup, WARPGROUP);
#pragma unroll
        for (uint32_t piece = 0; piece < 16; piece += 2) {
            uint32_t words[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float(&one)[4] = sums[first / 8 + piece + i / 2];
                if constexpr (KIND == Kind::GATED) {
                    const float(&other)[4] = sums[16 + piece + i / 2];
                    words[i] = TensorCoreElement<T>::pack(gated(one[i % 2 * 2], other[i % 2 * 2]),
                                                          gated(one[i % 2 * 2 + 1], other[i % 2 * 2 + 1]));
                } else {
                    words[i] = TensorCoreElement<T>::pack(one[i % 2 * 2], one[i % 2 * 2 + 1]);
                }
            }
            store_quarters(staging + piece / 8 * BOX_BYTES + Swizzle<64>::place(to_row, piece % 8 + to_piece), words);
        }
        publish_writes();
        part_sync(ALONE + warpgroup, WARPGROUP);
        if (thread == 0) {
            store_box(out, staging, static_cast<int32_t>(column + first), static_cast<int32_t>(row));
            store_box(out, staging + BOX_BYTES, static_cast<int32_t>(column + first + 64), static_cast<int32_t>(row));
        }
    }
}

// Two adjacent elements of the previous contents of the output, from two boxes that contain a
// warpgroup's rows and 128 columns. `tile` selects eight columns, and `half` the upper or lower
// half of a warp's rows.
template <typename T>
__device__ __forceinline__ float2 held_pair(uint32_t boxes, uint32_t tile, uint32_t half) {
    const uint32_t thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    uint32_t pair;
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(pair)
                 : "r"(boxes + tile / 8 * BOX_BYTES + Swizzle<64>::place(row, tile % 8) + thread % 4 * 4)
                 : "memory");
    return pair_to_floats<T>(pair);
}

// Calls `take(sum, held)` for each of this thread's sums, where `held` is the previous contents of
// the output. The previous contents are in two stages of 128 columns each.
template <typename T, typename Pipeline, typename Take>
__device__ __forceinline__ void take_held(const Consumer<Pipeline>& consumer, float (&sums)[32][4], const Take& take) {
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
        consumer.await_full();
        const uint32_t boxes = consumer.address() + consumer.warpgroup * 2 * BOX_BYTES;
#pragma unroll
        for (uint32_t tile = 0; tile < 16; ++tile) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const float2 held = held_pair<T>(boxes, tile, half);
                take(sums[part * 16 + tile][2 * half], held.x);
                take(sums[part * 16 + tile][2 * half + 1], held.y);
            }
        }
        part_sync(ALONE + consumer.warpgroup, WARPGROUP);
        consumer.release(consumer.ring.stage);
        consumer.ring.advance();
    }
}

// Copies the previous contents of a tile, in two stages of 128 columns.
template <typename Pipeline>
__device__ __forceinline__ void copy_held(const Producer<Pipeline>& producer, const TensorMap& out, uint32_t shared,
                                          uint32_t row, uint32_t column) {
    for (uint32_t part = 0; part < 2; ++part) {
        const uint32_t full = producer.begin(2 * MULTIPLIERS * BOX_BYTES);
        for (uint32_t box = 0; box < 2 * MULTIPLIERS; ++box) {
            copy_box(shared + producer.ring.stage * STAGE_BYTES + box * BOX_BYTES, out, full,
                     static_cast<int32_t>(column + part * 128 + box % 2 * 64), static_cast<int32_t>(row + box / 2 * 64));
        }
        producer.ring.advance();
    }
}

// Copies all tiles' operands, step by step, into the ring. Called by one thread. With HELD_FIRST,
// the previous contents of a tile are copied before its steps, otherwise after its steps. E4M3
// kernels copy the previous contents last, because sums are scaled before the contents are added.
template <typename Pipeline, Kind KIND, uint32_t DEPTH, bool HELD_FIRST>
__device__ __forceinline__ void copy(const TensorMap& x, const TensorMap& weight, const TensorMap& out,
                                     const Arguments& arguments, uint32_t shared,
                                     typename Pipeline::Barriers& barriers, uint32_t rank) {
    fetch_map(x);
    fetch_map(weight);
    fetch_map(out);
    wait_for_previous_kernel();
    LargeMRing ring;
    const Producer<Pipeline> producer{ring, barriers};
    // Each block copies one half of the weight's rows to both blocks: gate or up, or 128 columns.
    const uint32_t half = rank * (KIND == Kind::GATED ? arguments.columns : HALF);
    Tiles<KIND, DEPTH> tiles(arguments);
    while (tiles.advance(rank)) {
        if (KIND == Kind::ADDED && HELD_FIRST) {
            copy_held(producer, out, shared, tiles.row, tiles.column);
        }
        for (uint32_t step = 0; step < tiles.steps; ++step) {
            const uint32_t full = producer.begin(STAGE_BYTES);
            const uint32_t stage = shared + ring.stage * STAGE_BYTES;
            const int32_t depth = static_cast<int32_t>(step * DEPTH);
            copy_box(stage, x, full, depth, static_cast<int32_t>(tiles.row));
            copy_box_to((1 << BLOCKS) - 1, stage + X_BYTES + rank * HALF_BYTES, weight, full, depth,
                        static_cast<int32_t>(tiles.column + half));
            ring.advance();
        }
        if (KIND == Kind::ADDED && !HELD_FIRST) {
            copy_held(producer, out, shared, tiles.row, tiles.column);
        }
    }
}
