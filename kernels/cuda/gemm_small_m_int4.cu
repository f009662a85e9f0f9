// GEMM with few rows and a weight of 4-bit integers (int4.cuh): gemm_small_m.cu with a weight that
// is dequantized in registers. A decode step reads about a quarter of the bytes of 16-bit weights.
// Targets: sm_90a
//
// gemm_small_m_int4_<type>_r<ROWS>         out = x * weight^T (+ bias) (+ out)
// gemm_small_m_int4_gated_<type>_r<ROWS>   out = silu(x * gate^T) * (x * up^T)   (SwiGLU, Shazeer
//                                          2020, arXiv 2002.05202)
//
// <type> is bf16 or f16. ROWS is 8, 16, 32, 64 or 128, the largest number of rows that the kernel
// supports.
//
// weight    int4.cuh, as a tensor map
// scales, zeros   int4.cuh
// steps     div_ceil(columns, 128)
// tile_rows rows of the tallest tile, a multiple of 8, or of 16 if gated
// group     log2 of the columns of a group, 5 to 7
//
// features is a multiple of 8, and columns a multiple of the group. The other parameters, the
// division of the work and the memory layout are those of gemm_small_m.cu, with three differences.
// First, operand A (the weight) is in registers. With more than 16 rows, a warp dequantizes 32
// columns of its 16 weight rows while earlier wgmma products run. With up to 16 rows, each warp
// multiplies with mma.sync and does not wait for other warps. Second, if a tile has at most 64
// weight rows, the two warpgroups take alternate steps, because instructions, not copies, limit the
// speed. Third, the multiplying warpgroups, not the writer warp, write every tile.
//
// In the last step, columns past the end are zeros in x and finite numbers in the weight, so their
// products are zero. Scales start at a multiple of 16 bytes, zero points at a multiple of 8. A NaN
// in x affects only its row, a NaN in the scales only the features that use it.

#include "small_m_product.cuh"

#define GEMM_SMALL_M(name, Element, ROWS)                                                                              \
    extern "C" __global__ void __cluster_dims__(TEAM, 1, 1) __launch_bounds__(contract::gemm_small_m::THREADS, 1)      \
        gemm_small_m_int4_##name##_r##ROWS(                                                                            \
            const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out,                  \
            const Element* bias, float* parts, uint32_t* counters, uint32_t out_pitch, uint32_t rows,                  \
            uint32_t features, uint32_t steps, uint32_t tiles, uint32_t tile_rows, uint32_t flags,                     \
            const Element* scales, const uint8_t* zeros, uint32_t columns, uint32_t group) {                           \
        small_m<Int4Format<Element>, ROWS, false>(                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags,         \
                        {scales, zeros, columns, group}});                                                             \
    }                                                                                                                  \
    extern "C" __global__ void __cluster_dims__(TEAM, 1, 1) __launch_bounds__(contract::gemm_small_m::THREADS, 1)      \
        gemm_small_m_int4_gated_##name##_r##ROWS(                                                                      \
            const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, Element* out, float* parts, \
            uint32_t* counters, uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps, uint32_t tiles,  \
            uint32_t tile_rows, const Element* scales, const uint8_t* zeros, uint32_t columns, uint32_t group) {       \
        small_m<Int4Format<Element>, ROWS, true>(                                                                      \
            weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, 0,          \
                        {scales, zeros, columns, group}});                                                             \
    }
#define KERNEL(name, Element) FOR_EACH_INT4_ROWS(GEMM_SMALL_M, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: the same grid, block, shared memory and counters as gemm_small_m.cu. Tensor maps: x as in
// gemm_small_m.cu; the weight with type UINT32, interleave NONE, swizzle NONE, L2 promotion 128
// bytes, out of bounds NONE (zeros), and
//   gemm_small_m_int4        rank 2, dimensions {columns, features / 8}, strides {4 * columns}
//                            bytes, box {128, tile_rows / 8}
//   gemm_small_m_int4_gated  rank 3, dimensions {columns, features / 8, 2}, strides {4 * columns,
//                            4 * columns * features / 8} bytes, box {128, tile_rows / 16, 2}
//
// Alternatives that were measured on an H200 with one row and not adopted:
// - Multiplying x by the raw integers, and subtracting the zero point times the sum of x, is as
//   fast.
// - Two blocks on an SM are faster by 6 % for the tallest weights, and slower by 15 % for the
//   others.
// - wgmma for up to 16 rows is slower by a sixth.
