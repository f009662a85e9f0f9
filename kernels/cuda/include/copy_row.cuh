// Copying one row with one block, byte for byte and independent of the element type.
#pragma once

#include "element.cuh"

// Number of words that each thread loads before it stores the first one.
constexpr uint32_t COPIES = 4;

// Copies `count` words with the threads of a block. Each thread loads COPIES words before it stores
// the first one, so that it waits for memory once per COPIES words.
template <typename Stored>
__device__ __forceinline__ void copy_words(const Stored* from, Stored* to, uint32_t count) {
    uint32_t word = threadIdx.x;
    for (; word + (COPIES - 1) * blockDim.x < count; word += COPIES * blockDim.x) {
        Stored held[COPIES];
#pragma unroll
        for (uint32_t copy = 0; copy < COPIES; ++copy) {
            held[copy] = from[word + copy * blockDim.x];
        }
#pragma unroll
        for (uint32_t copy = 0; copy < COPIES; ++copy) {
            to[word + copy * blockDim.x] = held[copy];
        }
    }
    Stored held[COPIES - 1];
#pragma unroll
    for (uint32_t copy = 0; copy < COPIES - 1; ++copy) {
        if (word + copy * blockDim.x < count) {
            held[copy] = from[word + copy * blockDim.x];
        }
    }
#pragma unroll
    for (uint32_t copy = 0; copy < COPIES - 1; ++copy) {
        if (word + copy * blockDim.x < count) {
            to[word + copy * blockDim.x] = held[copy];
        }
    }
}

// Copies `bytes` (a multiple of 2) with the widest words that both addresses and the length allow.
__device__ __forceinline__ void copy_row(const void* from, void* to, uint32_t bytes) {
    const uint64_t together = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes;
    if (aligned_to(together, 16)) {
        copy_words(static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
    } else if (aligned_to(together, 4)) {
        copy_words(static_cast<const uint32_t*>(from), static_cast<uint32_t*>(to), bytes / 4);
    } else {
        copy_words(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), bytes / 2);
    }
}

// Fills `bytes` (a multiple of 2) with one bit pattern: all bits 0, or all bits 1, which is a NaN
// in every float type.
__device__ __forceinline__ void fill_row(void* to, uint32_t bytes, uint32_t pattern) {
    if (aligned_to(reinterpret_cast<uint64_t>(to) | bytes, 16)) {
        for (uint32_t word = threadIdx.x; word < bytes / 16; word += blockDim.x) {
            static_cast<uint4*>(to)[word] = make_uint4(pattern, pattern, pattern, pattern);
        }
    } else {
        for (uint32_t word = threadIdx.x; word < bytes / 2; word += blockDim.x) {
            static_cast<uint16_t*>(to)[word] = static_cast<uint16_t>(pattern);
        }
    }
}

constexpr uint32_t ALL_ONES = 0xffffffffu;
