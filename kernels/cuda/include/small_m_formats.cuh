// Formats of GEMMs with few rows: the element types of weight, x, bias and output, and the scales.
// An E4M3 weight has a scale for each row (BY_ROWS) or for each block (BY_BLOCKS).
#pragma once

#include "e4m3.cuh"

// One type for weight, x, bias and output.
template <typename T>
struct PlainFormat {
    using Element = T;
    using Operand = T;
    static constexpr bool IS_PLAIN = true, IS_INT4 = false, BY_ROWS = false, BY_BLOCKS = false;
    struct Scales {};
};

// E4M3 weight and x. Products are summed in f32 by groups of 128 columns (two-level accumulation,
// DeepSeek-V3's report, arXiv 2412.19437), because the tensor cores keep fewer bits of a sum of
// E4M3 products than f32 has.
template <typename T, bool BLOCKS>
struct E4m3Format {
    using Element = T;  // of bias and output
    using Operand = E4m3;
    static constexpr bool IS_PLAIN = false, IS_INT4 = false, BY_ROWS = !BLOCKS, BY_BLOCKS = BLOCKS;
    struct Scales {
        const float* weight;  // BLOCKS: [features / height, groups]; otherwise [features]
        const float* x;       // BLOCKS: [rows, groups]; otherwise [rows], or null for `fixed`
        float fixed;
        uint32_t groups;  // div_ceil(in, 128)
        uint32_t height;  // rows of the weight in a block
    };
};

// 4-bit integer weights (int4.cuh), which are dequantized in registers. The other operands have
// type T.
template <typename T>
struct Int4Format {
    using Element = T;
    using Operand = T;  // of x
    static constexpr bool IS_PLAIN = false, IS_INT4 = true, BY_ROWS = false, BY_BLOCKS = false;
    struct Scales {
        const T* weight;       // int4.cuh
        const uint8_t* zeros;  // or null
        uint32_t columns;
        uint32_t group;  // log2 of the columns of a group
    };
};
