// 4-bit integer weights with a scale and an optional zero point for each group of columns of a row.
//
// weight  [rows / 8, strips, 8, 4, words]   u32: blocks of 8 rows, strips of 128 columns
// scales  [rows / 8, groups, 8]             in the activation type, one for each group of columns
// zeros   [rows / 8, groups, 8]             u8, or null: every zero point is 8
//
// In a strip, each row has four units of 16 bytes, and a unit has a word for each 32 columns. The
// last strip may have fewer columns, a multiple of 32; its units have fewer words. Word `w` of unit
// `u` holds four pairs of adjacent columns. Pair `p` is columns c = 32 * w + 8 * p + 2 * u and
// c + 1. Column c is in bits 4 * p to 4 * p + 3, and column c + 1 is 16 bits higher. So unit
// `lane % 4` of row `lane / 4` has exactly the columns that lane `lane` of a warp provides in
// operand A of the tensor core instructions. A shift of the word and one logic instruction give two
// adjacent columns as a pair of numbers (FasterTransformer; Marlin, Frantar et al. 2024, arXiv
// 2408.11743).
//
// An element is (integer - zero point) * scale: the difference is exact, and the product is rounded
// once to the activation type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "tensor_core.cuh"

constexpr uint32_t BLOCK_ROWS = 8, STRIP_COLUMNS = 128, UNITS = 4, SPAN_COLUMNS = 32, WORDS = STRIP_COLUMNS / SPAN_COLUMNS;
constexpr uint32_t UNIT_BYTES = 4 * WORDS;

// Number of words of a unit in a strip.
__device__ __forceinline__ uint32_t words_of_strip(uint32_t columns, uint32_t strip) {
    return min(columns / SPAN_COLUMNS - strip * WORDS, WORDS);
}

// Index of a scale or zero point.
__device__ __forceinline__ uint64_t scale_index(uint32_t row, uint32_t group, uint32_t groups) {
    return (static_cast<uint64_t>(row / BLOCK_ROWS) * groups + group) * BLOCK_ROWS + row % BLOCK_ROWS;
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

// The two operands A [16, 16] (tensor_core.cuh) of 32 columns, from the words of a lane's two rows.
template <typename Element>
__device__ __forceinline__ void dequantize_span(uint32_t (&a)[2][4], uint32_t top, uint32_t bottom,
                                                const GroupOperands<Element>& of_top,
                                                const GroupOperands<Element>& of_bottom) {
#pragma unroll
    for (uint32_t pair = 0; pair < 4; ++pair) {
        a[pair / 2][pair % 2 * 2] = dequantized<Element>(top >> 4 * pair, of_top);
        a[pair / 2][pair % 2 * 2 + 1] = dequantized<Element>(bottom >> 4 * pair, of_bottom);
    }
}

// Reads a lane's words of a block's strip from shared memory. In the last strip of a row, units may
// have fewer words. The missing words become zeros.
__device__ __forceinline__ void read_words(uint32_t (&words)[WORDS], uint32_t strip, uint32_t unit_words) {
    const uint32_t lane = threadIdx.x % 32;
    if (unit_words == WORDS) {
        const uint4 read = load_16_bytes(strip + lane * UNIT_BYTES);
        words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
        return;
    }
#pragma unroll
    for (uint32_t word = 0; word < WORDS; ++word) {
        words[word] = 0;
        if (word < unit_words) {
            asm volatile("ld.shared.u32 %0, [%1];"
                         : "=r"(words[word])
                         : "r"(strip + (lane * unit_words + word) * 4)
                         : "memory");
        }
    }
}
