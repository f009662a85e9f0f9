// GEMMs of rows with the weights of their experts, for all GPUs (mma.sync). Rows are sorted by
// expert, and only the device knows how many rows each expert has.
//
// A choice is one of the `top` experts of a row. Choice number row * top + k is the row's k-th
// expert. A place is a position in the list of all choices sorted by expert (route.cu).
//
// gated_experts_<type>   out[place] = activation(x[row] * gate^T) * (x[row] * up^T)   (SwiGLU and
//                        GeGLU, Shazeer 2020, arXiv 2002.05202)
// experts_<type>         out[place] = router weight of the choice * (x[place] * w^T)
// add_experts_<type>     sum[row] += out[place] over the places of a row's choices, in the order of
//                        k; without `accumulate`, the sum replaces the previous contents
//
// x        gated: [rows, in], x_pitch elements apart; otherwise [rows * top, in] without gaps, in
//          the order of places
// weight   gated: [experts * 2 * features, in], for each expert gate, then up; otherwise [experts *
//          features, in]
// choices  [rows * top] u32: the choice at each place
// starts   [experts + 1] u32: the first place of each expert on this rank, then the end of the last
//          expert. Other places belong to experts on other ranks: nothing is read or written there
// weights  [rows * top] f32, indexed by choice
// out      [rows * top, features]
//
// Sums are f32, rounded once at the end; a choice's weight is multiplied in before the rounding.
// add_experts adds in f32 to the row's previous contents and rounds once. Any sizes and any
// alignment; the copies of an operand are 16 bytes wide if its rows are aligned to 16 bytes.
// Elements past an edge of a matrix count as zeros. Results have the same bits every time, and a
// row's bits do not depend on the other rows.
//
// A block computes a tile of 64 rows of the weight (gated: 32 of gate and 32 of up, alternating in
// groups of eight) and 32 places of one expert. The grid has as many tiles of places as any routing
// can need: a block looks up its tile among the existing tiles, and returns if its tile does not
// exist.

#include "contract.cuh"
#include "element.cuh"
#include "expert_sum.cuh"
#include "expert_tiles.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"

using contract::experts::EXPERTS_MAX;
using contract::experts::THREADS;
using contract::experts::TILE_PLACES;
using contract::experts::TILE_ROWS;
constexpr uint32_t DEPTH = 64;  // columns of a step: 128 bytes
constexpr uint32_t PIECES = DEPTH / 8;
constexpr uint32_t STAGES = 3;
constexpr uint32_t STAGE_BYTES = (TILE_ROWS + TILE_PLACES) * DEPTH * 2;
constexpr uint32_t GROUPS = TILE_PLACES / 8;
static_assert(TILE_ROWS == 16 * (THREADS / WARP) && STAGES * STAGE_BYTES <= 48 * 1024,
              "each warp computes 16 rows, and the stages fit into static shared memory");

// Byte offset of a 16-byte piece. The pieces of a row are permuted, so that the same piece of eight
// rows covers all banks.
__device__ __forceinline__ uint32_t piece_at(uint32_t row, uint32_t piece) {
    return row * (DEPTH * 2) + ((piece ^ (row & 7)) << 4);
}

// Returns tile `number`, or an empty tile if there are fewer tiles.
__device__ __forceinline__ Tile tile_of(const uint32_t* starts, uint32_t experts, uint32_t number, uint32_t* shared) {
    // Inclusive prefix sums of the experts' tiles. Each thread counts the tiles of consecutive
    // experts.
    constexpr uint32_t OF_THREAD = EXPERTS_MAX / THREADS;
    uint32_t tiles[OF_THREAD], sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < OF_THREAD; ++i) {
        const uint32_t expert = threadIdx.x * OF_THREAD + i;
        uint32_t count = 0;
        if (expert < experts) {
            count = starts[expert + 1] - starts[expert];
        }
        sum += (count + TILE_PLACES - 1) / TILE_PLACES;
        tiles[i] = sum;
    }
    uint32_t before = sum;
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (uint32_t distance = 1; distance < WARP; distance *= 2) {
        const uint32_t more = __shfl_up_sync(ALL_LANES, before, distance);
        before += lane >= distance ? more : 0;
    }
    if (lane == WARP - 1) {
        shared[warp] = before;
    }
    if (threadIdx.x == 0) {
        shared[THREADS / WARP] = experts;
    }
    __syncthreads();
    before -= sum;
    for (uint32_t other = 0; other < warp; ++other) {
        before += shared[other];
    }
#pragma unroll
    for (uint32_t i = 0; i < OF_THREAD; ++i) {
        const uint32_t begin = before + (i == 0 ? 0 : tiles[i - 1]);
        if (begin <= number && number < before + tiles[i]) {
            shared[THREADS / WARP] = threadIdx.x * OF_THREAD + i;
            shared[THREADS / WARP + 1] = number - begin;
        }
    }
    __syncthreads();
    const uint32_t expert = shared[THREADS / WARP];
    if (expert >= experts) {
        return {0, 0, 0};
    }
    const uint32_t first = starts[expert] + shared[THREADS / WARP + 1] * TILE_PLACES;
    return {expert, first, min(starts[expert + 1], first + TILE_PLACES)};
}

// Copies eight elements of a row into shared memory. Elements from column `columns` on become
// zeros. If `is_row` is false, all elements become zeros.
template <typename Element>
__device__ __forceinline__ void copy_piece(uint32_t to, const Element* row, uint32_t column, uint32_t columns, bool is_row,
                                           bool is_aligned) {
    if (is_aligned) {
        copy_16_bytes(to, is_row && column < columns ? row + column : row, is_row && column < columns);
        return;
    }
    uint32_t words[4];
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
        const uint32_t at = column + 2 * pair;
        const float low = is_row && at < columns ? to_float(row[at]) : 0.0f;
        const float high = is_row && at + 1 < columns ? to_float(row[at + 1]) : 0.0f;
        words[pair] = pair_from_floats<Element>(low, high);
    }
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of copies except the last `LATER` groups have arrived.
template <uint32_t LATER>
__device__ __forceinline__ void wait_for_groups() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

template <typename Element, bool GATED>
__device__ __forceinline__ void experts(const Element* x, uint32_t x_pitch, const Element* weight, uint32_t in,
                                        uint32_t features, const uint32_t* choices, uint32_t top, const uint32_t* starts,
                                        uint32_t count, const float* weights, uint32_t activation, Element* out) {
    __shared__ __align__(128) uint8_t stages[STAGES * STAGE_BYTES];
    __shared__ uint32_t scan_words[THREADS / WARP + 2];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Tile tile = tile_of(starts, count, blockIdx.y, scan_words);
    if (tile.first >= tile.end) {
        return;
    }
    constexpr uint32_t FEATURES = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const uint32_t first_feature = blockIdx.x * FEATURES;
    const uint64_t weight_rows = static_cast<uint64_t>(tile.expert) * (GATED ? 2 : 1) * features;
    const bool is_weight_aligned = aligned_to(weight, 16) && in % 8 == 0;
    const bool is_x_aligned = aligned_to(x, 16) && in % 8 == 0 && x_pitch % 8 == 0;
    const uint32_t shared = shared_address(stages);
    const uint32_t steps = (in + DEPTH - 1) / DEPTH;
    const auto copy_step = [&](uint32_t step) {
        const uint32_t at = shared + step % STAGES * STAGE_BYTES;
        for (uint32_t piece = threadIdx.x; piece < TILE_ROWS * PIECES; piece += THREADS) {
            const uint32_t row = piece / PIECES, column = step * DEPTH + piece % PIECES * 8;
            // Eight rows of gate, then the same eight rows of up.
            const uint32_t feature = first_feature + (GATED ? row / 16 * 8 + row % 8 : row);
            const uint64_t part = GATED && row % 16 >= 8 ? features : 0;
            const bool is_row = feature < features;
            const Element* from = weight + (weight_rows + part + (is_row ? feature : 0)) * in;
            copy_piece(at + piece_at(row, piece % PIECES), from, column, in, is_row, is_weight_aligned);
        }
        for (uint32_t piece = threadIdx.x; piece < TILE_PLACES * PIECES; piece += THREADS) {
            const uint32_t row = piece / PIECES, column = step * DEPTH + piece % PIECES * 8;
            const bool is_row = tile.first + row < tile.end;
            const uint32_t place = is_row ? tile.first + row : tile.first;
            const uint64_t source = GATED ? choices[place] / top : place;
            copy_piece(at + TILE_ROWS * DEPTH * 2 + piece_at(row, piece % PIECES), x + source * x_pitch, column, in, is_row,
                       is_x_aligned);
        }
        commit_copies();
    };
    float c[GROUPS][4] = {};
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll 1
    for (uint32_t step = 0; step < STAGES - 1; ++step) {
        if (step < steps) {
            copy_step(step);
        } else {
            commit_copies();
        }
    }
#pragma unroll 1
    for (uint32_t step = 0; step < steps; ++step) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            copy_step(step + STAGES - 1);
        } else {
            commit_copies();
        }
        const uint32_t at = shared + step % STAGES * STAGE_BYTES, x_at = at + TILE_ROWS * DEPTH * 2;
#pragma unroll
        for (uint32_t k = 0; k < DEPTH / 16; ++k) {
            // Quarters of A: top left, bottom left, top right, bottom right.
            uint32_t a[4];
            load_quarters(a, at + piece_at(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (uint32_t two = 0; two < GROUPS; two += 2) {
                // Two groups of eight rows of x: the left and right half of the first group, then
                // of the second group.
                uint32_t b[4];
                load_quarters(b, x_at + piece_at(two * 8 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                TensorCoreElement<Element>::multiply_add(c[two], a, b[0], b[1]);
                TensorCoreElement<Element>::multiply_add(c[two + 1], a, b[2], b[3]);
            }
        }
    }
    write_tile<Element, GROUPS, GATED>(c, tile, first_feature, warp, features, choices, weights, GatedProduct(activation), out);
}

// The range of places that belong to experts on this rank.
struct LocalPlaces {
    uint32_t first, count;

    __device__ __forceinline__ bool has(uint32_t place) const {
        return place - first < count;
    }
};

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void add_row(const Element* products, const uint32_t* places, uint32_t top, LocalPlaces here,
                                        bool accumulate, uint32_t columns, Element* sum) {
    for (uint32_t vector = threadIdx.x + blockIdx.y * blockDim.x; vector < columns / WIDTH; vector += gridDim.y * blockDim.x) {
        float values[1][WIDTH] = {};
        if (accumulate) {
            load<WIDTH>(sum + vector * WIDTH, values[0]);
        }
        const auto each = [&](auto step) { step(0, vector * WIDTH); };
        add_products<WIDTH>(products, places, top, columns, each, [&](uint32_t place) { return here.has(place); }, values);
        store<WIDTH>(sum + vector * WIDTH, values[0]);
    }
}

template <typename Element>
__device__ __forceinline__ void add_experts(const Element* products, const uint32_t* places, uint32_t top,
                                            const uint32_t* starts, uint32_t count, bool accumulate, uint32_t columns,
                                            Element* sum, uint32_t sum_pitch) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    places += static_cast<uint64_t>(blockIdx.x) * top;
    sum += static_cast<uint64_t>(blockIdx.x) * sum_pitch;
    const LocalPlaces here{starts[0], starts[count] - starts[0]};
    const uint64_t together = reinterpret_cast<uint64_t>(products) | reinterpret_cast<uint64_t>(sum);
    if (aligned_to(together, 16) && columns % VECTOR<Element> == 0) {
        add_row<VECTOR<Element>>(products, places, top, here, accumulate, columns, sum);
    } else {
        add_row<1>(products, places, top, here, accumulate, columns, sum);
    }
}

#define KERNEL(name, Element)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        gated_experts_##name(const Element* weight, const Element* x, uint32_t x_pitch, uint32_t in, uint32_t features,    \
                             const uint32_t* choices, uint32_t top, const uint32_t* starts, uint32_t count,\
                             uint32_t activation, Element* out) {\
        experts<Element, true>(x, x_pitch, weight, in, features, choices, top, starts, count, nullptr, activation, out); \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        experts_##name(const Element* weight, const Element* x, uint32_t in, uint32_t features, const uint32_t* choices,   \
                       uint32_t top, const uint32_t* starts, uint32_t count, const float* weights, Element* out) {         \
        experts<Element, false>(x, in, weight, in, features, choices, top, starts, count, weights, contract::gate::SILU, out); \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(contract::experts::ADD_THREADS)                                           \
        add_experts_##name(const Element* products, const uint32_t* places, uint32_t top, const uint32_t* starts,          \
                           uint32_t count, uint32_t accumulate, uint32_t columns, Element* sum, uint32_t sum_pitch) {      \
        add_experts(products, places, top, starts, count, accumulate, columns, sum, sum_pitch);                            \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: no dynamic shared memory; rows > 0. All kernels may be launched
// with programmatic stream serialization.
//   gated_experts and experts: grid (div_ceil(features, 32 if gated, else 64), div_ceil(choices,
//                                   TILE_PLACES) + min(experts, choices)), block (THREADS)
//   add_experts: grid (rows, any), block (ADD_THREADS)
