// GEMM with many rows and FP8 weights on Hopper (sm_90a only), also fused with the gate of a
// gated MLP (SwiGLU, Shazeer 2020, arXiv 2002.05202). Blocks, clusters, tiles and the order of work
// are as in gemm_large_m.cu.
//
// gemm_large_m_e4m3_<scales>_<type>
//   out = x * weight^T + bias
// gemm_large_m_add_e4m3_<scales>_<type>
//   out += x * weight^T + bias
// gemm_large_m_gated_e4m3_<scales>_<type>
//   out = gate / (1 + exp(-gate)) * up, gate and up as in gemm_large_m.cu
// gemm_large_m_gated_rounded_e4m3_<scales>_<type>
//   as gemm_large_m_gated_e4m3, with out rounded to E4M3, and one scale for each 128 columns of a
//   row or one scale for all of out
//
// <scales> is `blocks` (one scale for each block of the weight, and one for each 128 columns of a
// row of x) or `rows` (one for each row of the weight, and one for each row of x or for all rows).
//
// x             [rows, in]        E4M3, as a tensor map
// weight        [features, in]    E4M3, as a tensor map; features is columns, or 2 * columns with a
//               gate
// out           [rows, columns]   <type>, or E4M3, as a tensor map
// bias          [features]        <type>, or null
// weight_scales blocks: [div_ceil(features, height), groups] f32; rows: [features] f32
// x_scales      blocks: [rows, groups] f32; rows: [rows] f32, or null: all rows have the scale
//               `fixed`
// out_scales    [rows, div_ceil(columns, 128)] f32, or null: the scale is out_fixed (rounded
//               outputs only)
// groups        div_ceil(in, 128)
// height        rows of the weight per scale block: 128, or one of 8, 16, 32 and 64
//
// After each group of 128 columns, its sum of E4M3 products is added to an f32 total (two-level
// accumulation, DeepSeek-V3's report, arXiv 2412.19437), because the tensor cores keep fewer bits
// than f32 has. The result is rounded once at the end. `in` is a multiple of 16, columns a multiple
// of 8 (of 16 if rounded), bias is aligned to 4 bytes; everything else is as in
// gemm_large_m.cu. A NaN in x or its scales affects only its row; a NaN in the weight or its
// scales affects only the features that use it.

// Targets: sm_90a

#include "include/e4m3.cuh"
#include "include/kernel_order.cuh"
#include "include/large_m_tiles.cuh"
#include "include/rounding.cuh"

namespace {

constexpr uint32_t DEPTH = GROUP;  // columns of a step: 128 bytes
constexpr uint32_t QUARTER = TILE_WEIGHTS / 4;
static_assert(DEPTH == STEP_ROW_BYTES, "one byte per column");

struct Pipeline : LargeMPipeline {
    static constexpr Release RELEASE = Release::EACH_WARP;
    static constexpr uint32_t LEAD = 2, BEGIN = ::BEGIN;
};

struct Scales {
    const float* weight;
    const float* x;
    float fixed;
    uint32_t groups;
    uint32_t height;
    float* out;
    float out_fixed;
};

// One half of a warpgroup's sums: 128 rows of the weight.
using Sums = float[HALF / 8][4];

// Adds a group's sums to one half of a warpgroup's totals. This function is for scales per row,
// which scale_rows applies at the end.
__device__ __forceinline__ void promote_plain(float (&to)[32][4], uint32_t first, const Sums& from) {
#pragma unroll
    for (uint32_t tile = 0; tile < HALF / 8; ++tile) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            to[first + tile][i] += from[tile][i];
        }
    }
}
// Like promote_plain, but each 64 rows of the weight have one scale. `of_x` has the scales of this
// thread's two rows of x. promote and promote_low need an explicit FMA. Without it, the compiler
// shares one addition between the two branches, so neither branch uses FMA instructions.
__device__ __forceinline__ void promote(float (&to)[32][4], uint32_t first, const Sums& from, const float (&of_x)[2],
                                        const float* of_weight) {
#pragma unroll
    for (uint32_t quarter = 0; quarter < 2; ++quarter) {
        const float both[2] = {of_x[0] * of_weight[quarter], of_x[1] * of_weight[quarter]};
#pragma unroll
        for (uint32_t tile = quarter * QUARTER / 8; tile < (quarter + 1) * QUARTER / 8; ++tile) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                to[first + tile][i] = __fmaf_rn(from[tile][i], both[i / 2], to[first + tile][i]);
            }
        }
    }
}

// Like promote, for scale blocks of the weight that have fewer than 64 rows or do not begin at a
// multiple of 64 rows: one scale for each eight rows of the weight.
__device__ __forceinline__ void promote_low(float (&to)[32][4], uint32_t first, const Sums& from, const float (&of_x)[2],
                                            const Scales& scales, uint32_t feature, uint32_t features, uint32_t group) {
#pragma unroll
    for (uint32_t tile = 0; tile < HALF / 8; ++tile) {
        const uint32_t block = min(feature + tile * 8, features - 1) / scales.height;
        const float of_weight = __ldg(scales.weight + static_cast<uint64_t>(block) * scales.groups + group);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            to[first + tile][i] = __fmaf_rn(from[tile][i], of_x[i / 2] * of_weight, to[first + tile][i]);
        }
    }
}

// Multiplies by the scales of the rows of the weight and of x, after all groups are summed.
template <Kind KIND>
__device__ __forceinline__ void scale_rows(float (&sums)[32][4], const float (&of_x)[2], const float* of_weight,
                                           uint32_t column, uint32_t columns) {
#pragma unroll
    for (uint32_t tile = 0; tile < 32; ++tile) {
        const uint32_t at = column + (KIND == Kind::GATED ? tile % 16 : tile) * 8 + threadIdx.x % 4 * 2;
        const uint32_t skipped = KIND == Kind::GATED ? tile / 16 * columns : 0;
        // The number of columns is a multiple of eight, so both columns exist or neither does.
        const float2 two = at < columns ? __ldg(reinterpret_cast<const float2*>(of_weight + skipped + at)) : float2{};
        sums[tile][0] *= of_x[0] * two.x;
        sums[tile][1] *= of_x[0] * two.y;
        sums[tile][2] *= of_x[1] * two.x;
        sums[tile][3] *= of_x[1] * two.y;
    }
}

// Writes one warpgroup's 64 rows of 128 gated columns as E4M3, through shared memory.
__device__ __forceinline__ void write_rounded(float (&sums)[32][4], const TensorMap& out, uint32_t staging,
                                              const Scales& scales, const Arguments& arguments, uint32_t row,
                                              uint32_t column, uint32_t warpgroup) {
    const uint32_t thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % 32;
    const uint32_t own = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (uint32_t tile = 0; tile < 16; ++tile) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            sums[tile][i] = gated(sums[tile][i], sums[16 + tile][i]);
        }
    }
    if (thread == 0) {
        stores_read<0>();
    }
    part_sync(ALONE + warpgroup, WARPGROUP);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        float scale = scales.out_fixed;
        if (scales.out != nullptr) {
            float largest = 0.0f;
#pragma unroll
            for (uint32_t tile = 0; tile < 16; ++tile) {
                // Sums past the last column are zero.
                largest = larger_magnitude(largest, sums[tile][2 * half]);
                largest = larger_magnitude(largest, sums[tile][2 * half + 1]);
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            scale = e4m3_scale(fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)));
            const uint32_t at = row + own + 8 * half;
            if (lane % 4 == 0 && at < arguments.rows) {
                const uint32_t groups = (arguments.columns + GROUP - 1) / GROUP;
                scales.out[static_cast<uint64_t>(at) * groups + column / GROUP] = scale;
            }
        }
        with_divisor(scale, [&](auto divide) {
#pragma unroll
            for (uint32_t tile = 0; tile < 16; ++tile) {
                const uint32_t pair = e4m3_pair(divide(sums[tile][2 * half]), divide(sums[tile][2 * half + 1]));
                const uint32_t place = Swizzle<64>::place(own + 8 * half, tile / 2) + tile % 2 * 8 + lane % 4 * 2;
                asm volatile("st.shared.u16 [%0], %1;" ::"r"(staging + place), "h"(static_cast<uint16_t>(pair)) : "memory");
            }
        });
    }
    publish_writes();
    part_sync(ALONE + warpgroup, WARPGROUP);
    if (thread == 0) {
        store_box(out, staging, static_cast<int32_t>(column), static_cast<int32_t>(row));
    }
}

// Processes all tiles of one multiplying warpgroup.
template <Kind KIND, bool BY_BLOCKS, bool ROUNDED, typename T>
__device__ __forceinline__ void multiply(const TensorMap& out, const T* bias, const Arguments& arguments,
                                         const Scales& scales, uint32_t shared, Pipeline::Barriers& barriers, uint32_t rank,
                                         uint32_t warpgroup) {
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t staging = shared + STAGING_AT + warpgroup * 2 * BOX_BYTES;
    const uint32_t features = KIND == Kind::GATED ? 2 * arguments.columns : arguments.columns;
    // True if scale blocks have fewer than 64 rows, or if up does not begin at a multiple of 64
    // rows.
    const bool is_low = scales.height < QUARTER || (KIND == Kind::GATED && arguments.columns % QUARTER != 0);
    LargeMRing ring;
    float sums[32][4];
    Consumer<Pipeline> consumer{barriers, ring, shared, warpgroup, thread};

    wait_for_previous_kernel();
    Tiles<KIND, DEPTH> tiles(arguments);
    Biases<KIND, T> biases;
    while (tiles.advance(rank)) {
        if (bias != nullptr) {
            biases.load(bias, tiles.column, arguments.columns);
        }
        // This thread's rows of x are `own` and `own + 8`.
        const uint32_t own = tiles.row + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
        // `of_rows` has the addresses of the first scales of this thread's rows of x. `of_quarters`
        // has the indices of the first scales of the four quarters of the tile's weight rows.
        const uint32_t last_row = arguments.rows - 1;
        const float* of_rows[2] = {scales.x + static_cast<uint64_t>(min(own, last_row)) * scales.groups,
                                   scales.x + static_cast<uint64_t>(min(own + 8, last_row)) * scales.groups};
        const auto feature_of = [&](uint32_t half) {
            return tiles.column + half * (KIND == Kind::GATED ? arguments.columns : HALF);
        };
        uint32_t of_quarters[4];
#pragma unroll
        for (uint32_t quarter = 0; quarter < 4; ++quarter) {
            const uint32_t feature = feature_of(quarter / 2) + quarter % 2 * QUARTER;
            of_quarters[quarter] = min(feature, features - 1) / scales.height * scales.groups;
        }
#pragma unroll
        for (uint32_t tile = 0; tile < 32; ++tile) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sums[tile][i] = 0.0f;
            }
        }
        consumer.begin_steps();
        for (uint32_t step = 0; step < tiles.steps; ++step) {
            float of_x[2], of_weight[4];
            if constexpr (BY_BLOCKS) {
                // The scales are loaded while products are computed.
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    of_x[i] = of_rows[i][step];
                }
#pragma unroll
                for (uint32_t quarter = 0; quarter < 4; ++quarter) {
                    of_weight[quarter] = __ldg(scales.weight + of_quarters[quarter] + step);
                }
            }
            consumer.await_full();
            const uint32_t stage = consumer.address();
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                Sums part;
                consumer.template multiply_part<E4m3>(part, stage, half * HALF_BYTES, half == 1);
                if constexpr (!BY_BLOCKS) {
                    promote_plain(sums, half * 16, part);
                } else if (!is_low) {
                    promote(sums, half * 16, part, of_x, of_weight + 2 * half);
                } else {
                    promote_low(sums, half * 16, part, of_x, scales, feature_of(half), features, step);
                }
            }
            consumer.end_step(step, tiles.steps);
        }
        consumer.staggers = false;
        if constexpr (!BY_BLOCKS) {
            const auto of_row = [&](uint32_t row) { return scales.x == nullptr ? scales.fixed : scales.x[min(row, last_row)]; };
            const float both[2] = {of_row(own), of_row(own + 8)};
            scale_rows<KIND>(sums, both, scales.weight, tiles.column, arguments.columns);
        }
        if (bias != nullptr) {
            biases.add(sums);
        }
        if (KIND == Kind::ADDED) {
            take_held<T>(consumer, sums, [](float& sum, float held) { sum += held; });
        }
        if constexpr (ROUNDED) {
            write_rounded(sums, out, staging, scales, arguments, tiles.row + warpgroup * 64, tiles.column, warpgroup);
        } else {
            write_out<KIND, T>(sums, out, staging, tiles.row + warpgroup * 64, tiles.column, warpgroup,
                               [](float gate, float up) { return gated(gate, up); });
        }
    }
    if (thread == 0) {
        stores_read<0>();
    }
}

template <Kind KIND, bool BY_BLOCKS, bool ROUNDED, typename T>
__device__ __forceinline__ void linear(const TensorMap& x, const TensorMap& weight, const TensorMap& out, const T* bias,
                                       const Arguments& arguments, const Scales& scales) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Pipeline::Barriers barriers;
    const uint32_t shared = shared_address(tiles_of_shared);
    const uint32_t rank = cluster_rank();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&barriers.full[stage]), 1);
            barrier_init(shared_address(&barriers.empty[stage]), RELEASES<Pipeline>);
        }
        barrier_init_done();
    }
    // From here until end_roles, the other block may copy into this block's memory.
    cluster_sync();
    const uint32_t warpgroup = warpgroup_index();
    if (warpgroup == 0) {
        give_registers<40>();
        if (warp_index() == 0 && is_elected()) {
            copy<Pipeline, KIND, DEPTH, false>(x, weight, out, arguments, shared, barriers, rank);
        }
    } else {
        take_registers<232>();
        multiply<KIND, BY_BLOCKS, ROUNDED, T>(out, bias, arguments, scales, shared, barriers, rank, warpgroup - 1);
    }
    end_roles();
}

}  // namespace

#define GEMM_LARGE_M_E4M3(NAME, KIND, BY_BLOCKS, ROUNDED, TYPE)                                                             \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)                         \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,                           \
             const __grid_constant__ TensorMap out, const TYPE* bias, uint32_t rows, uint32_t columns,                \
             uint32_t in_features, uint32_t group, const float* weight_scales, const float* x_scales, float fixed,    \
             uint32_t groups, uint32_t height, float* out_scales, float out_fixed) {                                  \
        linear<KIND, BY_BLOCKS, ROUNDED, TYPE>(                                                                       \
            x, weight, out, bias, {rows, columns, in_features, group},                                                \
            {weight_scales, x_scales, fixed, groups, height, out_scales, out_fixed});                                 \
    }
#define GEMM_LARGE_M_E4M3_WITH(SCALES, BY_BLOCKS, SUFFIX, TYPE)                                                  \
    GEMM_LARGE_M_E4M3(gemm_large_m_e4m3_##SCALES##_##SUFFIX, Kind::PLAIN, BY_BLOCKS, false, TYPE)                           \
    GEMM_LARGE_M_E4M3(gemm_large_m_add_e4m3_##SCALES##_##SUFFIX, Kind::ADDED, BY_BLOCKS, false, TYPE)                  \
    GEMM_LARGE_M_E4M3(gemm_large_m_gated_e4m3_##SCALES##_##SUFFIX, Kind::GATED, BY_BLOCKS, false, TYPE)                \
    GEMM_LARGE_M_E4M3(gemm_large_m_gated_rounded_e4m3_##SCALES##_##SUFFIX, Kind::GATED, BY_BLOCKS, true, TYPE)
#define GEMM_LARGE_M_E4M3_OF(SUFFIX, TYPE)                    \
    GEMM_LARGE_M_E4M3_WITH(blocks, true, SUFFIX, TYPE)        \
    GEMM_LARGE_M_E4M3_WITH(rows, false, SUFFIX, TYPE)

FOR_EACH_ACTIVATION(GEMM_LARGE_M_E4M3_OF)

// Launch: as gemm_large_m.cu. The tensor maps of x, weight and a rounded output have type
// UINT8, strides of {in}, {in} and {columns} bytes, and boxes {128, 128}, {128, 128} and {128, 64}.
