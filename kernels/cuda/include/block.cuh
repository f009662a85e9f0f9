// Operations of a whole warp or block: sums, running sums and sorting.
#pragma once

#include <stdint.h>

constexpr uint32_t LANES = 32;
constexpr uint32_t EVERY_LANE = 0xffffffffu;

__device__ __forceinline__ uint32_t lane_of_thread() { return threadIdx.x % LANES; }
__device__ __forceinline__ uint32_t warp_of_thread() { return threadIdx.x / LANES; }

// From sm_80 on, `warp_largest` and `warp_count` take one instruction each.
__device__ __forceinline__ uint32_t warp_largest(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(EVERY_LANE, value);
#else
    for (uint32_t step = LANES / 2; step > 0; step /= 2) {
        value = max(value, __shfl_xor_sync(EVERY_LANE, value, step));
    }
    return value;
#endif
}

__device__ __forceinline__ uint32_t warp_least(uint32_t value) { return ~warp_largest(~value); }

__device__ __forceinline__ uint32_t warp_count(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_add_sync(EVERY_LANE, value);
#else
    for (uint32_t step = LANES / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(EVERY_LANE, value, step);
    }
    return value;
#endif
}

// Returns the sum over the warp. The additions are always in the same order, so the result does not
// depend on the batch.
template <typename Number>
__device__ __forceinline__ Number warp_sum(Number value) {
#pragma unroll
    for (uint32_t step = LANES / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(EVERY_LANE, value, step);
    }
    return value;
}

// The sum over this lane and the lanes before it.
template <typename Number>
__device__ __forceinline__ Number warp_running_sum(Number value) {
#pragma unroll
    for (uint32_t step = 1; step < LANES; step *= 2) {
        const Number before = __shfl_up_sync(EVERY_LANE, value, step);
        value += lane_of_thread() >= step ? before : 0;
    }
    return value;
}

// The sum over this thread and the threads before it. `sums` has LANES elements, enough for the
// warps of a block of 1024 threads. For integers only.
template <typename Number>
__device__ __forceinline__ Number block_running_sum(Number value, Number* sums) {
    const Number own = warp_running_sum(value);
    __syncthreads();
    if (lane_of_thread() == LANES - 1) {
        sums[warp_of_thread()] = own;
    }
    __syncthreads();
    if (warp_of_thread() == 0) {
        const Number warp = lane_of_thread() < blockDim.x / LANES ? sums[lane_of_thread()] : 0;
        sums[lane_of_thread()] = warp_running_sum(warp);
    }
    __syncthreads();
    return own + (warp_of_thread() > 0 ? sums[warp_of_thread() - 1] : 0);
}

// The sum over the block, returned to every thread. `sums` has LANES elements. For integers only.
template <typename Number>
__device__ __forceinline__ Number block_sum(Number value, Number* sums) {
    block_running_sum(value, sums);
    return sums[blockDim.x / LANES - 1];
}

// Sorts `count` numbers, smallest first (Batcher's bitonic network, 1968). `length` is a power of
// two, at least `count` and at most twice the number of threads; elements from `count` to `length`
// are overwritten with the largest number.
__device__ __forceinline__ void block_sort(uint64_t* numbers, uint32_t count, uint32_t length) {
    for (uint32_t place = count + threadIdx.x; place < length; place += blockDim.x) {
        numbers[place] = ~0ull;
    }
    __syncthreads();
    const uint32_t pair = threadIdx.x;
#pragma unroll 1
    for (uint32_t run = 2; run <= length; run *= 2) {
#pragma unroll 1
        for (uint32_t step = run / 2; step > 0; step /= 2) {
            if (pair < length / 2) {
                const uint32_t left = 2 * pair - (pair & (step - 1));
                const uint32_t right = left + step;
                const uint64_t one = numbers[left], other = numbers[right];
                if ((one > other) == ((left & run) == 0)) {
                    numbers[left] = other;
                    numbers[right] = one;
                }
            }
            // In steps of up to 32, the 64 numbers of a warp are compared only with each other, so
            // that a barrier of the warp is enough.
            if (step > LANES) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
        if (run > LANES) {
            __syncthreads();
        }
    }
    __syncthreads();
}

__device__ __forceinline__ uint32_t power_of_two_from(uint32_t count) {
    return count <= 2 ? 2 : 1u << (32 - __clz(count - 1));
}

// Adds to a 64-bit sum in two halves. In shared memory, a 32-bit atomic add is one instruction, but
// a 64-bit atomic add is a compare-and-swap loop.
__device__ __forceinline__ void add_wide(uint32_t* low, uint32_t* high, uint64_t number) {
    const uint32_t part = static_cast<uint32_t>(number);
    const uint32_t before = atomicAdd(low, part);
    const uint32_t rest = static_cast<uint32_t>(number >> 32) + (before + part < before ? 1 : 0);
    if (rest > 0) {
        atomicAdd(high, rest);
    }
}
