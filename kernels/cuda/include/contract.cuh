// What the host and the kernels agree on. Generated from kernels/src/cuda/contract: change it there, write this file with
// `BURSAR_WRITE_PAGES=1 cargo test -p bursar-kernels contract`, then compile (kernels/cuda/compile.py).
#pragma once

#include <stdint.h>

// `KERNEL(..., size)` for each head size of attention over the cache.
#define FOR_EACH_HEAD_DIM(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 128)

// `KERNEL(..., size)` for each of attention within packed stretches.
#define FOR_EACH_PACKED_HEAD_DIM(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 72) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 128)

// `KERNEL(..., size)` for each that windows have.
#define FOR_EACH_HEAD_DIM_OF_WINDOWS(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 72) \
    KERNEL(__VA_ARGS__, 80)

// `KERNEL(..., size)` for each number of rows that products of few rows are compiled for.
#define FOR_EACH_FEW_ROWS(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 8) \
    KERNEL(__VA_ARGS__, 16) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64)

// `KERNEL(..., size)` for each number of features that a tile of gate_up_middle.cu has.
#define FOR_EACH_GATED_WIDTH(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 96) \
    KERNEL(__VA_ARGS__, 112)

namespace contract {

// What several families share.
namespace common {
// Tokens per block of the cache.
constexpr uint32_t BLOCK_TOKENS = 16;
// What stands for a token where none could be chosen.
constexpr uint32_t NO_CHOICE = 0xffffffffu;
// Bit of a token id that makes the rest an index into what the previous step chose.
constexpr uint32_t PREVIOUS = 0x80000000u;
// Where the keys and values of a row go that fills up a captured step.
constexpr uint32_t NO_SLOT = 0xffffffffu;
}  // namespace common

// all_reduce.cu: units a grid apart; block b of a rank meets block b of the others.
namespace all_reduce {
// Threads of a block.
constexpr uint32_t THREADS = 512;
// Most blocks, all of which run at once.
constexpr uint32_t BLOCKS_MAX = 128;
// Most ranks.
constexpr uint32_t RANKS_MAX = 8;
// Bytes of a unit, which is copied or added up at once.
constexpr uint32_t UNIT = 16;
// Of one where rows have no whole ones of those.
constexpr uint32_t ODD_UNIT = 2;
// Where the failure stands among the bytes of exchange memory.
constexpr uint32_t FAILED_AT = 8200;
// Most threads of a block that normalises: one for each unit of a row.
constexpr uint32_t NORM_THREADS_MAX = 1024;
// Most units that are pushed at once. Each takes two, for the epoch beside it.
constexpr uint32_t PUSHED_UNITS = 8192;
// Where stands what other ranks push.
constexpr uint32_t PUSHED_AT = 32768;
// Where its data begin.
constexpr uint32_t DATA_AT = 4227072;
}  // namespace all_reduce

// argmax.cu: a cluster of blocks shares a row in Hopper's machine code; elsewhere a row has one block.
namespace argmax {
// Threads of a block.
constexpr uint32_t THREADS = 512;
// Blocks of a cluster.
constexpr uint32_t CLUSTER = 8;
}  // namespace argmax

// embed.cu, gather_rows.cu, scatter_rows.cu and add_rows.cu: a block a row.
namespace copy_rows {
// Threads of a block.
constexpr uint32_t THREADS = 128;
}  // namespace copy_rows

// rms_norm.cu and layer_norm.cu: rows a grid apart, and columns shared by whole warps.
namespace norm {
// Most threads of a block.
constexpr uint32_t THREADS_MAX = 512;
}  // namespace norm

// silu_mul.cu and gelu.cu: a row in x, its columns in y.
namespace gate {
// Threads of a block.
constexpr uint32_t THREADS = 256;
}  // namespace gate

// rotary.cu: a block a token.
namespace rotary {
// Most threads of a block.
constexpr uint32_t THREADS_MAX = 320;
// Axes of positions, whose pairs of elements a launch gives by value.
constexpr uint32_t AXES_MAX = 4;
// Most query and key heads that are normalised.
constexpr uint32_t NORMED_HEADS_MAX = 256;
}  // namespace rotary

// route.cu: a warp a row, then a thread a choice.
namespace route {
// Most rows of the kernel that does all of it.
constexpr uint32_t FEW_ROWS = 16;
// Rows of a block where one block sorts all.
constexpr uint32_t SORTED_BLOCK_ROWS = 4;
// Most choices that one block sorts.
constexpr uint32_t SORTED_CHOICES = 2048;
// Rows of a block where each block sorts its own.
constexpr uint32_t BLOCK_ROWS = 64;
// Most experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Threads of a block.
constexpr uint32_t THREADS = 512;
}  // namespace route

// route_normed.cu: a cluster for all rows, of which each block has some experts; no more rows than `route` calls few.
namespace route_normed {
// Blocks of the cluster.
constexpr uint32_t CLUSTER = 8;
// Most experts.
constexpr uint32_t EXPERTS_MAX = 128;
// Columns that a warp multiplies at once.
constexpr uint32_t COLUMNS = 32;
// Most columns.
constexpr uint32_t HIDDEN_MAX = 4096;
// Bytes between two rows in shared memory.
constexpr uint32_t ROW_GAP_BYTES = 64;
// Bytes of the sums of each warp.
constexpr uint32_t SUM_BYTES = 16384;
}  // namespace route_normed

// experts.cu: a block a tile of an expert's weights and of its places.
namespace experts {
// Most experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Threads of a block.
constexpr uint32_t THREADS = 128;
// Rows of the weight of a tile; gated, half of them are gate and half up.
constexpr uint32_t TILE_ROWS = 64;
// Places of a tile.
constexpr uint32_t TILE_PLACES = 32;
// Threads of a block that adds up a row.
constexpr uint32_t ADD_THREADS = 256;
}  // namespace experts

// experts_few.cu: stretches of a line of tiles of experts' weights.
namespace experts_few {
// Most experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Rows of the weight of a tile; gated, half of them are gate and half up.
constexpr uint32_t TILE_ROWS = 64;
// Bytes of a row of a step.
constexpr uint32_t STEP_BYTES = 256;
// Bytes of a row that one copy brings, which one swizzle spans.
constexpr uint32_t ROW_BYTES = 128;
// Threads of a block: those that multiply, and a warp that copies.
constexpr uint32_t THREADS = 160;
// Bytes of a stage: a tile's rows of a step.
constexpr uint32_t STAGE_BYTES = 16384;
// Most stages of a ring.
constexpr uint32_t STAGES_MAX = 12;
}  // namespace experts_few

// fill_random.cu: an element a thread, a grid apart.
namespace random {
// Threads of a block.
constexpr uint32_t THREADS = 256;
}  // namespace random

// patchify.cu: patches in y, a patch's pixels in x.
namespace patchify {
// Most threads of a block.
constexpr uint32_t THREADS_MAX = 256;
// Neighbouring pixels that a thread takes where the side of a patch is even; one where it is odd.
constexpr uint32_t PIXELS = 4;
// Colour channels.
constexpr uint32_t CHANNELS = 3;
// Numbers that say where a picture is.
constexpr uint32_t LAYOUT_NUMBERS = 4;
// Numbers that normalise a picture's levels.
constexpr uint32_t LEVEL_NUMBERS = 7;
}  // namespace patchify

// position_grid.cu: patches in y, a patch's elements in x.
namespace position_grid {
// Threads of a block.
constexpr uint32_t THREADS = 256;
}  // namespace position_grid

// attention_decode.cu: single rows over the cache.
namespace attention_decode {
// Query vectors per tile.
constexpr uint32_t TILE_QUERIES = 8;
// Most warps of a block.
constexpr uint32_t WARPS_MAX = 8;
// Tiles that a block may leave for others to add up: of the run that its share begins in, and of the one that it ends
// in.
constexpr uint32_t PARTS = 2;
// Counters in the module, one per block of a launch.
constexpr uint32_t COUNTERS = 2048;
// Bit of `flags`: no kernel in front writes what stands in front of a sequence's rows.
constexpr uint32_t PAST_IS_THERE = 1;
// Bit of `flags`: weights are the first to go from the L2 cache, and so keys and values should be.
constexpr uint32_t OTHERS_READ_ONCE = 2;
// Blocks of the cache in the ring of one warp.
template <uint32_t HEAD_DIM>
constexpr uint32_t RING_STAGES =
    HEAD_DIM == 32 ? 6 : HEAD_DIM == 64 ? 6 : HEAD_DIM == 80 ? 4 : HEAD_DIM == 128 ? 3 : 0;
// Bytes of shared memory of that ring: keys and values of one head.
template <uint32_t HEAD_DIM>
constexpr uint32_t RING_BYTES =
    HEAD_DIM == 32 ? 12288 : HEAD_DIM == 64 ? 24576 : HEAD_DIM == 80 ? 20480 : HEAD_DIM == 128 ? 24576 : 0;
// f32 numbers of a part: for each query vector of a tile a weighted sum of values, the highest score and the sum of
// weights.
template <uint32_t HEAD_DIM>
constexpr uint32_t PART_NUMBERS =
    HEAD_DIM == 32 ? 272 : HEAD_DIM == 64 ? 528 : HEAD_DIM == 80 ? 656 : HEAD_DIM == 128 ? 1040 : 0;
}  // namespace attention_decode

// attention_prefill.cu: many rows, on every device.
namespace attention_prefill {
// Query vectors per tile, 16 a warp.
constexpr uint32_t TILE_QUERIES = 64;
// Threads of a block, which has one tile.
constexpr uint32_t THREADS = 128;
// Most rows of a stretch that is one tile.
constexpr uint32_t WINDOW_ROWS = 64;
}  // namespace attention_prefill

// attention_prefill_hopper.cu and attention_paged_combine.cu: over the cache (paged), and within packed rows.
namespace attention_hopper {
// Stages of queries, of keys and of values.
constexpr uint32_t STAGES = 2;
// Elements of a head.
constexpr uint32_t PAGED_HEAD_DIM = 128;
// Query vectors per tile.
constexpr uint32_t PAGED_QUERIES = 128;
// Keys per step.
constexpr uint32_t PAGED_KEYS = 128;
// Fewest keys in one part of a split tile; with fewer, the second launch costs more than it saves.
constexpr uint32_t SPLIT_KEYS = 512;
// Threads of a block.
constexpr uint32_t PAGED_THREADS = 384;
// Bytes of dynamic shared memory.
constexpr uint32_t PAGED_SHARED_BYTES = 196608;
// Threads of a block over a cache in E4M3, which a warpgroup of its own widens.
constexpr uint32_t PAGED_E4M3_THREADS = 512;
// Bytes of dynamic shared memory likewise: stages of what is to be widened are added.
constexpr uint32_t PAGED_E4M3_SHARED_BYTES = 229376;
// f32 numbers of a part of a split tile: for each query vector a weighted sum of values, the highest score and the sum
// of weights.
constexpr uint32_t PAGED_PART_NUMBERS = 16640;
// Warps of a block that adds up parts, one query vector each.
constexpr uint32_t COMBINE_WARPS = 8;
// Rows per tile of packed rows.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_QUERIES =
    HEAD_DIM == 32 ? 192 : HEAD_DIM == 64 ? 192 : HEAD_DIM == 72 ? 192 : HEAD_DIM == 80 ? 192 : HEAD_DIM == 128 ? 128 : 0;
// Keys per step.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_KEYS =
    HEAD_DIM == 32 ? 128 : HEAD_DIM == 64 ? 128 : HEAD_DIM == 72 ? 112 : HEAD_DIM == 80 ? 112 : HEAD_DIM == 128 ? 128 : 0;
// Columns that one copy brings, which one swizzle spans.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_CHUNK =
    HEAD_DIM == 32 ? 16 : HEAD_DIM == 64 ? 64 : HEAD_DIM == 72 ? 16 : HEAD_DIM == 80 ? 16 : HEAD_DIM == 128 ? 64 : 0;
// Threads of a block.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_THREADS =
    HEAD_DIM == 32 ? 512 : HEAD_DIM == 64 ? 512 : HEAD_DIM == 72 ? 512 : HEAD_DIM == 80 ? 512 : HEAD_DIM == 128 ? 384 : 0;
// Bytes of dynamic shared memory, where products are 16 columns deep.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_SHARED_BYTES =
    HEAD_DIM == 32 ? 57344 : HEAD_DIM == 64 ? 114688 : HEAD_DIM == 72 ? 133120 : HEAD_DIM == 80 ? 133120 : HEAD_DIM == 128 ? 196608 : 0;
}  // namespace attention_hopper

// linear_few.cu: products of few rows.
namespace linear_few {
// Most rows of x.
constexpr uint32_t ROWS_MAX = 64;
// Most weight rows of a tile.
constexpr uint32_t TILE_ROWS = 128;
// Columns of a step.
constexpr uint32_t STEP_COLUMNS = 128;
// Columns that one copy brings, which one swizzle spans.
constexpr uint32_t CHUNK_COLUMNS = 64;
// Rows of the gate that stand before as many rows of up.
constexpr uint32_t GATE_ROWS = 8;
// Blocks of a cluster.
constexpr uint32_t TEAM = 2;
// Threads that multiply.
constexpr uint32_t MULTIPLIERS = 256;
// Threads of a block: those, a warp that copies and one that writes.
constexpr uint32_t THREADS = 320;
// Most stages of a ring.
constexpr uint32_t STAGES_MAX = 40;
// Bytes of barriers: two a stage, and what the block tells itself.
constexpr uint32_t BARRIER_BYTES = 704;
// Streams that may launch at the same time, each with counters of its own.
constexpr uint32_t STREAMS = 8;
// Counters of a stream, one a tile.
constexpr uint32_t STREAM_COUNTERS = 4096;
// Bit of `flags`: the product is added to the output.
constexpr uint32_t ADD_TO_OUT = 1;
// Bit of `flags`: the output is f32.
constexpr uint32_t OUT_IS_F32 = 2;
// Bytes for stages.
template <uint32_t ROWS>
constexpr uint32_t STAGES_BYTES =
    ROWS == 8 ? 159744 : ROWS == 16 ? 159744 : ROWS == 32 ? 147456 : ROWS == 64 ? 184320 : 0;
// Bytes in which warps tell each other sums: those of the tallest tile, and what a cluster's blocks send.
template <uint32_t ROWS>
constexpr uint32_t TOLD_BYTES =
    ROWS == 8 ? 12288 : ROWS == 16 ? 12288 : ROWS == 32 ? 16384 : ROWS == 64 ? 32768 : 0;
// Bytes of dynamic shared memory: more than half of a multiprocessor's, so that it runs one block at a time, but not
// all, so that small kernels fit beside it.
template <uint32_t ROWS>
constexpr uint32_t SHARED_BYTES =
    ROWS == 8 ? 172736 : ROWS == 16 ? 172736 : ROWS == 32 ? 164544 : ROWS == 64 ? 217792 : 0;
// f32 numbers that a block leaves of a tile for others to add up.
template <uint32_t ROWS>
constexpr uint32_t PART_NUMBERS =
    ROWS == 8 ? 1024 : ROWS == 16 ? 2048 : ROWS == 32 ? 4096 : ROWS == 64 ? 8192 : 0;
}  // namespace linear_few

// quantize.cu, and what products of FP8 know of it.
namespace fp8 {
// Columns of a row of activations, and of a weight's block, with a common scale.
constexpr uint32_t GROUP = 128;
// Fewest rows of a weight's block.
constexpr uint32_t BLOCK_ROWS_MIN = 8;
// Numbers that a thread rounds at once.
constexpr uint32_t VECTOR = 8;
// Most threads of a block, which has a row.
constexpr uint32_t THREADS_MAX = 512;
// Blocks of a cluster, which shares a row of gates.
constexpr uint32_t GATE_BLOCKS = 8;
// Vectors that a thread keeps of a long row.
constexpr uint32_t LONG_HELD = 4;
// Most threads of a block that has one of those, where two blocks are on a multiprocessor.
constexpr uint32_t LONG_THREADS_MAX = 640;
// The same, where one is.
constexpr uint32_t LONGER_THREADS_MAX = 1024;
// Each group of a row has a scale.
constexpr uint32_t BY_GROUPS = 0;
// Each row has one.
constexpr uint32_t BY_ROWS = 1;
// All have one, which is given.
constexpr uint32_t FIXED = 2;
}  // namespace fp8

// turn_scales.cu: scales as cuBLASLt reads them.
namespace turn_scales {
// Rows and groups of a tile, which a block turns.
constexpr uint32_t TILE = 32;
// Threads of a block.
constexpr uint32_t THREADS = 256;
// What the scales of a block's row are filled up to a multiple of.
constexpr uint32_t PADDED = 4;
}  // namespace turn_scales

// linear_e4m3.cu: products of FP8 weights on generations that have no other kernels for them.
namespace linear_e4m3 {
// Features of a block that has few rows.
constexpr uint32_t FEW_FEATURES = 16;
// Warps of such a block, which share the columns.
constexpr uint32_t FEW_WARPS = 4;
// Threads of such a block.
constexpr uint32_t FEW_THREADS = 128;
// Features of a block's tile where rows are many.
constexpr uint32_t MANY_FEATURES = 128;
// Rows of x of that tile.
constexpr uint32_t MANY_ROWS = 64;
// Threads of such a block.
constexpr uint32_t MANY_THREADS = 256;
// Bytes of dynamic shared memory of such a block: two stages of a group's columns.
constexpr uint32_t MANY_SHARED_BYTES = 49152;
// Bit of `flags`: scales are for blocks of the weight and groups of x, not for rows.
constexpr uint32_t BY_BLOCKS = 1;
// Bit of `flags`: the product is added to the output.
constexpr uint32_t ADD_TO_OUT = 2;
// Bit of `flags`: the output is f32.
constexpr uint32_t OUT_IS_F32 = 4;
// Bit of `flags`: activations are bf16, not f16.
constexpr uint32_t IS_BF16 = 8;
}  // namespace linear_e4m3

// gate_up_middle.cu: gated products of some hundred rows.
namespace gate_up_middle {
// Blocks of a cluster, one below the other.
constexpr uint32_t CLUSTER = 2;
// Warpgroups of a block that multiply; one more copies.
constexpr uint32_t MULTIPLIERS = 2;
// Rows of x that each of them has, which one copy brings.
constexpr uint32_t PART_ROWS = 64;
// Most rows of x of a block.
constexpr uint32_t BLOCK_ROWS = 128;
// Columns of a step.
constexpr uint32_t STEP_COLUMNS = 64;
// Threads of a block.
constexpr uint32_t THREADS = 384;
// Most stages, each of rows of x, of gate and of up.
constexpr uint32_t STAGES_MAX = 8;
// Bytes of dynamic shared memory, which has as many stages as fit.
constexpr uint32_t SHARED_BYTES = 229376;
}  // namespace gate_up_middle

// linear_gated_hopper.cu: products of many rows.
namespace linear_many {
// Blocks of a cluster, one below the other, which share their weights.
constexpr uint32_t CLUSTER = 2;
// Warpgroups of a block that multiply; one more copies.
constexpr uint32_t MULTIPLIERS = 2;
// Rows of x of a block's tile.
constexpr uint32_t TILE_ROWS = 128;
// Rows of the weight of a tile, of which each block of a cluster copies half.
constexpr uint32_t TILE_WEIGHTS = 256;
// Columns of a step.
constexpr uint32_t STEP_COLUMNS = 64;
// Rows and columns of the output that one copy takes.
constexpr uint32_t BOX = 64;
// Threads of a block.
constexpr uint32_t THREADS = 384;
// Stages of a ring.
constexpr uint32_t STAGES = 4;
// Bytes of dynamic shared memory: the stages, and two boxes of output for each warpgroup that multiplies.
constexpr uint32_t SHARED_BYTES = 229376;
}  // namespace linear_many

// sampling.cu and include/sampling: what a row asks for, and what its kernels hand on.
namespace sampling {
// 32-bit words of what a row asks for.
constexpr uint32_t ROW_WORDS = 20;
// The likeliest tokens that may be asked for.
constexpr uint32_t TOP_MAX = 20;
// A row without a report.
constexpr uint32_t NO_REPORT = 0xffffffffu;
// A row without a mask.
constexpr uint32_t NO_MASK = 0xffffffffu;
// A row whose token is to be chosen.
constexpr uint32_t NONE_GIVEN = 0xffffffffu;
// Lists of tokens, in the order in which their places are laid out: these may not follow.
constexpr uint32_t LIST_FORBIDDEN = 0;
// These have a bias.
constexpr uint32_t LIST_BIASED = 1;
// Those biases.
constexpr uint32_t LIST_BIASES = 2;
// The prompt.
constexpr uint32_t LIST_PROMPT = 3;
// What was produced.
constexpr uint32_t LIST_PRODUCED = 4;
// There are NaN or infinity among the logits.
constexpr uint32_t FAULT_NOT_NUMBERS = 1;
// No token is left.
constexpr uint32_t FAULT_NOTHING_ALLOWED = 2;
// The row is padding.
constexpr uint32_t FAULT_IGNORED = 3;
// Threads of a block that copies what the previous step chose, a token each.
constexpr uint32_t PREVIOUS_THREADS = 256;
// Threads of a block that has a slice of a row.
constexpr uint32_t SLICE_THREADS = 256;
// Threads of the block that plans a row.
constexpr uint32_t PLAN_THREADS = 512;
// Threads of the block that chooses for a row, each with a bin.
constexpr uint32_t CHOICE_THREADS = 1024;
// Tokens of a slice, which is one block's share of a row.
constexpr uint32_t SLICE = 4096;
// Tokens of a group, whose largest logit is remembered.
constexpr uint32_t GROUP = 128;
// Candidates that fit in a list.
constexpr uint32_t LIST = 2048;
// Bins of a histogram.
constexpr uint32_t BINS = 1024;
// Bytes of what is known of a row.
constexpr uint32_t PLAN_BYTES = 128;
// Bytes of what is known of a slice.
constexpr uint32_t FACTS_BYTES = 40;
// Bytes of scratch for a row, whatever its slices: the plan, two lists, and weights and counts of the bins.
constexpr uint32_t ROW_BYTES = 45184;
// Bytes of scratch for a slice: its weight, what is known of it, and the largest of its groups twice.
constexpr uint32_t SLICE_BYTES = 304;
// What the bytes of a row are rounded up to.
constexpr uint32_t ROW_ALIGNMENT = 128;
}  // namespace sampling

}  // namespace contract
