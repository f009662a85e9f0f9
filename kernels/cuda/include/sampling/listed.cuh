// Two ways to draw a token: from the list of a row's most likely tokens, or from the whole
// vocabulary in the order of ids.
#pragma once

#include <stdint.h>

#include "choice.cuh"
#include "philox.cuh"
#include "request.cuh"

// The drawn id, or NONE if the nucleus extends beyond the list. `finite_weights` is the sum of the
// weights that min-p keeps in the whole row. It is used only with top-p and without top-k. All
// threads of the block must call this function.
__device__ uint32_t draw_from_list(ChoiceRoom& room, const RowPlan& plan, const SampleRow& wanted,
                                   const uint64_t* list, uint64_t finite_weights) {
    const uint32_t count = plan.listed;
    for (uint32_t place = threadIdx.x; place < count; place += CHOICE_THREADS) {
        room.list[place] = list[place];
    }
    block_sort(room.list, count, power_of_two_from(count));
    uint32_t kept = count;
    if (plan.top_k > 0) {
        // Ties with the last kept candidate are kept, and -0 ties with 0.
        const uint32_t last = key_of(room.list[plan.top_k - 1]);
        const uint32_t least = last == KEY_OF_ZERO ? KEY_OF_MINUS_ZERO : last;
        kept = first_place(room, count, [&](uint32_t place) { return key_of(room.list[place]) < least; });
    }
    const auto difference = [&](uint32_t place) { return value_of(key_of(room.list[place])) - plan.largest; };
    kept = first_place(room, kept, [&](uint32_t place) { return difference(place) < plan.least_difference; });
    run_sums(room, kept, [&](uint32_t place) { return weight_of(difference(place), plan.softening); });
    if (wanted.top_p < 1.0) {
        const uint64_t threshold =
            threshold_of(wanted.top_p, plan.top_k > 0 ? room.running[kept - 1] : finite_weights);
        const uint32_t crossing =
            first_place(room, kept, [&](uint32_t place) { return room.running[place] >= threshold; });
        if (crossing == kept) {
            return NONE;
        }
        kept = crossing + 1;
    }
    const uint64_t target = target_of(philox_uniform(wanted.seed, wanted.position), room.running[kept - 1]);
    const uint32_t drawn = first_place(room, kept, [&](uint32_t place) { return room.running[place] > target; });
    return id_of(room.list[drawn]);
}

// Draws from the whole vocabulary in the order of ids: first a slice by the slices' weights, then a
// token of that slice.
__device__ uint32_t draw_in_id_order(ChoiceRoom& room, const RowPlan& plan, const SampleRow& wanted,
                                     const float* logits, const uint64_t* slice_weights, uint32_t slices,
                                     uint32_t vocabulary) {
    constexpr uint32_t EACH = SLICE / CHOICE_THREADS;
    const uint64_t weights = threadIdx.x < slices ? slice_weights[threadIdx.x] : 0;
    const uint64_t running = block_running_sum(weights, room.sums);
    const uint64_t all = room.sums[LANES - 1];
    const uint64_t target = target_of(philox_uniform(wanted.seed, wanted.position), all);
    if (running > target && running - weights <= target) {
        room.place = threadIdx.x;
        room.before = running - weights;
    }
    __syncthreads();
    const uint32_t first = room.place * SLICE + threadIdx.x * EACH;
    const uint64_t rest = target - room.before;
    uint64_t own[EACH];
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t one = 0; one < EACH; ++one) {
        const float logit = first + one < vocabulary ? logits[first + one] : -INFINITY;
        const float difference = logit - plan.largest;
        own[one] = difference >= plan.least_difference ? weight_of(difference, plan.softening) : 0;
        sum += own[one];
    }
    const uint64_t before = block_running_sum(sum, room.sums) - sum;
    uint64_t reached = before;
#pragma unroll
    for (uint32_t one = 0; one < EACH; ++one) {
        if (reached <= rest && rest < reached + own[one]) {
            room.place = first + one;
        }
        reached += own[one];
    }
    __syncthreads();
    return room.place;
}
