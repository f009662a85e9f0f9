// Weights of 4-bit integers by groups of columns.
//
// weight  blocks of 16 rows; a block has a unit of 16 bytes for each row and each 32 columns
// scales  [features, groups]            in the activation type, one for each group of columns
// zeros   [features, groups]            u8, or null: every zero point is 8
//
// The unit of row `r` of a block and of the 32 columns from `32 * s` on has the index 16 * s +
// (r ^ 2 * (s % 4)) in the block. So blocks are read in order, and lanes that read units of
// adjacent rows and columns from a copy in shared memory hit different banks. A unit has four words
// of 8 adjacent columns.
//
// An element is (integer - zero point) * scale: the difference is exact, and the product is rounded
// once to the activation type. From the lowest bits on, a word has the integers of its columns 0,
// 2, 4, 6, 1, 3, 5, 7. So a shift of the word and one logic instruction give two adjacent columns
// as a pair of numbers (FasterTransformer; Marlin, Frantar et al. 2024, arXiv 2408.11743).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

constexpr uint32_t BLOCK_ROWS = 16, STRIP_COLUMNS = 32, UNIT_BYTES = 16;

// Byte offset of a unit in its block.
__device__ __forceinline__ uint32_t unit_of(uint32_t row, uint32_t strip) {
    return (strip * BLOCK_ROWS + (row ^ 2 * (strip % 4))) * UNIT_BYTES;
}

// BASE is a number whose lowest mantissa bit is worth 1, in both halves of a word. Writing an
// integer below 16 into the lowest bits of BASE adds the integer exactly.
template <typename Element>
struct Int4;

template <>
struct Int4<__half> {
    using Pair = __half2;
    static constexpr uint32_t BASE = 0x64006400u;  // 1024
};

template <>
struct Int4<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr uint32_t BASE = 0x43004300u;  // 128
};

// The scale and the zero point of a group as operands for pairs of elements.
template <typename Element>
struct GroupOperands {
    typename Int4<Element>::Pair zero, scale;

    GroupOperands() = default;
    __device__ __forceinline__ GroupOperands(Element scale, uint32_t zero_point)
        : scale{scale, scale} {
        const uint32_t both = Int4<Element>::BASE | zero_point * 0x00010001u;
        zero = reinterpret_cast<const typename Int4<Element>::Pair&>(both);
    }
};

// Two adjacent elements, the first in the low half, from the integers in the lowest bits of both
// halves of `word`.
template <typename Element>
__device__ __forceinline__ uint32_t dequantized(uint32_t word, const GroupOperands<Element>& group) {
    using Pair = typename Int4<Element>::Pair;
    uint32_t placed;
    // (word & 0x000f000f) | BASE
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(placed) : "r"(word), "n"(Int4<Element>::BASE));
    const Pair element = __hmul2(__hsub2(reinterpret_cast<const Pair&>(placed), group.zero), group.scale);
    return reinterpret_cast<const uint32_t&>(element);
}
