// Exchange memory, which the GPUs of all ranks have mapped: its layout, the barrier between ranks,
// and sums of its contents.
#pragma once

#include <stddef.h>

#include "contract.cuh"
#include "element.cuh"

using contract::all_reduce::BLOCKS_MAX;
using contract::all_reduce::RANKS_MAX;

// Start of each rank's exchange memory. It is zero before the first collective.
struct Control {
    // The epoch at which each rank arrived, indexed by barrier within a collective, block, and
    // arriving rank. Written by the arriving rank.
    uint32_t arrived[2][BLOCKS_MAX][RANKS_MAX];
    // `epoch` is the number of finished collectives, `done` the number of blocks that have finished
    // the current collective. `failed` is 1 + the rank that did not arrive, or 0.
    uint32_t epoch;
    uint32_t done;
    uint32_t failed;
    // Indexed by block and announcing rank. The upper half is the epoch, the lower half the number
    // of pieces of the announcing rank that have arrived.
    uint64_t pieces[BLOCKS_MAX][RANKS_MAX];
};
static_assert(offsetof(Control, failed) == contract::all_reduce::FAILED_AT, "the host reads `failed` at this offset");
static_assert(sizeof(Control) <= contract::all_reduce::PUSHED_AT, "the pushed units begin after the control block");

// Exchange memory as passed to a launch.
struct Exchange {
    Control* control[RANKS_MAX];
    // First half of each rank's data. The second half is `half` bytes after it.
    uint8_t* data[RANKS_MAX];
    uint64_t half;
    uint64_t patience;  // nanoseconds after which a wait fails
    uint32_t rank;
    uint32_t ranks;
    // 1 if no two ranks share a GPU.
    uint32_t apart;
};

// Rows of a tensor in device memory, in units of 16 or 2 bytes.
struct RowView {
    uint8_t* start;
    // `columns` is the number of units per row, `pitch` the number of units from the start of a row
    // to the start of the next.
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

// Exchange memory is written by other GPUs, so it must not be read from a cache that is
// not coherent with them.
template <typename Unit>
__device__ __forceinline__ Unit load_exchanged(const uint8_t* at) {
    return __ldcv(reinterpret_cast<const Unit*>(at));
}

// Records on all ranks that rank `missing` did not arrive, unless another rank is recorded already.
// The missing rank finds the record, too, if it arrives later.
__device__ __forceinline__ void record_timeout(const Exchange& all, uint32_t missing) {
    for (uint32_t rank = 0; rank < all.ranks; ++rank) {
        atomicCAS_system(&all.control[rank]->failed, 0u, missing + 1);
    }
}

// Barrier between this block and the same block of all other ranks. Returns false if a rank does
// not arrive in time. Once `failed` names a rank, the barrier fails at once if any rank is missing.
__device__ __forceinline__ bool meet(const Exchange& all, uint32_t meeting, uint32_t epoch) {
    // The writes of all threads happen before the releases of the first threads.
    __threadfence_system();
    __syncthreads();
    bool came = true;
    if (threadIdx.x < all.ranks && threadIdx.x != all.rank) {
        store_release(&all.control[threadIdx.x]->arrived[meeting][blockIdx.x][all.rank], epoch);
        Control* own = all.control[all.rank];
        const uint32_t* theirs = &own->arrived[meeting][blockIdx.x][threadIdx.x];
        const uint64_t start = nanoseconds();
        // Only `epoch` and `epoch + 1` count as arrived: the other rank cannot arrive at a
        // collective beyond the next one before this rank has finished the current collective. The
        // stored epoch may be from long ago, when a launch last had this many blocks, and may be
        // larger than `epoch` because the epoch has wrapped since.
        while (load_acquire(theirs) - epoch > 1) {
            if (load_acquire(&own->failed) != 0 || nanoseconds() - start > all.patience) {
                record_timeout(all, threadIdx.x);
                came = false;
                break;
            }
        }
    }
    return __syncthreads_and(came);
}

// The last block that finishes a collective increments the epoch, which opens the next collective.
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
__device__ __forceinline__ Unit* unit_of(const RowView& rows, uint64_t unit) {
    const uint64_t row = unit / rows.columns;
    return reinterpret_cast<Unit*>(rows.start) + row * rows.pitch + (unit - row * rows.columns);
}

// The sum of a unit over all ranks, plus the unit at `before` unless it is null.
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

// Reads the unit at `offset` from the exchange memory of every rank.
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

// The epoch of a launch's collective, the half of the exchange memory that the collective uses, and
// the units of this thread.
struct Collective {
    uint32_t epoch;
    uint64_t half, first, step;
};

__device__ __forceinline__ Collective begin(const Exchange& all) {
    const uint32_t epoch = all.control[all.rank]->epoch + 1;
    return {epoch, (epoch & 1) * all.half, blockIdx.x * uint64_t(blockDim.x) + threadIdx.x,
            uint64_t(gridDim.x) * blockDim.x};
}

// Copies this rank's input to its exchange memory.
template <typename Unit>
__device__ __forceinline__ void bring(const Exchange& all, uint64_t half, const RowView& part, uint64_t units,
                                      uint64_t first, uint64_t step) {
    for (uint64_t unit = first; unit < units; unit += step) {
        *reinterpret_cast<Unit*>(all.data[all.rank] + half + unit * sizeof(Unit)) = *unit_of<Unit>(part, unit);
    }
}
