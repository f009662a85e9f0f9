//! Constants of kernels that process rows and recurrent states, and constants that several families
//! share. `numbers.rs` has the constants of the other families.

use super::families::{SUM, contract};

contract! {
    /// Constants that several families of kernels share.
    mod common {
        /// Tokens per block of the KV cache.
        const BLOCK_TOKENS: usize = crate::BLOCK_TOKENS;
        /// Value that is written in place of a token when no token could be chosen.
        const NO_CHOICE: u32 = crate::calls::NO_CHOICE;
        /// Bit of a token id: if it is set, the other bits are an index into the tokens that
        /// the previous step chose.
        const PREVIOUS: u32 = crate::input_token::PREVIOUS;
        /// Cache slot of padding rows of a captured graph. Their keys and values are not written.
        const NO_SLOT: u32 = crate::calls::NO_SLOT;
        /// Value of a kernel's `window` argument for attention without a sliding window. It is
        /// longer than any context, and the sum of this value and a context does not overflow.
        const NO_WINDOW: u32 = 1 << 30;
    }

    /// all_reduce.cu: a grid-stride loop over units; thread block b of a rank synchronizes with
    /// thread block b of the other ranks.
    mod all_reduce {
        /// Threads per thread block.
        const THREADS: usize = 512;
        /// Maximum number of thread blocks, all of which must be resident at the same time.
        const BLOCKS_MAX: usize = 128;
        /// Maximum number of ranks.
        const RANKS_MAX: usize = 8;
        /// Bytes of a unit, which a thread copies or adds at once.
        const UNIT: usize = 16;
        /// Bytes of a unit if the starts or lengths of rows are not multiples of `UNIT` bytes.
        const ODD_UNIT: usize = 2;
        /// Offset of the failure word in the exchange memory, in bytes.
        const FAILED_AT: usize = (2 * BLOCKS_MAX * RANKS_MAX + 2) * SUM;
        /// Maximum threads per thread block of the fused norm: one thread for each unit of a row.
        const NORM_THREADS_MAX: usize = 1024;
        /// Maximum number of units that are pushed at once. A pushed unit takes the space of two,
        /// because each 4 bytes of data are followed by the epoch.
        const PUSHED_UNITS: usize = 8 << 10;
        /// Offset in the exchange memory, in bytes, of the area that the other ranks push to.
        const PUSHED_AT: usize = 32 << 10;
        /// Offset in the exchange memory, in bytes, of the data.
        const DATA_AT: usize = PUSHED_AT + 2 * RANKS_MAX * PUSHED_UNITS * 2 * UNIT;
    }

    /// argmax.cu: in Hopper's machine code a cluster of thread blocks shares a row; elsewhere a row
    /// has one thread block.
    mod argmax {
        /// Threads per thread block.
        const THREADS: usize = 512;
        /// Thread blocks per cluster.
        const CLUSTER: usize = 8;
    }

    /// embed.cu, gather_rows.cu, scatter_rows.cu and add_rows.cu: one thread block per row.
    mod copy_rows {
        /// Threads per thread block.
        const THREADS: usize = 128;
    }

    /// rms_norm.cu and layer_norm.cu: a grid-stride loop over rows; whole warps share the columns.
    mod norm {
        /// Maximum threads per thread block.
        const THREADS_MAX: usize = 512;
    }

    /// Activations of gated GEMMs. Also silu_mul.cu, gelu.cu, mean_rows.cu and sigmoid_mul.cu: grid
    /// x is the row, grid y covers the columns of the row.
    mod gate {
        /// Threads per thread block.
        const THREADS: usize = 256;
        /// Value of `activation` of a gated GEMM: SiLU.
        const SILU: u32 = 0;
        /// Value of `activation` of a gated GEMM: the tanh approximation of GELU.
        const GELU_TANH: u32 = 1;
    }

    /// state_sequences.cuh: layers with a recurrent state.
    mod states {
        /// Slot number of a state that is not written.
        const NO_STATE: u32 = crate::calls::NO_STATE;
        /// Snapshots of one sequence's state in a step.
        const SNAPSHOTS: usize = crate::calls::SNAPSHOTS;
    }

    /// causal_conv.cu: grid x covers the channels, grid y the sequences with one row, then tiles of
    /// rows of the other sequences.
    mod causal_conv {
        /// Threads per thread block.
        const THREADS: usize = 128;
        /// Channels per thread and loop iteration, if all addresses are aligned.
        const CHANNELS: usize = 8;
        /// Rows of a sequence per tile.
        const TILE_ROWS: usize = 16;
        /// Minimum width of the convolution.
        const TAPS_MIN: usize = 2;
        /// Maximum width of the convolution.
        const TAPS_MAX: usize = 4;
    }

    /// gated_delta.cu: eight lanes share a row of a head's matrix. A thread block processes some
    /// rows of one head of one sequence.
    mod gated_delta {
        /// Threads per thread block.
        const ROW_THREADS: usize = 128;
        /// Lanes that share a row.
        const ROW_LANES: usize = 8;
        /// Rows per thread block and round.
        const GROUPS: usize = ROW_THREADS / ROW_LANES;
        /// Rounds per thread block of the kernel for single rows of many sequences and heads.
        const HELD: usize = 4;
        /// Key size, in elements, that has dedicated kernels.
        const KEY_DIM: usize = 128;
        /// `key_dim` must be a multiple of this number.
        const KEY_DIM_STEP: usize = 16;
        /// Maximum number of elements of a key.
        const KEY_DIM_MAX: usize = 256;
        /// Maximum number of tokens per chunk of gated_delta_prepare.cu and gated_delta_chunked.cu.
        const CHUNK: usize = 64;
        /// Values of a head per thread block of gated_delta_chunked.cu.
        const CHUNK_VALUES: usize = 32;
        /// Threads per thread block of gated_delta_prepare.cu and gated_delta_chunked.cu.
        const CHUNK_THREADS: usize = 256;
        /// Bytes of dynamic shared memory per thread block of gated_delta_prepare.cu.
        const PREPARE_SHARED_BYTES: usize = prepare_shared_bytes(KEY_DIM, CHUNK);
        /// Bytes of dynamic shared memory per thread block of gated_delta_chunked.cu.
        const CHUNK_SHARED_BYTES: usize = chunk_shared_bytes(KEY_DIM, CHUNK, CHUNK_VALUES);
    }

    /// gated_rms_norm.cu: several lanes share a head.
    mod gated_rms_norm {
        /// Threads per thread block.
        const THREADS: usize = 256;
        /// Elements per lane of a head, if all addresses are aligned.
        const VECTOR: usize = 8;
    }
}

/// Padding between rows, in f16 elements, in the shared memory of the chunked gated delta rule.
const GAP: usize = 8;

/// Returns the bytes of dynamic shared memory per thread block of gated_delta_prepare.cu: queries
/// and keys, three matrices over pairs of tokens, blocks on the diagonal in f32, and two gates per
/// token. The device code asserts that this number is the size of its struct.
const fn prepare_shared_bytes(key_dim: usize, tokens: usize) -> usize {
    // Size of a diagonal block, and the padding between its rows, in f32 elements.
    let (tile, tile_gap) = (16, 4);
    let halves = 2 * tokens * (key_dim + GAP) + 3 * tokens * (tokens + GAP);
    2 * halves + SUM * (tokens * (tile + tile_gap) + 2 * tokens)
}

/// Returns the bytes of dynamic shared memory per thread block of gated_delta_chunked.cu: queries,
/// two buffers of keys, the state, two matrices over pairs of tokens, and three matrices of values.
/// The device code asserts that this number is the size of its struct.
const fn chunk_shared_bytes(key_dim: usize, tokens: usize, values: usize) -> usize {
    let rows_of_keys = 3 * tokens + values;
    2 * (rows_of_keys * (key_dim + GAP) + 2 * tokens * (tokens + GAP) + 3 * tokens * (values + GAP))
}
