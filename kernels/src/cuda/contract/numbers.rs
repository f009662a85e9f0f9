//! The numbers that launches and kernels agree on, a module for each family of kernels.
//!
//! Here they are written; `kernels/cuda/include/contract.cuh`, which the device code includes, is generated from this
//! file, with the same names in namespaces of the modules' names (`header.rs`). Where a kernel lays out memory by types
//! or templates of its own, it asserts that the outcome is the number that stands here.

use super::sizes::{FewRows, HeadDim, PackedHeadDim};

/// Threads that multiply together on Hopper, and rows that each of them has of a product (wgmma).
const WARPGROUP: usize = 128;
const WGMMA_ROWS: usize = 64;

/// Bytes of an activation, bf16 or f16, and of a sum, f32.
const ACTIVATION: usize = 2;
const SUM: usize = 4;

/// Defines constants and functions of a size, and for tests lists them as the device code is to know them: a constant
/// under its name, a function as a variable template with a value for each size.
macro_rules! contract {
    ($($(#[doc = $about:literal])* mod $family:ident {
        $($(#[doc = $doc:literal])* const $name:ident: $type:ty = $value:expr;)*
        $(by $size:ident: $($(#[doc = $by_doc:literal])* fn $function:ident($argument:ident) -> usize { $($body:tt)* })*)?
    })*) => {
        $($(#[doc = $about])*
        #[allow(dead_code, reason = "some numbers only the device code needs")]
        pub(crate) mod $family {
            #[allow(unused_imports, reason = "not every family needs all of it")]
            use super::*;

            $($(#[doc = $doc])* pub(crate) const $name: $type = $value;)*
            $($($(#[doc = $by_doc])* pub(crate) const fn $function($argument: $size) -> usize { $($body)* })*)?
        })*

        /// Every family, in the order of the file.
        #[cfg(test)]
        pub(super) fn families() -> Vec<super::header::Family> {
            use super::header::{Family, Item};
            vec![$(Family {
                name: stringify!($family),
                about: [$($about),*].concat(),
                items: vec![
                    $(Item::constant(stringify!($name), [$($doc),*].concat(), $family::$name as u64),)*
                    $($(Item::of_sizes::<$size>(
                        stringify!($function), [$($by_doc),*].concat(), |size| $family::$function(size)),)*)?
                ],
            }),*]
        }
    };
}

contract! {
    /// What several families share.
    mod common {
        /// Tokens per block of the cache.
        const BLOCK_TOKENS: usize = crate::BLOCK_TOKENS;
        /// What stands for a token where none could be chosen.
        const NO_CHOICE: u32 = crate::ops::argmax::NO_CHOICE;
        /// Bit of a token id that makes the rest an index into what the previous step chose.
        const PREVIOUS: u32 = crate::input_token::PREVIOUS;
        /// Where the keys and values of a row go that fills up a captured step.
        const NO_SLOT: u32 = crate::ops::rotary_kv_write::NO_SLOT;
    }

    /// all_reduce.cu: units a grid apart; block b of a rank meets block b of the others.
    mod all_reduce {
        /// Threads of a block.
        const THREADS: usize = 512;
        /// Most blocks, all of which run at once.
        const BLOCKS_MAX: usize = 128;
        /// Most ranks.
        const RANKS_MAX: usize = 8;
        /// Bytes of a unit, which is copied or added up at once.
        const UNIT: usize = 16;
        /// Of one where rows have no whole ones of those.
        const ODD_UNIT: usize = 2;
        /// Where the failure stands among the bytes of exchange memory.
        const FAILED_AT: usize = (2 * BLOCKS_MAX * RANKS_MAX + 2) * SUM;
        /// Most threads of a block that normalises: one for each unit of a row.
        const NORM_THREADS_MAX: usize = 1024;
        /// Most units that are pushed at once. Each takes two, for the epoch beside it.
        const PUSHED_UNITS: usize = 8 << 10;
        /// Where stands what other ranks push.
        const PUSHED_AT: usize = 32 << 10;
        /// Where its data begin.
        const DATA_AT: usize = PUSHED_AT + 2 * RANKS_MAX * PUSHED_UNITS * 2 * UNIT;
    }

    /// argmax.cu: a cluster of blocks shares a row in Hopper's machine code; elsewhere a row has one block.
    mod argmax {
        /// Threads of a block.
        const THREADS: usize = 512;
        /// Blocks of a cluster.
        const CLUSTER: usize = 8;
    }

    /// embed.cu, gather_rows.cu, scatter_rows.cu and add_rows.cu: a block a row.
    mod copy_rows {
        /// Threads of a block.
        const THREADS: usize = 128;
    }

    /// rms_norm.cu and layer_norm.cu: rows a grid apart, and columns shared by whole warps.
    mod norm {
        /// Most threads of a block.
        const THREADS_MAX: usize = 512;
    }

    /// silu_mul.cu and gelu.cu: a row in x, its columns in y.
    mod gate {
        /// Threads of a block.
        const THREADS: usize = 256;
    }

    /// rotary.cu: a block a token.
    mod rotary {
        /// Most threads of a block.
        const THREADS_MAX: usize = 320;
        /// Axes of positions, whose pairs of elements a launch gives by value.
        const AXES_MAX: usize = 4;
        /// Most query and key heads that are normalised.
        const NORMED_HEADS_MAX: usize = 256;
    }

    /// route.cu: a warp a row, then a thread a choice.
    mod route {
        /// Most rows of the kernel that does all of it.
        const FEW_ROWS: usize = THREADS / 32;
        /// Rows of a block where one block sorts all.
        const SORTED_BLOCK_ROWS: usize = 4;
        /// Most choices that one block sorts.
        const SORTED_CHOICES: usize = 2048;
        /// Rows of a block where each block sorts its own.
        const BLOCK_ROWS: usize = 64;
        /// Most experts.
        const EXPERTS_MAX: usize = crate::ops::route::EXPERTS_MAX;
        /// Threads of a block.
        const THREADS: usize = EXPERTS_MAX;
    }

    /// route_normed.cu: a cluster for all rows, of which each block has some experts; no more rows than `route` calls few.
    mod route_normed {
        /// Blocks of the cluster.
        const CLUSTER: usize = 8;
        /// Most experts.
        const EXPERTS_MAX: usize = 16 * CLUSTER;
        /// Columns that a warp multiplies at once.
        const COLUMNS: usize = 32;
        /// Most columns.
        const HIDDEN_MAX: usize = 4096;
        /// Bytes between two rows in shared memory.
        const ROW_GAP_BYTES: usize = 64;
        /// Bytes of the sums of each warp.
        const SUM_BYTES: usize = 16 * 16 * 16 * 4;
    }

    /// experts.cu: a block a tile of an expert's weights and of its places.
    mod experts {
        /// Most experts.
        const EXPERTS_MAX: usize = crate::ops::route::EXPERTS_MAX;
        /// Threads of a block.
        const THREADS: usize = 128;
        /// Rows of the weight of a tile; gated, half of them are gate and half up.
        const TILE_ROWS: usize = 64;
        /// Places of a tile.
        const TILE_PLACES: usize = 32;
        /// Threads of a block that adds up a row.
        const ADD_THREADS: usize = 256;
    }

    /// experts_few.cu: stretches of a line of tiles of experts' weights.
    mod experts_few {
        /// Most experts.
        const EXPERTS_MAX: usize = crate::ops::route::EXPERTS_MAX;
        /// Rows of the weight of a tile; gated, half of them are gate and half up.
        const TILE_ROWS: usize = WGMMA_ROWS;
        /// Bytes of a row of a step.
        const STEP_BYTES: usize = 2 * ROW_BYTES;
        /// Bytes of a row that one copy brings, which one swizzle spans.
        const ROW_BYTES: usize = 128;
        /// Threads of a block: those that multiply, and a warp that copies.
        const THREADS: usize = WARPGROUP + 32;
        /// Bytes of a stage: a tile's rows of a step.
        const STAGE_BYTES: usize = TILE_ROWS * STEP_BYTES;
        /// Most stages of a ring.
        const STAGES_MAX: usize = 12;
    }

    /// fill_random.cu: an element a thread, a grid apart.
    mod random {
        /// Threads of a block.
        const THREADS: usize = 256;
    }

    /// patchify.cu: patches in y, a patch's pixels in x.
    mod patchify {
        /// Most threads of a block.
        const THREADS_MAX: usize = 256;
        /// Neighbouring pixels that a thread takes where the side of a patch is even; one where it is odd.
        const PIXELS: usize = 4;
        /// Colour channels.
        const CHANNELS: usize = crate::ops::patchify::CHANNELS;
        /// Numbers that say where a picture is.
        const LAYOUT_NUMBERS: usize = crate::ops::patchify::LAYOUT_NUMBERS;
        /// Numbers that normalise a picture's levels.
        const LEVEL_NUMBERS: usize = crate::ops::patchify::LEVEL_NUMBERS;
    }

    /// position_grid.cu: patches in y, a patch's elements in x.
    mod position_grid {
        /// Threads of a block.
        const THREADS: usize = 256;
    }

    /// attention_decode.cu: single rows over the cache.
    mod attention_decode {
        /// Query vectors per tile.
        const TILE_QUERIES: usize = 8;
        /// Most warps of a block.
        const WARPS_MAX: usize = 8;
        /// Tiles that a block may leave for others to add up: of the run that its share begins in, and of the one that
        /// it ends in.
        const PARTS: usize = 2;
        /// Counters in the module, one per block of a launch.
        const COUNTERS: usize = 2048;
        /// Bit of `flags`: no kernel in front writes what stands in front of a sequence's rows.
        const PAST_IS_THERE: u32 = 1;
        /// Bit of `flags`: weights are the first to go from the L2 cache, and so keys and values should be.
        const OTHERS_READ_ONCE: u32 = 2;

        by HeadDim:
        /// Blocks of the cache in the ring of one warp.
        fn ring_stages(head_dim) -> usize {
            match head_dim {
                HeadDim::D32 | HeadDim::D64 => 6,
                HeadDim::D80 => 4,
                HeadDim::D128 => 3,
            }
        }
        /// Bytes of shared memory of that ring: keys and values of one head.
        fn ring_bytes(head_dim) -> usize {
            ring_stages(head_dim) * 2 * common::BLOCK_TOKENS * head_dim.elements() * ACTIVATION
        }
        /// f32 numbers of a part: for each query vector of a tile a weighted sum of values, the highest score and the
        /// sum of weights.
        fn part_numbers(head_dim) -> usize {
            TILE_QUERIES * (head_dim.elements() + 2)
        }
    }

    /// attention_prefill.cu: many rows, on every device.
    mod attention_prefill {
        /// Query vectors per tile, 16 a warp.
        const TILE_QUERIES: usize = 64;
        /// Threads of a block, which has one tile.
        const THREADS: usize = TILE_QUERIES / 16 * 32;
        /// Most rows of a stretch that is one tile.
        const WINDOW_ROWS: usize = 64;
    }

    /// attention_prefill_hopper.cu and attention_paged_combine.cu: over the cache (paged), and within packed rows.
    mod attention_hopper {
        /// Stages of queries, of keys and of values.
        const STAGES: usize = 2;
        /// Elements of a head.
        const PAGED_HEAD_DIM: usize = 128;
        /// Query vectors per tile.
        const PAGED_QUERIES: usize = 128;
        /// Keys per step.
        const PAGED_KEYS: usize = 128;
        /// Fewest keys in one part of a split tile; with fewer, the second launch costs more than it saves.
        const SPLIT_KEYS: usize = 512;
        /// Threads of a block.
        const PAGED_THREADS: usize = threads(PAGED_QUERIES);
        /// Bytes of dynamic shared memory.
        const PAGED_SHARED_BYTES: usize = shared_bytes(PAGED_HEAD_DIM, PAGED_QUERIES, PAGED_KEYS);
        /// Threads of a block over a cache in E4M3, which a warpgroup of its own widens.
        const PAGED_E4M3_THREADS: usize = PAGED_THREADS + 128;
        /// Bytes of dynamic shared memory likewise: stages of what is to be widened are added.
        const PAGED_E4M3_SHARED_BYTES: usize = PAGED_SHARED_BYTES + STAGES * PAGED_KEYS * PAGED_HEAD_DIM;
        /// f32 numbers of a part of a split tile: for each query vector a weighted sum of values, the highest score and
        /// the sum of weights.
        const PAGED_PART_NUMBERS: usize = PAGED_QUERIES * (PAGED_HEAD_DIM + 2);
        /// Warps of a block that adds up parts, one query vector each.
        const COMBINE_WARPS: usize = 8;

        by PackedHeadDim:
        /// Rows per tile of packed rows.
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
        /// Columns that one copy brings, which one swizzle spans.
        fn packed_chunk(head_dim) -> usize {
            if head_dim.elements().is_multiple_of(64) { 64 } else { 16 }
        }
        /// Threads of a block.
        fn packed_threads(head_dim) -> usize {
            threads(packed_queries(head_dim))
        }
        /// Bytes of dynamic shared memory, where products are 16 columns deep.
        fn packed_shared_bytes(head_dim) -> usize {
            let columns = head_dim.elements().next_multiple_of(16);
            shared_bytes(columns, packed_queries(head_dim), packed_keys(head_dim))
        }
    }

    /// linear_few.cu: products of few rows.
    mod linear_few {
        /// Most rows of x.
        const ROWS_MAX: usize = FewRows::R64.rows();
        /// Most weight rows of a tile.
        const TILE_ROWS: usize = 128;
        /// Columns of a step.
        const STEP_COLUMNS: usize = 128;
        /// Columns that one copy brings, which one swizzle spans.
        const CHUNK_COLUMNS: usize = 64;
        /// Rows of the gate that stand before as many rows of up.
        const GATE_ROWS: usize = 8;
        /// Blocks of a cluster.
        const TEAM: usize = 2;
        /// Threads that multiply.
        const MULTIPLIERS: usize = 2 * WARPGROUP;
        /// Threads of a block: those, a warp that copies and one that writes.
        const THREADS: usize = MULTIPLIERS + 2 * 32;
        /// Most stages of a ring.
        const STAGES_MAX: usize = 40;
        /// Bytes of barriers: two a stage, and what the block tells itself.
        const BARRIER_BYTES: usize = 2 * 8 * STAGES_MAX + 64;
        /// Streams that may launch at the same time, each with counters of its own.
        const STREAMS: usize = 8;
        /// Counters of a stream, one a tile.
        const STREAM_COUNTERS: usize = 4096;
        /// Bit of `flags`: the product is added to the output.
        const ADD_TO_OUT: u32 = 1;
        /// Bit of `flags`: the output is f32.
        const OUT_IS_F32: u32 = 2;

        by FewRows:
        /// Bytes for stages.
        fn stages_bytes(rows) -> usize {
            match rows {
                FewRows::R8 | FewRows::R16 => 156 * 1024,
                FewRows::R32 => 144 * 1024,
                FewRows::R64 => 180 * 1024,
            }
        }
        /// Bytes in which warps tell each other sums: those of the tallest tile, and what a cluster's blocks send.
        fn told_bytes(rows) -> usize {
            match rows {
                FewRows::R8 | FewRows::R16 => 12 * 1024,
                FewRows::R32 | FewRows::R64 => part_numbers(rows) * SUM,
            }
        }
        /// Bytes of dynamic shared memory: more than half of a multiprocessor's, so that it runs one block at a time,
        /// but not all, so that small kernels fit beside it.
        fn shared_bytes(rows) -> usize {
            stages_bytes(rows) + told_bytes(rows) + BARRIER_BYTES
        }
        /// f32 numbers that a block leaves of a tile for others to add up.
        fn part_numbers(rows) -> usize {
            rows.rows() * TILE_ROWS
        }
    }

    /// quantize.cu, and what products of FP8 know of it.
    mod fp8 {
        /// Columns of a row of activations, and of a weight's block, with a common scale.
        const GROUP: usize = crate::FP8_BLOCK;
        /// Fewest rows of a weight's block.
        const BLOCK_ROWS_MIN: usize = 8;
        /// Numbers that a thread rounds at once.
        const VECTOR: usize = 8;
        /// Most threads of a block, which has a row.
        const THREADS_MAX: usize = 512;
        /// Blocks of a cluster, which shares a row of gates.
        const GATE_BLOCKS: usize = 8;
        /// Vectors that a thread keeps of a long row.
        const LONG_HELD: usize = 4;
        /// Most threads of a block that has one of those, where two blocks are on a multiprocessor.
        const LONG_THREADS_MAX: usize = 640;
        /// The same, where one is.
        const LONGER_THREADS_MAX: usize = 1024;
        /// Each group of a row has a scale.
        const BY_GROUPS: u32 = 0;
        /// Each row has one.
        const BY_ROWS: u32 = 1;
        /// All have one, which is given.
        const FIXED: u32 = 2;
    }

    /// turn_scales.cu: scales as cuBLASLt reads them.
    mod turn_scales {
        /// Rows and groups of a tile, which a block turns.
        const TILE: usize = 32;
        /// Threads of a block.
        const THREADS: usize = 256;
        /// What the scales of a block's row are filled up to a multiple of.
        const PADDED: usize = 4;
    }

    /// linear_e4m3.cu: products of FP8 weights on generations that have no other kernels for them.
    mod linear_e4m3 {
        /// Features of a block that has few rows.
        const FEW_FEATURES: usize = 16;
        /// Warps of such a block, which share the columns.
        const FEW_WARPS: usize = 4;
        /// Threads of such a block.
        const FEW_THREADS: usize = 32 * FEW_WARPS;
        /// Features of a block's tile where rows are many.
        const MANY_FEATURES: usize = 128;
        /// Rows of x of that tile.
        const MANY_ROWS: usize = 64;
        /// Threads of such a block.
        const MANY_THREADS: usize = 256;
        /// Bytes of dynamic shared memory of such a block: two stages of a group's columns.
        const MANY_SHARED_BYTES: usize = 2 * (MANY_FEATURES + MANY_ROWS) * crate::FP8_BLOCK;
        /// Bit of `flags`: scales are for blocks of the weight and groups of x, not for rows.
        const BY_BLOCKS: u32 = 1;
        /// Bit of `flags`: the product is added to the output.
        const ADD_TO_OUT: u32 = 2;
        /// Bit of `flags`: the output is f32.
        const OUT_IS_F32: u32 = 4;
        /// Bit of `flags`: activations are bf16, not f16.
        const IS_BF16: u32 = 8;
    }

    /// gate_up_middle.cu: gated products of some hundred rows.
    mod gate_up_middle {
        /// Blocks of a cluster, one below the other.
        const CLUSTER: usize = 2;
        /// Warpgroups of a block that multiply; one more copies.
        const MULTIPLIERS: usize = 2;
        /// Rows of x that each of them has, which one copy brings.
        const PART_ROWS: usize = WGMMA_ROWS;
        /// Most rows of x of a block.
        const BLOCK_ROWS: usize = MULTIPLIERS * PART_ROWS;
        /// Columns of a step.
        const STEP_COLUMNS: usize = 64;
        /// Threads of a block.
        const THREADS: usize = (MULTIPLIERS + 1) * WARPGROUP;
        /// Most stages, each of rows of x, of gate and of up.
        const STAGES_MAX: usize = 8;
        /// Bytes of dynamic shared memory, which has as many stages as fit.
        const SHARED_BYTES: usize = 224 << 10;
    }

    /// linear_gated_hopper.cu: products of many rows.
    mod linear_many {
        /// Blocks of a cluster, one below the other, which share their weights.
        const CLUSTER: usize = 2;
        /// Warpgroups of a block that multiply; one more copies.
        const MULTIPLIERS: usize = 2;
        /// Rows of x of a block's tile.
        const TILE_ROWS: usize = MULTIPLIERS * WGMMA_ROWS;
        /// Rows of the weight of a tile, of which each block of a cluster copies half.
        const TILE_WEIGHTS: usize = 256;
        /// Columns of a step.
        const STEP_COLUMNS: usize = 64;
        /// Rows and columns of the output that one copy takes.
        const BOX: usize = 64;
        /// Threads of a block.
        const THREADS: usize = (MULTIPLIERS + 1) * WARPGROUP;
        /// Stages of a ring.
        const STAGES: usize = 4;
        /// Bytes of dynamic shared memory: the stages, and two boxes of output for each warpgroup that multiplies.
        const SHARED_BYTES: usize =
            (STAGES * (TILE_ROWS + TILE_WEIGHTS) * STEP_COLUMNS + 2 * MULTIPLIERS * BOX * BOX) * ACTIVATION;
    }

    /// sampling.cu and include/sampling: what a row asks for, and what its kernels hand on.
    mod sampling {
        /// 32-bit words of what a row asks for.
        const ROW_WORDS: usize = crate::sampling::ROW_WORDS;
        /// The likeliest tokens that may be asked for.
        const TOP_MAX: usize = crate::sampling::TOP_MAX;
        /// A row without a report.
        const NO_REPORT: u32 = crate::sampling::NO_REPORT;
        /// A row without a mask.
        const NO_MASK: u32 = crate::sampling::NO_MASK;
        /// A row whose token is to be chosen.
        const NONE_GIVEN: u32 = crate::sampling::NONE_GIVEN;
        /// Lists of tokens, in the order in which their places are laid out: these may not follow.
        const LIST_FORBIDDEN: usize = crate::sampling::SampleList::Forbidden as usize;
        /// These have a bias.
        const LIST_BIASED: usize = crate::sampling::SampleList::Biased as usize;
        /// Those biases.
        const LIST_BIASES: usize = crate::sampling::SampleList::Biases as usize;
        /// The prompt.
        const LIST_PROMPT: usize = crate::sampling::SampleList::Prompt as usize;
        /// What was produced.
        const LIST_PRODUCED: usize = crate::sampling::SampleList::Produced as usize;
        /// There are NaN or infinity among the logits.
        const FAULT_NOT_NUMBERS: usize = crate::sampling::Fault::NotNumbers as usize;
        /// No token is left.
        const FAULT_NOTHING_ALLOWED: usize = crate::sampling::Fault::NothingAllowed as usize;
        /// The row is padding.
        const FAULT_IGNORED: usize = crate::sampling::Fault::Ignored as usize;
        /// Threads of a block that copies what the previous step chose, a token each.
        const PREVIOUS_THREADS: usize = 256;
        /// Threads of a block that has a slice of a row.
        const SLICE_THREADS: usize = 256;
        /// Threads of the block that plans a row.
        const PLAN_THREADS: usize = 512;
        /// Threads of the block that chooses for a row, each with a bin.
        const CHOICE_THREADS: usize = BINS;
        /// Tokens of a slice, which is one block's share of a row.
        const SLICE: usize = 4096;
        /// Tokens of a group, whose largest logit is remembered.
        const GROUP: usize = 128;
        /// Candidates that fit in a list.
        const LIST: usize = 2048;
        /// Bins of a histogram.
        const BINS: usize = 1024;
        /// Bytes of what is known of a row.
        const PLAN_BYTES: usize = 128;
        /// Bytes of what is known of a slice.
        const FACTS_BYTES: usize = 40;
        /// Bytes of scratch for a row, whatever its slices: the plan, two lists, and weights and counts of the bins.
        const ROW_BYTES: usize = PLAN_BYTES + 2 * LIST * 8 + BINS * (8 + 4);
        /// Bytes of scratch for a slice: its weight, what is known of it, and the largest of its groups twice.
        const SLICE_BYTES: usize = 8 + FACTS_BYTES + 2 * (SLICE / GROUP) * 4;
        /// What the bytes of a row are rounded up to.
        const ROW_ALIGNMENT: usize = 128;
    }
}

/// Threads of a block of attention on Hopper: a warpgroup for each 64 query vectors, and one that copies.
const fn threads(queries: usize) -> usize {
    (queries / WGMMA_ROWS + 1) * WARPGROUP
}

/// Bytes of shared memory of a block of attention on Hopper.
const fn shared_bytes(head_dim: usize, queries: usize, keys: usize) -> usize {
    attention_hopper::STAGES * (queries + 2 * keys) * head_dim * ACTIVATION
}
