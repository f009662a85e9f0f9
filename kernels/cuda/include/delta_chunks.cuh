// Shared by the two kernels of the gated delta rule in chunks: gated_delta_prepare.cu, which
// computes everything that does not depend on the state, and gated_delta_chunked.cu, which
// processes the chunks of each sequence in order.
//
// For a chunk of up to CHUNK tokens with normalized keys K and queries Q [tokens, key_dim], values
// V, strengths b, and C the running sum of the logarithms of the decays (Yang et al. 2024, arXiv
// 2406.06484 and 2412.06464):
//
//   A    = strictly lower part of b_i (k_i . k_j) exp(C_i - C_j)
//   T    = (I + A)^-1
//   P    = lower part of (q_i . k_j) exp(C_i - C_j)
//   V'   = T (b (V - exp(C) K S))                         the changes of all tokens
//   out  = exp(C) Q S + P V'
//   S    = exp(C_last) S + (exp(C_last - C) K)^T V'
//
// The first kernel computes K, Q, C, b, T and P of all chunks in parallel, and the second kernel
// computes the rest. All exponents are at most 0, because C decreases from token to token. A chunk
// ends where a snapshot is taken. Rows after the end of a chunk are zeros with a strength and a log
// decay of 0, so they do not change the state.
//
// Operands of the tensor cores are f16 for every type of activations. Normalized keys, normalized
// queries and T are at most 1 in magnitude (T is part of a product of contractions), and f16 has
// three more bits of precision than bf16. Changes, values and the state as an operand are limited
// to 65504 in magnitude. Sums, gates, the state that is carried from chunk to chunk, and the
// inverses of diagonal blocks are f32. The rounding of a result depends on where chunks begin, and
// therefore on how a prompt is divided into steps. A NaN affects only its own sequence.
#pragma once

#include "delta_gates.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"

using contract::gated_delta::CHUNK;
using contract::gated_delta::CHUNK_THREADS;
using contract::gated_delta::KEY_DIM;

using Core = TensorCoreElement<__half>;

constexpr uint32_t TILE = 16;
constexpr uint32_t BLOCKS = CHUNK / TILE;  // 16-token blocks of a chunk, one per warp of each half
constexpr uint32_t HALF_WARPS = BLOCKS;    // warps in each half of the thread block
constexpr uint32_t PIECE = 8;              // elements of 16 bytes
static_assert(CHUNK_THREADS == 2 * HALF_WARPS * WARP, "a thread block has two halves");

// Elements from row to row in shared memory. A row has 16 additional bytes, so that 8 rows start in
// 8 different groups of banks.
constexpr uint32_t KEY_ROW = KEY_DIM + 8, TOKEN_ROW = CHUNK + 8;

// Pieces of a row of keys or queries, and the number of rows that all threads move at once.
constexpr uint32_t KEY_PIECES = KEY_DIM / PIECE, KEY_ROWS_AT_ONCE = CHUNK_THREADS / KEY_PIECES;
constexpr uint32_t KEY_ROUNDS = CHUNK / KEY_ROWS_AT_ONCE;
// The same numbers for rows of T and P.
constexpr uint32_t TOKEN_PIECES = CHUNK / PIECE, TOKEN_ROWS_AT_ONCE = CHUNK_THREADS / TOKEN_PIECES;
constexpr uint32_t TOKEN_ROUNDS = CHUNK / TOKEN_ROWS_AT_ONCE;

// Results of the first kernel, indexed by row of the batch. A row of T or P has one element for
// each token of the row's chunk. Elements in blocks above the diagonal are not written. The host
// computes the same size (`delta_scratch` in kernels/src/cuda/target.rs).
struct Prepared {
    __half *keys, *queries;   // [key_heads, rows, KEY_DIM]
    __half *inverse, *of_queries;  // T and P, [value_heads, rows, CHUNK]
    float2* gates;            // C and b, [value_heads, rows]

    // Pointers to the first row of a value head.
    template <typename Element, typename Stored>
    static __device__ __forceinline__ Prepared of_head(__half* memory, const Delta<Element, Stored>& call, uint32_t head) {
        const uint64_t rows = call.sequences.rows;
        __half *queries = memory + call.key_heads * rows * KEY_DIM, *inverse = queries + call.key_heads * rows * KEY_DIM;
        __half *of_queries = inverse + call.value_heads * rows * CHUNK;
        float2* gates = reinterpret_cast<float2*>(of_queries + call.value_heads * rows * CHUNK);
        const uint64_t of_keys = call.key_head(head) * rows * KEY_DIM, of_tokens = head * rows * CHUNK;
        return {memory + of_keys, queries + of_keys, inverse + of_tokens, of_queries + of_tokens, gates + head * rows};
    }
};

// Returns `true` if a piece of a row of T or P belongs to a block on or below the diagonal.
__device__ __forceinline__ bool is_lower(uint32_t row, uint32_t piece) { return piece * PIECE / TILE <= row / TILE; }

__device__ __forceinline__ uint32_t pack(float low, float high) { return Core::pack(low, high); }

__device__ __forceinline__ void store_pair(__half* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pack(low, high);
}

// Stores numbers as f16. Their magnitudes are limited to 65504, the largest finite f16. A NaN stays
// a NaN.
__device__ __forceinline__ void store_limited(__half* to, float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    *reinterpret_cast<uint32_t*>(to) = both;
#else
    const auto limited = [](float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; };
    store_pair(to, limited(low), limited(high));
#endif
}

// Operand A: 16 rows from `row` on and 16 columns from `column` on of a matrix in shared memory.
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const __half* matrix, uint32_t pitch, uint32_t row,
                                       uint32_t column) {
    const uint32_t lane = threadIdx.x % WARP;
    load_quarters(a, shared_address(matrix + (row + lane % 16) * pitch + column + lane / 16 * 8));
}

// Operand A: the transpose of 16 rows from `row` on and 16 columns from `column` on.
__device__ __forceinline__ void load_a_transposed(uint32_t (&a)[4], const __half* matrix, uint32_t pitch, uint32_t row,
                                                  uint32_t column) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t at = (row + lane / 16 * 8 + lane % 8) * pitch + column + lane / 8 % 2 * 8;
    load_quarters_transposed(a, shared_address(matrix + at));
}

// Operands B of two products with adjacent columns: the transpose of 16 rows from `row` on and 16
// columns from `column` on. The first product has b[0] and b[1].
__device__ __forceinline__ void load_b_transposed(uint32_t (&b)[4], const __half* matrix, uint32_t pitch, uint32_t row,
                                                  uint32_t column) {
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t at = (row + lane / 16 * 8 + lane % 8) * pitch + column + lane / 8 % 2 * 8;
    load_quarters(b, shared_address(matrix + at));
}

// Operands B of two products with adjacent columns: 16 rows from `row` on and 16 columns from
// `column` on.
__device__ __forceinline__ void load_b(uint32_t (&b)[4], const __half* matrix, uint32_t pitch, uint32_t row,
                                       uint32_t column) {
    const uint32_t lane = threadIdx.x % WARP;
    load_quarters_transposed(b, shared_address(matrix + (row + lane % 16) * pitch + column + lane / 16 * 8));
}

__device__ __forceinline__ void multiply_add_two(float (&c)[4], float (&next)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[4]) {
    Core::multiply_add(c, a, b[0], b[1]);
    Core::multiply_add(next, a, b[2], b[3]);
}

// The tokens `from` to `to` (exclusive) of a sequence.
struct Chunk {
    uint32_t from, to;

    __device__ __forceinline__ bool holds(uint32_t token) const { return from + token < to; }
};

// The chunk that begins at `from`; it is empty at the end of the sequence.
__device__ __forceinline__ Chunk chunk_at(const StatePart& part, uint32_t from) {
    uint32_t to = min(from + CHUNK, part.rows);
    part.each_written([&](uint32_t rows, char*) { to = rows > from ? min(to, rows) : to; });
    return {from, max(to, from)};
}

// The start of the first chunk that begins at row `row` or later.
__device__ __forceinline__ uint32_t chunk_start(const StatePart& part, uint32_t row) {
    uint32_t before = 0, after = part.rows;
    part.each_written([&](uint32_t rows, char*) {
        before = rows <= row ? max(before, rows) : before;
        after = rows > row ? min(after, rows) : after;
    });
    return min(before + (row - before + CHUNK - 1) / CHUNK * CHUNK, after);
}

// This thread's part of a chunk. The halves of a thread block have different work.
struct Role {
    static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / WARP; }
    static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ bool is_first_half() { return warp() < HALF_WARPS; }
    // The 16 tokens of this warp. Later tokens have more work; the second half is in reverse order,
    // because warp w and warp w + 4 share a scheduler.
    static __device__ __forceinline__ uint32_t block() { return is_first_half() ? warp() : 2 * HALF_WARPS - 1 - warp(); }
    // The token of c[2 * half] and c[2 * half + 1], and the column of c[0] in its tile.
    static __device__ __forceinline__ uint32_t token(uint32_t half) { return block() * TILE + lane() / 4 + 8 * half; }
    static __device__ __forceinline__ uint32_t column() { return lane() % 4 * 2; }
};

// The parameters of a kernel of the gated delta rule in chunks, and their struct.
#define DELTA_PARAMETERS(Element)                                                                                     \
    const Element *qkv, uint32_t qkv_pitch, const Element *update, uint32_t update_pitch, const Element *decay,       \
        uint32_t decay_pitch, const float *log_decay, const float *bias, uint32_t key_heads, uint32_t value_heads,    \
        uint32_t key_dim, uint32_t value_dim, StateSequences sequences, StateSlots slots, uint32_t first_sequence,    \
        Element *out, __half *prepared
#define DELTA_CALL(Element, Stored)                                                                                   \
    Delta<Element, Stored> {                                                                                          \
        qkv, qkv_pitch, update, update_pitch, decay, decay_pitch, log_decay, bias, key_heads, value_heads, key_dim,   \
            value_dim, sequences, slots, first_sequence, out                                                          \
    }
