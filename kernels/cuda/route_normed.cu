// The residual stream's norm, the router's GEMM and the routing of few rows in one launch. Launched
// separately, each of the three kernels would have only a microsecond of work.
// Targets: sm_90a
//
// route_normed_<type>   normed = x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)
//                       (Zhang and Sennrich 2019, arXiv 1910.07467); then
//                       route_small_m_f32 of route.cu with logits = normed * router^T
//
// x        [rows, hidden]       rows x_pitch elements apart
// weight   [hidden]             activations' type
// router   [experts, hidden]    activations' type
// normed   [rows, hidden]       contiguous, bit-identical to rms_norm.cu
//
// The rows of all operands are aligned to 16 bytes. hidden is a multiple of COLUMNS, at most
// HIDDEN_MAX; experts is at most EXPERTS_MAX, rows at most SMALL_M_ROWS. Sums are f32. The order of
// a logit's additions is fixed, so a row's bits do not depend on the other rows.
//
// The grid is one cluster. Each block normalizes all rows and multiplies them by sixteen experts of
// the router, whose weights it has read before the previous kernel has ended. The warps of a block
// divide the columns. The first block then routes.

#include "contract.cuh"
#include "element.cuh"
#include "hopper_cluster.cuh"
#include "kernel_order.cuh"
#include "route_rows.cuh"
#include "tensor_core.cuh"

using contract::route_normed::CLUSTER;
using contract::route_normed::COLUMNS;
using contract::route_normed::HIDDEN_MAX;
using contract::route_normed::ROW_GAP_BYTES;
constexpr uint32_t ROUTED_MAX = contract::route_normed::EXPERTS_MAX;
constexpr uint32_t OF_BLOCK = ROUTED_MAX / CLUSTER;
constexpr uint32_t WIDTH = 8;
// Number of groups of COLUMNS columns that a warp multiplies.
constexpr uint32_t HELD = HIDDEN_MAX / COLUMNS / WARPS;
constexpr uint32_t SUM_BYTES = contract::route_normed::SUM_BYTES;
static_assert(OF_BLOCK == 16 && SMALL_M_ROWS == 16, "16 rows and 16 experts are two tiles of mma.sync");
static_assert(HELD * COLUMNS * WARPS == HIDDEN_MAX && COLUMNS == 4 * WIDTH,
              "the warps cover all columns, and four lanes share a row of a group");
static_assert(SUM_BYTES == WARPS * SMALL_M_ROWS * OF_BLOCK * sizeof(float), "each warp has separate sums");

template <typename Element>
struct Operands {
    const Element* x;
    uint32_t x_pitch;
    const Element* weight;
    NormTerms terms;
    uint32_t hidden;
    const Element* router;
    Element* normed;
};

// Writes a number to shared memory of the cluster's first block, at the same offset as
// `at` in this block.
__device__ __forceinline__ void send_to_first(uint32_t at, float value) {
    asm volatile(
        "{\n"
        ".reg .b32 place;\n"
        "mapa.shared::cluster.u32 place, %0, 0;\n"
        "st.shared::cluster.f32 [place], %1;\n"
        "}\n" ::"r"(at),
        "f"(value)
        : "memory");
}

template <typename Element>
__device__ __forceinline__ void route_normed(const Operands<Element>& call, const Routed& routed, const RoutedTo& to) {
    // Dynamic shared memory starts with the rows of x, which are later replaced by the normalized
    // rows. Gaps between the rows spread eight rows over all banks. The norm's weight follows the
    // rows, and the sums follow the weight.
    extern __shared__ __align__(16) uint8_t dynamic[];
    __shared__ Sort sort;
    __shared__ uint32_t of_row[THREADS];
    __shared__ float logits[SMALL_M_ROWS][ROUTED_MAX], squares[SMALL_M_ROWS][WARPS];
    let_next_kernel_start();
    const uint32_t rank = cluster_rank(), warp = warp_of_thread(), lane = lane_of_thread();
    const uint32_t eight = lane / 4, quarter = lane % 4, rows = routed.rows;
    const uint32_t groups = call.hidden / COLUMNS, pieces = call.hidden / WIDTH, row_bytes = 2 * call.hidden + ROW_GAP_BYTES;
    uint8_t *weight_at = dynamic + rows * row_bytes, *sums_at = weight_at + 2 * call.hidden;
    // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
    uint4 router[HELD][2];
#pragma unroll
    for (uint32_t i = 0; i < HELD; ++i) {
        const uint32_t group = warp + i * WARPS;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t expert = rank * OF_BLOCK + half * 8 + eight;
            router[i][half] = make_uint4(0, 0, 0, 0);
            if (group < groups && expert < routed.experts) {
                const Element* from = call.router + static_cast<uint64_t>(expert) * call.hidden + group * COLUMNS;
                router[i][half] = *reinterpret_cast<const uint4*>(from + quarter * WIDTH);
            }
        }
    }
    for (uint32_t piece = threadIdx.x; piece < pieces; piece += THREADS) {
        copy_16_bytes(shared_address(weight_at + 16 * piece), call.weight + WIDTH * piece, true);
    }
    sort.clear();
    // No block may write to the first block's memory before the first block has begun.
    cluster_arrive();
    wait_for_previous_kernel();
    for (uint32_t piece = threadIdx.x; piece < rows * pieces; piece += THREADS) {
        const uint32_t row = piece / pieces, of = piece % pieces;
        const Element* from = call.x + static_cast<uint64_t>(row) * call.x_pitch + WIDTH * of;
        copy_16_bytes(shared_address(dynamic + row * row_bytes + 16 * of), from, true);
    }
    wait_for_copies();
    __syncthreads();
    // The squares are added in the order of rms_norm.cu: by the same number of threads, each with
    // two pieces, warp by warp.
    const uint32_t parts = (call.hidden + 16 * LANES - 1) / (16 * LANES), threads = parts * LANES;
    const auto each = [&](uint32_t task, auto&& step) {
        const uint32_t row = task / parts, part = task % parts;
#pragma unroll
        for (uint32_t slot = 0; slot < 2; ++slot) {
            const uint32_t piece = part * LANES + lane + slot * threads;
            if (piece < pieces) {
                auto* at = reinterpret_cast<Element*>(dynamic + row * row_bytes + 16 * piece);
                float values[WIDTH];
                load<WIDTH>(at, values);
                step(piece, at, values);
            }
        }
    };
    for (uint32_t task = warp; task < rows * parts; task += WARPS) {
        float sum = 0.0f;
        each(task, [&](uint32_t, const Element*, const float(&values)[WIDTH]) {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                sum += values[i] * values[i];
            }
        });
        sum = warp_sum(sum);
        if (lane == 0) {
            squares[task / parts][task % parts] = sum;
        }
    }
    __syncthreads();
    for (uint32_t task = warp; task < rows * parts; task += WARPS) {
        const uint32_t row = task / parts;
        const float sum = parts == 1 ? squares[row][0] : warp_sum(lane < parts ? squares[row][lane] : 0.0f);
        const float factor = 1.0f / sqrtf(sum / call.hidden + call.terms.epsilon);
        each(task, [&](uint32_t piece, Element* at, float(&values)[WIDTH]) {
            float by[WIDTH];
            load<WIDTH>(reinterpret_cast<const Element*>(weight_at + 16 * piece), by);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                values[i] = values[i] * factor * (by[i] + call.terms.weight_offset);
            }
            store<WIDTH>(at, values);
            if (row % CLUSTER == rank) {
                store<WIDTH>(call.normed + static_cast<uint64_t>(row) * call.hidden + WIDTH * piece, values);
            }
        });
    }
    __syncthreads();
    // A lane's 16 bytes of a row and of an expert are its operands of two products. It does not
    // matter which columns these bytes are, as long as both operands have the same columns.
    float c[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < HELD; ++i) {
        const uint32_t group = warp + i * WARPS;
        if (group < groups) {
            const uint8_t* at = dynamic + eight * row_bytes + 2 * group * COLUMNS + 16 * quarter;
            uint4 upper = make_uint4(0, 0, 0, 0), lower = upper;
            if (eight < rows) {
                upper = *reinterpret_cast<const uint4*>(at);
            }
            if (eight + 8 < rows) {
                lower = *reinterpret_cast<const uint4*>(at + 8 * row_bytes);
            }
            const uint32_t first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint4& by = router[i][half];
                TensorCoreElement<Element>::multiply_add(c[half], first, by.x, by.y);
                TensorCoreElement<Element>::multiply_add(c[half], second, by.z, by.w);
            }
        }
    }
    auto* sums = reinterpret_cast<float(*)[SMALL_M_ROWS][OF_BLOCK]>(sums_at);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t expert = half * 8 + 2 * quarter;
        *reinterpret_cast<float2*>(&sums[warp][eight][expert]) = make_float2(c[half][0], c[half][1]);
        *reinterpret_cast<float2*>(&sums[warp][eight + 8][expert]) = make_float2(c[half][2], c[half][3]);
    }
    __syncthreads();
    cluster_wait();
    const uint32_t row = threadIdx.x / OF_BLOCK, expert = threadIdx.x % OF_BLOCK;
    if (row < rows) {
        float logit = 0.0f;
#pragma unroll
        for (uint32_t of = 0; of < WARPS; ++of) {
            logit += sums[of][row][expert];
        }
        send_to_first(shared_address(&logits[row][rank * OF_BLOCK + expert]), logit);
    }
    cluster_sync();
    if (rank == 0) {
        route_small_m(sort, of_row, &logits[0][0], ROUTED_MAX, routed, to);
    }
}

#define KERNEL(name, Element)                                                                                              \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)                              \
        route_normed_##name(const Element* x, uint32_t x_pitch, const Element* weight, float epsilon,                     \
                            float weight_offset, uint32_t hidden, const Element* router, Element* normed, uint32_t rows, \
                            uint32_t experts, uint32_t top, uint32_t renormalized, float logit_scale, \
                            const float* expert_scales, float* weights, uint32_t* places, uint32_t* choices, uint32_t* starts, \
                            uint32_t* loads, const uint32_t* slots) { \
        route_normed(Operands<Element>{x, x_pitch, weight, NormTerms{epsilon, weight_offset}, hidden, router, normed},    \
                     {rows, experts, {top, renormalized != 0, logit_scale, expert_scales}}, \
                     {weights, places, choices, starts, loads, slots}); \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (CLUSTER), block (THREADS of contract::route), dynamic shared memory rows
// * (2 * hidden + ROW_GAP_BYTES) + 2 * hidden + SUM_BYTES. rows > 0. May be launched
// with programmatic stream serialization.
