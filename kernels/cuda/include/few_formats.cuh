// What products of few rows multiply: the elements of weight and x, those of bias and output, and scales.
#pragma once

#include "e4m3.cuh"

// Weight, x, bias and output alike.
template <typename T>
struct PlainFormat {
    using Element = T;
    using Operand = T;
    static constexpr bool IS_PLAIN = true;
    static constexpr bool BY_BLOCKS = false;
    struct Scales {};
};

// E4M3 weight and x, whose products are summed in f32 by groups of 128 columns (two-level accumulation, DeepSeek-V3's
// report, arXiv 2412.19437): the tensor cores keep fewer bits of a sum of E4M3 products than f32 has.
template <typename T, bool BLOCKS>
struct E4m3Format {
    using Element = T;  // of bias and output
    using Operand = E4m3;
    static constexpr bool IS_PLAIN = false;
    static constexpr bool BY_BLOCKS = BLOCKS;
    struct Scales {
        const float* weight;  // BLOCKS: [features / height, groups]; otherwise [features]
        const float* x;       // BLOCKS: [rows, groups]; otherwise [rows], or null for `fixed`
        float fixed;
        uint32_t groups;  // div_ceil(in, 128)
        uint32_t height;  // of a block
    };
};

// The scales that one thread's sums of a group of columns want: of two features, and of two rows in each eight.
template <typename Format, uint32_t ROWS>
struct GroupScales {
    float weight[2];
    float x[ROWS / 8][2];

    // `features` are those of c[j][0] and c[j][2], `row` the first row's number.
    __device__ __forceinline__ void load(const typename Format::Scales& scales, const uint32_t (&features)[2],
                                         uint32_t row, uint32_t rows, uint32_t group) {
        // Of columns past the last all products are zero.
        group = min(group, scales.groups - 1);
#pragma unroll
        for (uint32_t own = 0; own < 2; ++own) {
            weight[own] = __ldg(scales.weight + static_cast<uint64_t>(features[own] / scales.height) * scales.groups + group);
        }
#pragma unroll
        for (uint32_t eight = 0; eight < ROWS / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t at = row + eight * 8 + i;
                x[eight][i] = at < rows ? scales.x[at * scales.groups + group] : 0.0f;
            }
        }
    }
};
