// Products of few rows with FP8 weights, which a step of decoding reads at half the bytes: linear_few.cu with E4M3 numbers
// and scales. Work, memory and launch are those of linear_few.cu, where they are described; here is what differs. The warps
// that multiply write all tiles, and scales of blocks come beside each step (few_scales.cuh): those of the weight, like it,
// before the kernel in front has ended.
// Targets: sm_90a
//
// linear_few_e4m3_blocks_<type>_r<ROWS>    a scale for each block of the weight, and for 128 columns of each row of x
// linear_few_e4m3_rows_<type>_r<ROWS>      a scale for each row of the weight, and for each row of x or for all
//
// out = sum over groups of 128 columns of (x * weight^T) * (their scales)  (+ bias) (+ out)
//
// weight        [features, in]  E4M3, as a tensor map
// x             [rows, in]      E4M3, as a tensor map
// weight_scales blocks: [div_ceil(features, height), groups] f32; rows: [features] f32
// x_scales      blocks: [rows, groups] f32; rows: [rows] f32, or null: all rows have the scale `fixed`
// steps         div_ceil(in, 256)
// groups        div_ceil(in, 128)
// height        rows of a block: at least 8 (BLOCK_ROWS_MIN)
//
// Sums of E4M3 products go on in f32 after each group (two-level accumulation, DeepSeek-V3's report, arXiv 2412.19437).
// A NaN, of a number or of a scale, stays in its row of x, or in the features whose weights have it. `in` is a multiple of 16.

#include "few_product.cuh"

#define LINEAR_FEW(name, Element, SCALES, BLOCKS, ROWS)                                                                \
    extern "C" __global__ void __cluster_dims__(TEAM, 1, 1) __launch_bounds__(contract::linear_few::THREADS, 1)        \
        linear_few_e4m3_##SCALES##_##name##_r##ROWS(                                                                   \
            const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out,                  \
            const Element* bias, float* parts, uint32_t* counters, uint32_t out_pitch, uint32_t rows,                  \
            uint32_t features, uint32_t steps, uint32_t tiles, uint32_t tile_rows, uint32_t flags,                     \
            const float* weight_scales, const float* x_scales, float fixed, uint32_t groups, uint32_t height) {        \
        few<E4m3Format<Element, BLOCKS>, ROWS, false>(                                                                 \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags,         \
                        {weight_scales, x_scales, fixed, groups, height}});                                            \
    }
#define OF_ROWS(name, Element, ROWS)                      \
    LINEAR_FEW(name, Element, blocks, true, ROWS)         \
    LINEAR_FEW(name, Element, rows, false, ROWS)
#define KERNEL(name, Element) FOR_EACH_FEW_ROWS(OF_ROWS, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: as linear_few.cu, with its counters; the tensor maps are of type UINT8, with strides of {in} and {pitch} bytes
// and boxes {128, tile_rows} and {128, ROWS}.
