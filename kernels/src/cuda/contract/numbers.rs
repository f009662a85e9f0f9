//! The numbers that launches and kernels agree on, in one module per family of kernels.
//!
//! This file and `row_numbers.rs` are the source of `kernels/cuda/include/contract.cuh`, which
//! `header.rs` generates and the device code includes. There, a namespace with a module's name has
//! the constants of that module under the same names. A kernel whose memory layout follows from its
//! types or templates asserts that the result equals the number in this file.

use super::{
    families::{SUM, contract},
    row_numbers::common,
    sizes::{HeadDim, HopperHeadDim, PackedHeadDim, SmallMRows},
};

/// Threads that execute one `wgmma` instruction together on Hopper.
const WARPGROUP: usize = 128;

/// Rows of the product that one `wgmma` instruction computes.
const WGMMA_ROWS: usize = 64;

/// Bytes of an activation (bf16 or f16).
const ACTIVATION: usize = 2;

contract! {
    /// rotary.cu: one thread block per token.
    mod rotary {
        /// Maximum threads per thread block.
        const THREADS_MAX: usize = 320;
        /// Maximum number of position axes. A launch passes the number of element pairs
        /// per axis by value.
        const AXES_MAX: usize = 4;
        /// Maximum number of normalized heads in a row. Value heads that are read from keys do not count.
        const NORMED_HEADS_MAX: usize = 256;
        /// Value of `values`: values are written unchanged.
        const VALUES_UNCHANGED: u32 = 0;
        /// Value of `values`: each head of values is normalized.
        const VALUES_NORMALIZED: u32 = 1;
        /// Value of `values`: a row has no value heads. Each key head is normalized without its weight
        /// and without a rotation, and written as a value head.
        const VALUES_OF_KEYS: u32 = 2;
    }

    /// route.cu: one warp per row, then one thread per choice.
    mod route {
        /// Maximum number of rows of the kernel that needs only one launch.
        const SMALL_M_ROWS: usize = THREADS / 32;
        /// Rows per thread block of `route_choose` when a single thread block sorts all choices.
        const SORTED_BLOCK_ROWS: usize = 4;
        /// Maximum number of choices that a single thread block sorts.
        const SORTED_CHOICES: usize = 2048;
        /// Rows per thread block when each thread block sorts its own choices.
        const BLOCK_ROWS: usize = 64;
        /// Maximum number of experts.
        const EXPERTS_MAX: usize = crate::calls::EXPERTS_MAX;
        /// Threads per thread block.
        const THREADS: usize = EXPERTS_MAX;
    }

    /// route_normed.cu: one cluster for all rows, in which each thread block has some of the
    /// experts. The kernel accepts up to `route::SMALL_M_ROWS` rows.
    mod route_normed {
        /// Thread blocks per cluster.
        const CLUSTER: usize = 8;
        /// Maximum number of experts.
        const EXPERTS_MAX: usize = 16 * CLUSTER;
        /// Columns that a warp multiplies at once.
        const COLUMNS: usize = 32;
        /// Maximum number of columns.
        const HIDDEN_MAX: usize = 4096;
        /// Padding bytes between two rows in shared memory.
        const ROW_GAP_BYTES: usize = 64;
        /// Bytes of shared memory for the f32 sums of all warps.
        const SUM_BYTES: usize = 16 * 16 * 16 * 4;
    }

    /// experts.cu: one thread block per tile of an expert's weights and places. A place is a
    /// position in the list of choices sorted by expert.
    mod experts {
        /// Maximum number of experts.
        const EXPERTS_MAX: usize = crate::calls::EXPERTS_MAX;
        /// Threads per thread block.
        const THREADS: usize = 128;
        /// Weight rows per tile. In a gated GEMM, half of them are gate rows and half are up rows.
        const TILE_ROWS: usize = 64;
        /// Places per tile.
        const TILE_PLACES: usize = 32;
        /// Threads per thread block of the kernel that adds up a row.
        const ADD_THREADS: usize = 256;
    }

    /// experts_small_m.cu: the tiles of all experts' weights form one list. Each thread block
    /// computes a contiguous range of the list.
    mod experts_small_m {
        /// Maximum number of experts.
        const EXPERTS_MAX: usize = crate::calls::EXPERTS_MAX;
        /// Weight rows per tile. In a gated GEMM, half of them are gate rows and half are up rows.
        const TILE_ROWS: usize = WGMMA_ROWS;
        /// Bytes per row and pipeline step.
        const STEP_BYTES: usize = 2 * ROW_BYTES;
        /// Bytes of a row that one copy transfers, which is the span of one swizzle.
        const ROW_BYTES: usize = 128;
        /// Threads per thread block: one warpgroup that multiplies and one warp that copies.
        const THREADS: usize = WARPGROUP + 32;
        /// Bytes of a pipeline stage: the rows of one tile for one step.
        const STAGE_BYTES: usize = TILE_ROWS * STEP_BYTES;
        /// Maximum number of pipeline stages.
        const STAGES_MAX: usize = 12;
    }

    /// fill_random.cu: one thread per element, in a grid-stride loop.
    mod random {
        /// Threads per thread block.
        const THREADS: usize = 256;
    }

    /// patchify.cu: in a thread block, y is the patch and x covers the pixels of the patch.
    mod patchify {
        /// Maximum threads per thread block.
        const THREADS_MAX: usize = 256;
        /// Adjacent pixels per thread if the side of a patch is even. If the side is odd, a
        /// thread takes one pixel.
        const PIXELS: usize = 4;
        /// Number of color channels.
        const CHANNELS: usize = crate::calls::CHANNELS;
        /// Numbers that locate a picture: its first byte, patches down, patches across, frames.
        const LAYOUT_NUMBERS: usize = crate::calls::LAYOUT_NUMBERS;
        /// Numbers that normalize a picture's color levels.
        const LEVEL_NUMBERS: usize = crate::calls::LEVEL_NUMBERS;
    }

    /// position_grid.cu: in a thread block, y is the patch and x covers the elements of the patch.
    mod position_grid {
        /// Threads per thread block.
        const THREADS: usize = 256;
    }

    /// attention_decode.cu: single rows over the KV cache.
    mod attention_decode {
        /// Query vectors per tile.
        const TILE_QUERIES: usize = 8;
        /// Maximum warps per thread block.
        const WARPS_MAX: usize = 8;
        /// Maximum number of partial tiles that a thread block leaves for another thread block to
        /// add up: one at the start of its share of the work, and one at the end.
        const PARTS: usize = 2;
        /// Counters in the module, one per thread block of a launch.
        const COUNTERS: usize = 2048;
        /// Bit of `flags`: the preceding kernel does not write the cached tokens before a
        /// sequence's rows of this step.
        const PAST_IS_THERE: u32 = 1;
        /// Bit of `flags`: weights are read with the hint that the L2 cache evicts them first, so
        /// keys and values should be read with the same hint if they exceed `READ_ONCE_MIB` of
        /// decode_attention.cuh.
        const OTHERS_READ_ONCE: u32 = 2;

        by HeadDim:
        /// Pipeline stages of one warp's ring. A stage holds one KV head of one block of the cache.
        fn ring_stages(head_dim) -> usize {
            match head_dim {
                HeadDim::D32 | HeadDim::D64 => 6,
                HeadDim::D80 => 4,
                HeadDim::D128 | HeadDim::D256 => 3,
                HeadDim::D512 => 2,
            }
        }
        /// Bytes of shared memory of one warp's ring. A stage has the keys and values of one head.
        fn ring_bytes(head_dim) -> usize {
            ring_stages(head_dim) * 2 * common::BLOCK_TOKENS * head_dim.elements() * ACTIVATION
        }
        /// Number of f32 elements of a partial tile: for each query vector, a weighted sum of
        /// values, the maximum score and the sum of weights.
        fn part_numbers(head_dim) -> usize {
            TILE_QUERIES * (head_dim.elements() + 2)
        }
    }

    /// attention_prefill.cu: many rows, on every GPU generation.
    mod attention_prefill {
        /// Query vectors per tile, 16 per warp.
        const TILE_QUERIES: usize = 64;
        /// Threads per thread block. A thread block computes one tile.
        const THREADS: usize = TILE_QUERIES / 16 * 32;
        /// Number of warps that share the 16 query vectors of heads of 512 elements. Each of them
        /// has a slice of the elements.
        const WIDE_SLICES: usize = 4;
        /// Query vectors per tile of heads of 512 elements.
        const WIDE_TILE_QUERIES: usize = 32;
        /// Threads per thread block for heads of 512 elements.
        const WIDE_THREADS: usize = WIDE_TILE_QUERIES / 16 * 32 * WIDE_SLICES;
        /// Maximum number of rows of a packed sequence that is processed as one tile.
        const WINDOW_ROWS: usize = 64;
    }

    /// attention_prefill_hopper.cu and attention_paged_combine.cu: attention over the KV cache.
    mod attention_paged_hopper {
        /// Query vectors per tile.
        const QUERIES: usize = 128;
        /// Minimum number of keys in one part of a split tile; with fewer, the second launch costs
        /// more than it saves.
        const SPLIT_KEYS: usize = 512;
        /// Threads per thread block.
        const THREADS: usize = threads(QUERIES);
        /// Elements per head of the kernels over a cache in E4M3. With 256 elements, four
        /// warpgroups leave a thread too few registers for its sums.
        const E4M3_HEAD_DIM: usize = HopperHeadDim::D128.elements();
        /// Threads per thread block over a cache in E4M3. An additional warpgroup converts the keys
        /// and values to f16.
        const E4M3_THREADS: usize = THREADS + WARPGROUP;
        /// Bytes of dynamic shared memory over a cache in E4M3, which adds stages for keys and
        /// values that are not converted yet.
        const E4M3_SHARED_BYTES: usize =
            shared_bytes(HopperHeadDim::D128) + attention_hopper::STAGES * keys(HopperHeadDim::D128) * E4M3_HEAD_DIM;
        /// Warps per thread block of the kernel that combines parts, one query vector per warp.
        const COMBINE_WARPS: usize = 8;

        by HopperHeadDim:
        /// Keys per step.
        fn keys(head_dim) -> usize {
            match head_dim {
                HopperHeadDim::D128 => 128,
                HopperHeadDim::D256 => 80,
            }
        }
        /// Bytes of dynamic shared memory.
        fn shared_bytes(head_dim) -> usize {
            hopper_shared_bytes(head_dim.elements(), QUERIES, keys(head_dim))
        }
        /// Number of f32 elements of one part of a split tile: for each query vector, a weighted
        /// sum of values, the maximum score and the sum of weights.
        fn part_numbers(head_dim) -> usize {
            QUERIES * (head_dim.elements() + 2)
        }
    }

    /// attention_prefill_hopper.cu: attention within packed sequences.
    mod attention_hopper {
        /// Pipeline stages of keys and of values, also of attention over the KV cache.
        const STAGES: usize = 2;

        by PackedHeadDim:
        /// Query rows per tile.
        fn packed_queries(head_dim) -> usize {
            match head_dim {
                PackedHeadDim::D128 => 128,
                _ => 192,
            }
        }
        /// Keys per step.
        fn packed_keys(head_dim) -> usize {
            match head_dim {
                PackedHeadDim::D72 | PackedHeadDim::D80 => 112,
                _ => 128,
            }
        }
        /// Columns that one copy transfers, which is the span of one swizzle.
        fn packed_chunk(head_dim) -> usize {
            if head_dim.elements().is_multiple_of(64) { 64 } else { 16 }
        }
        /// Threads per thread block.
        fn packed_threads(head_dim) -> usize {
            threads(packed_queries(head_dim))
        }
        /// Bytes of dynamic shared memory. Columns are rounded up to 16, the depth of
        /// the tensor core products.
        fn packed_shared_bytes(head_dim) -> usize {
            let columns = head_dim.elements().next_multiple_of(16);
            hopper_shared_bytes(columns, packed_queries(head_dim), packed_keys(head_dim))
        }
    }

    /// gemm_small_m.cu: GEMMs of few rows.
    mod gemm_small_m {
        /// Maximum number of rows of x.
        const ROWS_MAX: usize = SmallMRows::R64.rows();
        /// Maximum weight rows per tile.
        const TILE_ROWS: usize = 128;
        /// Columns per step. With E4M3, a step has twice as many.
        const STEP_COLUMNS: usize = 128;
        /// Columns that one copy transfers, which is the span of one swizzle. With E4M3, a copy
        /// transfers twice as many.
        const CHUNK_COLUMNS: usize = 64;
        /// Number of adjacent gate rows in a tile, after which the same number of up rows follows.
        const GATE_ROWS: usize = 8;
        /// Thread blocks per cluster.
        const TEAM: usize = 2;
        /// Number of threads per thread block that multiply.
        const MULTIPLIERS: usize = 2 * WARPGROUP;
        /// Threads per thread block: the multiplying threads, one warp that copies and one warp
        /// that writes the output.
        const THREADS: usize = MULTIPLIERS + 2 * 32;
        /// Maximum number of pipeline stages.
        const STAGES_MAX: usize = 40;
        /// Bytes of shared memory for barriers (two per stage) and for values that the threads
        /// of a block exchange.
        const BARRIER_BYTES: usize = 2 * 8 * STAGES_MAX + 64;
        /// Maximum number of streams that may launch at the same time. Each
        /// stream has separate counters.
        const STREAMS: usize = 8;
        /// Counters per stream, one per tile.
        const STREAM_COUNTERS: usize = 4096;
        /// Bit of `flags`: the product is added to the output.
        const ADD_TO_OUT: u32 = 1;
        /// Bit of `flags`: the output is f32.
        const OUT_IS_F32: u32 = 2;
        /// Bit of `flags`: the activation of gates is the tanh approximation of GELU, not SiLU.
        const IS_GELU: u32 = 4;

        by SmallMRows:
        /// Bytes of shared memory for pipeline stages.
        fn stages_bytes(rows) -> usize {
            match rows {
                SmallMRows::R8 | SmallMRows::R16 => 156 * 1024,
                SmallMRows::R32 => 144 * 1024,
                SmallMRows::R64 => 180 * 1024,
                SmallMRows::R128 => 148 * 1024,
            }
        }
        /// Bytes of shared memory for sums that warpgroups exchange: the sums of the tallest tile,
        /// or the sums that the thread blocks of a cluster send.
        fn sums_bytes(rows) -> usize {
            match rows {
                SmallMRows::R8 | SmallMRows::R16 => 12 * 1024,
                _ => part_numbers(rows) * SUM,
            }
        }
        /// Bytes of dynamic shared memory. It is more than half of an SM's shared memory, so that
        /// the SM runs one of these thread blocks at a time, but not all of it, so that thread
        /// blocks of small kernels still fit on the SM.
        fn shared_bytes(rows) -> usize {
            stages_bytes(rows) + sums_bytes(rows) + BARRIER_BYTES
        }
        /// Number of f32 elements of a partial tile that a thread block leaves for another thread
        /// block to add up.
        fn part_numbers(rows) -> usize {
            rows.rows() * TILE_ROWS
        }
    }

    /// quantize.cu, and the FP8 constants that the FP8 GEMMs share with it.
    mod fp8 {
        /// Columns that share a scale, in a row of activations and in a block of a weight.
        const GROUP: usize = crate::SCALE_BLOCK;
        /// Minimum number of rows in a block of a weight.
        const BLOCK_ROWS_MIN: usize = 8;
        /// Values that a thread rounds at once (one vector).
        const VECTOR: usize = 8;
        /// Maximum threads per thread block, except in the kernels for long rows.
        const THREADS_MAX: usize = 512;
        /// Thread blocks of the cluster that shares one row of gate and up values.
        const GATE_BLOCKS: usize = 8;
        /// Vectors of a long row that a thread keeps in registers.
        const LONG_HELD: usize = 4;
        /// Maximum threads per thread block for a long row if two thread blocks fit on an SM.
        const LONG_THREADS_MAX: usize = 640;
        /// Maximum threads per thread block for a long row if one thread block fits on an SM.
        const LONGER_THREADS_MAX: usize = 1024;
        /// Scale kind: each group of a row has a scale.
        const BY_GROUPS: u32 = 0;
        /// Scale kind: each row has a scale.
        const BY_ROWS: u32 = 1;
        /// Scale kind: all rows share one scale, which is given.
        const FIXED: u32 = 2;
    }

    /// transpose_scales.cu: transposes scales into the layout that cuBLASLt reads.
    mod transpose_scales {
        /// Rows and groups of the tile that a thread block transposes.
        const TILE: usize = 32;
        /// Threads per thread block.
        const THREADS: usize = 256;
        /// The scales of a row of weight blocks are padded to a multiple of this number.
        const PADDED: usize = 4;
    }

    /// gemm_tiled_e4m3.cu: GEMMs of FP8 weights on GPU generations that have no other
    /// kernels for FP8 weights.
    mod gemm_tiled_e4m3 {
        /// Features per thread block of the kernel for few rows.
        const SMALL_M_FEATURES: usize = 16;
        /// Warps per thread block of the kernel for few rows. The warps share the columns.
        const SMALL_M_WARPS: usize = 4;
        /// Threads per thread block of the kernel for few rows.
        const SMALL_M_THREADS: usize = 32 * SMALL_M_WARPS;
        /// Features per tile of the kernel for many rows.
        const LARGE_M_FEATURES: usize = 128;
        /// Rows of x per tile of the kernel for many rows.
        const LARGE_M_ROWS: usize = 64;
        /// Threads per thread block of the kernel for many rows.
        const LARGE_M_THREADS: usize = 256;
        /// Bytes of dynamic shared memory of the kernel for many rows: two stages, each with the
        /// columns of one group.
        const LARGE_M_SHARED_BYTES: usize = 2 * (LARGE_M_FEATURES + LARGE_M_ROWS) * crate::SCALE_BLOCK;
        /// Bit of `flags`: there is a scale for each block of the weight and each group of x,
        /// instead of each row.
        const BY_BLOCKS: u32 = 1;
        /// Bit of `flags`: the product is added to the output.
        const ADD_TO_OUT: u32 = 2;
        /// Bit of `flags`: the output is f32.
        const OUT_IS_F32: u32 = 4;
        /// Bit of `flags`: activations are bf16, not f16.
        const IS_BF16: u32 = 8;
    }

    /// gemm_int4.cu: GEMMs with weights of 4-bit integers, with a scale for each group of columns.
    mod gemm_int4 {
        /// Maximum number of rows of x.
        const ROWS_MAX: usize = SmallMRows::R64.rows();
        /// Weight rows per tile.
        const TILE_ROWS: usize = 128;
        /// Columns per step.
        const STEP_COLUMNS: usize = 128;
        /// Threads per thread block.
        const THREADS: usize = 128;
        /// Maximum number of streams that may launch at the same time. Each stream has separate
        /// counters.
        const STREAMS: usize = 8;
        /// Counters per stream, one per tile.
        const STREAM_COUNTERS: usize = 4096;
        /// Bytes of shared memory for a value that the threads of a block exchange.
        const EXCHANGED_BYTES: usize = 16;
        /// Bit of `flags`: the product is added to the output.
        const ADD_TO_OUT: u32 = 1;
        /// Bit of `flags`: the output is f32.
        const OUT_IS_F32: u32 = 2;
        /// Bit of `flags`: half of the features are gates for the other half.
        const GATED: u32 = 4;

        by SmallMRows:
        /// Pipeline stages. A stage has the weights and the rows of x of one step.
        fn stages(rows) -> usize {
            match rows {
                SmallMRows::R8 => 5,
                _ => 4,
            }
        }
        /// Bytes of dynamic shared memory.
        fn shared_bytes(rows) -> usize {
            stages(rows) * (TILE_ROWS * STEP_COLUMNS / 2 + rows.rows() * STEP_COLUMNS * 2) + EXCHANGED_BYTES
        }
        /// Thread blocks that an SM runs at once, if it has enough shared memory.
        fn blocks(rows) -> usize {
            match rows {
                SmallMRows::R8 | SmallMRows::R16 => 4,
                SmallMRows::R32 => 3,
                SmallMRows::R64 | SmallMRows::R128 => 2,
            }
        }
        /// Number of f32 elements of a partial tile that a thread block leaves for another thread
        /// block to add up.
        fn part_numbers(rows) -> usize {
            TILE_ROWS * rows.rows()
        }
    }

    /// gemm_medium_m.cu: gated GEMMs of a few hundred rows.
    mod gemm_medium_m {
        /// Thread blocks per cluster. They compute tiles of adjacent rows.
        const CLUSTER: usize = 2;
        /// Warpgroups per thread block that multiply; one more warpgroup copies.
        const MULTIPLIERS: usize = 2;
        /// Rows of x per multiplying warpgroup, which one copy transfers.
        const PART_ROWS: usize = WGMMA_ROWS;
        /// Maximum number of rows of x per thread block.
        const BLOCK_ROWS: usize = MULTIPLIERS * PART_ROWS;
        /// Columns per step.
        const STEP_COLUMNS: usize = 64;
        /// Threads per thread block.
        const THREADS: usize = (MULTIPLIERS + 1) * WARPGROUP;
        /// Maximum number of pipeline stages. A stage has rows of x, of gate and of up.
        const STAGES_MAX: usize = 8;
        /// Bytes of dynamic shared memory, which holds as many stages as fit.
        const SHARED_BYTES: usize = 224 << 10;
    }

    /// gemm_large_m.cu: GEMMs of many rows.
    mod gemm_large_m {
        /// Thread blocks per cluster. They compute tiles of adjacent rows and share the
        /// weights of these tiles.
        const CLUSTER: usize = 2;
        /// Warpgroups per thread block that multiply; one more warpgroup copies.
        const MULTIPLIERS: usize = 2;
        /// Rows of x per tile.
        const TILE_ROWS: usize = MULTIPLIERS * WGMMA_ROWS;
        /// Weight rows per tile. Each thread block of a cluster copies half of them.
        const TILE_WEIGHTS: usize = 256;
        /// Columns per step. With E4M3, a step has twice as many.
        const STEP_COLUMNS: usize = 64;
        /// Rows and columns of the output that one copy transfers (a box).
        const BOX: usize = 64;
        /// Threads per thread block.
        const THREADS: usize = (MULTIPLIERS + 1) * WARPGROUP;
        /// Pipeline stages of the ring.
        const STAGES: usize = 4;
        /// Bytes of dynamic shared memory: the stages, and two output boxes
        /// for each multiplying warpgroup.
        const SHARED_BYTES: usize =
            (STAGES * (TILE_ROWS + TILE_WEIGHTS) * STEP_COLUMNS + 2 * MULTIPLIERS * BOX * BOX) * ACTIVATION;
    }

    /// sampling.cu and include/sampling: the sampling request of a row, and the data that the
    /// kernels pass to each other.
    mod sampling {
        /// 32-bit words of a row's sampling request.
        const ROW_WORDS: usize = crate::sampling::ROW_WORDS;
        /// Maximum number of likeliest tokens that may be requested.
        const TOP_MAX: usize = crate::sampling::TOP_MAX;
        /// Marks a row without a report.
        const NO_REPORT: u32 = crate::sampling::NO_REPORT;
        /// Marks a row without a mask.
        const NO_MASK: u32 = crate::sampling::NO_MASK;
        /// Marks a row whose token is to be chosen, not given.
        const NONE_GIVEN: u32 = crate::sampling::NONE_GIVEN;
        /// Index of the list of forbidden tokens. The starts of the lists are laid out in the
        /// order of these indexes.
        const LIST_FORBIDDEN: usize = crate::sampling::SampleList::Forbidden as usize;
        /// Index of the list of tokens with a bias.
        const LIST_BIASED: usize = crate::sampling::SampleList::Biased as usize;
        /// Index of the list with the biases of those tokens.
        const LIST_BIASES: usize = crate::sampling::SampleList::Biases as usize;
        /// Index of the list of the prompt's tokens.
        const LIST_PROMPT: usize = crate::sampling::SampleList::Prompt as usize;
        /// Index of the list of the tokens produced so far.
        const LIST_PRODUCED: usize = crate::sampling::SampleList::Produced as usize;
        /// Fault: the logits contain NaN or +infinity.
        const FAULT_NON_FINITE_LOGITS: usize = crate::sampling::Fault::NonFiniteLogits as usize;
        /// Fault: no token is allowed.
        const FAULT_NOTHING_ALLOWED: usize = crate::sampling::Fault::NothingAllowed as usize;
        /// Fault: the row is padding.
        const FAULT_IGNORED: usize = crate::sampling::Fault::Ignored as usize;
        /// Threads per thread block of the kernel that copies the tokens chosen by the previous
        /// step, one token per thread.
        const PREVIOUS_THREADS: usize = 256;
        /// Threads per thread block of the kernels that process one slice of a
        /// row per thread block.
        const SLICE_THREADS: usize = 256;
        /// Threads of the thread block that plans a row.
        const PLAN_THREADS: usize = 512;
        /// Threads of the thread block that chooses a row's token, one histogram bin per thread.
        const CHOICE_THREADS: usize = BINS;
        /// Tokens per slice. A thread block processes one slice of a row.
        const SLICE: usize = 4096;
        /// Tokens per group. The largest logit of each group is recorded.
        const GROUP: usize = 128;
        /// Maximum number of candidates in a list.
        const LIST: usize = 2048;
        /// Bins of a histogram.
        const BINS: usize = 1024;
        /// Bytes of the plan of a row (`RowPlan`).
        const PLAN_BYTES: usize = 128;
        /// Bytes of the facts about a slice (`SliceFacts`).
        const FACTS_BYTES: usize = 40;
        /// Bytes of scratch per row that do not depend on the number of slices: the plan, two
        /// lists, and the weights and counts of the bins.
        const ROW_BYTES: usize = PLAN_BYTES + 2 * LIST * 8 + BINS * (8 + 4);
        /// Bytes of scratch per slice: its weight, its facts, and two sets of the largest
        /// logits of its groups.
        const SLICE_BYTES: usize = 8 + FACTS_BYTES + 2 * (SLICE / GROUP) * 4;
        /// The bytes of a row are rounded up to a multiple of this number.
        const ROW_ALIGNMENT: usize = 128;
    }
}

/// Returns the threads per thread block of attention on Hopper: one warpgroup for each 64 query
/// vectors, and one warpgroup that copies.
const fn threads(queries: usize) -> usize {
    (queries / WGMMA_ROWS + 1) * WARPGROUP
}

/// Returns the bytes of dynamic shared memory per thread block of attention on Hopper: stages of
/// queries, keys and values. Two tiles of queries of more than 128 elements leave no space for keys
/// and values.
const fn hopper_shared_bytes(head_dim: usize, queries: usize, keys: usize) -> usize {
    let query_stages = if head_dim > 128 { 1 } else { attention_hopper::STAGES };
    (query_stages * queries + attention_hopper::STAGES * 2 * keys) * head_dim * ACTIVATION
}
