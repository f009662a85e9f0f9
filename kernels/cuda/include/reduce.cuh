// Sums over a warp and over a block.
#pragma once

#include <stdint.h>

constexpr uint32_t WARP = 32;
constexpr uint32_t WARPS_MAX = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// Every lane gets the sum. The order of the additions is fixed, so the same row gives the
// same bits every time.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// Every thread of the block gets the sum. The block must consist of whole warps. One barrier
// is enough if consecutive reductions use different `partial` arrays: a thread that writes an
// array again has passed the barrier of the reduction in between, so all threads have
// finished reading the array.
__device__ __forceinline__ float block_sum(float value, float (&partial)[WARPS_MAX]) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    value = warp_sum(value);
    if (warps == 1) {
        return value;
    }
    if (lane == 0) {
        partial[warp] = value;
    }
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

// Sums several numbers, with one barrier for all of them.
template <uint32_t COUNT>
__device__ __forceinline__ void block_sums(float (&values)[COUNT], float (&partial)[COUNT][WARPS_MAX]) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        values[i] = warp_sum(values[i]);
        if (lane == 0) {
            partial[i][warp] = values[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        values[i] = warp_sum(lane < warps ? partial[i][lane] : 0.0f);
    }
}
