// Sums over ranks and columns side by side, through memory that every rank's device has mapped.
// Targets: sm_90a
//
// all_reduce: out = (out +) the sum of all ranks' partial rows, each rank reading all others
// all_reduce_two_shot: the same; each rank sums its share of the units and then reads the others' shares. What the sum
//                      is added to must be the same on all ranks, as a residual stream is: each adds its share's
// all_gather:          out[:, rank * columns..] = that rank's rows
//
// A rank copies what it brings to its exchange memory, its block b meets block b of all other ranks, and reads what
// the same blocks have written there. Sums are f32 in the order of the ranks, rounded once: every rank gets the same bits.
// Exchange memory has two halves that take turns. A rank that arrives at exchange e + 1 has ended its kernel of exchange
// e, so no rank still reads the half that exchange e + 2 writes. The epoch is in memory, so a captured graph can be
// replayed. The waits need all blocks of a launch on the device at once: at most BLOCKS_MAX, one a multiprocessor.
//
// A wait ends after `patience` nanoseconds: the rank notes who is missing in `failed`, and this and all later exchanges
// end without waiting; what they would have written is undefined.

#include <stddef.h>

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

using contract::all_reduce::BLOCKS_MAX;
using contract::all_reduce::RANKS_MAX;
using contract::all_reduce::THREADS;

// At the start of each rank's exchange memory, zero before the first exchange.
struct Control {
    // By meeting within an exchange, block and the rank that arrived: the epoch it came to. Written by that rank.
    uint32_t arrived[2][BLOCKS_MAX][RANKS_MAX];
    // Exchanges that are over, blocks of the current one that are done, and 1 + the rank that did not come.
    uint32_t epoch;
    uint32_t done;
    uint32_t failed;
};
static_assert(offsetof(Control, failed) == contract::all_reduce::FAILED_AT, "the host reads it there");
static_assert(sizeof(Control) <= contract::all_reduce::DATA_AT, "data follow");

// What a launch is told of the exchange memory.
struct Exchange {
    Control* control[RANKS_MAX];
    // The first half of each rank's data; the second follows after `half` bytes.
    uint8_t* data[RANKS_MAX];
    uint64_t half;
    uint64_t patience;
    uint32_t rank;
    uint32_t ranks;
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

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Exchange memory is written by other devices, so it must not come from a cache that they do not know of.
template <typename Unit>
__device__ __forceinline__ Unit load_exchanged(const uint8_t* at) {
    return __ldcv(reinterpret_cast<const Unit*>(at));
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
        // Signed, so that the epoch may wrap.
        while (static_cast<int32_t>(load_acquire(theirs) - epoch) < 0) {
            if (load_acquire(&own->failed) != 0 || nanoseconds() - start > all.patience) {
                // The others' hosts must learn of it too, also that of a rank that comes late.
                for (uint32_t rank = 0; rank < all.ranks; ++rank) {
                    atomicCAS_system(&all.control[rank]->failed, 0u, threadIdx.x + 1);
                }
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

template <typename Element>
__device__ __forceinline__ float as_float(Element value) {
    return static_cast<float>(value);
}

// The sum of one unit over all ranks, and of what `out` has if `before` is there.
template <typename Element, typename Unit>
__device__ __forceinline__ Unit sum_of(const Exchange& all, uint64_t offset, const Unit* before) {
    constexpr uint32_t WIDTH = sizeof(Unit) / sizeof(Element);
    Unit read[RANKS_MAX];
#pragma unroll
    for (uint32_t rank = 0; rank < RANKS_MAX; ++rank) {
        if (rank < all.ranks) {
            read[rank] = load_exchanged<Unit>(all.data[rank] + offset);
        }
    }
    float total[WIDTH];
#pragma unroll
    for (uint32_t rank = 0; rank < RANKS_MAX; ++rank) {
        if (rank < all.ranks) {
            const Element* values = reinterpret_cast<const Element*>(&read[rank]);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                total[i] = rank == 0 ? as_float(values[i]) : total[i] + as_float(values[i]);
            }
        }
    }
    if (before != nullptr) {
        const Unit there = *before;
        const Element* values = reinterpret_cast<const Element*>(&there);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            total[i] = as_float(values[i]) + total[i];
        }
    }
    Unit rounded;
    Element* values = reinterpret_cast<Element*>(&rounded);
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        values[i] = Element(total[i]);
    }
    return rounded;
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

template <typename Element, typename Unit>
__device__ __forceinline__ void one_shot(const Exchange& all, const Place& partial, const Place& out, uint64_t units,
                                         bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    bring<Unit>(all, half, partial, units, first, step);
    if (meet(all, 0, epoch)) {
        for (uint64_t unit = first; unit < units; unit += step) {
            Unit* to = unit_of<Unit>(out, unit);
            *to = sum_of<Element, Unit>(all, half + unit * sizeof(Unit), accumulate ? to : nullptr);
        }
    }
    leave(all, epoch);
}

template <typename Element, typename Unit>
__device__ __forceinline__ void two_shot(const Exchange& all, const Place& partial, const Place& out, uint64_t units,
                                         bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    // Block b has the same places of every share, so it depends on blocks b alone.
    const uint64_t share = (units + all.ranks - 1) / all.ranks;
    const auto each = [&](uint32_t rank, auto work) {
        const uint64_t start = rank * share, end = min(start + share, units);
        for (uint64_t unit = start + first; unit < end; unit += step) {
            work(unit, half + unit * sizeof(Unit));
        }
    };
    for (uint32_t rank = 0; rank < all.ranks; ++rank) {
        each(rank, [&](uint64_t unit, uint64_t offset) {
            *reinterpret_cast<Unit*>(all.data[all.rank] + offset) = *unit_of<Unit>(partial, unit);
        });
    }
    bool came = meet(all, 0, epoch);
    if (came) {
        // No other rank reads this rank's share of what it brought, so the sum takes its place.
        each(all.rank, [&](uint64_t unit, uint64_t offset) {
            const Unit* before = accumulate ? unit_of<Unit>(out, unit) : nullptr;
            *reinterpret_cast<Unit*>(all.data[all.rank] + offset) = sum_of<Element, Unit>(all, offset, before);
        });
        came = meet(all, 1, epoch);
    }
    if (came) {
        for (uint32_t next = 0; next < all.ranks; ++next) {
            // Ranks begin with different links.
            const uint32_t rank = (all.rank + next) % all.ranks;
            each(rank, [&](uint64_t unit, uint64_t offset) {
                *unit_of<Unit>(out, unit) = load_exchanged<Unit>(all.data[rank] + offset);
            });
        }
    }
    leave(all, epoch);
}

template <typename Unit>
__device__ __forceinline__ void gather(const Exchange& all, const Place& part, const Place& out, uint64_t units) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    bring<Unit>(all, half, part, units, first, step);
    if (meet(all, 0, epoch)) {
        for (uint32_t next = 0; next < all.ranks; ++next) {
            const uint32_t rank = (all.rank + next) % all.ranks;
            for (uint64_t unit = first; unit < units; unit += step) {
                const uint64_t row = unit / part.columns, column = unit - row * part.columns;
                Unit* to = reinterpret_cast<Unit*>(out.start) + row * out.pitch + rank * uint64_t(part.columns) + column;
                *to = load_exchanged<Unit>(all.data[rank] + half + unit * sizeof(Unit));
            }
        }
    }
    leave(all, epoch);
}

#define KERNELS(name, Element)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_##name(                               \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        one_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_odd_##name(                           \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        one_shot<Element, uint16_t>(all, partial, out, units, accumulate != 0);                                    \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_shot_##name(                               \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        two_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }
FOR_EACH_ACTIVATION(KERNELS)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const __grid_constant__ Exchange all, Place part, Place out, uint64_t units) {
    gather<uint4>(all, part, out, units);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather_odd(const __grid_constant__ Exchange all, Place part, Place out, uint64_t units) {
    gather<uint16_t>(all, part, out, units);
}

// Launch: grid (at most BLOCKS_MAX), block (THREADS of contract::all_reduce), the same on all ranks. Units are 16 bytes where
// starts, columns and pitches are whole ones, else 2; `units` is all rows' and fits a half.
