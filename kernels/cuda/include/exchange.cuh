// What ranks share: exchange memory that every rank's device has mapped, how their blocks meet in it, and sums of what it holds.
#pragma once

#include <stddef.h>

#include "contract.cuh"
#include "element.cuh"

using contract::all_reduce::BLOCKS_MAX;
using contract::all_reduce::RANKS_MAX;

// At the start of each rank's exchange memory, zero before the first exchange.
struct Control {
    // By meeting within an exchange, block and the rank that arrived: the epoch it came to. Written by that rank.
    uint32_t arrived[2][BLOCKS_MAX][RANKS_MAX];
    // Exchanges that are over, blocks of the current one that are done, and 1 + the rank that did not come.
    uint32_t epoch;
    uint32_t done;
    uint32_t failed;
    // By block and the rank that tells: the epoch in the upper half, and how many of its pieces have come.
    uint64_t pieces[BLOCKS_MAX][RANKS_MAX];
};
static_assert(offsetof(Control, failed) == contract::all_reduce::FAILED_AT, "the host reads it there");
static_assert(sizeof(Control) <= contract::all_reduce::PUSHED_AT, "what is pushed follows");

// What a launch is told of the exchange memory.
struct Exchange {
    Control* control[RANKS_MAX];
    // The first half of each rank's data; the second follows after `half` bytes.
    uint8_t* data[RANKS_MAX];
    uint64_t half;
    uint64_t patience;
    uint32_t rank;
    uint32_t ranks;
    // Whether each has a GPU of its own.
    uint32_t apart;
};

// Rows as they stand in a tensor.
struct Place {
    uint8_t* start;
    // Units of a row, and from row to row.
    uint32_t columns;
    uint32_t pitch;
};

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void store_release(uint32_t* to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(uint64_t* to, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

// Exchange memory is written by other devices, so it must not come from a cache that they do not know of.
template <typename Unit>
__device__ __forceinline__ Unit load_exchanged(const uint8_t* at) {
    return __ldcv(reinterpret_cast<const Unit*>(at));
}

// Notes for all hosts that `rank` did not come, unless another is noted. It may learn of it itself, when it comes.
__device__ __forceinline__ void give_up(const Exchange& all, uint32_t missing) {
    for (uint32_t rank = 0; rank < all.ranks; ++rank) {
        atomicCAS_system(&all.control[rank]->failed, 0u, missing + 1);
    }
}

// This block meets the same block of all other ranks. False if one did not come in time, here or before.
__device__ __forceinline__ bool meet(const Exchange& all, uint32_t meeting, uint32_t epoch) {
    // All threads' writes come before the first threads' releases.
    __threadfence_system();
    __syncthreads();
    bool came = true;
    if (threadIdx.x < all.ranks && threadIdx.x != all.rank) {
        store_release(&all.control[threadIdx.x]->arrived[meeting][blockIdx.x][all.rank], epoch);
        Control* own = all.control[all.rank];
        const uint32_t* theirs = &own->arrived[meeting][blockIdx.x][threadIdx.x];
        const uint64_t start = nanoseconds();
        // It comes to no exchange beyond the next before this rank has ended this one. What stands there from long ago, when
        // so many blocks met last, may be larger since the epoch wrapped.
        while (load_acquire(theirs) - epoch > 1) {
            if (load_acquire(&own->failed) != 0 || nanoseconds() - start > all.patience) {
                give_up(all, threadIdx.x);
                came = false;
                break;
            }
        }
    }
    return __syncthreads_and(came);
}

// The last block to end an exchange opens the next one.
__device__ __forceinline__ void leave(const Exchange& all, uint32_t epoch) {
    __syncthreads();
    if (threadIdx.x == 0) {
        Control* own = all.control[all.rank];
        __threadfence();
        if (atomicAdd(&own->done, 1u) + 1 == gridDim.x) {
            own->done = 0;
            own->epoch = epoch;
        }
    }
}

template <typename Unit>
__device__ __forceinline__ Unit* unit_of(const Place& place, uint64_t unit) {
    const uint64_t row = unit / place.columns;
    return reinterpret_cast<Unit*>(place.start) + row * place.pitch + (unit - row * place.columns);
}

// The sum of a unit of all ranks, and of what `before` has if it is there.
template <typename Element, typename Unit, uint32_t RANKS>
__device__ __forceinline__ Unit add_up(const Exchange& all, const Unit (&read)[RANKS], const Unit* before) {
    constexpr uint32_t WIDTH = sizeof(Unit) / sizeof(Element);
    float total[WIDTH];
#pragma unroll
    for (uint32_t rank = 0; rank < RANKS; ++rank) {
        if (rank < all.ranks) {
            const Element* values = reinterpret_cast<const Element*>(&read[rank]);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                total[i] = rank == 0 ? to_float(values[i]) : total[i] + to_float(values[i]);
            }
        }
    }
    if (before != nullptr) {
        const Unit there = *before;
        const Element* values = reinterpret_cast<const Element*>(&there);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            total[i] = to_float(values[i]) + total[i];
        }
    }
    Unit rounded;
    Element* values = reinterpret_cast<Element*>(&rounded);
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        values[i] = from_float<Element>(total[i]);
    }
    return rounded;
}

// The unit that every rank has brought.
template <typename Unit, uint32_t RANKS>
__device__ __forceinline__ void read_all(const Exchange& all, uint64_t offset, Unit (&read)[RANKS]) {
#pragma unroll
    for (uint32_t rank = 0; rank < RANKS; ++rank) {
        if (rank < all.ranks) {
            read[rank] = load_exchanged<Unit>(all.data[rank] + offset);
        }
    }
}

template <typename Element, typename Unit>
__device__ __forceinline__ Unit sum_of(const Exchange& all, uint64_t offset, const Unit* before) {
    Unit read[RANKS_MAX];
    read_all(all, offset, read);
    return add_up<Element>(all, read, before);
}

// A launch's exchange, the half of the memory that it has, and this thread's units.
struct Turn {
    uint32_t epoch;
    uint64_t half, first, step;
};

__device__ __forceinline__ Turn begin(const Exchange& all) {
    const uint32_t epoch = all.control[all.rank]->epoch + 1;
    return {epoch, (epoch & 1) * all.half, blockIdx.x * uint64_t(blockDim.x) + threadIdx.x,
            uint64_t(gridDim.x) * blockDim.x};
}

// Copies what this rank brings to its exchange memory.
template <typename Unit>
__device__ __forceinline__ void bring(const Exchange& all, uint64_t half, const Place& part, uint64_t units,
                                      uint64_t first, uint64_t step) {
    for (uint64_t unit = first; unit < units; unit += step) {
        *reinterpret_cast<Unit*>(all.data[all.rank] + half + unit * sizeof(Unit)) = *unit_of<Unit>(part, unit);
    }
}
