// Descent: a search through a row's candidates, most likely first, for the candidate at which a
// running sum passes a target. Descent is used for rows with too many relevant tokens to list.
//
// A histogram repeatedly narrows the row to the keys of one bin, until the remaining candidates fit
// in the list. Sums are integers, so the result does not depend on the order of additions.
#pragma once

#include <stdint.h>

#include "choice.cuh"
#include "philox.cuh"
#include "request.cuh"
#include "scratch.cuh"

struct DescentRow {
    const float* logits;
    uint32_t vocabulary;
    const RowPlan* plan;
    bool raw;  // compare by keys for which -0 equals 0, as log-probability reports do
};

enum Amount : uint32_t { COUNTS, WEIGHTS };

__device__ __forceinline__ uint64_t amount_of(const DescentRow& row, Amount amount, float logit) {
    return amount == COUNTS ? 1 : weight_of(logit - row.plan->largest, row.plan->softening);
}

// Calls `visit(logit, key, id)` for each logit of a row whose key is within `low` to `high`. All
// threads of the block take part. A comparison of floats, which is exact except for the signs of
// zeros, skips nearly all other logits before their keys are computed.
template <typename Visit>
__device__ __forceinline__ void for_each_between(const DescentRow& row, uint32_t low, uint32_t high, Visit visit) {
    const float least = value_of(low), most = value_of(high);
    const auto look = [&](float logit, uint32_t id) {
        if (logit >= least && logit <= most) {
            const uint32_t key = row.raw ? signless_key(logit) : order_key(logit);
            if (key >= low && key <= high) {
                visit(logit, key, id);
            }
        }
    };
    const uint32_t whole =
        reinterpret_cast<uint64_t>(row.logits) % 16 == 0 ? row.vocabulary / 4 : 0;
    const float4* fours = reinterpret_cast<const float4*>(row.logits);
    uint32_t at = threadIdx.x;
#pragma unroll 1
    for (; at + 3 * CHOICE_THREADS < whole; at += 4 * CHOICE_THREADS) {
        float4 held[4];
#pragma unroll
        for (uint32_t one = 0; one < 4; ++one) {
            held[one] = fours[at + one * CHOICE_THREADS];
        }
#pragma unroll
        for (uint32_t one = 0; one < 4; ++one) {
            const uint32_t id = 4 * (at + one * CHOICE_THREADS);
            look(held[one].x, id), look(held[one].y, id + 1), look(held[one].z, id + 2), look(held[one].w, id + 3);
        }
    }
#pragma unroll 1
    for (uint32_t id = 4 * at; id < 4 * whole; id += 4 * CHOICE_THREADS) {
        const float4 four = fours[id / 4];
        look(four.x, id), look(four.y, id + 1), look(four.z, id + 2), look(four.w, id + 3);
    }
#pragma unroll 1
    for (uint32_t id = 4 * whole + threadIdx.x; id < row.vocabulary; id += CHOICE_THREADS) {
        look(row.logits[id], id);
    }
}

// The first bin at which `before` plus the running sum of `own` (one bin per thread) passes the
// target. Sets `before` to the sum of everything before that bin.
__device__ __forceinline__ uint32_t bin_that_passes(ChoiceRoom& room, uint64_t own, uint64_t target,
                                                    uint64_t& before) {
    const uint64_t running = block_running_sum(own, room.sums) + before;
    if (running > target && running - own <= target) {
        room.place = threadIdx.x;
        room.before = running - own;
    }
    __syncthreads();
    before = room.before;
    const uint32_t bin = room.place;
    __syncthreads();
    return bin;
}

// The largest key whose logit falls in `bin` or a later bin. Later bins have smaller keys.
__device__ __forceinline__ uint32_t key_where_bin_begins(const RowPlan& plan, uint32_t bin) {
    uint64_t low = KEY_OF_NOTHING, high = order_key(plan.largest);
    // Invariant: logits of keys up to `low` are in `bin` or later bins, and logits of keys above
    // `high` are not.
#pragma unroll 1
    while (low < high) {
        const uint64_t middle = (low + high + 1) / 2;
        const bool in_it = bin_of(value_of(static_cast<uint32_t>(middle)), plan) >= bin;
        low = in_it ? middle : low;
        high = in_it ? high : middle - 1;
    }
    return static_cast<uint32_t>(low);
}

// The id of the `nth` token (from 0, in order of ids) whose key is `wanted`.
__device__ __forceinline__ uint32_t nth_equal(ChoiceRoom& room, const DescentRow& row, uint32_t wanted, uint64_t nth) {
    const uint32_t each = (row.vocabulary + CHOICE_THREADS - 1) / CHOICE_THREADS;
    const uint32_t first = threadIdx.x * each, end = min(first + each, row.vocabulary);
    uint64_t own = 0;
#pragma unroll 4
    for (uint32_t id = first; id < end; ++id) {
        own += (row.raw ? signless_key(row.logits[id]) : order_key(row.logits[id])) == wanted;
    }
    uint64_t before = block_running_sum(own, room.sums) - own;
    if (before <= nth && nth < before + own) {
#pragma unroll 1
        for (uint32_t id = first; id < end; ++id) {
            const uint32_t key = row.raw ? signless_key(row.logits[id]) : order_key(row.logits[id]);
            if (key == wanted && before++ == nth) {
                room.place = id;
            }
        }
    }
    __syncthreads();
    const uint32_t id = room.place;
    __syncthreads();
    return id;
}

// The candidate at which the running sum of amounts passes `target`, which must be less than the
// row's total. Sets `reached` to the sum up to and including this candidate. A histogram of the
// row, if there is one (`bin_weights` not null), saves the first pass. All threads of the block
// must call this function.
__device__ __forceinline__ uint64_t descend(ChoiceRoom& room, const DescentRow& row, Amount amount, uint64_t target,
                            const uint64_t* bin_weights, const uint32_t* bin_counts, uint64_t& reached) {
    uint32_t low = row.raw ? KEY_OF_LEAST : row.plan->least;
    uint32_t high = signless_key(row.raw ? row.plan->raw_largest : row.plan->largest);
    uint64_t before = 0;
    uint32_t left = row.vocabulary;
    if (bin_weights != nullptr) {
        const uint64_t own = amount == COUNTS ? bin_counts[threadIdx.x] : bin_weights[threadIdx.x];
        const uint32_t bin = bin_that_passes(room, own, target, before);
        left = bin_counts[bin];
        high = key_where_bin_begins(*row.plan, bin);
        low = max(low, bin == BINS - 1 ? 0 : key_where_bin_begins(*row.plan, bin + 1) + 1);
    }
    while (left > LIST && low < high) {
        const uint32_t width = (high - low) / BINS + 1;
        room.bins.low[threadIdx.x] = 0, room.bins.high[threadIdx.x] = 0, room.bins.count[threadIdx.x] = 0;
        __syncthreads();
        for_each_between(row, low, high, [&](float logit, uint32_t key, uint32_t) {
            const uint32_t bin = (high - key) / width;
            add_wide(&room.bins.low[bin], &room.bins.high[bin], amount_of(row, amount, logit));
            atomicAdd(&room.bins.count[bin], 1u);
        });
        __syncthreads();
        const uint64_t own = static_cast<uint64_t>(room.bins.high[threadIdx.x]) << 32 | room.bins.low[threadIdx.x];
        const uint32_t bin = bin_that_passes(room, own, target, before);
        left = room.bins.count[bin];
        high -= bin * width;
        low = high - low < width ? low : high - width + 1;
        __syncthreads();
    }
    if (left > LIST) {
        const uint64_t each = amount_of(row, amount, value_of(low));
        const uint64_t nth = (target - before) / each;
        reached = before + (nth + 1) * each;
        return candidate(low, nth_equal(room, row, low, nth));
    }
    if (threadIdx.x == 0) {
        room.gathered = 0;
    }
    __syncthreads();
    for_each_between(row, low, high, [&](float, uint32_t key, uint32_t id) {
        room.list[atomicAdd(&room.gathered, 1u)] = candidate(key, id);
    });
    __syncthreads();
    const uint32_t count = room.gathered;
    block_sort(room.list, count, power_of_two_from(count));
    run_sums(room, count, [&](uint32_t place) { return amount_of(row, amount, value_of(key_of(room.list[place]))); });
    const uint32_t place =
        first_place(room, count, [&](uint32_t place) { return before + room.running[place] > target; });
    reached = before + room.running[place];
    const uint64_t found = room.list[place];
    __syncthreads();
    return found;
}

// The sum of the weights of the candidates up to `last` that min-p keeps.
__device__ __forceinline__ uint64_t weights_up_to(ChoiceRoom& room, const DescentRow& row, uint64_t last,
                                                  float least_difference) {
    uint64_t weights = 0;
    const float largest = row.plan->largest;
    // Skips the logits that min-p certainly removes, with a margin for rounding. The exact test is
    // below.
    const float bound = largest + least_difference;
    const float sure = bound - fabsf(bound) * 1e-6f - fabsf(largest) * 1e-6f;
    const uint32_t least = max(max(key_of(last), KEY_OF_LEAST), sure > -INFINITY ? order_key(sure) : 0);
    for_each_between(row, least, signless_key(largest), [&](float logit, uint32_t key, uint32_t id) {
        const bool kept = candidate(key, id) <= last && logit - row.plan->largest >= least_difference;
        weights += kept ? amount_of(row, WEIGHTS, logit) : 0;
    });
    return block_sum(weights, room.sums);
}

// Writes the candidates of a row up to `last` into the list of `room`, in any order.
__device__ __forceinline__ void list_up_to(ChoiceRoom& room, const DescentRow& row, uint64_t last) {
    if (threadIdx.x == 0) {
        room.gathered = 0;
    }
    __syncthreads();
    const uint32_t most = signless_key(row.plan->raw_largest);
    for_each_between(row, key_of(last), most, [&](float, uint32_t key, uint32_t id) {
        if (candidate(key, id) <= last) {
            room.list[atomicAdd(&room.gathered, 1u)] = candidate(key, id);
        }
    });
    __syncthreads();
}

// The results found by descents, in this order. One loop finds all results, so that a kernel
// contains the code only once.
enum Step : uint32_t { STEP_TOP_K, STEP_TOP_P, STEP_DRAW, STEP_REPORT, STEPS };

struct Descents {
    bool draws;              // draw the token, most likely first, with top-k, top-p and min-p
    bool reports;            // gather the `reported` largest raw logits into the list, unsorted
    bool binned;             // there is a histogram of the logits that are drawn from
    const float* drawn_from;
    const float* raw;
    uint32_t vocabulary;
    uint32_t reported;
};

// The drawn token, or `token` if `draws` is false. All threads of the block
// must call this function.
__device__ __forceinline__ uint32_t find_by_descent(ChoiceRoom& room, const RowPlan& plan, const SampleRow& wanted,
                                                    const RowScratch& scratch, const Descents& descents,
                                                    uint32_t token) {
    uint64_t last = ~0ull, weights = 0;
    const bool nucleus = wanted.top_p < 1.0;
#pragma unroll 1
    for (uint32_t step = STEP_TOP_K; step < STEPS; ++step) {
        const bool report = step == STEP_REPORT;
        if (report ? !descents.reports
                   : !descents.draws || (step == STEP_TOP_K && plan.top_k == 0) || (step == STEP_TOP_P && !nucleus)) {
            continue;
        }
        const DescentRow row = {report ? descents.raw : descents.drawn_from, descents.vocabulary, &plan, report};
        // Candidates are ordered from most to least likely, so min-p keeps a prefix. A target below
        // the sum of this prefix never reaches a candidate that min-p removes.
        if (step == STEP_TOP_P || (step == STEP_DRAW && !nucleus)) {
            // With a histogram and without top-k and min-p, the sum is the total of the histogram's
            // weights.
            weights = descents.binned && last == ~0ull && plan.least_difference == -INFINITY
                          ? block_sum(scratch.bin_weights[threadIdx.x], room.sums)
                          : weights_up_to(room, row, last, plan.least_difference);
        }
        const uint64_t target =
            step == STEP_TOP_K   ? plan.top_k - 1
            : step == STEP_TOP_P ? threshold_of(wanted.top_p, weights) - 1
            : step == STEP_DRAW  ? target_of(philox_uniform(wanted.seed, wanted.position), weights)
                                 : descents.reported - 1;
        const Amount amount = step == STEP_TOP_K || report ? COUNTS : WEIGHTS;
        const bool binned = descents.binned && !report;
        uint64_t reached = 0;
        const uint64_t found = descend(room, row, amount, target, binned ? scratch.bin_weights : nullptr,
                                       scratch.bin_counts, reached);
        if (step == STEP_TOP_K) {
            // Ties with the last kept candidate are kept, and -0 ties with 0.
            last = candidate(key_of(found) == KEY_OF_ZERO ? KEY_OF_MINUS_ZERO : key_of(found), NONE);
        } else if (step == STEP_TOP_P) {
            last = found;
            weights = reached;
        } else if (step == STEP_DRAW) {
            token = id_of(found);
        } else {
            list_up_to(room, row, found);
        }
    }
    return token;
}
