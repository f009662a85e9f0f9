// GEMM with few rows: a decode step, which is bound by the time to read the weights once.
// Targets: sm_90a
//
// gemm_small_m_<type>_r<ROWS>         out = x * weight^T (+ bias) (+ out)
// gemm_small_m_gated_<type>_r<ROWS>   out = activation(x * gate^T) * (x * up^T)   (SwiGLU and GEGLU,
//                                     Shazeer 2020, arXiv 2002.05202)
//
// <type> is bf16 or f16. ROWS is 8, 16, 32 or 64, the largest number of rows that the kernel
// supports.
//
// weight    [features, in]          as a tensor map; gemm_small_m_gated: [2 * features, in], gate
//           rows, then up rows
// x         [rows, in]              as a tensor map, 1 <= rows <= ROWS
// out       [rows, features]        the same type, or f32 with OUT_IS_F32; rows out_pitch elements
//           apart, any alignment
// bias      [features]              the same type, or null
// parts     [2 * grid, PART_NUMBERS] f32, scratch; needs no initialization
// counters  [tiles]                 u32, zero before the first launch, and zero again after each
//           launch
// steps     div_ceil(in, 128)
// tiles     number of tiles that the features are divided into, as equally as possible
// tile_rows rows of the tallest tile, div_ceil(features, tiles) <= 128; gemm_small_m_gated: 16 *
//           div_ceil(features / 8, tiles)
// flags     ADD_TO_OUT: add to the contents of out; OUT_IS_F32; gemm_small_m_gated: IS_GELU for the
//           tanh approximation of GELU, otherwise the activation is SiLU
//
// Sums are f32 on the tensor cores, rounded once at the end; gate and up are not rounded before
// they are multiplied. The same shape, kernel, grid and tile_rows give the same bits every time:
// the order of additions does not depend on which block finishes last. A NaN in x affects only its
// row, a NaN in the weight only the features that use it. The tensor maps require that `in` is a
// multiple of 8, that rows of x and weight start at multiples of 16 bytes, and, for
// gemm_small_m_gated, that features is a multiple of 8. Otherwise any size is correct: positions
// past an edge count as zeros and are not written. out must not overlap x. Consecutive launches in
// one stream may share parts and counters; other launches must not.
//
// The first copies of weights do not wait for the previous kernel. Code that writes weights must
// therefore synchronize before it launches this kernel with programmatic stream serialization.
//
// The work is a sequence of units: one tile after another, each in steps of 128 columns. Blocks
// take equal contiguous ranges of units (Stream-K, Osama et al. 2023, arXiv 2301.03598). A block
// that has only part of a tile leaves its sums in `parts`, and the last block to finish the tile
// adds them up. This exchange costs three round trips to the L2 cache at the very end. Therefore
// blocks form clusters of two, and a tile that only the two blocks of one cluster share is added up
// in their shared memory instead; each warpgroup finishes some of the rows of x.
//
// One warp copies and two warpgroups multiply. Another warp writes the tiles that a block computes
// completely, except the block's last tile, which the multiplying warpgroups write. The weight is
// the M operand of wgmma and x the N operand, whose size can be as small as 8, so that few rows
// waste little. No two blocks of this kernel share an SM: equal ranges take equal time only if each
// block has the bandwidth of a whole SM. If launched early, a block starts on an SM as soon as the
// previous kernel's block on that SM has ended, and fills its stages while other blocks of that
// kernel still run.

#include "small_m_product.cuh"

// One set of counters for each stream that may launch at the same time. Each such stream needs a
// separate set, from this array or from other device memory.
using contract::gemm_small_m::STREAM_COUNTERS;
using contract::gemm_small_m::STREAMS;
extern "C" __device__ uint32_t gemm_small_m_counters[STREAMS * STREAM_COUNTERS] = {};

// This bound allows 168 registers per thread, which adding up parts of 64 rows needs; 128 registers
// were slower.
#define IN_TEAMS __cluster_dims__(TEAM, 1, 1) __launch_bounds__(384, 1)
#define GEMM_SMALL_M(name, Element, ROWS)                                                                                \
    extern "C" __global__ void IN_TEAMS                                                                                \
        gemm_small_m_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,     \
                                    void* out, const Element* bias, float* parts, uint32_t* counters,                  \
                                    uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps,              \
                                    uint32_t tiles, uint32_t tile_rows, uint32_t flags) {                              \
        small_m<PlainFormat<Element>, ROWS, false>(                                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags});       \
    }                                                                                                                  \
    extern "C" __global__ void IN_TEAMS                                                                                \
        gemm_small_m_gated_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,    \
                                     Element* out, float* parts, uint32_t* counters, uint32_t out_pitch,               \
                                     uint32_t rows, uint32_t features, uint32_t steps, uint32_t tiles,                 \
                                     uint32_t tile_rows, uint32_t flags) {                                             \
        small_m<PlainFormat<Element>, ROWS, true>(                                                                                      \
            weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags});    \
    }
#define KERNEL(name, Element) FOR_EACH_SMALL_M_ROWS(GEMM_SMALL_M, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (SMs), or tiles * steps if that is less; the grid is even. Block (THREADS), dynamic
// shared memory SHARED_BYTES<ROWS> (contract::gemm_small_m), for which the function's limit must be
// raised first. ROWS is the smallest of 8, 16, 32 and 64 that is >= rows. Clusters of two are
// compiled in. The kernel may, and should, be launched with programmatic stream serialization. For
// parts and counters see the head of this file.
//
// Any number of tiles that keeps tile_rows in its range is correct. The fastest division is half as
// many tiles as SMs, unless those tiles are too tall. With half as many tiles as SMs, each cluster
// has one tile, and `parts` is not used. With more features, the number of tiles is a multiple of
// the number of SMs, so that each block has whole tiles and no sums of several blocks are added up.
//
// Alternatives that were measured and not adopted:
// - Two blocks on an SM at once, started early, took 1.5 times as long as two blocks one after the
//   other. Therefore a block takes a whole SM.
// - Prefetching into the L2 cache while the previous kernel ends was slower.
// - At 64 rows, copying x only once, or sharing it through multicast, changed nothing. Writing
//   whole lines through shared memory was slower.
// - x does not arrive sooner than the weights that were requested before it, although it is in the
//   L2 cache. With fewer steps of x in flight than of the weight, in separate stages, the o and qkv
//   projections took 3 to 15 % longer. Loading the first steps of x from the multiplying warps
//   (cp.async) did not help either.
// - Twice as many steps, of 64 columns each, made a decode step of 64 rows 2 % slower.
// - With clusters of four, a GPU of 132 SMs reported a maximum of only 120 blocks.
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element
// strides 1, interleave NONE, swizzle 128B, L2 promotion 128 bytes (256 were slower), out of
// bounds NONE (zeros), and
//   weight of gemm_small_m    rank 2, dimensions {in, features}, strides {2 * in} bytes,
//                           box {64, tile_rows}
//   weight of gemm_small_m_gated   rank 4, dimensions {in, 8, 2, features / 8},
//                           strides {2 * in, 2 * in * features, 16 * in} bytes,
//                           box {64, 8, 2, tile_rows / 16}
//   x                       rank 2, dimensions {in, rows}, strides {2 * pitch} bytes,
//                           box {64, ROWS}
// A weight's map is valid as long as the weight; the map of x is valid for one address
// and number of rows.
