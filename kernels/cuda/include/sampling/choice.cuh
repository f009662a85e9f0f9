// Shared memory and routines of the last kernel, which chooses a token with one block per row.
#pragma once

#include <stdint.h>

#include "block.cuh"
#include "order_key.cuh"
#include "scratch.cuh"
#include "weight.cuh"

using contract::sampling::CHOICE_THREADS;
static_assert(CHOICE_THREADS == BINS, "each thread has one bin");

struct ChoiceRoom {
    uint64_t list[LIST];
    union {
        uint64_t running[LIST];  // running sums of weights over the list
        struct {
            uint32_t low[BINS], high[BINS], count[BINS];
        } bins;
    };
    uint64_t sums[LANES];
    uint64_t before;
    uint32_t place;
    uint32_t gathered;
};

// The first of `count` indices for which `reached(index)` holds, or `count` if there is no such
// index. `reached` must also hold for all later indices.
template <typename Reached>
__device__ __forceinline__ uint32_t first_place(ChoiceRoom& room, uint32_t count, Reached reached) {
    __syncthreads();
    if (threadIdx.x == 0) {
        room.place = count;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t place = threadIdx.x; place < count; place += CHOICE_THREADS) {
        if (reached(place) && (place == 0 || !reached(place - 1))) {
            room.place = place;
        }
    }
    __syncthreads();
    return room.place;
}

// Sets `running[i]` to the sum of `amount(j)` over the first i + 1 entries of the list.
template <typename Amount>
__device__ __forceinline__ void run_sums(ChoiceRoom& room, uint32_t count, Amount amount) {
    constexpr uint32_t EACH = LIST / CHOICE_THREADS;
    uint64_t own[EACH];
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t one = 0; one < EACH; ++one) {
        const uint32_t place = threadIdx.x * EACH + one;
        sum += place < count ? amount(place) : 0;
        own[one] = sum;
    }
    const uint64_t before = block_running_sum(sum, room.sums) - sum;
#pragma unroll
    for (uint32_t one = 0; one < EACH; ++one) {
        room.running[threadIdx.x * EACH + one] = before + own[one];
    }
    __syncthreads();
}
