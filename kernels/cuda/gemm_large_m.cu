// GEMM with many rows on Hopper (sm_90a only), also fused with the gate of a gated MLP (SwiGLU,
// Shazeer 2020, arXiv 2002.05202), so that the gate's input is never written to memory. Modeled on
// the warp-specialized persistent GEMMs of CUTLASS 3: TMA loads tiles, two warpgroups multiply with
// wgmma, and two blocks share the weights that both need.
//
// gemm_large_m_gated_<type>
//   gate = x * weight[0 .. columns]^T + bias[0 .. columns]
//   up   = x * weight[columns .. 2 * columns]^T + bias[columns .. 2 * columns]
//   out  = gate / (1 + exp(-gate)) * up
//   x [rows, in], weight [2 * columns, in], bias [2 * columns] or null, out [rows, columns]
//
// gemm_large_m_<type>
//   out = x * weight^T + bias
//   x [rows, in], weight [columns, in], bias [columns] or null, out [rows, columns]
//
// gemm_large_m_add_<type>
//   out += x * weight^T + bias, operands as for gemm_large_m
//
// Sums are f32, rounded once at the end; neither a bias nor the previous contents of `out` cause a
// rounding in between. `x`, `weight` and `out` are passed as tensor maps (see Launch): they start
// at multiples of 16 bytes, and their rows are a multiple of 16 bytes apart. `bias` is aligned to
// 4 bytes; `columns` is even. Any number of rows, any `columns` and any `in`. A NaN affects only
// its row or column.

// Targets: sm_90a

#include "include/contract.cuh"
#include "include/element.cuh"
#include "include/hopper_cluster.cuh"
#include "include/hopper_store.cuh"
#include "include/kernel_order.cuh"
#include "include/large_m_tiles.cuh"
#include "include/tensor_core.cuh"
#include "include/wgmma.cuh"

namespace {

using contract::gemm_large_m::MULTIPLIERS;   // warpgroups that multiply, 64 rows of the tile each
using contract::gemm_large_m::STAGES;
constexpr uint32_t DEPTH = contract::gemm_large_m::STEP_COLUMNS;  // columns of a step: 128 bytes
constexpr uint32_t X_BYTES = TILE_ROWS * DEPTH * 2;              // 16 KiB per step
constexpr uint32_t HALF_BYTES = TILE_WEIGHTS * DEPTH;            // half of the weight's rows: 16 KiB
constexpr uint32_t STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
constexpr uint32_t STAGING_AT = STAGES * STAGE_BYTES;            // two boxes per multiplying warpgroup
static_assert(contract::gemm_large_m::THREADS == (1 + MULTIPLIERS) * WARPGROUP, "the launch");
static_assert(contract::gemm_large_m::SHARED_BYTES == STAGING_AT + 2 * MULTIPLIERS * BOX_BYTES, "and what it gives");
// Number of steps by which the first multiplying warpgroup is ahead of the second, so that one
// warpgroup multiplies while the other writes out.
constexpr uint32_t LEAD = 3;

using Barriers = RingBarriers<STAGES>;

// Copies all tiles' operands, step by step, into the ring. Called by one thread.
template <Kind KIND>
__device__ __forceinline__ void copy(const TensorMap& x, const TensorMap& weight, const TensorMap& out,
                                     const Arguments& arguments, uint32_t shared, Barriers& barriers, uint32_t rank) {
    fetch_map(x);
    fetch_map(weight);
    fetch_map(out);
    wait_for_previous_kernel();
    Ring<STAGES> ring;
    const auto begin = [&](uint32_t bytes) {
        const uint32_t full = shared_address(&barriers.full[ring.stage]);
        barrier_wait(shared_address(&barriers.empty[ring.stage]), ring.parity ^ 1);
        barrier_arrive_expecting(full, bytes);
        return full;
    };
    // Each block copies one half of the weight's rows to both blocks: gate or up, or 128 columns.
    const uint32_t half = rank * (KIND == Kind::GATED ? arguments.columns : TILE_WEIGHTS / 2);
    Tiles<KIND, DEPTH> tiles(arguments);
    while (tiles.advance(rank)) {
        if (KIND == Kind::ADDED) {
            // Copies the previous contents of the tile, in two stages of 128 columns.
            for (uint32_t part = 0; part < 2; ++part) {
                const uint32_t full = begin(2 * MULTIPLIERS * BOX_BYTES);
                for (uint32_t box = 0; box < 2 * MULTIPLIERS; ++box) {
                    copy_box(shared + ring.stage * STAGE_BYTES + box * BOX_BYTES, out, full,
                             static_cast<int32_t>(tiles.column + part * 128 + box % 2 * 64),
                             static_cast<int32_t>(tiles.row + box / 2 * 64));
                }
                ring.advance();
            }
        }
        for (uint32_t step = 0; step < tiles.steps; ++step) {
            const uint32_t full = begin(STAGE_BYTES);
            const uint32_t stage = shared + ring.stage * STAGE_BYTES;
            const int32_t depth = static_cast<int32_t>(step * DEPTH);
            copy_box(stage, x, full, depth, static_cast<int32_t>(tiles.row));
            copy_box_to((1 << BLOCKS) - 1, stage + X_BYTES + rank * HALF_BYTES, weight, full, depth,
                        static_cast<int32_t>(tiles.column + half));
            ring.advance();
        }
    }
}

// Processes all tiles of one multiplying warpgroup.
template <Kind KIND, typename T>
__device__ __forceinline__ void multiply(const TensorMap& out, const T* bias, const Arguments& arguments,
                                         uint32_t shared, Barriers& barriers, uint32_t rank, uint32_t warpgroup) {
    constexpr uint64_t LAYOUT = matrix_layout<DEPTH>(16, 8 * DEPTH * 2);
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t staging = shared + STAGING_AT + warpgroup * 2 * BOX_BYTES;
    Ring<STAGES> ring;
    float sums[32][4];

    const auto await = [&]() { barrier_wait(shared_address(&barriers.full[ring.stage]), ring.parity); };
    // Both blocks copy into this stage, so one warp signals each of the two blocks.
    const auto release = [&](uint32_t stage) {
        if (thread % 32 == 0 && thread / 32 < BLOCKS) {
            barrier_arrive_at(shared_address(&barriers.empty[stage]), thread / 32);
        }
    };

    Tiles<KIND, DEPTH> tiles(arguments);
    Biases<KIND, T> biases;
    bool first_tile = true;
    while (tiles.advance(rank)) {
        if (bias != nullptr) {
            biases.load(bias, tiles.column, arguments.columns);
        }
        if (KIND == Kind::ADDED) {
#pragma unroll
            for (uint32_t part = 0; part < 2; ++part) {
                await();
                const uint32_t boxes = shared + ring.stage * STAGE_BYTES + warpgroup * 2 * BOX_BYTES;
#pragma unroll
                for (uint32_t tile = 0; tile < 16; ++tile) {
#pragma unroll
                    for (uint32_t half = 0; half < 2; ++half) {
                        const float2 held = held_pair<T>(boxes, tile, half);
                        sums[part * 16 + tile][2 * half] = held.x;
                        sums[part * 16 + tile][2 * half + 1] = held.y;
                    }
                }
                part_sync(ALONE + warpgroup, WARPGROUP);
                release(ring.stage);
                ring.advance();
            }
            hold(sums);
        }
        if (first_tile && warpgroup == 1) {
            part_sync(BEGIN, MULTIPLIERS * WARPGROUP);
        }
        uint32_t before = 0;  // the stage of the previous step
        for (uint32_t step = 0; step < tiles.steps; ++step) {
            await();
            const uint32_t stage = shared + ring.stage * STAGE_BYTES;
            hold(sums);
            products_begin();
#pragma unroll
            for (uint32_t k = 0; k < DEPTH / 16; ++k) {
                Warpgroup<T>::multiply(sums, matrix_at(LAYOUT, stage + warpgroup * (X_BYTES / 2) + k * 32),
                                     matrix_at(LAYOUT, stage + X_BYTES + k * 32),
                                     KIND == Kind::ADDED || k > 0 || step > 0);
            }
            products_end();
            if (step > 0) {
                products_wait<1>();
                release(before);
            }
            before = ring.stage;
            ring.advance();
            if (first_tile && warpgroup == 0 && step + 1 == min(LEAD, tiles.steps)) {
                part_arrive(BEGIN, MULTIPLIERS * WARPGROUP);
            }
        }
        first_tile = false;
        products_wait<0>();
        hold(sums);
        release(before);
        if (bias != nullptr) {
            biases.add(sums);
        }
        write_out<KIND, T>(sums, out, staging, tiles.row + warpgroup * 64, tiles.column, warpgroup);
    }
    if (thread == 0) {
        stores_read<0>();
    }
}

template <Kind KIND, typename T>
__device__ __forceinline__ void linear(const TensorMap& x, const TensorMap& weight, const TensorMap& out, const T* bias,
                                       const Arguments& arguments) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Barriers barriers;
    const uint32_t shared = shared_address(tiles_of_shared);
    const uint32_t rank = cluster_rank();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&barriers.full[stage]), 1);
            barrier_init(shared_address(&barriers.empty[stage]), MULTIPLIERS * BLOCKS);
        }
        barrier_init_done();
    }
    // From here until the cluster_sync at the end, the other block may copy
    // into this block's memory.
    cluster_sync();
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        give_registers<40>();
        if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 0 && is_elected()) {
            copy<KIND>(x, weight, out, arguments, shared, barriers, rank);
        }
    } else {
        take_registers<232>();
        multiply<KIND, T>(out, bias, arguments, shared, barriers, rank, warpgroup - 1);
    }
    __syncwarp();
    cluster_sync();
}

}  // namespace

#define GEMM_LARGE_M(NAME, KIND, TYPE)                                                                            \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__((1 + MULTIPLIERS) * WARPGROUP, 1)  \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,                        \
             const __grid_constant__ TensorMap out, const TYPE* bias, uint32_t rows, uint32_t columns,             \
             uint32_t in_features, uint32_t group) {                                                               \
        linear<KIND, TYPE>(x, weight, out, bias, {rows, columns, in_features, group});                             \
    }
#define GEMM_LARGE_M_OF(SUFFIX, TYPE)                                         \
    GEMM_LARGE_M(gemm_large_m_gated_##SUFFIX, Kind::GATED, TYPE)       \
    GEMM_LARGE_M(gemm_large_m_##SUFFIX, Kind::PLAIN, TYPE)                    \
    GEMM_LARGE_M(gemm_large_m_add_##SUFFIX, Kind::ADDED, TYPE)

FOR_EACH_ACTIVATION(GEMM_LARGE_M_OF)

// Launch. Persistent: block THREADS, dynamic shared memory SHARED_BYTES (contract::gemm_large_m),
// grid x = 2 * min(SMs / 2, pairs * across), where
//   pairs = div_ceil(rows, 256), and
//   across = div_ceil(columns, 128) for the gated kernel and div_ceil(columns, 256) for the other
//   kernels.
// Any even grid is correct; this grid is the fastest. `rows`, `columns`, `in_features` and `group`
// are > 0. `group` is the number of pairs of row tiles that clusters process before they continue
// with the next columns (large_m_tiles.cuh); 16 is a good value. The kernel itself sets its cluster
// size of two. The limit of dynamic shared memory must be raised once per function
// (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, rank 2, element
// strides 1, interleave NONE, swizzle 128B, L2 promotion 128 bytes, out of bounds NONE (zeros), and
//   x       dimensions {in, rows}, stride {2 * pitch} bytes, box {64, 128}
//   weight  dimensions {in, rows of the weight}, stride {2 * in} bytes, box {64, 128}
//   out     dimensions {columns, rows}, stride {2 * pitch} bytes, box {64, 64}
