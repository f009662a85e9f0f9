// Which experts compute which token, and all choices sorted by expert: what stands between a mixture's router and its
// products. One launch for few rows, otherwise two, one after the other.
//
// route_few_f32      all of it, for up to FEW_ROWS rows
// route_choose_f32   each row's experts and weights, and how many choices each expert has of each block's rows
// route_sort_u32     where the sorted order has each choice, and the other way round
//
// logits   [rows, experts] f32       rows pitch elements apart
// weights  [rows, top] f32           softmax over all experts, or with `renormalised` over the row's own
// places   [rows * top] u32          between the launches: each choice's expert
// choices  [rows * top] u32          the choice at each place
// starts   [experts + 1] u32         where each expert's places start, and at last where they end
// loads    [experts] u32             each expert's choices are added
// counts   [blocks, experts] u32     scratch; null if one block sorts, which counts for itself
//
// Of equal logits the expert of the lower index comes first; what is no number comes last, and makes the weights
// that it counts for none. The
// order of additions is fixed, so a row has the same bits whatever stands beside it. Choices of an expert stand in the
// order of their rows: the sort is a counting sort whose ranks within a warp come from one comparison of all its lanes.

#include "contract.cuh"
#include "kernel_order.cuh"
#include "block.cuh"

using contract::route::EXPERTS_MAX;
using contract::route::FEW_ROWS;
using contract::route::THREADS;
constexpr uint32_t WARPS = THREADS / LANES;
constexpr uint32_t NO_EXPERT = EXPERTS_MAX;
static_assert(THREADS == EXPERTS_MAX, "a thread an expert");
static_assert(FEW_ROWS == WARPS && FEW_ROWS * LANES == THREADS, "a warp a row, and a thread a choice of any row");

// Larger for a larger number, above 1 for each but those that are none, and the same for both zeros.
__device__ __forceinline__ uint32_t order_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return isnan(value) ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

// What a warp chooses from a row of up to 32 * OF_LANE experts: lane `rank` gets the choice of that rank, others NO_EXPERT.
template <uint32_t OF_LANE>
__device__ __forceinline__ uint32_t choose(const float* logits, uint32_t experts, uint32_t top, bool renormalised,
                                           float& weight) {
    const uint32_t lane = threadIdx.x % LANES;
    float found[OF_LANE];
    uint32_t order[OF_LANE];  // zero: not there, or chosen
#pragma unroll
    for (uint32_t i = 0; i < OF_LANE; ++i) {
        const uint32_t expert = i * LANES + lane;
        found[i] = expert < experts ? logits[expert] : 0.0f;
        order[i] = expert < experts ? order_of(found[i]) : 0u;
    }
    uint32_t own = NO_EXPERT, own_order = 0, largest = 0;
    for (uint32_t rank = 0; rank < top; ++rank) {
        uint32_t best = 0, at = 0;
#pragma unroll
        for (uint32_t i = 0; i < OF_LANE; ++i) {
            at = order[i] > best ? i : at;
            best = max(best, order[i]);
        }
        const uint32_t most = warp_largest(best);
        const uint32_t expert = warp_least(best == most ? at * LANES + lane : 0xffffffffu);
#pragma unroll
        for (uint32_t i = 0; i < OF_LANE; ++i) {
            order[i] = i * LANES + lane == expert ? 0u : order[i];
        }
        largest = rank == 0 ? most : largest;
        own = rank == lane ? expert : own;
        own_order = rank == lane ? most : own_order;
    }
    const float from = value_of(largest);
    weight = lane < top ? expf(value_of(own_order) - from) : 0.0f;
    float total = weight;
    if (!renormalised) {
        total = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < OF_LANE; ++i) {
            if (i * LANES + lane < experts) {
                total += expf(found[i] - from);
            }
        }
    }
    weight /= warp_sum(total);
    return own;
}

// By the least that holds the experts. Without this, a mixture of 128 would look at each lane's place for 512.
__device__ __forceinline__ uint32_t choose(const float* logits, uint32_t experts, uint32_t top, bool renormalised,
                                           float& weight) {
    if (experts <= 4 * LANES) {
        return choose<4>(logits, experts, top, renormalised, weight);
    }
    return choose<EXPERTS_MAX / LANES>(logits, experts, top, renormalised, weight);
}

// A block that sorts a stretch of choices, of which each warp has a stretch of its own.
struct Sort {
    uint32_t next[EXPERTS_MAX];                // where an expert's next choice of this block goes
    uint32_t of_warp[WARPS][EXPERTS_MAX + 1];  // choices of the warp, then those of the warps in front of it
    uint32_t sums[WARPS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            of_warp[warp][threadIdx.x] = 0;
        }
    }

    // Calls `with` with each choice of the warp's, those of 32 lanes at a time, and how many of its expert's the warp has had
    // before; adds to that. `chosen` says a choice's expert.
    template <typename Chosen, typename With>
    __device__ __forceinline__ void for_each(uint32_t first, uint32_t last, const Chosen& chosen, const With& with) {
        const uint32_t warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const uint32_t stretch = (last - first + THREADS - 1) / THREADS * LANES;
        const uint32_t end = min(last, first + (warp + 1) * stretch);
        for (uint32_t base = first + warp * stretch; base < end; base += LANES) {
            const uint32_t choice = base + lane, expert = choice < end ? chosen(choice) : NO_EXPERT;
            const uint32_t same = __match_any_sync(EVERY_LANE, expert);
            const uint32_t rank = __popc(same & ((1u << lane) - 1)), before = of_warp[warp][expert];
            if (choice < end) {
                with(choice, expert, before + rank);
            }
            __syncwarp();
            if (rank == 0) {
                of_warp[warp][expert] = before + __popc(same);
            }
            __syncwarp();
        }
    }

    // Turns each warp's numbers of choices into those of the warps in front; returns all of the expert of this thread.
    __device__ __forceinline__ uint32_t sum_warps() {
        uint32_t before = 0;
#pragma unroll
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            const uint32_t own = of_warp[warp][threadIdx.x];
            of_warp[warp][threadIdx.x] = before;
            before += own;
        }
        return before;
    }

    // The sum of what the threads in front have, and own.
    __device__ __forceinline__ uint32_t sum_until(uint32_t own) {
        const uint32_t warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        uint32_t sum = own;
#pragma unroll
        for (uint32_t distance = 1; distance < LANES; distance *= 2) {
            const uint32_t more = __shfl_up_sync(EVERY_LANE, sum, distance);
            sum += lane >= distance ? more : 0;
        }
        if (lane == LANES - 1) {
            sums[warp] = sum;
        }
        __syncthreads();
        for (uint32_t other = 0; other < warp; ++other) {
            sum += sums[other];
        }
        return sum;
    }

    // Sorts choices [first, last), all that there are if `counts` is null.
    template <typename Chosen>
    __device__ __forceinline__ void run(uint32_t first, uint32_t last, uint32_t experts, const uint32_t* counts,
                                        const Chosen& chosen, uint32_t* places, uint32_t* choices, uint32_t* starts,
                                        uint32_t* loads) {
        for_each(first, last, chosen, [](uint32_t, uint32_t, uint32_t) {});
        __syncthreads();
        // Of all rows, and of those before this block's.
        const uint32_t expert = threadIdx.x;
        uint32_t all = sum_warps(), before = 0;
        if (counts != nullptr && expert < experts) {
            all = 0;
#pragma unroll 8
            for (uint32_t block = 0; block < gridDim.x; ++block) {
                const uint32_t more = counts[block * experts + expert];
                before += block < blockIdx.x ? more : 0;
                all += more;
            }
        }
        const uint32_t end = sum_until(all);
        if (blockIdx.x == 0 && expert < experts) {
            starts[expert] = end - all;
            if (expert == experts - 1) {
                starts[experts] = end;
            }
            loads[expert] += all;
        }
        next[expert] = end - all + before;
        __syncthreads();
        for_each(first, last, chosen, [&](uint32_t choice, uint32_t expert, uint32_t rank) {
            const uint32_t place = next[expert] + rank;
            places[choice] = place;
            choices[place] = choice;
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    route_few_f32(const float* logits, uint32_t pitch, uint32_t rows, uint32_t experts, uint32_t top,
                  uint32_t renormalised, float* weights, uint32_t* places, uint32_t* choices, uint32_t* starts,
                  uint32_t* loads) {
    __shared__ Sort sort;
    __shared__ uint32_t of_row[THREADS];
    let_next_kernel_start();
    sort.clear();
    wait_for_previous_kernel();
    const uint32_t row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (row < rows) {
        float weight;
        const uint32_t own = choose(logits + static_cast<uint64_t>(row) * pitch, experts, top, renormalised, weight);
        if (lane < top) {
            weights[row * top + lane] = weight;
            of_row[row * top + lane] = own;
        }
    }
    __syncthreads();
    const auto chosen = [&](uint32_t choice) { return of_row[choice]; };
    sort.run(0, rows * top, experts, nullptr, chosen, places, choices, starts, loads);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_choose_f32(const float* logits, uint32_t pitch, uint32_t rows, uint32_t experts, uint32_t top,
                     uint32_t renormalised, uint32_t block_rows, float* weights, uint32_t* places, uint32_t* counts) {
    __shared__ uint32_t count[EXPERTS_MAX];
    let_next_kernel_start();
    for (uint32_t expert = threadIdx.x; expert < EXPERTS_MAX; expert += blockDim.x) {
        count[expert] = 0;
    }
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t lane = threadIdx.x % LANES;
    const uint32_t last = min(rows, (blockIdx.x + 1) * block_rows);
    for (uint32_t row = blockIdx.x * block_rows + threadIdx.x / LANES; row < last; row += blockDim.x / LANES) {
        float weight;
        const uint32_t own = choose(logits + static_cast<uint64_t>(row) * pitch, experts, top, renormalised, weight);
        if (lane < top) {
            weights[row * top + lane] = weight;
            places[row * top + lane] = own;
            atomicAdd(&count[own], 1u);
        }
    }
    if (counts == nullptr) {
        return;
    }
    __syncthreads();
    for (uint32_t expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        counts[blockIdx.x * experts + expert] = count[expert];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_sort_u32(uint32_t* places, uint32_t choices_count, uint32_t experts, uint32_t block_choices,
                   const uint32_t* counts, uint32_t* choices, uint32_t* starts, uint32_t* loads) {
    __shared__ Sort sort;
    let_next_kernel_start();
    sort.clear();
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t first = blockIdx.x * block_choices, last = min(choices_count, first + block_choices);
    const auto chosen = [&](uint32_t choice) { return places[choice]; };
    sort.run(first, last, experts, counts, chosen, places, choices, starts, loads);
}

// Launch: no dynamic shared memory, and all may be launched with programmatic stream serialization.
//   route_few_f32      grid (1), block (THREADS); rows <= FEW_ROWS, also none
//   route_choose_f32   grid (div_ceil(rows, block_rows)), block (any whole warps up to THREADS)
//   route_sort_u32     with counts, the same grid, and block_choices = block_rows * top; without, grid (1) and block_choices
//                      = choices_count. Block (THREADS)
