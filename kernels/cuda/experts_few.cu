// Products of few rows with the weights of their experts on Hopper: a step of decoding, which is bound by reading the
// weights of the experts that were chosen once.
// Targets: sm_90a
//
// gated_experts_few_<type>_r<PLACES>   out[place] = silu(x[row] * gate^T) * (x[row] * up^T)   (SwiGLU, arXiv 2002.05202)
// experts_few_<type>_r<PLACES>         out[place] = weight of the choice * (x[place] * w^T)
//
// <type> is bf16 or f16; PLACES is 8, 16, 24 or 32: the places of one expert that a tile takes. Operands are those of
// experts.cu, but the weight comes as a tensor map; x and its rows start at multiples of 16 bytes, `in` is a multiple of 8,
// and gated `features` is one too. Sums are f32 with one rounding at the end, in the order of columns, so a row has the
// same bits whatever stands beside it. A NaN stays in its row, or in the features whose weights have it.
//
// The work is a line of items: of each tile of places all tiles of 64 rows of the weight (gated: 32 of gate and 32 of up,
// eight and eight). Blocks take equal stretches of the line, so that most of a block's items are of one tile of places,
// whose rows of x it keeps in shared memory, all columns of them. One warp copies weights, and is ahead of the others by as
// many stages as there are, also over the end of an item; a warpgroup multiplies. The weight is the tall operand of wgmma, x
// the narrow one.

#include "contract.cuh"
#include "expert_list.cuh"
#include "expert_tiles.cuh"
#include "hopper_copy.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"
#include "wgmma.cuh"

using contract::experts_few::CHUNK_COLUMNS;
using contract::experts_few::STAGES_MAX;
using contract::experts_few::STEP_COLUMNS;
using contract::experts_few::THREADS;
using contract::experts_few::TILE_ROWS;
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t CHUNKS = STEP_COLUMNS / CHUNK_COLUMNS;
constexpr uint32_t ROW_BYTES = CHUNK_COLUMNS * 2;
constexpr uint32_t CHUNK_BYTES = TILE_ROWS * ROW_BYTES;
constexpr uint32_t STAGE_BYTES = CHUNKS * CHUNK_BYTES;
static_assert(THREADS == WARPGROUP + 32 && TILE_ROWS == 64, "a warpgroup multiplies, a warp copies");
static_assert(STAGE_BYTES == contract::experts_few::STAGE_BYTES, "the launch counts so many");

template <typename Element>
struct Arguments {
    const Element* x;
    const uint32_t* choices;
    const uint32_t* ends;
    const float* weights;
    Element* out;
    uint32_t x_pitch;
    uint32_t in;
    uint32_t features;
    uint32_t top;
    uint32_t experts;
    uint32_t stages;
};

// A tile's rows of x, all columns: chunks of 64 columns, one after the other, as the copy engine would leave them.
template <typename Element, uint32_t PLACES, bool GATED>
__device__ __forceinline__ void bring_rows(const Arguments<Element>& arguments, const Tile& tile, uint32_t shared,
                                           uint32_t steps) {
    constexpr uint32_t PIECES = ROW_BYTES / 16;
    constexpr uint32_t HELD = 8;
    const uint32_t of_row = steps * CHUNKS * PIECES, all = PLACES * of_row;
    for (uint32_t first = threadIdx.x; first < all; first += HELD * WARPGROUP) {
        uint4 held[HELD];
#pragma unroll
        for (uint32_t i = 0; i < HELD; ++i) {
            const uint32_t piece = first + i * WARPGROUP;
            held[i] = make_uint4(0, 0, 0, 0);
            const uint32_t place = tile.first + piece / of_row, column = piece % of_row * 8;
            if (piece < all && place < tile.end && column < arguments.in) {
                const uint64_t row = GATED ? arguments.choices[place] / arguments.top : place;
                held[i] = *reinterpret_cast<const uint4*>(arguments.x + row * arguments.x_pitch + column);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < HELD; ++i) {
            const uint32_t piece = first + i * WARPGROUP;
            if (piece < all) {
                const uint32_t row = piece / of_row, chunk = piece % of_row / PIECES;
                const uint32_t to =
                    shared + chunk * PLACES * ROW_BYTES + Swizzle<CHUNK_COLUMNS>::place(row, piece % PIECES);
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(held[i].x), "r"(held[i].y),
                             "r"(held[i].z), "r"(held[i].w)
                             : "memory");
            }
        }
    }
}

template <typename Element, uint32_t PLACES, bool GATED>
__device__ __forceinline__ void few(const TensorMap& weight, const Arguments<Element>& arguments) {
    extern __shared__ __align__(1024) uint8_t dynamic[];
    __shared__ Tiles tiles;
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
        tiles.count<PLACES>(arguments.ends, arguments.experts);
    }
    __syncthreads();
    constexpr uint32_t FEATURES = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const uint32_t steps = (arguments.in + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const uint32_t across = (arguments.features + FEATURES - 1) / FEATURES;
    const uint64_t items = static_cast<uint64_t>(tiles.before[arguments.experts]) * across;
    const uint32_t first = static_cast<uint32_t>(items * blockIdx.x / gridDim.x);
    const uint32_t last = static_cast<uint32_t>(items * (blockIdx.x + 1) / gridDim.x);
    const uint32_t stages_at = shared + PLACES * steps * CHUNKS * ROW_BYTES;
    uint32_t stage = 0, parity = 0;
    if (warp == WARPGROUP / 32) {
        if (is_elected()) {
            for (uint32_t item = first; item < last; ++item) {
                const uint32_t expert = tiles.expert_of(item / across, arguments.experts);
                const uint32_t feature = item % across * FEATURES;
                for (uint32_t step = 0; step < steps; ++step) {
                    const uint32_t barrier = full_at + 8 * stage;
                    barrier_wait(empty_at + 8 * stage, parity ^ 1);
                    barrier_arrive_expecting(barrier, STAGE_BYTES);
#pragma unroll
                    for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                        const uint32_t to = stages_at + stage * STAGE_BYTES + chunk * CHUNK_BYTES;
                        const uint32_t column = step * STEP_COLUMNS + chunk * CHUNK_COLUMNS;
                        if (GATED) {
                            copy_box_once(to, weight, barrier, column, 0, 0, feature / 8, expert);
                        } else {
                            copy_box_once(to, weight, barrier, column, feature, expert);
                        }
                    }
                    if (++stage == arguments.stages) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
        return;
    }
    constexpr uint64_t LAYOUT = matrix_layout<CHUNK_COLUMNS>(0, 8 * ROW_BYTES);
    uint32_t held = 0xffffffffu;  // the tile whose rows are there
    Tile tile = {0, 0, 0};
    for (uint32_t item = first; item < last; ++item) {
        if (item / across != held) {
            held = item / across;
            const uint32_t expert = tiles.expert_of(held, arguments.experts);
            tile = tiles.tile<PLACES>(held, expert, arguments.ends);
            // The last products of the rows that were there have ended in all warps.
            part_sync(WARPGROUP_MEETS, WARPGROUP);
            bring_rows<Element, PLACES, GATED>(arguments, tile, shared, steps);
            publish_writes();
            part_sync(WARPGROUP_MEETS, WARPGROUP);
        }
        float c[PLACES / 8][4] = {};
        for (uint32_t step = 0; step < steps; ++step) {
            barrier_wait(full_at + 8 * stage, parity);
            hold(c);
            products_begin();
#pragma unroll
            for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
                const uint32_t weight_at = stages_at + stage * STAGE_BYTES + chunk * CHUNK_BYTES;
                const uint32_t x_at = shared + (step * CHUNKS + chunk) * PLACES * ROW_BYTES;
#pragma unroll
                for (uint32_t k = 0; k < CHUNK_COLUMNS / 16; ++k) {
                    Warpgroup<Element>::multiply(c, matrix_at(LAYOUT, weight_at + 32 * k), matrix_at(LAYOUT, x_at + 32 * k),
                                                 1);
                }
            }
            products_end();
            products_wait<0>();
            hold(c);
            if (threadIdx.x % 32 == 0) {
                barrier_arrive(empty_at + 8 * stage);
            }
            if (++stage == arguments.stages) {
                stage = 0;
                parity ^= 1;
            }
        }
        write_tile<Element, PLACES / 8, GATED>(c, tile, item % across * FEATURES, warp, arguments.features,
                                               arguments.choices, arguments.weights, arguments.out);
    }
}

#define EXPERTS_FEW(name, Element, PLACES)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        gated_experts_few_##name##_r##PLACES(const __grid_constant__ TensorMap weight, const Element* x, uint32_t x_pitch, \
                                             uint32_t in, uint32_t features, const uint32_t* choices, uint32_t top,        \
                                             const uint32_t* ends, uint32_t experts, Element* out, uint32_t stages) {      \
        few<Element, PLACES, true>(                                                                                        \
            weight, {x, choices, ends, nullptr, out, x_pitch, in, features, top, experts, stages});                        \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        experts_few_##name##_r##PLACES(const __grid_constant__ TensorMap weight, const Element* x, uint32_t in,            \
                                       uint32_t features, const uint32_t* choices, uint32_t top, const uint32_t* ends,     \
                                       uint32_t experts, const float* weights, Element* out, uint32_t stages) {            \
        few<Element, PLACES, false>(weight,                                                                                \
                                    {x, choices, ends, weights, out, in, in, features, top, experts, stages});             \
    }
#define KERNEL(name, Element)     \
    EXPERTS_FEW(name, Element, 8)  \
    EXPERTS_FEW(name, Element, 16) \
    EXPERTS_FEW(name, Element, 24) \
    EXPERTS_FEW(name, Element, 32)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (as many blocks as fit at once, no more than there can be items), block (THREADS); dynamic shared memory
// PLACES * div_ceil(in, STEP_COLUMNS) * 2 * STEP_COLUMNS + stages * STAGE_BYTES, 1 <= stages <= STAGES_MAX. May be launched
// with programmatic stream serialization.
//
// The tensor map of the weight: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE, swizzle 128B, out of bounds
// NONE (zeros), and
//   gated_experts_few   rank 5, dimensions {in, 8, 2, features / 8, experts}, strides {2 * in, 2 * in * features, 16 * in,
//                       4 * in * features} bytes, box {64, 8, 2, 4, 1}
//   experts_few         rank 3, dimensions {in, features, experts}, strides {2 * in, 2 * in * features} bytes, box {64, 64, 1}
