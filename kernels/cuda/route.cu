// Which experts compute which token, and all choices sorted by expert: what stands between a mixture's router and its
// products. Two launches, one after the other.
//
// route_choose_f32   each row's experts and weights, and how many choices each expert has of each block's rows
// route_sort_u32     where the sorted order has each choice, and the other way round
//
// logits   [rows, experts] f32       rows pitch elements apart
// weights  [rows, top] f32           softmax over all experts, or with `renormalised` over the row's own
// places   [rows * top] u32          between the launches: each choice's expert
// choices  [rows * top] u32          the choice at each place
// ends     [experts] u32             where each expert's places end
// loads    [experts] u32             each expert's choices are added
// counts   [blocks, experts] u32     scratch
//
// Of equal logits the expert of the lower index comes first; what is no number comes last, and its weight is none. The
// order of additions is fixed, so a row has the same bits whatever stands beside it. Choices of an expert stand in the
// order of their rows: the sort is a counting sort whose ranks within a warp come from one comparison of all its lanes.

#include "contract.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

using contract::route::BLOCK_ROWS;
using contract::route::EXPERTS_MAX;
using contract::route::THREADS;
constexpr uint32_t WARPS = THREADS / WARP;
constexpr uint32_t OF_LANE = EXPERTS_MAX / WARP;  // experts
static_assert(THREADS == EXPERTS_MAX, "a thread an expert");

extern "C" __global__ void __launch_bounds__(THREADS)
    route_choose_f32(const float* logits, uint32_t pitch, uint32_t rows, uint32_t experts, uint32_t top,
                     uint32_t renormalised, float* weights, uint32_t* places, uint32_t* counts) {
    __shared__ uint32_t count[EXPERTS_MAX];
    count[threadIdx.x] = 0;
    let_next_kernel_start();
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t last = min(rows, (blockIdx.x + 1) * BLOCK_ROWS);
    for (uint32_t row = blockIdx.x * BLOCK_ROWS + threadIdx.x / WARP; row < last; row += WARPS) {
        const float* from = logits + static_cast<uint64_t>(row) * pitch;
        float found[OF_LANE];
        uint32_t is_left = 0;
#pragma unroll
        for (uint32_t i = 0; i < OF_LANE; ++i) {
            const uint32_t expert = i * WARP + lane;
            if (expert < experts) {
                found[i] = from[expert];
                is_left |= 1u << i;
            }
        }
        // Lane `rank` keeps the choice of that rank.
        uint32_t own = 0;
        float own_logit = 0.0f, largest = 0.0f;
        for (uint32_t rank = 0; rank < top; ++rank) {
            float best = 0.0f;
            float best_raw = 0.0f;
            uint32_t index = 0xffffffffu;
#pragma unroll
            for (uint32_t i = 0; i < OF_LANE; ++i) {
                if (is_left & (1u << i)) {
                    const float value = isnan(found[i]) ? -INFINITY : found[i];
                    if (index == 0xffffffffu || value > best) {
                        best = value;
                        best_raw = found[i];
                        index = i * WARP + lane;
                    }
                }
            }
#pragma unroll
            for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
                const float other = __shfl_xor_sync(ALL_LANES, best, distance);
                const float other_raw = __shfl_xor_sync(ALL_LANES, best_raw, distance);
                const uint32_t other_index = __shfl_xor_sync(ALL_LANES, index, distance);
                const bool is_there = other_index != 0xffffffffu;
                const bool is_better = other > best || (other == best && other_index < index);
                if (is_there && (index == 0xffffffffu || is_better)) {
                    best = other;
                    best_raw = other_raw;
                    index = other_index;
                }
            }
            if (index % WARP == lane) {
                is_left &= ~(1u << (index / WARP));
            }
            if (rank == 0) {
                largest = best_raw;
            }
            if (rank == lane) {
                own = index;
                own_logit = best_raw;
            }
        }
        const bool is_choice = lane < top;
        float weight = is_choice ? expf(own_logit - largest) : 0.0f;
        float total = weight;
        if (!renormalised) {
            total = 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < OF_LANE; ++i) {
                if (i * WARP + lane < experts) {
                    total += expf(found[i] - largest);
                }
            }
        }
        weight /= warp_sum(total);
        if (is_choice) {
            weights[row * top + lane] = weight;
            places[row * top + lane] = own;
            atomicAdd(&count[own], 1u);
        }
    }
    __syncthreads();
    if (threadIdx.x < experts) {
        counts[blockIdx.x * experts + threadIdx.x] = count[threadIdx.x];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_sort_u32(uint32_t* places, uint32_t choices_count, uint32_t experts, uint32_t block_choices,
                   const uint32_t* counts, uint32_t* choices, uint32_t* ends, uint32_t* loads) {
    __shared__ uint32_t next[EXPERTS_MAX];        // where an expert's next choice goes
    __shared__ uint16_t of_warp[WARPS][EXPERTS_MAX];
    let_next_kernel_start();
    wait_for_previous_kernel();
    // Of all rows, and of those before this block's.
    const uint32_t expert = threadIdx.x;
    uint32_t all = 0, before = 0;
    if (expert < experts) {
        for (uint32_t block = 0; block < gridDim.x; ++block) {
            const uint32_t more = counts[block * experts + expert];
            before += block < blockIdx.x ? more : 0;
            all += more;
        }
    }
    // Inclusive sums over experts.
    next[expert] = all;
    __syncthreads();
    for (uint32_t distance = 1; distance < EXPERTS_MAX; distance *= 2) {
        const uint32_t more = expert >= distance ? next[expert - distance] : 0;
        __syncthreads();
        next[expert] += more;
        __syncthreads();
    }
    const uint32_t end = next[expert];
    if (blockIdx.x == 0 && expert < experts) {
        ends[expert] = end;
        loads[expert] += all;
    }
    __syncthreads();
    next[expert] = end - all + before;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32_t first = blockIdx.x * block_choices, last = min(choices_count, first + block_choices);
    for (uint32_t base = first; base < last; base += THREADS) {
#pragma unroll
        for (uint32_t other = 0; other < WARPS; ++other) {
            of_warp[other][expert] = 0;
        }
        __syncthreads();
        const uint32_t choice = base + threadIdx.x;
        const bool is_there = choice < last;
        // Lanes without a choice share a number that is no expert.
        const uint32_t chosen = is_there ? places[choice] : EXPERTS_MAX;
        const uint32_t same = __match_any_sync(ALL_LANES, chosen);
        const uint32_t rank = __popc(same & ((1u << lane) - 1));
        if (is_there && rank == 0) {
            of_warp[warp][chosen] = static_cast<uint16_t>(__popc(same));
        }
        __syncthreads();
        if (is_there) {
            uint32_t place = next[chosen] + rank;
            for (uint32_t other = 0; other < warp; ++other) {
                place += of_warp[other][chosen];
            }
            places[choice] = place;
            choices[place] = choice;
        }
        __syncthreads();
        uint32_t more = 0;
#pragma unroll
        for (uint32_t other = 0; other < WARPS; ++other) {
            more += of_warp[other][expert];
        }
        next[expert] += more;
        __syncthreads();
    }
}

// Launch: grid (div_ceil(rows, BLOCK_ROWS)), block (THREADS), no dynamic shared memory; rows > 0. block_choices is
// BLOCK_ROWS * top. Both may be launched with programmatic stream serialization.
