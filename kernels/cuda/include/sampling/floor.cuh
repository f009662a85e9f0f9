// Lower bounds for sampling: a key that at least `nth` tokens reach, and the smallest difference
// that min-p keeps.
#pragma once

#include <math.h>
#include <stdint.h>

#include "choice.cuh"
#include "request.cuh"
#include "scratch.cuh"

using contract::sampling::PLAN_THREADS;

// Bins for 11 bits of a key: floor_of sorts by a key's leading 22 bits in two passes.
constexpr uint32_t KEY_BINS = 2048;

// The `nth` largest (from 1) of the groups' largest keys, truncated to 22 bits, or the smallest key
// if fewer than `nth` groups have a key. If there are `nth` groups, at least `nth` tokens have the
// returned key or a larger key, because each of the `nth` groups with the largest keys has such a
// token.
__device__ __noinline__ uint32_t floor_of(const uint32_t* groups, uint32_t count, uint32_t nth, uint32_t* bins, uint32_t* sums,
                             uint32_t* found) {
    uint32_t known = 0, wanted = nth;
    for (uint32_t digit = 0; digit < 2; ++digit) {
        const uint32_t shift = digit == 0 ? 21 : 10;
        for (uint32_t bin = threadIdx.x; bin < KEY_BINS; bin += PLAN_THREADS) {
            bins[bin] = 0;
        }
        if (threadIdx.x == 0) {
            found[0] = NONE;
        }
        __syncthreads();
        for (uint32_t group = threadIdx.x; group < count; group += PLAN_THREADS) {
            const uint32_t key = groups[group];
            if (key > KEY_OF_NOTHING && (digit == 0 || key >> 21 == known >> 21)) {
                atomicAdd(&bins[KEY_BINS - 1 - (key >> shift) % KEY_BINS], 1u);
            }
        }
        __syncthreads();
        // Four bins per thread, the largest keys first.
        uint32_t own = 0;
        for (uint32_t one = 0; one < 4; ++one) {
            own += bins[4 * threadIdx.x + one];
        }
        uint32_t before = block_running_sum(own, sums) - own;
        for (uint32_t one = 0; one < 4; ++one) {
            const uint32_t here = bins[4 * threadIdx.x + one];
            if (before < wanted && wanted <= before + here) {
                found[0] = KEY_BINS - 1 - (4 * threadIdx.x + one);
                found[1] = before;
            }
            before += here;
        }
        __syncthreads();
        if (found[0] == NONE) {
            return KEY_OF_LEAST;
        }
        known |= found[0] << shift;
        wanted -= found[1];
        __syncthreads();
    }
    // -0 is equal to 0 but has a smaller key, so a floor of 0 must include it.
    known = known == KEY_OF_ZERO ? KEY_OF_MINUS_ZERO : known;
    return max(known, KEY_OF_LEAST);
}

// The smallest difference (a token's logit minus the largest logit, in f32) that min-p keeps. The
// comparison is in f64, as in the CPU sampler.
__device__ float least_difference_of(const SampleRow& wanted) {
    if (wanted.min_p_logarithm == -INFINITY) {
        return -INFINITY;
    }
    const auto kept = [&](float difference) {
        return static_cast<double>(difference) / wanted.temperature >= wanted.min_p_logarithm;
    };
    float least = -fabsf(static_cast<float>(wanted.min_p_logarithm * wanted.temperature));
    while (!kept(least) && least < 0.0f) {
        least = nextafterf(least, 0.0f);
    }
    for (float next = nextafterf(least, -INFINITY); next > -INFINITY && kept(next);) {
        least = next;
        next = nextafterf(least, -INFINITY);
    }
    return least;
}
