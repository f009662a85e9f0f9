// GEMM with few rows and FP8 weights: gemm_small_m.cu with E4M3 elements and scales. A decode step
// reads half as many bytes as with 16-bit weights. Work division, memory layout and launch are the
// same as in gemm_small_m.cu, with three differences. There is no gated kernel. The wgmma
// warpgroups, not the writer warp, write every tile. With scales for blocks, each step also copies
// its scales (small_m_scales.cuh). The weight's scales, like the weight, are loaded before the
// previous kernel has ended.
// Targets: sm_90a
//
// gemm_small_m_e4m3_blocks_<type>_r<ROWS>   one scale for each block of the weight, and one for
//                                           each 128 columns of a row of x
// gemm_small_m_e4m3_rows_<type>_r<ROWS>     one scale for each row of the weight, and one for each
//                                           row of x or for all rows
//
// out = sum over groups of 128 columns of (x * weight^T) * (their scales)  (+ bias) (+ out)
//
// weight        [features, in]  E4M3, as a tensor map
// x             [rows, in]      E4M3, as a tensor map
// weight_scales blocks: [div_ceil(features, height), groups] f32; rows: [features] f32
// x_scales      blocks: [rows, groups] f32; rows: [rows] f32, or null: all rows have the scale
//               `fixed`
// steps         div_ceil(in, 256)
// groups        div_ceil(in, 128)
// height        rows of the weight per scale block: at least 8 (BLOCK_ROWS_MIN)
//
// After each group, its sum of E4M3 products is added to an f32 total (two-level accumulation,
// DeepSeek-V3's report, arXiv 2412.19437). A NaN in x or its scales affects only its row; a NaN in
// the weight or its scales affects only the features that use it. `in` is a multiple of 16.

#include "small_m_product.cuh"

#define GEMM_SMALL_M(name, Element, SCALES, BLOCKS, ROWS)                                                                \
    extern "C" __global__ void __cluster_dims__(TEAM, 1, 1) __launch_bounds__(contract::gemm_small_m::THREADS, 1)        \
        gemm_small_m_e4m3_##SCALES##_##name##_r##ROWS(                                                                   \
            const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out,                  \
            const Element* bias, float* parts, uint32_t* counters, uint32_t out_pitch, uint32_t rows,                  \
            uint32_t features, uint32_t steps, uint32_t tiles, uint32_t tile_rows, uint32_t flags,                     \
            const float* weight_scales, const float* x_scales, float fixed, uint32_t groups, uint32_t height) {        \
        small_m<E4m3Format<Element, BLOCKS>, ROWS, false>(                                                                 \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags,         \
                        {weight_scales, x_scales, fixed, groups, height}});                                            \
    }
#define OF_ROWS(name, Element, ROWS)                      \
    GEMM_SMALL_M(name, Element, blocks, true, ROWS)         \
    GEMM_SMALL_M(name, Element, rows, false, ROWS)
#define KERNEL(name, Element) FOR_EACH_SMALL_M_ROWS(OF_ROWS, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: the same grid, block, shared memory and counters as gemm_small_m.cu. The tensor maps have
// type UINT8, strides of {in} and {pitch} bytes, and boxes {128, tile_rows} and {128, ROWS}.
