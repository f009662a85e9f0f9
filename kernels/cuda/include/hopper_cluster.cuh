// Thread block clusters of Hopper (sm_90a): multicast copies, barriers across blocks,
// and bulk tensor copies from shared to device memory. Source: the PTX ISA manual,
// sections on clusters and cp.async.bulk.tensor.
#pragma once

#include <cstdint>

#include "hopper_copy.cuh"

// Rank of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster. Their earlier writes to shared
// memory are visible afterward.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The two halves of cluster_sync. Between them, a thread may do work that does not depend
// on the other blocks.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Arrives at the barrier at this address in block `rank` of the cluster. A thread that waits there
// may overwrite data that this thread has read. The arrival does not make this thread's writes
// visible to the waiting thread, because an arrival that releases to the cluster costs a fence each
// time.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n"
        ".reg .b32 place;\n"
        "mapa.shared::cluster.u32 place, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [place];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A warp arrives at the barrier at this address in each of the cluster's first BLOCKS blocks. Each
// warp of a warpgroup must arrive by itself if warps access memory between products, for example to
// read scales: wgmma does not synchronize the four warps, and while one warp waits for its
// accesses, another warp may be a stage ahead.
template <uint32_t BLOCKS>
__device__ __forceinline__ void release_to_all(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < BLOCKS) {
        barrier_arrive_at(barrier, threadIdx.x % 32);
    }
}

// Writes 16 bytes to this address in block `rank` of the cluster. The barrier at address `barrier`
// of that block counts the bytes.
__device__ __forceinline__ void send_to(uint32_t rank, uint32_t at, uint32_t barrier, const float (&values)[4]) {
    asm volatile(
        "{\n"
        ".reg .b32 place, counted;\n"
        "mapa.shared::cluster.u32 place, %0, %2;\n"
        "mapa.shared::cluster.u32 counted, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, [counted];\n"
        "}\n" ::"r"(at),
        "r"(barrier), "r"(rank), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
}

// Like `barrier_wait`, but also makes data visible that other blocks of the cluster have sent.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra ended;\n"
        "bra again;\n"
        "ended:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Starts the copy of the map's box at two coordinates, like `copy_box` in hopper_copy.cuh.
__device__ __forceinline__ void copy_box(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                         int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(
            destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// Starts the copy of the map's box to this address in every block of the cluster whose bit in
// `blocks` is set. In each block, the barrier at address `barrier` counts the bytes.
__device__ __forceinline__ void copy_box_to(uint16_t blocks, uint32_t destination, const TensorMap& map,
                                            uint32_t barrier, int32_t x, int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3,%4}], [%2], %5;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
        : "memory");
}

// Starts the copy of a box from shared memory to the tensor, as one bulk group. Elements outside
// the tensor are not written.
__device__ __forceinline__ void store_box(const TensorMap& map, uint32_t source, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2,%3}], [%1];\n"
                 "cp.async.bulk.commit_group;" ::"l"(&map),
                 "r"(source), "r"(x), "r"(y)
                 : "memory");
}

// Waits until all stores of this thread except the latest `GROUPS` stores have finished reading
// shared memory.
template <int GROUPS>
__device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}

// Waits until all of this thread's stores are complete.
__device__ __forceinline__ void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
