// One-way transfers between ranks, with the epoch next to each 4 bytes (NCCL's LL protocol).
#pragma once

#include "exchange.cuh"

using contract::all_reduce::PUSHED_UNITS;

// A unit with the epoch next to each 4 bytes. The 8 bytes of data and epoch arrive together, so a
// thread that reads the current epoch also reads the current data.
struct Pushed {
    uint4 words[2];
};
// Units pushed by other ranks are stored between a rank's control block and its data, indexed by
// the parity of the epoch and by the pushing rank.
static_assert(contract::all_reduce::PUSHED_AT + 2 * RANKS_MAX * PUSHED_UNITS * sizeof(Pushed) == contract::all_reduce::DATA_AT,
              "the host leases space for all pushed units");

// Address of unit `unit` that rank `from` pushes to rank `to`.
__device__ __forceinline__ Pushed* pushed(const Exchange& all, uint32_t to, uint32_t from, uint32_t epoch, uint64_t unit) {
    uint8_t* start = reinterpret_cast<uint8_t*>(all.control[to]) + contract::all_reduce::PUSHED_AT;
    return reinterpret_cast<Pushed*>(start) + ((epoch & 1) * RANKS_MAX + from) * uint64_t(PUSHED_UNITS) + unit;
}

__device__ __forceinline__ void push(Pushed* to, const uint4& unit, uint32_t epoch) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(&to->words[0]), "r"(unit.x), "r"(unit.y),
                 "r"(epoch)
                 : "memory");
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(&to->words[1]), "r"(unit.z), "r"(unit.w),
                 "r"(epoch)
                 : "memory");
}

// Waits for a unit that rank `from` pushes to this rank. Returns false if the unit does not arrive
// in time. If an earlier wait has failed, a missing unit is awaited only until the next check.
__device__ __forceinline__ bool receive(const Exchange& all, uint32_t from, uint32_t epoch, uint64_t at, uint4& unit) {
    const Pushed* own = pushed(all, all.rank, from, epoch, at);
    // The clock and the failure flag are checked only every POLLS_PER_CHECK polls, because either
    // check takes longer than a poll of the data.
    constexpr uint32_t POLLS_PER_CHECK = 64;
    uint64_t start = 0;
    for (uint32_t looks = 1;; ++looks) {
        uint4 low, high;
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(low.x), "=r"(low.y), "=r"(low.z), "=r"(low.w)
                     : "l"(&own->words[0])
                     : "memory");
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(high.x), "=r"(high.y), "=r"(high.z), "=r"(high.w)
                     : "l"(&own->words[1])
                     : "memory");
        if (low.y == epoch && low.w == epoch && high.y == epoch && high.w == epoch) {
            unit = make_uint4(low.x, low.z, high.x, high.z);
            return true;
        }
        if (looks % POLLS_PER_CHECK == 0) {
            const uint64_t now = nanoseconds();
            start = start == 0 ? now : start;
            if (load_acquire(&all.control[all.rank]->failed) != 0 || now - start > all.patience) {
                record_timeout(all, from);
                return false;
            }
        }
    }
}
