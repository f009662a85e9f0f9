// Hopper's asynchronous hardware (sm_90a): barriers that count bytes, bulk tensor copies (TMA),
// named barriers for a part of a thread block, and the register budget of a warpgroup. Source: the
// PTX ISA manual, sections on mbarrier, cp.async.bulk.tensor and setmaxnreg.
#pragma once

#include <cstdint>

// The 128 bytes that cuTensorMapEncodeTiled fills in on the host.
struct alignas(64) TensorMap {
    uint64_t words[16];
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes newly initialized barriers visible to TMA.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier. The barrier's phase completes only after `bytes` bytes have also been
// copied.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase with this parity. A new barrier is in phase 0; the phase before
// phase 0, with parity 1, counts as ended.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ended;\n"
        "bra again;\n"
        "ended:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Starts the copy of the map's box at these coordinates into shared memory. Elements outside the
// tensor become zeros and count as copied.
__device__ __forceinline__ void copy_box(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                         int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], "
        "[%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void copy_box(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                         int32_t y, int32_t z, int32_t u, int32_t v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
        "{%3,%4,%5,%6,%7}], "
        "[%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v)
        : "memory");
}

__device__ __forceinline__ void fetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Returns true in one thread of a warp. All threads of the warp must call this function. With
// `elect.sync`, the compiler knows that only one thread is selected. If the thread is selected by
// its index instead, the compiler turns each copy into a loop over threads; with small copies, a
// GEMM would then wait for the warp that starts them.
__device__ __forceinline__ bool is_elected() {
    uint32_t is_elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, elected;\n"
        "}\n"
        : "=r"(is_elected));
    return is_elected != 0;
}

// A position in a ring of `STAGES` stages.
template <uint32_t STAGES>
struct Ring {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Barriers of a ring of `STAGES` stages.
template <uint32_t STAGES>
struct RingBarriers {
    uint64_t full[STAGES];
    uint64_t empty[STAGES];
};

// Orders this thread's ordinary writes to shared memory before later reads by the tensor cores and
// TMA.
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Synchronizes `threads` threads at the named barrier `name` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void part_sync(uint32_t name, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void part_arrive(uint32_t name, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

template <uint32_t REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <uint32_t REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
