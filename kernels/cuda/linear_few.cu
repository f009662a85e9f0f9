// Products of few rows: a step of decoding, which is bound by reading the weights once.
// Targets: sm_90a
//
// linear_few_<type>_r<ROWS>     out = x * weight^T (+ bias) (+ out)
// gate_up_few_<type>_r<ROWS>    out = silu(x * gate^T) * (x * up^T)   (SwiGLU, Shazeer 2020, arXiv 2002.05202)
//
// <type> is bf16 or f16, ROWS is 8, 16, 32 or 64: the most rows that the kernel takes.
//
// weight    [features, in]          as a tensor map; gate_up_few: [2 * features, in], gate rows, then up rows
// x         [rows, in]              as a tensor map, 1 <= rows <= ROWS
// out       [rows, features]        the same type, or f32 if flags say so; rows out_pitch elements apart, any alignment
// bias      [features]              the same type, or null
// parts     [2 * grid, PART_NUMBERS] f32, scratch: what is in it before does not matter
// counters  [tiles]                 u32, zeros before the first launch, and zeros again after each
// steps     div_ceil(in, 128)
// tiles     how many tiles the features are cut into, all as tall as can be alike
// tile_rows rows of the tallest, div_ceil(features, tiles) <= 128; gate_up_few: 16 * div_ceil(features / 8, tiles)
// flags     ADD_TO_OUT: add to what is in out; OUT_IS_F32
//
// Sums are f32 on the tensor cores, with one rounding at the end; gate and up are not rounded before they are
// multiplied. The same bits every time for the same shape, kernel, grid and tile_rows: the order of additions does
// not depend on who comes last. A NaN stays in its row of x, or in the features whose weights have it. `in` is a
// multiple of 8, rows of x and weight start at multiples of 16 bytes, and gate_up_few wants features to be a multiple
// of 8: that is what the tensor maps need. Any other size is right: places past an edge count as zeros, and nothing is
// written there. out must not overlap x. Launches that follow each other in one stream may share parts and counters;
// others must not.
//
// The first copies of weights do not wait for the kernel in front. Whoever writes weights synchronises before it
// launches this with programmatic stream serialization.
//
// The work is a line of units: one tile after the other, each in steps of 128 columns. Blocks take equal stretches of
// the line ("Stream-K", Osama et al. 2023, arXiv 2301.03598): who has only part of a tile leaves it in `parts`, and the
// last to come adds them up. That costs the way to the L2 cache and back three times over, at the very end. So blocks
// are clusters of two, and a tile that two of a cluster have to themselves is added up in their shared memory instead,
// each warpgroup finishing some of the rows of x.
//
// One warp copies, two warpgroups multiply, and one warp writes the tiles after which a block has more to do. The
// weight is the tall operand of wgmma, x the narrow one, so that few rows waste little. A block has a multiprocessor
// without another of its kind: shares are equal only while each has the bandwidth of a whole one. Started early, a
// block comes where the one in front has just ended, and fills its stages while others end still.

#include "few_product.cuh"

// Counters of as many streams as may launch at the same time: each must have its own, here or elsewhere.
using contract::linear_few::STREAM_COUNTERS;
using contract::linear_few::STREAMS;
extern "C" __device__ uint32_t linear_few_counters[STREAMS * STREAM_COUNTERS] = {};

// The bound lets a thread have 168 registers, which is what adding up parts of 64 rows takes; 128 were slower.
#define IN_TEAMS __cluster_dims__(TEAM, 1, 1) __launch_bounds__(384, 1)
#define LINEAR_FEW(name, Element, ROWS)                                                                                \
    extern "C" __global__ void IN_TEAMS                                                                                \
        linear_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,     \
                                    void* out, const Element* bias, float* parts, uint32_t* counters,                  \
                                    uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps,              \
                                    uint32_t tiles, uint32_t tile_rows, uint32_t flags) {                              \
        few<PlainFormat<Element>, ROWS, false>(                                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags});       \
    }                                                                                                                  \
    extern "C" __global__ void IN_TEAMS                                                                                \
        gate_up_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,    \
                                     Element* out, float* parts, uint32_t* counters, uint32_t out_pitch,               \
                                     uint32_t rows, uint32_t features, uint32_t steps, uint32_t tiles,                 \
                                     uint32_t tile_rows) {                                                             \
        few<PlainFormat<Element>, ROWS, true>(                                                                                      \
            weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, 0});        \
    }
#define KERNEL(name, Element) FOR_EACH_FEW_ROWS(LINEAR_FEW, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (multiprocessors), or tiles * steps if that is less, and even; block (THREADS); dynamic shared memory
// SHARED_BYTES<ROWS> (contract::linear_few), for which the function's limit has to be raised first. ROWS is the least of 8,
// 16, 32, 64 that rows fit in. Clusters of two are compiled in. May be launched with programmatic stream serialization, and
// should be. parts and counters: see above.
//
// Any tiles in the range of tile_rows is right. Where half as many tiles as multiprocessors are not too tall they are
// the fastest cut: each cluster has one, and nothing goes through parts. Of more features each block takes tiles of its
// own (a multiple of the multiprocessors), and nothing is added up at all. Two blocks of this on a multiprocessor,
// started early, took half as long again as one after the other: hence their size. Fetching ahead into the L2 cache
// while the kernel in front ends was slower. At 64 rows it changed nothing to copy x no more than once, or to share it
// through multicast, and writing whole lines by way of shared memory was slower. x does not come sooner than the
// weights that were asked for before it, though it stands in the L2 cache: with fewer steps of it under way than of
// the weight, in stages of its own, o and qkv took 3 to 15 % longer. Nor was it of use that the multipliers bring
// its first steps (cp.async). Steps of 64 columns, twice as many, made a step of 64 rows slower by two in a hundred.
// Clusters of four have room for 120 blocks only on a card of 132 multiprocessors that was asked.
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE,
// swizzle 128B, L2 promotion 128 bytes (256 were slower), out of bounds NONE (zeros), and
//   weight of linear_few    rank 2, dimensions {in, features}, strides {2 * in} bytes, box {64, tile_rows}
//   weight of gate_up_few   rank 4, dimensions {in, 8, 2, features / 8}, strides {2 * in, 2 * in * features, 16 * in}
//                           bytes, box {64, 8, 2, tile_rows / 16}
//   x                       rank 2, dimensions {in, rows}, strides {2 * pitch} bytes, box {64, ROWS}
// Those of the weights last as long as the weights; that of x belongs to one address and number of rows.
