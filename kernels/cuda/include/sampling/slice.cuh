// A slice of a row in a block's registers.
#pragma once

#include <stdint.h>

#include "block.cuh"
#include "scratch.cuh"

using contract::sampling::SLICE_THREADS;
// Number of blocks of the first kernel (SLICE_BLOCKS) and of the third (GATHER_BLOCKS) that must
// fit on a multiprocessor at once. This limits the kernels' registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr uint32_t SLICE_BLOCKS = 1, GATHER_BLOCKS = 1;
#else
constexpr uint32_t SLICE_BLOCKS = 6, GATHER_BLOCKS = 4;
#endif
constexpr uint32_t SLICE_WARPS = SLICE_THREADS / LANES;
// Number of logits that a thread loads at once. The logits of one load of a warp are a group.
constexpr uint32_t AT_ONCE = 4;
constexpr uint32_t LOADS = SLICE / (SLICE_THREADS * AT_ONCE);

struct Held {
    float logit[LOADS][AT_ONCE];
};

// The index in the slice of the first logit that this thread loads in load `load`.
__device__ __forceinline__ uint32_t place_of(uint32_t load) {
    return (load * SLICE_THREADS + threadIdx.x) * AT_ONCE;
}

// Logits beyond the vocabulary become minus infinity, which is never chosen or counted.
__device__ __forceinline__ void load_slice(Held& held, const float* row, uint32_t slice, uint32_t vocabulary) {
    const bool aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
#pragma unroll
    for (uint32_t load = 0; load < LOADS; ++load) {
        const uint32_t id = slice * SLICE + place_of(load);
        if (aligned && id + AT_ONCE <= vocabulary) {
            const float4 four = *reinterpret_cast<const float4*>(row + id);
            held.logit[load][0] = four.x, held.logit[load][1] = four.y;
            held.logit[load][2] = four.z, held.logit[load][3] = four.w;
        } else {
#pragma unroll
            for (uint32_t one = 0; one < AT_ONCE; ++one) {
                held.logit[load][one] = id + one < vocabulary ? row[id + one] : -INFINITY;
            }
        }
    }
}

__device__ __forceinline__ void store_slice(const Held& held, float* row, uint32_t slice, uint32_t vocabulary) {
    const bool aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
#pragma unroll
    for (uint32_t load = 0; load < LOADS; ++load) {
        const uint32_t id = slice * SLICE + place_of(load);
        if (aligned && id + AT_ONCE <= vocabulary) {
            *reinterpret_cast<float4*>(row + id) = make_float4(held.logit[load][0], held.logit[load][1],
                                                               held.logit[load][2], held.logit[load][3]);
        } else {
#pragma unroll
            for (uint32_t one = 0; one < AT_ONCE; ++one) {
                if (id + one < vocabulary) {
                    row[id + one] = held.logit[load][one];
                }
            }
        }
    }
}

// Calls `visit(logit, id)` for each logit that this thread has in registers.
template <typename Visit>
__device__ __forceinline__ void for_each_held(const Held& held, uint32_t slice, Visit visit) {
#pragma unroll
    for (uint32_t load = 0; load < LOADS; ++load) {
#pragma unroll
        for (uint32_t one = 0; one < AT_ONCE; ++one) {
            visit(held.logit[load][one], slice * SLICE + place_of(load) + one);
        }
    }
}
