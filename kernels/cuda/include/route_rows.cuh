// The choice of a row's experts by a warp, and the sorting of choices by expert within a block.
// For blocks of contract::route::THREADS threads.
#pragma once

#include "block.cuh"
#include "contract.cuh"

using contract::route::EXPERTS_MAX;
using contract::route::SMALL_M_ROWS;
using contract::route::THREADS;
constexpr uint32_t WARPS = THREADS / LANES;
constexpr uint32_t NO_EXPERT = EXPERTS_MAX;
static_assert(THREADS == EXPERTS_MAX, "each expert has one thread");
static_assert(SMALL_M_ROWS == WARPS && SMALL_M_ROWS * LANES == THREADS,
              "each row has one warp, and each choice of all rows has one thread");

// Maps a value to an integer that sorts like the value. Both zeros have the same integer. NaN has
// the integer 1, and all numbers have larger integers.
__device__ __forceinline__ uint32_t order_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.0f);
    return isnan(value) ? 1u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

// How experts are chosen and weighted (RoutingRule in calls/experts.rs).
struct Rule {
    uint32_t top;
    bool renormalized;
    float logit_scale;
    const float* expert_scales;  // [experts], or null
};

struct Routed {
    uint32_t rows, experts;
    Rule rule;
};

// Chooses experts from a row of up to 32 * OF_LANE experts. Lane k gets the row's k-th choice and
// its weight; lanes from `top` on get NO_EXPERT.
template <uint32_t OF_LANE>
__device__ __forceinline__ uint32_t choose(const float* logits, uint32_t experts, const Rule& rule, float& weight) {
    const uint32_t lane = threadIdx.x % LANES;
    float found[OF_LANE];
    uint32_t order[OF_LANE];  // 0 if the expert does not exist or is already chosen
#pragma unroll
    for (uint32_t i = 0; i < OF_LANE; ++i) {
        const uint32_t expert = i * LANES + lane;
        found[i] = expert < experts ? logits[expert] : 0.0f;
        order[i] = expert < experts ? order_of(found[i]) : 0u;
    }
    uint32_t own = NO_EXPERT, own_order = 0, largest = 0;
    for (uint32_t rank = 0; rank < rule.top; ++rank) {
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
    const auto exponential = [&](float logit) { return expf(rule.logit_scale * (logit - from)); };
    weight = lane < rule.top ? exponential(value_of(own_order)) : 0.0f;
    float total = weight;
    if (!rule.renormalized) {
        total = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < OF_LANE; ++i) {
            if (i * LANES + lane < experts) {
                total += exponential(found[i]);
            }
        }
    }
    weight /= warp_sum(total);
    if (rule.expert_scales != nullptr && lane < rule.top) {
        weight *= rule.expert_scales[own];
    }
    return own;
}

// Uses the smallest variant that supports all experts. With the larger variant, each lane would
// process its share of 512 experts even if the model has only 128.
__device__ __forceinline__ uint32_t choose(const float* logits, uint32_t experts, const Rule& rule, float& weight) {
    if (experts <= 4 * LANES) {
        return choose<4>(logits, experts, rule, weight);
    }
    return choose<EXPERTS_MAX / LANES>(logits, experts, rule, weight);
}

// Sorts a range of choices within one block. Each warp has a contiguous part of the range.
struct Sort {
    uint32_t next[EXPERTS_MAX];                // position of the expert's first choice in this block
    uint32_t of_warp[WARPS][EXPERTS_MAX + 1];  // choices in the warp; after `sum_warps`, choices in earlier warps
    uint32_t sums[WARPS];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (uint32_t warp = 0; warp < WARPS; ++warp) {
            of_warp[warp][threadIdx.x] = 0;
        }
    }

    // Calls `with(choice, expert, earlier choices of that expert in this warp)` for each choice
    // of the warp, 32 lanes at a time, and adds the choices to `of_warp`. `chosen` returns the
    // expert of a choice.
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

    // Replaces each warp's number of choices by the number in earlier warps. Returns the total
    // for this thread's expert.
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

    // The sum of `own` over this thread and the threads before it.
    __device__ __forceinline__ uint32_t sum_until(uint32_t own) {
        const uint32_t warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        uint32_t sum = warp_running_sum(own);
        if (lane == LANES - 1) {
            sums[warp] = sum;
        }
        __syncthreads();
        for (uint32_t other = 0; other < warp; ++other) {
            sum += sums[other];
        }
        return sum;
    }

    // Sorts the choices [first, last). If `counts` is null, these are all choices of the launch.
    // Otherwise, `counts` `[blocks, experts]` is the number of choices of each expert in each
    // block.
    template <typename Chosen>
    __device__ __forceinline__ void run(uint32_t first, uint32_t last, uint32_t experts, const uint32_t* counts,
                                        const Chosen& chosen, uint32_t* places, uint32_t* choices, uint32_t* starts,
                                        uint32_t* loads) {
        for_each(first, last, chosen, [](uint32_t, uint32_t, uint32_t) {});
        __syncthreads();
        // `all` is the number of choices of this expert in all rows, and `before` is the number in
        // the rows of earlier blocks.
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

// Outputs of the routing, as in route.cu.
struct RoutedTo {
    float* weights;
    uint32_t *places, *choices, *starts, *loads;
    const uint32_t* slots;
};

// Subtracts a choice from `loads` if its row is padding of a captured step. `Sort::run` counts all
// choices in `loads`, including the choices of padding rows.
__device__ __forceinline__ void count_off(const uint32_t* slots, uint32_t row, uint32_t* loads, uint32_t expert) {
    if (slots != nullptr && slots[row] == contract::common::NO_SLOT) {
        atomicSub(&loads[expert], 1u);
    }
}

// Routes up to SMALL_M_ROWS rows completely, with one block. `sort.clear()` must have been called.
__device__ __forceinline__ void route_small_m(Sort& sort, uint32_t (&of_row)[THREADS], const float* logits, uint32_t pitch,
                                          const Routed& routed, const RoutedTo& to) {
    const uint32_t row = threadIdx.x / LANES, lane = threadIdx.x % LANES, top = routed.rule.top;
    if (row < routed.rows) {
        float weight;
        const float* of_logits = logits + static_cast<uint64_t>(row) * pitch;
        const uint32_t own = choose(of_logits, routed.experts, routed.rule, weight);
        if (lane < top) {
            to.weights[row * top + lane] = weight;
            of_row[row * top + lane] = own;
            count_off(to.slots, row, to.loads, own);
        }
    }
    __syncthreads();
    const auto chosen = [&](uint32_t choice) { return of_row[choice]; };
    sort.run(0, routed.rows * top, routed.experts, nullptr, chosen, to.places, to.choices, to.starts, to.loads);
}
