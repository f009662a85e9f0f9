// Box copies for weights: data that is read only once per step is marked as the first to evict
// from the L2 cache.
#pragma once

#include "hopper_copy.cuh"

// Cache policy for lines that are not needed again, as created by
// createpolicy.fractional.L2::evict_first.
constexpr uint64_t READ_ONCE = 0x12f0000000000000ull;

// Starts the copy of the map's box at column x of row y, from memory that is read once. Elements
// outside the tensor become zeros and count as copied.
__device__ __forceinline__ void copy_box_once(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                              int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3,%4}], [%2], %5;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(READ_ONCE)
        : "memory");
}

// copy_box_once in four dimensions.
__device__ __forceinline__ void copy_box_once(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                              int32_t y, int32_t z, int32_t u) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3,%4,%5,%6}], [%2], %7;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "l"(READ_ONCE)
        : "memory");
}

// copy_box_once in three and in five dimensions.
__device__ __forceinline__ void copy_box_once(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                              int32_t y, int32_t z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3,%4,%5}], [%2], %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(READ_ONCE)
        : "memory");
}
__device__ __forceinline__ void copy_box_once(uint32_t destination, const TensorMap& map, uint32_t barrier, int32_t x,
                                              int32_t y, int32_t z, int32_t u, int32_t v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3,%4,%5,%6,%7}], [%2], %8;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "l"(READ_ONCE)
        : "memory");
}

// copy_box_once in two dimensions, into every block of the cluster whose bit in `blocks` is set, as
// copy_box_to does.
__device__ __forceinline__ void copy_box_once_to(uint16_t blocks, uint32_t destination, const TensorMap& map,
                                                 uint32_t barrier, int32_t x, int32_t y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3,%4}], [%2], %5, %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks), "l"(READ_ONCE)
        : "memory");
}
