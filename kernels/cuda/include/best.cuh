// The largest value of a row and its place, over the threads of a block and, on sm_90, of a cluster of
// blocks that shares the row.
#pragma once

#include "contract.cuh"
#include "reduce.cuh"

using contract::argmax::THREADS;
using contract::common::NO_CHOICE;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_BLOCK_CLUSTERS
#define CLUSTER_DIMS __cluster_dims__(BLOCKS_PER_ROW, 1, 1)
constexpr uint32_t BLOCKS_PER_ROW = contract::argmax::CLUSTER;
#else
#define CLUSTER_DIMS
constexpr uint32_t BLOCKS_PER_ROW = 1;
#endif

struct Best {
    float value;
    uint32_t index;
};

// Returns true if `next` wins over `best`, in whichever order the two were read.
__device__ __forceinline__ bool beats(const Best& next, const Best& best) {
    if (next.index == NO_CHOICE || best.index == NO_CHOICE) {
        return best.index == NO_CHOICE;
    }
    return next.value > best.value || (next.value == best.value && next.index < best.index);
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
        const Best next = {__shfl_xor_sync(ALL_LANES, best.value, distance),
                           __shfl_xor_sync(ALL_LANES, best.index, distance)};
        if (beats(next, best)) {
            best = next;
        }
    }
    return best;
}

// The first half of a barrier of the cluster of blocks. All threads must call it once before best_of_row,
// which waits at the barrier. Does nothing before sm_90.
__device__ __forceinline__ void arrive_at_cluster_barrier() {
#ifdef HAS_BLOCK_CLUSTERS
    // No block may write to the first block's shared memory before the first block runs. The work
    // between this arrival and the wait hides the delay.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// The best of all threads of the cluster. The result is valid in thread 0 of block 0, which is
// `part` 0.
__device__ __forceinline__ Best best_of_row(Best best, uint32_t part) {
    __shared__ Best of_warps[THREADS / WARP];
#ifdef HAS_BLOCK_CLUSTERS
    __shared__ Best of_blocks[BLOCKS_PER_ROW];
#endif
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) {
        of_warps[threadIdx.x / WARP] = best;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        best = warp_best(threadIdx.x < THREADS / WARP ? of_warps[threadIdx.x] : Best{-INFINITY, NO_CHOICE});
    }
#ifdef HAS_BLOCK_CLUSTERS
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0) {
        const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(&of_blocks[part]));
        uint32_t there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(here));
        asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(__float_as_uint(best.value)),
                     "r"(best.index)
                     : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (part == 0 && threadIdx.x < WARP) {
        best = warp_best(threadIdx.x < BLOCKS_PER_ROW ? of_blocks[threadIdx.x] : Best{-INFINITY, NO_CHOICE});
    }
#endif
    return best;
}
