// GEMMs of few rows with the weights of their experts on Hopper, for decode steps. Their time is
// bound by reading the weights of the chosen experts once.
//
// gated_experts_small_m_<type>_r<PLACES>   out[place] = activation(x[row] * gate^T) * (x[row] * up^T)
//                                      (SwiGLU and GeGLU, arXiv 2002.05202)
// experts_small_m_<type>_r<PLACES>
//                                      out[place] = router weight of the choice * (x[place] * w^T)
//
// experts_small_m_e4m3.cu has variants of both kernels with weights and x in E4M3, which are named
// `_e4m3_blocks` and `_e4m3_rows` as in gemm_small_m_e4m3.cu.
//
// <type> is bf16 or f16. PLACES is 8, 16, 24 or 32: the places of one expert in a tile. Operands
// are as in experts.cu, with three differences. The weight is passed as a tensor map. The rows of x
// start at multiples of 16 bytes. `in` and `features` are multiples of 8. Sums are f32 in the order
// of columns, rounded once at the end, so the bits of a row do not depend on other rows. A NaN in x
// affects only its row, and a NaN in the weight only its feature.
//
// An item is a tile of places and a tile of 64 rows of the weight (gated: 32 of gate and 32 of up,
// alternating in groups of eight). Blocks take equal numbers of items in the order of
// expert_walk.cuh, so that most of a block's items have the same tile of places. The block keeps
// that tile's rows of x in shared memory, with all of their columns. One warp copies weights into a
// ring of stages, and a warpgroup multiplies. The copying warp fills every free stage, so it may
// copy weights of the next item while the warpgroup multiplies the current item. The weight is the
// M operand of wgmma, and x is the N operand. Weights that only one tile reads are the first to be
// evicted from the L2 cache, so that weights that several tiles read stay there.

#pragma once

#include "contract.cuh"
#include "expert_places.cuh"
#include "expert_walk.cuh"
#include "small_m_formats.cuh"
#include "hopper_copy.cuh"
#include "kernel_order.cuh"
#include "tensor_core.cuh"
#include "weight_copy.cuh"
#include "wgmma.cuh"

using contract::experts_small_m::ROW_BYTES;
using contract::experts_small_m::STAGES_MAX;
using contract::experts_small_m::STEP_BYTES;
using contract::experts_small_m::THREADS;
using contract::experts_small_m::TILE_ROWS;
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t CHUNKS = STEP_BYTES / ROW_BYTES;
constexpr uint32_t CHUNK_BYTES = TILE_ROWS * ROW_BYTES;
constexpr uint32_t STAGE_BYTES = CHUNKS * CHUNK_BYTES;
static_assert(THREADS == WARPGROUP + 32 && TILE_ROWS == 64, "one warpgroup multiplies 64 rows, and one warp copies");
static_assert(STAGE_BYTES == contract::experts_small_m::STAGE_BYTES, "the host computes the number of stages from this size");

template <typename Format>
struct Arguments {
    const typename Format::Operand* x;
    const uint32_t* choices;
    const uint32_t* starts;
    const float* weights;
    typename Format::Element* out;
    uint32_t x_pitch;
    uint32_t in;
    uint32_t features;
    uint32_t top;
    uint32_t experts;
    uint32_t activation;  // contract::gate
    uint32_t stages;
    typename Format::Scales scales;
};

template <typename Format>
constexpr uint32_t CHUNK_COLUMNS = ROW_BYTES / sizeof(typename Format::Operand);

// Starts the copies of a tile's rows of x with all columns, chunk by chunk in the layout that TMA
// would use. A thread copies the same piece of each step in every eighth row.
template <typename Format, uint32_t PLACES, bool GATED>
__device__ __forceinline__ void bring_rows(const Arguments<Format>& arguments, const Tile& tile, uint32_t shared,
                                           uint32_t steps) {
    constexpr uint32_t PIECES = ROW_BYTES / 16, PIECE_COLUMNS = CHUNK_COLUMNS<Format> / PIECES;
    constexpr uint32_t OF_STEP = CHUNKS * PIECES, ROWS = WARPGROUP / OF_STEP;
    static_assert(ROWS == 8 && PLACES % ROWS == 0, "a thread's rows have the same swizzle");
    const uint32_t piece = threadIdx.x % OF_STEP, row = threadIdx.x / OF_STEP;
    const uint32_t to = shared + piece / PIECES * PLACES * ROW_BYTES + Swizzle<64>::place(row, piece % PIECES);
    const uint32_t column = piece * PIECE_COLUMNS;
    const typename Format::Operand* from[PLACES / ROWS];
#pragma unroll
    for (uint32_t i = 0; i < PLACES / ROWS; ++i) {
        const uint32_t place = tile.first + i * ROWS + row;
        from[i] = nullptr;
        if (place < tile.end) {
            const uint64_t of_x = GATED ? arguments.choices[place] / arguments.top : place;
            from[i] = arguments.x + of_x * arguments.x_pitch + column;
        }
    }
    for (uint32_t step = 0; step < steps; ++step) {
        const uint32_t ahead = step * CHUNKS * CHUNK_COLUMNS<Format>;
#pragma unroll
        for (uint32_t i = 0; i < PLACES / ROWS; ++i) {
            const bool is_there = from[i] != nullptr && column + ahead < arguments.in;
            copy_16_bytes(to + (step * CHUNKS * PLACES + i * ROWS) * ROW_BYTES, is_there ? from[i] + ahead : arguments.x,
                          is_there);
        }
    }
}

// A thread's data for the places of its sums, which are two of every eight places. `by` is the
// factor of each place's product. For E4M3 with blocks, `scales_at` is the start of the scales of
// the place's row; for E4M3 with one scale per row, `scale` is that scale.
template <typename Format, uint32_t PLACES, bool GATED>
struct Places {
    uint32_t choice[PLACES / 8][2];
    float by[PLACES / 8][2];
    uint32_t scales_at[PLACES / 8][2];
    float scale[PLACES / 8][2];

    // A place past the end of the tile is replaced by the tile's last place.
    static __device__ __forceinline__ uint32_t place(const Tile& tile, uint32_t eight, uint32_t i) {
        return min(tile.first + eight * 8 + threadIdx.x % 4 * 2 + i, tile.end - 1);
    }

    // Loads the choices, on which the other loads depend. The choices arrive while the copies of
    // the rows of x are being started.
    __device__ __forceinline__ void begin(const Arguments<Format>& arguments, const Tile& tile) {
        if constexpr (!GATED || !Format::IS_PLAIN) {
#pragma unroll
            for (uint32_t eight = 0; eight < PLACES / 8; ++eight) {
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    choice[eight][i] = arguments.choices[place(tile, eight, i)];
                }
            }
        }
    }

    __device__ __forceinline__ void load(const Arguments<Format>& arguments, const Tile& tile) {
#pragma unroll
        for (uint32_t eight = 0; eight < PLACES / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                if constexpr (!GATED) {
                    by[eight][i] = arguments.weights[choice[eight][i]];
                }
                if constexpr (!Format::IS_PLAIN) {
                    const uint32_t row = GATED ? choice[eight][i] / arguments.top : place(tile, eight, i);
                    const auto& scales = arguments.scales;
                    if constexpr (Format::BY_BLOCKS) {
                        scales_at[eight][i] = row * scales.groups;
                    } else {
                        scale[eight][i] = scales.x == nullptr ? scales.fixed : scales.x[row];
                    }
                }
            }
        }
    }
};

// The E4M3 scales of one thread's sums of an item: the scales of two rows of the weight, and of the
// thread's places.
template <typename Format, uint32_t PLACES, bool GATED>
struct ExpertScales {
    const Places<Format, PLACES, GATED>& places;
    const float* of_weight[2];  // the row's first scale, or its only scale

    __device__ __forceinline__ ExpertScales(const Arguments<Format>& arguments, const Places<Format, PLACES, GATED>& places,
                                            uint32_t expert, uint32_t first_feature, uint32_t warp)
        : places(places) {
        const uint32_t lane = threadIdx.x % 32, most = arguments.features - 1;
        const auto& scales = arguments.scales;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t feature = first_feature + warp * (GATED ? 8 : 16) + (GATED ? 0 : half * 8) + lane / 4;
            const uint32_t row = (GATED ? expert * 2 + half : expert) * arguments.features + min(feature, most);
            of_weight[half] =
                scales.weight + (Format::BY_BLOCKS ? static_cast<uint64_t>(row / scales.height) * scales.groups : row);
        }
    }

    // Adds the sums of a group of columns. Scales by blocks are applied here, and scales by rows at
    // the end, by `scale_rows`.
    __device__ __forceinline__ void add(float (&c)[PLACES / 8][4], const float (&sums)[PLACES / 8][4],
                                        const float (&weight)[2], const float (&x)[PLACES / 8][2]) const {
#pragma unroll
        for (uint32_t eight = 0; eight < PLACES / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                c[eight][i] += Format::BY_BLOCKS ? sums[eight][i] * (x[eight][i % 2] * weight[i / 2]) : sums[eight][i];
            }
        }
    }

    __device__ __forceinline__ void load(const typename Format::Scales& scales, uint32_t group, float (&weight)[2],
                                         float (&x)[PLACES / 8][2]) const {
        // All products of columns past the last are zero, so the scale of any existing group can be
        // used.
        group = min(group, scales.groups - 1);
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            weight[half] = __ldg(of_weight[half] + group);
        }
#pragma unroll
        for (uint32_t eight = 0; eight < PLACES / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                x[eight][i] = scales.x[places.scales_at[eight][i] + group];
            }
        }
    }

    // Applies the scales of the rows of the weight and of x, or the fixed scale of x, after all
    // sums are complete.
    __device__ __forceinline__ void scale_rows(float (&c)[PLACES / 8][4]) const {
#pragma unroll
        for (uint32_t eight = 0; eight < PLACES / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                c[eight][i] *= places.scale[eight][i % 2] * __ldg(of_weight[i / 2]);
            }
        }
    }
};

// Starts the copy of a tile of a run's weight from `feature` on.
template <bool GATED>
__device__ __forceinline__ void copy_weight(uint32_t to, const TensorMap& weight, uint32_t barrier, uint32_t column,
                                            uint32_t feature, const Run& run) {
    if (GATED && run.is_shared) {
        copy_box(to, weight, barrier, column, 0, 0, feature / 8, run.expert);
    } else if (GATED) {
        copy_box_once(to, weight, barrier, column, 0, 0, feature / 8, run.expert);
    } else if (run.is_shared) {
        copy_box(to, weight, barrier, column, feature, run.expert);
    } else {
        copy_box_once(to, weight, barrier, column, feature, run.expert);
    }
}

template <typename Format, uint32_t PLACES, bool GATED>
__device__ __forceinline__ void small_m(const TensorMap& weight, const Arguments<Format>& arguments) {
    extern __shared__ __align__(1024) uint8_t dynamic[];
    __shared__ Walk walk;
    __shared__ uint64_t full[STAGES_MAX], empty[STAGES_MAX];
    let_next_kernel_start();
    const uint32_t full_at = static_cast<uint32_t>(__cvta_generic_to_shared(full));
    const uint32_t empty_at = static_cast<uint32_t>(__cvta_generic_to_shared(empty));
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
    if (threadIdx.x == WARPGROUP) {
        fetch_map(weight);
        for (uint32_t stage = 0; stage < arguments.stages; ++stage) {
            barrier_init(full_at + 8 * stage, 1);
            barrier_init(empty_at + 8 * stage, WARPGROUP / 32);
        }
        barrier_init_done();
    }
    wait_for_previous_kernel();
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < WARPGROUP / 32) {
        walk.count<PLACES>(arguments.starts, arguments.experts);
    }
    __syncthreads();
    constexpr uint32_t FEATURES = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    constexpr uint32_t STEP_COLUMNS = CHUNKS * CHUNK_COLUMNS<Format>;
    const uint32_t steps = (arguments.in + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const uint32_t across = (arguments.features + FEATURES - 1) / FEATURES;
    Stretch stretch(walk, arguments.experts, across);
    Run run;
    const uint32_t stages_at = shared + PLACES * steps * CHUNKS * ROW_BYTES;
    uint32_t stage = 0, parity = 0;
    const auto advance = [&] {
        if (++stage == arguments.stages) {
            stage = 0;
            parity ^= 1;
        }
    };
    if (warp == WARPGROUP / 32) {
        if (is_elected()) {
            while (stretch.next(run)) {
                for (uint32_t feature = run.first * FEATURES; feature < run.end * FEATURES; feature += FEATURES) {
                    for (uint32_t step = 0; step < steps; ++step) {
                        const uint32_t barrier = full_at + 8 * stage;
                        barrier_wait(empty_at + 8 * stage, parity ^ 1);
                        barrier_arrive_expecting(barrier, STAGE_BYTES);
#pragma unroll
                        for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                            const uint32_t to = stages_at + stage * STAGE_BYTES + chunk * CHUNK_BYTES;
                            const uint32_t column = step * STEP_COLUMNS + chunk * CHUNK_COLUMNS<Format>;
                            copy_weight<GATED>(to, weight, barrier, column, feature, run);
                        }
                        advance();
                    }
                }
            }
        }
        return;
    }
    constexpr uint64_t LAYOUT = matrix_layout<64>(0, 8 * ROW_BYTES);
    while (stretch.next(run)) {
        const Tile tile = run.template places<PLACES>(arguments.starts);
        // After this barrier, the last products with the previous rows have ended in all warps.
        part_sync(WARPGROUP_MEETS, WARPGROUP);
        Places<Format, PLACES, GATED> places;
        places.begin(arguments, tile);
        bring_rows<Format, PLACES, GATED>(arguments, tile, shared, steps);
        places.load(arguments, tile);
        wait_for_copies();
        publish_writes();
        part_sync(WARPGROUP_MEETS, WARPGROUP);
        for (uint32_t feature = run.first * FEATURES; feature < run.end * FEATURES; feature += FEATURES) {
            float c[PLACES / 8][4] = {};
            const auto multiply = [&](float(&sums)[PLACES / 8][4], uint32_t step, uint32_t chunk, bool adds) {
                const uint32_t weight_at = stages_at + stage * STAGE_BYTES + chunk * CHUNK_BYTES;
                const uint32_t x_at = shared + (step * CHUNKS + chunk) * PLACES * ROW_BYTES;
#pragma unroll
                for (uint32_t k = 0; k < ROW_BYTES / 32; ++k) {
                    Warpgroup<typename Format::Operand>::multiply(sums, matrix_at(LAYOUT, weight_at + 32 * k),
                                                                  matrix_at(LAYOUT, x_at + 32 * k), adds || k > 0);
                }
            };
            const auto release = [&] {
                if (threadIdx.x % 32 == 0) {
                    barrier_arrive(empty_at + 8 * stage);
                }
            };
            if constexpr (Format::IS_PLAIN) {
                for (uint32_t step = 0; step < steps; ++step) {
                    barrier_wait(full_at + 8 * stage, parity);
                    hold(c);
                    products_begin();
#pragma unroll
                    for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                        multiply(c, step, chunk, true);
                    }
                    products_end();
                    products_wait<0>();
                    hold(c);
                    release();
                    advance();
                }
            } else {
                const ExpertScales<Format, PLACES, GATED> own(arguments, places, run.expert, feature, warp);
                for (uint32_t step = 0; step < steps; ++step) {
#pragma unroll
                    for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                        // A chunk is a group of columns, whose sums are computed separately and
                        // then added to `c`.
                        float sums[PLACES / 8][4], of_weight[2], of_x[PLACES / 8][2];
                        if constexpr (Format::BY_BLOCKS) {
                            own.load(arguments.scales, step * CHUNKS + chunk, of_weight, of_x);
                        }
                        if (chunk == 0) {
                            barrier_wait(full_at + 8 * stage, parity);
                        }
                        hold(sums);
                        products_begin();
                        multiply(sums, step, chunk, false);
                        products_end();
                        products_wait<0>();
                        if (chunk + 1 == CHUNKS) {
                            release();
                        }
                        hold(sums);
                        own.add(c, sums, of_weight, of_x);
                    }
                    advance();
                }
                if constexpr (!Format::BY_BLOCKS) {
                    own.scale_rows(c);
                }
            }
            write_places<typename Format::Element, PLACES / 8, GATED>(c, places.by, tile, feature, warp, arguments.features,
                                                                      GatedProduct(arguments.activation), arguments.out);
        }
    }
}

// Launch: grid (as many blocks as fit at once, at most the largest possible number of items), block
// (THREADS). Dynamic shared memory: PLACES * (the bytes of a row, rounded up to STEP_BYTES) +
// stages * STAGE_BYTES, 1 <= stages <= STAGES_MAX. All experts together must have fewer than 65,536
// tiles of places. May be launched with programmatic stream serialization.
//
// The tensor map of the weight: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE,
// swizzle 128B, out of bounds NONE (zeros), and
//
//   gated_experts_small_m   rank 5, dimensions {in, 8, 2, features / 8, experts},
//                       strides {2 * in, 2 * in * features, 16 * in, 4 * in * features} bytes,
//                       box {64, 8, 2, 4, 1}
//   experts_small_m         rank 3, dimensions {in, features, experts},
//                       strides {2 * in, 2 * in * features} bytes, box {64, 64, 1}
//   in E4M3             type UINT8, half the strides, boxes of 128 columns
