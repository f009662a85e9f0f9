// Constants that the host and the kernels share. Generated from kernels/src/cuda/contract: change
// them there, write this file with `BURSAR_WRITE_PAGES=1 cargo test -p bursar-kernels contract`,
// then compile (kernels/cuda/compile.py).
#pragma once

#include <stdint.h>

// `KERNEL(..., size)` for each head dimension that attention over the KV cache is compiled for.
#define FOR_EACH_HEAD_DIM(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 128) \
    KERNEL(__VA_ARGS__, 256) \
    KERNEL(__VA_ARGS__, 512)

// `KERNEL(..., size)` for each head dimension that attention over the KV cache of many rows on Hopper is compiled for.
#define FOR_EACH_HOPPER_HEAD_DIM(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 128) \
    KERNEL(__VA_ARGS__, 256)

// `KERNEL(..., size)` for each head dimension that attention within packed sequences is compiled for.
#define FOR_EACH_PACKED_HEAD_DIM(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 72) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 128)

// `KERNEL(..., size)` for each head dimension that attention within many short sequences (windows) is compiled for.
#define FOR_EACH_HEAD_DIM_OF_WINDOWS(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 72) \
    KERNEL(__VA_ARGS__, 80)

// `KERNEL(..., size)` for each maximum number of rows that the GEMMs of few rows are compiled for.
#define FOR_EACH_SMALL_M_ROWS(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 8) \
    KERNEL(__VA_ARGS__, 16) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64)

// `KERNEL(..., size)` for each maximum number of rows that gemm_small_m_int4.cu is compiled for.
#define FOR_EACH_INT4_ROWS(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 8) \
    KERNEL(__VA_ARGS__, 16) \
    KERNEL(__VA_ARGS__, 32) \
    KERNEL(__VA_ARGS__, 64) \
    KERNEL(__VA_ARGS__, 128)

// `KERNEL(..., size)` for each number of features per tile of gemm_medium_m.cu.
#define FOR_EACH_GATED_WIDTH(KERNEL, ...) \
    KERNEL(__VA_ARGS__, 80) \
    KERNEL(__VA_ARGS__, 96) \
    KERNEL(__VA_ARGS__, 112)

namespace contract {

// Constants that several families of kernels share.
namespace common {
// Tokens per block of the KV cache.
constexpr uint32_t BLOCK_TOKENS = 16;
// Value that is written in place of a token when no token could be chosen.
constexpr uint32_t NO_CHOICE = 0xffffffffu;
// Bit of a token id: if it is set, the other bits are an index into the tokens that the previous step chose.
constexpr uint32_t PREVIOUS = 0x80000000u;
// Cache slot of padding rows of a captured graph. Their keys and values are not written.
constexpr uint32_t NO_SLOT = 0xffffffffu;
// Value of a kernel's `window` argument for attention without a sliding window. It is longer than any context, and the
// sum of this value and a context does not overflow.
constexpr uint32_t NO_WINDOW = 1073741824;
}  // namespace common

// all_reduce.cu: a grid-stride loop over units; thread block b of a rank synchronizes with thread block b of the other
// ranks.
namespace all_reduce {
// Threads per thread block.
constexpr uint32_t THREADS = 512;
// Maximum number of thread blocks, all of which must be resident at the same time.
constexpr uint32_t BLOCKS_MAX = 128;
// Maximum number of ranks.
constexpr uint32_t RANKS_MAX = 8;
// Bytes of a unit, which a thread copies or adds at once.
constexpr uint32_t UNIT = 16;
// Bytes of a unit if the starts or lengths of rows are not multiples of `UNIT` bytes.
constexpr uint32_t ODD_UNIT = 2;
// Offset of the failure word in the exchange memory, in bytes.
constexpr uint32_t FAILED_AT = 8200;
// Maximum threads per thread block of the fused norm: one thread for each unit of a row.
constexpr uint32_t NORM_THREADS_MAX = 1024;
// Maximum number of units that are pushed at once. A pushed unit takes the space of two, because each 4 bytes of data
// are followed by the epoch.
constexpr uint32_t PUSHED_UNITS = 8192;
// Offset in the exchange memory, in bytes, of the area that the other ranks push to.
constexpr uint32_t PUSHED_AT = 32768;
// Offset in the exchange memory, in bytes, of the data.
constexpr uint32_t DATA_AT = 4227072;
}  // namespace all_reduce

// argmax.cu: in Hopper's machine code a cluster of thread blocks shares a row; elsewhere a row has one thread block.
namespace argmax {
// Threads per thread block.
constexpr uint32_t THREADS = 512;
// Thread blocks per cluster.
constexpr uint32_t CLUSTER = 8;
}  // namespace argmax

// embed.cu, gather_rows.cu, scatter_rows.cu and add_rows.cu: one thread block per row.
namespace copy_rows {
// Threads per thread block.
constexpr uint32_t THREADS = 128;
}  // namespace copy_rows

// rms_norm.cu and layer_norm.cu: a grid-stride loop over rows; whole warps share the columns.
namespace norm {
// Maximum threads per thread block.
constexpr uint32_t THREADS_MAX = 512;
}  // namespace norm

// Activations of gated GEMMs. Also silu_mul.cu, gelu.cu, mean_rows.cu and sigmoid_mul.cu: grid x is the row, grid y
// covers the columns of the row.
namespace gate {
// Threads per thread block.
constexpr uint32_t THREADS = 256;
// Value of `activation` of a gated GEMM: SiLU.
constexpr uint32_t SILU = 0;
// Value of `activation` of a gated GEMM: the tanh approximation of GELU.
constexpr uint32_t GELU_TANH = 1;
}  // namespace gate

// state_sequences.cuh: layers with a recurrent state.
namespace states {
// Slot number of a state that is not written.
constexpr uint32_t NO_STATE = 0xffffffffu;
// Snapshots of one sequence's state in a step.
constexpr uint32_t SNAPSHOTS = 2;
}  // namespace states

// causal_conv.cu: grid x covers the channels, grid y the sequences with one row, then tiles of rows of the other
// sequences.
namespace causal_conv {
// Threads per thread block.
constexpr uint32_t THREADS = 128;
// Channels per thread and loop iteration, if all addresses are aligned.
constexpr uint32_t CHANNELS = 8;
// Rows of a sequence per tile.
constexpr uint32_t TILE_ROWS = 16;
// Minimum width of the convolution.
constexpr uint32_t TAPS_MIN = 2;
// Maximum width of the convolution.
constexpr uint32_t TAPS_MAX = 4;
}  // namespace causal_conv

// gated_delta.cu: eight lanes share a row of a head's matrix. A thread block processes some rows of one head of one
// sequence.
namespace gated_delta {
// Threads per thread block.
constexpr uint32_t ROW_THREADS = 128;
// Lanes that share a row.
constexpr uint32_t ROW_LANES = 8;
// Rows per thread block and round.
constexpr uint32_t GROUPS = 16;
// Rounds per thread block of the kernel for single rows of many sequences and heads.
constexpr uint32_t HELD = 4;
// Key size, in elements, that has dedicated kernels.
constexpr uint32_t KEY_DIM = 128;
// `key_dim` must be a multiple of this number.
constexpr uint32_t KEY_DIM_STEP = 16;
// Maximum number of elements of a key.
constexpr uint32_t KEY_DIM_MAX = 256;
// Maximum number of tokens per chunk of gated_delta_prepare.cu and gated_delta_chunked.cu.
constexpr uint32_t CHUNK = 64;
// Values of a head per thread block of gated_delta_chunked.cu.
constexpr uint32_t CHUNK_VALUES = 32;
// Threads per thread block of gated_delta_prepare.cu and gated_delta_chunked.cu.
constexpr uint32_t CHUNK_THREADS = 256;
// Bytes of dynamic shared memory per thread block of gated_delta_prepare.cu.
constexpr uint32_t PREPARE_SHARED_BYTES = 68096;
// Bytes of dynamic shared memory per thread block of gated_delta_chunked.cu.
constexpr uint32_t CHUNK_SHARED_BYTES = 94720;
}  // namespace gated_delta

// gated_rms_norm.cu: several lanes share a head.
namespace gated_rms_norm {
// Threads per thread block.
constexpr uint32_t THREADS = 256;
// Elements per lane of a head, if all addresses are aligned.
constexpr uint32_t VECTOR = 8;
}  // namespace gated_rms_norm

// rotary.cu: one thread block per token.
namespace rotary {
// Maximum threads per thread block.
constexpr uint32_t THREADS_MAX = 320;
// Maximum number of position axes. A launch passes the number of element pairs per axis by value.
constexpr uint32_t AXES_MAX = 4;
// Maximum number of normalized heads in a row. Value heads that are read from keys do not count.
constexpr uint32_t NORMED_HEADS_MAX = 256;
// Value of `values`: values are written unchanged.
constexpr uint32_t VALUES_UNCHANGED = 0;
// Value of `values`: each head of values is normalized.
constexpr uint32_t VALUES_NORMALIZED = 1;
// Value of `values`: a row has no value heads. Each key head is normalized without its weight and without a rotation,
// and written as a value head.
constexpr uint32_t VALUES_OF_KEYS = 2;
}  // namespace rotary

// route.cu: one warp per row, then one thread per choice.
namespace route {
// Maximum number of rows of the kernel that needs only one launch.
constexpr uint32_t SMALL_M_ROWS = 16;
// Rows per thread block of `route_choose` when a single thread block sorts all choices.
constexpr uint32_t SORTED_BLOCK_ROWS = 4;
// Maximum number of choices that a single thread block sorts.
constexpr uint32_t SORTED_CHOICES = 2048;
// Rows per thread block when each thread block sorts its own choices.
constexpr uint32_t BLOCK_ROWS = 64;
// Maximum number of experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Threads per thread block.
constexpr uint32_t THREADS = 512;
}  // namespace route

// route_normed.cu: one cluster for all rows, in which each thread block has some of the experts. The kernel accepts up
// to `route::SMALL_M_ROWS` rows.
namespace route_normed {
// Thread blocks per cluster.
constexpr uint32_t CLUSTER = 8;
// Maximum number of experts.
constexpr uint32_t EXPERTS_MAX = 128;
// Columns that a warp multiplies at once.
constexpr uint32_t COLUMNS = 32;
// Maximum number of columns.
constexpr uint32_t HIDDEN_MAX = 4096;
// Padding bytes between two rows in shared memory.
constexpr uint32_t ROW_GAP_BYTES = 64;
// Bytes of shared memory for the f32 sums of all warps.
constexpr uint32_t SUM_BYTES = 16384;
}  // namespace route_normed

// experts.cu: one thread block per tile of an expert's weights and places. A place is a position in the list of choices
// sorted by expert.
namespace experts {
// Maximum number of experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Threads per thread block.
constexpr uint32_t THREADS = 128;
// Weight rows per tile. In a gated GEMM, half of them are gate rows and half are up rows.
constexpr uint32_t TILE_ROWS = 64;
// Places per tile.
constexpr uint32_t TILE_PLACES = 32;
// Threads per thread block of the kernel that adds up a row.
constexpr uint32_t ADD_THREADS = 256;
}  // namespace experts

// experts_small_m.cu: the tiles of all experts' weights form one list. Each thread block computes a contiguous range of
// the list.
namespace experts_small_m {
// Maximum number of experts.
constexpr uint32_t EXPERTS_MAX = 512;
// Weight rows per tile. In a gated GEMM, half of them are gate rows and half are up rows.
constexpr uint32_t TILE_ROWS = 64;
// Bytes per row and pipeline step.
constexpr uint32_t STEP_BYTES = 256;
// Bytes of a row that one copy transfers, which is the span of one swizzle.
constexpr uint32_t ROW_BYTES = 128;
// Threads per thread block: one warpgroup that multiplies and one warp that copies.
constexpr uint32_t THREADS = 160;
// Bytes of a pipeline stage: the rows of one tile for one step.
constexpr uint32_t STAGE_BYTES = 16384;
// Maximum number of pipeline stages.
constexpr uint32_t STAGES_MAX = 12;
}  // namespace experts_small_m

// fill_random.cu: one thread per element, in a grid-stride loop.
namespace random {
// Threads per thread block.
constexpr uint32_t THREADS = 256;
}  // namespace random

// patchify.cu: in a thread block, y is the patch and x covers the pixels of the patch.
namespace patchify {
// Maximum threads per thread block.
constexpr uint32_t THREADS_MAX = 256;
// Adjacent pixels per thread if the side of a patch is even. If the side is odd, a thread takes one pixel.
constexpr uint32_t PIXELS = 4;
// Number of color channels.
constexpr uint32_t CHANNELS = 3;
// Numbers that locate a picture: its first byte, patches down, patches across, frames.
constexpr uint32_t LAYOUT_NUMBERS = 4;
// Numbers that normalize a picture's color levels.
constexpr uint32_t LEVEL_NUMBERS = 7;
}  // namespace patchify

// position_grid.cu: in a thread block, y is the patch and x covers the elements of the patch.
namespace position_grid {
// Threads per thread block.
constexpr uint32_t THREADS = 256;
}  // namespace position_grid

// attention_decode.cu: single rows over the KV cache.
namespace attention_decode {
// Query vectors per tile.
constexpr uint32_t TILE_QUERIES = 8;
// Maximum warps per thread block.
constexpr uint32_t WARPS_MAX = 8;
// Maximum number of partial tiles that a thread block leaves for another thread block to add up: one at the start of
// its share of the work, and one at the end.
constexpr uint32_t PARTS = 2;
// Counters in the module, one per thread block of a launch.
constexpr uint32_t COUNTERS = 2048;
// Bit of `flags`: the preceding kernel does not write the cached tokens before a sequence's rows of this step.
constexpr uint32_t PAST_IS_THERE = 1;
// Bit of `flags`: weights are read with the hint that the L2 cache evicts them first, so keys and values should be read
// with the same hint if they exceed `READ_ONCE_MIB` of decode_attention.cuh.
constexpr uint32_t OTHERS_READ_ONCE = 2;
// Pipeline stages of one warp's ring. A stage holds one KV head of one block of the cache.
template <uint32_t HEAD_DIM>
constexpr uint32_t RING_STAGES =
    HEAD_DIM == 32 ? 6 : HEAD_DIM == 64 ? 6 : HEAD_DIM == 80 ? 4 : HEAD_DIM == 128 ? 3 : HEAD_DIM == 256 ? 3 : HEAD_DIM == 512 ? 2 : 0;
// Bytes of shared memory of one warp's ring. A stage has the keys and values of one head.
template <uint32_t HEAD_DIM>
constexpr uint32_t RING_BYTES =
    HEAD_DIM == 32 ? 12288 : HEAD_DIM == 64 ? 24576 : HEAD_DIM == 80 ? 20480 : HEAD_DIM == 128 ? 24576 : HEAD_DIM == 256 ? 49152 : HEAD_DIM == 512 ? 65536 : 0;
// Number of f32 elements of a partial tile: for each query vector, a weighted sum of values, the maximum score and the
// sum of weights.
template <uint32_t HEAD_DIM>
constexpr uint32_t PART_NUMBERS =
    HEAD_DIM == 32 ? 272 : HEAD_DIM == 64 ? 528 : HEAD_DIM == 80 ? 656 : HEAD_DIM == 128 ? 1040 : HEAD_DIM == 256 ? 2064 : HEAD_DIM == 512 ? 4112 : 0;
}  // namespace attention_decode

// attention_prefill.cu: many rows, on every GPU generation.
namespace attention_prefill {
// Query vectors per tile, 16 per warp.
constexpr uint32_t TILE_QUERIES = 64;
// Threads per thread block. A thread block computes one tile.
constexpr uint32_t THREADS = 128;
// Number of warps that share the 16 query vectors of heads of 512 elements. Each of them has a slice of the elements.
constexpr uint32_t WIDE_SLICES = 4;
// Query vectors per tile of heads of 512 elements.
constexpr uint32_t WIDE_TILE_QUERIES = 32;
// Threads per thread block for heads of 512 elements.
constexpr uint32_t WIDE_THREADS = 256;
// Maximum number of rows of a packed sequence that is processed as one tile.
constexpr uint32_t WINDOW_ROWS = 64;
}  // namespace attention_prefill

// attention_prefill_hopper.cu and attention_paged_combine.cu: attention over the KV cache.
namespace attention_paged_hopper {
// Query vectors per tile.
constexpr uint32_t QUERIES = 128;
// Minimum number of keys in one part of a split tile; with fewer, the second launch costs more than it saves.
constexpr uint32_t SPLIT_KEYS = 512;
// Threads per thread block.
constexpr uint32_t THREADS = 384;
// Elements per head of the kernels over a cache in E4M3. With 256 elements, four warpgroups leave a thread too few
// registers for its sums.
constexpr uint32_t E4M3_HEAD_DIM = 128;
// Threads per thread block over a cache in E4M3. An additional warpgroup converts the keys and values to f16.
constexpr uint32_t E4M3_THREADS = 512;
// Bytes of dynamic shared memory over a cache in E4M3, which adds stages for keys and values that are not converted
// yet.
constexpr uint32_t E4M3_SHARED_BYTES = 229376;
// Warps per thread block of the kernel that combines parts, one query vector per warp.
constexpr uint32_t COMBINE_WARPS = 8;
// Keys per step.
template <uint32_t HEAD_DIM>
constexpr uint32_t KEYS =
    HEAD_DIM == 128 ? 128 : HEAD_DIM == 256 ? 80 : 0;
// Bytes of dynamic shared memory.
template <uint32_t HEAD_DIM>
constexpr uint32_t SHARED_BYTES =
    HEAD_DIM == 128 ? 196608 : HEAD_DIM == 256 ? 229376 : 0;
// Number of f32 elements of one part of a split tile: for each query vector, a weighted sum of values, the maximum
// score and the sum of weights.
template <uint32_t HEAD_DIM>
constexpr uint32_t PART_NUMBERS =
    HEAD_DIM == 128 ? 16640 : HEAD_DIM == 256 ? 33024 : 0;
}  // namespace attention_paged_hopper

// attention_prefill_hopper.cu: attention within packed sequences.
namespace attention_hopper {
// Pipeline stages of keys and of values, also of attention over the KV cache.
constexpr uint32_t STAGES = 2;
// Query rows per tile.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_QUERIES =
    HEAD_DIM == 32 ? 192 : HEAD_DIM == 64 ? 192 : HEAD_DIM == 72 ? 192 : HEAD_DIM == 80 ? 192 : HEAD_DIM == 128 ? 128 : 0;
// Keys per step.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_KEYS =
    HEAD_DIM == 32 ? 128 : HEAD_DIM == 64 ? 128 : HEAD_DIM == 72 ? 112 : HEAD_DIM == 80 ? 112 : HEAD_DIM == 128 ? 128 : 0;
// Columns that one copy transfers, which is the span of one swizzle.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_CHUNK =
    HEAD_DIM == 32 ? 16 : HEAD_DIM == 64 ? 64 : HEAD_DIM == 72 ? 16 : HEAD_DIM == 80 ? 16 : HEAD_DIM == 128 ? 64 : 0;
// Threads per thread block.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_THREADS =
    HEAD_DIM == 32 ? 512 : HEAD_DIM == 64 ? 512 : HEAD_DIM == 72 ? 512 : HEAD_DIM == 80 ? 512 : HEAD_DIM == 128 ? 384 : 0;
// Bytes of dynamic shared memory. Columns are rounded up to 16, the depth of the tensor core products.
template <uint32_t HEAD_DIM>
constexpr uint32_t PACKED_SHARED_BYTES =
    HEAD_DIM == 32 ? 57344 : HEAD_DIM == 64 ? 114688 : HEAD_DIM == 72 ? 133120 : HEAD_DIM == 80 ? 133120 : HEAD_DIM == 128 ? 196608 : 0;
}  // namespace attention_hopper

// gemm_small_m.cu: GEMMs of few rows.
namespace gemm_small_m {
// Maximum number of rows of x.
constexpr uint32_t ROWS_MAX = 64;
// Maximum weight rows per tile.
constexpr uint32_t TILE_ROWS = 128;
// Columns per step. With E4M3, a step has twice as many.
constexpr uint32_t STEP_COLUMNS = 128;
// Columns that one copy transfers, which is the span of one swizzle. With E4M3, a copy transfers twice as many.
constexpr uint32_t CHUNK_COLUMNS = 64;
// Number of adjacent gate rows in a tile, after which the same number of up rows follows.
constexpr uint32_t GATE_ROWS = 8;
// Thread blocks per cluster.
constexpr uint32_t TEAM = 2;
// Number of threads per thread block that multiply.
constexpr uint32_t MULTIPLIERS = 256;
// Threads per thread block: the multiplying threads, one warp that copies and one warp that writes the output.
constexpr uint32_t THREADS = 320;
// Maximum number of pipeline stages.
constexpr uint32_t STAGES_MAX = 40;
// Bytes of shared memory for barriers (two per stage) and for values that the threads of a block exchange.
constexpr uint32_t BARRIER_BYTES = 704;
// Maximum number of streams that may launch at the same time. Each stream has separate counters.
constexpr uint32_t STREAMS = 8;
// Counters per stream, one per tile.
constexpr uint32_t STREAM_COUNTERS = 4096;
// Bit of `flags`: the product is added to the output.
constexpr uint32_t ADD_TO_OUT = 1;
// Bit of `flags`: the output is f32.
constexpr uint32_t OUT_IS_F32 = 2;
// Bit of `flags`: the activation of gates is the tanh approximation of GELU, not SiLU.
constexpr uint32_t IS_GELU = 4;
// Bytes of shared memory for pipeline stages.
template <uint32_t ROWS>
constexpr uint32_t STAGES_BYTES =
    ROWS == 8 ? 159744 : ROWS == 16 ? 159744 : ROWS == 32 ? 147456 : ROWS == 64 ? 184320 : ROWS == 128 ? 151552 : 0;
// Bytes of shared memory for sums that warpgroups exchange: the sums of the tallest tile, or the sums that the thread
// blocks of a cluster send.
template <uint32_t ROWS>
constexpr uint32_t SUMS_BYTES =
    ROWS == 8 ? 12288 : ROWS == 16 ? 12288 : ROWS == 32 ? 16384 : ROWS == 64 ? 32768 : ROWS == 128 ? 65536 : 0;
// Bytes of dynamic shared memory. It is more than half of an SM's shared memory, so that the SM runs one of these
// thread blocks at a time, but not all of it, so that thread blocks of small kernels still fit on the SM.
template <uint32_t ROWS>
constexpr uint32_t SHARED_BYTES =
    ROWS == 8 ? 172736 : ROWS == 16 ? 172736 : ROWS == 32 ? 164544 : ROWS == 64 ? 217792 : ROWS == 128 ? 217792 : 0;
// Number of f32 elements of a partial tile that a thread block leaves for another thread block to add up.
template <uint32_t ROWS>
constexpr uint32_t PART_NUMBERS =
    ROWS == 8 ? 1024 : ROWS == 16 ? 2048 : ROWS == 32 ? 4096 : ROWS == 64 ? 8192 : ROWS == 128 ? 16384 : 0;
}  // namespace gemm_small_m

// quantize.cu, and the FP8 constants that the FP8 GEMMs share with it.
namespace fp8 {
// Columns that share a scale, in a row of activations and in a block of a weight.
constexpr uint32_t GROUP = 128;
// Minimum number of rows in a block of a weight.
constexpr uint32_t BLOCK_ROWS_MIN = 8;
// Values that a thread rounds at once (one vector).
constexpr uint32_t VECTOR = 8;
// Maximum threads per thread block, except in the kernels for long rows.
constexpr uint32_t THREADS_MAX = 512;
// Thread blocks of the cluster that shares one row of gate and up values.
constexpr uint32_t GATE_BLOCKS = 8;
// Vectors of a long row that a thread keeps in registers.
constexpr uint32_t LONG_HELD = 4;
// Maximum threads per thread block for a long row if two thread blocks fit on an SM.
constexpr uint32_t LONG_THREADS_MAX = 640;
// Maximum threads per thread block for a long row if one thread block fits on an SM.
constexpr uint32_t LONGER_THREADS_MAX = 1024;
// Scale kind: each group of a row has a scale.
constexpr uint32_t BY_GROUPS = 0;
// Scale kind: each row has a scale.
constexpr uint32_t BY_ROWS = 1;
// Scale kind: all rows share one scale, which is given.
constexpr uint32_t FIXED = 2;
}  // namespace fp8

// transpose_scales.cu: transposes scales into the layout that cuBLASLt reads.
namespace transpose_scales {
// Rows and groups of the tile that a thread block transposes.
constexpr uint32_t TILE = 32;
// Threads per thread block.
constexpr uint32_t THREADS = 256;
// The scales of a row of weight blocks are padded to a multiple of this number.
constexpr uint32_t PADDED = 4;
}  // namespace transpose_scales

// gemm_tiled_e4m3.cu: GEMMs of FP8 weights on GPU generations that have no other kernels for FP8 weights.
namespace gemm_tiled_e4m3 {
// Features per thread block of the kernel for few rows.
constexpr uint32_t SMALL_M_FEATURES = 16;
// Warps per thread block of the kernel for few rows. The warps share the columns.
constexpr uint32_t SMALL_M_WARPS = 4;
// Threads per thread block of the kernel for few rows.
constexpr uint32_t SMALL_M_THREADS = 128;
// Features per tile of the kernel for many rows.
constexpr uint32_t LARGE_M_FEATURES = 128;
// Rows of x per tile of the kernel for many rows.
constexpr uint32_t LARGE_M_ROWS = 64;
// Threads per thread block of the kernel for many rows.
constexpr uint32_t LARGE_M_THREADS = 256;
// Bytes of dynamic shared memory of the kernel for many rows: two stages, each with the columns of one group.
constexpr uint32_t LARGE_M_SHARED_BYTES = 49152;
// Bit of `flags`: there is a scale for each block of the weight and each group of x, instead of each row.
constexpr uint32_t BY_BLOCKS = 1;
// Bit of `flags`: the product is added to the output.
constexpr uint32_t ADD_TO_OUT = 2;
// Bit of `flags`: the output is f32.
constexpr uint32_t OUT_IS_F32 = 4;
// Bit of `flags`: activations are bf16, not f16.
constexpr uint32_t IS_BF16 = 8;
}  // namespace gemm_tiled_e4m3

// gemm_int4.cu: GEMMs with weights of 4-bit integers, with a scale for each group of columns.
namespace gemm_int4 {
// Maximum number of rows of x.
constexpr uint32_t ROWS_MAX = 64;
// Weight rows per tile.
constexpr uint32_t TILE_ROWS = 128;
// Columns per step.
constexpr uint32_t STEP_COLUMNS = 128;
// Threads per thread block.
constexpr uint32_t THREADS = 128;
// Maximum number of streams that may launch at the same time. Each stream has separate counters.
constexpr uint32_t STREAMS = 8;
// Counters per stream, one per tile.
constexpr uint32_t STREAM_COUNTERS = 4096;
// Bytes of shared memory for a value that the threads of a block exchange.
constexpr uint32_t EXCHANGED_BYTES = 16;
// Bit of `flags`: the product is added to the output.
constexpr uint32_t ADD_TO_OUT = 1;
// Bit of `flags`: the output is f32.
constexpr uint32_t OUT_IS_F32 = 2;
// Bit of `flags`: half of the features are gates for the other half.
constexpr uint32_t GATED = 4;
// Pipeline stages. A stage has the weights and the rows of x of one step.
template <uint32_t ROWS>
constexpr uint32_t STAGES =
    ROWS == 8 ? 5 : ROWS == 16 ? 4 : ROWS == 32 ? 4 : ROWS == 64 ? 4 : ROWS == 128 ? 4 : 0;
// Bytes of dynamic shared memory.
template <uint32_t ROWS>
constexpr uint32_t SHARED_BYTES =
    ROWS == 8 ? 51216 : ROWS == 16 ? 49168 : ROWS == 32 ? 65552 : ROWS == 64 ? 98320 : ROWS == 128 ? 163856 : 0;
// Thread blocks that an SM runs at once, if it has enough shared memory.
template <uint32_t ROWS>
constexpr uint32_t BLOCKS =
    ROWS == 8 ? 4 : ROWS == 16 ? 4 : ROWS == 32 ? 3 : ROWS == 64 ? 2 : ROWS == 128 ? 2 : 0;
// Number of f32 elements of a partial tile that a thread block leaves for another thread block to add up.
template <uint32_t ROWS>
constexpr uint32_t PART_NUMBERS =
    ROWS == 8 ? 1024 : ROWS == 16 ? 2048 : ROWS == 32 ? 4096 : ROWS == 64 ? 8192 : ROWS == 128 ? 16384 : 0;
}  // namespace gemm_int4

// gemm_medium_m.cu: gated GEMMs of a few hundred rows.
namespace gemm_medium_m {
// Thread blocks per cluster. They compute tiles of adjacent rows.
constexpr uint32_t CLUSTER = 2;
// Warpgroups per thread block that multiply; one more warpgroup copies.
constexpr uint32_t MULTIPLIERS = 2;
// Rows of x per multiplying warpgroup, which one copy transfers.
constexpr uint32_t PART_ROWS = 64;
// Maximum number of rows of x per thread block.
constexpr uint32_t BLOCK_ROWS = 128;
// Columns per step.
constexpr uint32_t STEP_COLUMNS = 64;
// Threads per thread block.
constexpr uint32_t THREADS = 384;
// Maximum number of pipeline stages. A stage has rows of x, of gate and of up.
constexpr uint32_t STAGES_MAX = 8;
// Bytes of dynamic shared memory, which holds as many stages as fit.
constexpr uint32_t SHARED_BYTES = 229376;
}  // namespace gemm_medium_m

// gemm_large_m.cu: GEMMs of many rows.
namespace gemm_large_m {
// Thread blocks per cluster. They compute tiles of adjacent rows and share the weights of these tiles.
constexpr uint32_t CLUSTER = 2;
// Warpgroups per thread block that multiply; one more warpgroup copies.
constexpr uint32_t MULTIPLIERS = 2;
// Rows of x per tile.
constexpr uint32_t TILE_ROWS = 128;
// Weight rows per tile. Each thread block of a cluster copies half of them.
constexpr uint32_t TILE_WEIGHTS = 256;
// Columns per step. With E4M3, a step has twice as many.
constexpr uint32_t STEP_COLUMNS = 64;
// Rows and columns of the output that one copy transfers (a box).
constexpr uint32_t BOX = 64;
// Threads per thread block.
constexpr uint32_t THREADS = 384;
// Pipeline stages of the ring.
constexpr uint32_t STAGES = 4;
// Bytes of dynamic shared memory: the stages, and two output boxes for each multiplying warpgroup.
constexpr uint32_t SHARED_BYTES = 229376;
}  // namespace gemm_large_m

// sampling.cu and include/sampling: the sampling request of a row, and the data that the kernels pass to each other.
namespace sampling {
// 32-bit words of a row's sampling request.
constexpr uint32_t ROW_WORDS = 20;
// Maximum number of likeliest tokens that may be requested.
constexpr uint32_t TOP_MAX = 20;
// Marks a row without a report.
constexpr uint32_t NO_REPORT = 0xffffffffu;
// Marks a row without a mask.
constexpr uint32_t NO_MASK = 0xffffffffu;
// Marks a row whose token is to be chosen, not given.
constexpr uint32_t NONE_GIVEN = 0xffffffffu;
// Index of the list of forbidden tokens. The starts of the lists are laid out in the order of these indexes.
constexpr uint32_t LIST_FORBIDDEN = 0;
// Index of the list of tokens with a bias.
constexpr uint32_t LIST_BIASED = 1;
// Index of the list with the biases of those tokens.
constexpr uint32_t LIST_BIASES = 2;
// Index of the list of the prompt's tokens.
constexpr uint32_t LIST_PROMPT = 3;
// Index of the list of the tokens produced so far.
constexpr uint32_t LIST_PRODUCED = 4;
// Fault: the logits contain NaN or +infinity.
constexpr uint32_t FAULT_NON_FINITE_LOGITS = 1;
// Fault: no token is allowed.
constexpr uint32_t FAULT_NOTHING_ALLOWED = 2;
// Fault: the row is padding.
constexpr uint32_t FAULT_IGNORED = 3;
// Threads per thread block of the kernel that copies the tokens chosen by the previous step, one token per thread.
constexpr uint32_t PREVIOUS_THREADS = 256;
// Threads per thread block of the kernels that process one slice of a row per thread block.
constexpr uint32_t SLICE_THREADS = 256;
// Threads of the thread block that plans a row.
constexpr uint32_t PLAN_THREADS = 512;
// Threads of the thread block that chooses a row's token, one histogram bin per thread.
constexpr uint32_t CHOICE_THREADS = 1024;
// Tokens per slice. A thread block processes one slice of a row.
constexpr uint32_t SLICE = 4096;
// Tokens per group. The largest logit of each group is recorded.
constexpr uint32_t GROUP = 128;
// Maximum number of candidates in a list.
constexpr uint32_t LIST = 2048;
// Bins of a histogram.
constexpr uint32_t BINS = 1024;
// Bytes of the plan of a row (`RowPlan`).
constexpr uint32_t PLAN_BYTES = 128;
// Bytes of the facts about a slice (`SliceFacts`).
constexpr uint32_t FACTS_BYTES = 40;
// Bytes of scratch per row that do not depend on the number of slices: the plan, two lists, and the weights and counts
// of the bins.
constexpr uint32_t ROW_BYTES = 45184;
// Bytes of scratch per slice: its weight, its facts, and two sets of the largest logits of its groups.
constexpr uint32_t SLICE_BYTES = 304;
// The bytes of a row are rounded up to a multiple of this number.
constexpr uint32_t ROW_ALIGNMENT = 128;
}  // namespace sampling

}  // namespace contract
