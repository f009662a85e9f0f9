// The gated delta rule of gated_delta.cu for many rows: chunks of up to CHUNK tokens on the tensor
// cores (Yang et al. 2024, arXiv 2406.06484 and 2412.06464). Operands, slots and output are those
// of gated_delta.cu; key_dim is KEY_DIM, value_dim a multiple of CHUNK_VALUES, and rows of qkv
// are aligned to 16 bytes.
//
// For a chunk with normalized keys K and queries Q [tokens, key_dim], values V, strengths b, and C
// the running sum of the logarithms of the decays:
//
//   A    = strictly lower part of b_i (k_i . k_j) exp(C_i - C_j)
//   T    = (I + A)^-1
//   V'   = T (b (V - exp(C) K S))                         the changes of all tokens
//   out  = exp(C) Q S + P V',  P = lower part of (q_i . k_j) exp(C_i - C_j)
//   S    = exp(C_last) S + (exp(C_last - C) K)^T V'
//
// All exponents are at most 0, because C falls; pairs above the diagonal are masked before exp. A
// chunk ends where a snapshot is taken. Rows after the end of a chunk are zeros with a strength and
// a log decay of 0, which changes nothing. A log decay below -30 counts as -30.
//
// Operands of the tensor cores are f16, whatever the activations' type is: normalized keys and
// queries and T are at most 1 in magnitude (T is part of a product of contractions), for which f16
// has three more bits than bf16. Changes, values and the state as an operand are limited to 65504
// in magnitude. Sums, gates, the state that is carried from chunk to chunk, and the inverses of
// diagonal blocks are f32. A result differs in rounding with the positions of the chunks, so with
// the division of a prompt into steps. A NaN affects only its own sequence.
//
// Method: a block has CHUNK_VALUES of the values of one head of one sequence, and goes through the
// chunks. Blocks of the same head compute A, T and P each for itself. All warps normalize keys
// and queries. Then the first four warps compute K K^T and invert I + A: the diagonal blocks of 16
// tokens by substitution, the others by T_IJ = -T_II (sum over K < I of A_IK T_KJ), one warp per
// column J. The other four warps compute Q K^T and the products with the old state meanwhile. The
// first four warps have the state in registers, transposed as in a slot. The next chunk is loaded
// to registers during the products.

#include "delta_gates.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"
#include "tensor_core.cuh"

using contract::gated_delta::CHUNK;
using contract::gated_delta::CHUNK_THREADS;
using contract::gated_delta::CHUNK_VALUES;
using contract::gated_delta::KEY_DIM;

namespace {

using Core = TensorCoreElement<__half>;

constexpr uint32_t TILE = 16;
constexpr uint32_t BLOCKS = CHUNK / TILE;      // of 16 tokens in a chunk; a warp has one of them
constexpr uint32_t HALF_WARPS = BLOCKS;        // warps in each half of the block
constexpr uint32_t PIECE = 8;                  // elements of 16 bytes
constexpr uint32_t ROW_LANES = KEY_DIM / PIECE;
constexpr uint32_t ROWS_AT_ONCE = CHUNK_THREADS / ROW_LANES;
constexpr uint32_t HELD = CHUNK / ROWS_AT_ONCE;  // rows of queries, and of keys, per thread
constexpr uint32_t VALUE_TILES = CHUNK_VALUES / 8;
static_assert(CHUNK_THREADS == 2 * HALF_WARPS * WARP, "two halves");

// Elements from row to row in shared memory. A row has 16 additional bytes, so that 8 rows start in
// 8 different groups of banks.
constexpr uint32_t KEY_ROW = KEY_DIM + 8, VALUE_ROW = CHUNK_VALUES + 8, TOKEN_ROW = CHUNK + 8;

struct Shared {
    __half queries[CHUNK * KEY_ROW], keys[CHUNK * KEY_ROW];
    __half state[CHUNK_VALUES * KEY_ROW];  // [value, key]
    __half inputs[CHUNK * VALUE_ROW];      // b (V - exp(C) K S)
    __half changes[CHUNK * VALUE_ROW];     // V'
    __half decayed[CHUNK * VALUE_ROW];     // exp(C_last - C) V'
    __half among_keys[CHUNK * TOKEN_ROW];  // A, blocks below the diagonal
    __half inverse[CHUNK * TOKEN_ROW];     // T, blocks on and below the diagonal
    __half of_queries[CHUNK * TOKEN_ROW];  // P, blocks on and below the diagonal
    float diagonal[BLOCKS][TILE][TILE + 4];  // A, blocks on the diagonal
    float sums[CHUNK];                     // C
    float strengths[CHUNK];
};
static_assert(sizeof(Shared) == contract::gated_delta::CHUNK_SHARED_BYTES, "the host declares it");

__device__ __forceinline__ uint32_t pack(float low, float high) { return Core::pack(low, high); }

// f16 has no larger finite number. A NaN remains.
__device__ __forceinline__ float limited(float x) { return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x; }

// A log decay that keeps the differences of running sums accurate: after a token that forgets
// everything, sums would otherwise be so large that later decays are lost in rounding. exp(-30) is
// below the rounding error of f32. A NaN remains.
__device__ __forceinline__ float bounded_log(float x) { return x < -30.0f ? -30.0f : x; }

__device__ __forceinline__ void store_pair(__half* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pack(low, high);
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

// Waits for the first four warps.
__device__ __forceinline__ void first_half_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(HALF_WARPS * WARP) : "memory");
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

// A chunk's operands as a thread loads them.
struct Loaded {
    uint4 queries[HELD], keys[HELD];
    uint32_t values[2][VALUE_TILES];  // pairs, in the layout of operand C; only in the second half
    float update[2], decay[2];        // of two tokens; only in the first warp
};

template <typename Element>
struct Chunks {
    const Delta<Element>& call;
    const StatePart& part;
    Shared& shared;
    uint32_t head, first_value;
    HeadGates gates;

    static __device__ __forceinline__ uint32_t warp() { return threadIdx.x / WARP; }
    static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ bool is_first_half() { return warp() < HALF_WARPS; }
    // The 16 tokens of this warp. Later tokens have more work; the second half is in reverse order,
    // because warp w and warp w + 4 share a scheduler.
    static __device__ __forceinline__ uint32_t block() { return is_first_half() ? warp() : 2 * HALF_WARPS - 1 - warp(); }
    // The token of c[2 * half] and c[2 * half + 1], and the column of c[0] in its tile.
    static __device__ __forceinline__ uint32_t token(uint32_t half) { return block() * TILE + lane() / 4 + 8 * half; }
    static __device__ __forceinline__ uint32_t column() { return lane() % 4 * 2; }

    __device__ __forceinline__ void fetch(const Chunk& chunk, Loaded& loaded) const {
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            const uint32_t row = held * ROWS_AT_ONCE + threadIdx.x / ROW_LANES;
            loaded.queries[held] = loaded.keys[held] = make_uint4(0, 0, 0, 0);
            if (chunk.holds(row)) {
                const Element* from = call.row(part.first_row + chunk.from + row) + threadIdx.x % ROW_LANES * PIECE;
                loaded.queries[held] = load_words<PIECE>(from + call.query_column(head));
                loaded.keys[held] = load_words<PIECE>(from + call.key_column(head));
            }
        }
        if (!is_first_half()) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const bool is_in = chunk.holds(token(half));
                const Element* from = call.row(part.first_row + chunk.from + token(half)) + call.value_column(head);
#pragma unroll
                for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                    loaded.values[half][tile] =
                        is_in ? *reinterpret_cast<const uint32_t*>(from + first_value + tile * 8 + column()) : 0;
                }
            }
        }
        if (warp() == 0) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint64_t row = part.first_row + chunk.from + 2 * lane() + i;
                loaded.update[i] = loaded.decay[i] = 0.0f;
                if (chunk.holds(2 * lane() + i)) {
                    loaded.update[i] = to_float(call.update[row * call.update_pitch + head]);
                    loaded.decay[i] = to_float(call.decay[row * call.decay_pitch + head]);
                }
            }
        }
    }

    // Writes a row of queries or keys, divided by its L2 norm.
    static __device__ __forceinline__ void write_normalized(__half* to, const uint4& words) {
        float values[PIECE], squares = 0.0f;
        widen<PIECE, Element>(words, values);
#pragma unroll
        for (uint32_t i = 0; i < PIECE; ++i) {
            squares += values[i] * values[i];
        }
#pragma unroll
        for (uint32_t distance = ROW_LANES / 2; distance > 0; distance /= 2) {
            squares += __shfl_xor_sync(ALL_LANES, squares, distance);
        }
        const float factor = rsqrtf(squares + L2_EPSILON);
#pragma unroll
        for (uint32_t i = 0; i < PIECE; ++i) {
            values[i] *= factor;
        }
        store<PIECE>(to, values);
    }

    __device__ __forceinline__ void write_operands(const Chunk& chunk, const Loaded& loaded) const {
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            const uint32_t row = held * ROWS_AT_ONCE + threadIdx.x / ROW_LANES;
            const uint32_t at = row * KEY_ROW + threadIdx.x % ROW_LANES * PIECE;
            write_normalized(shared.queries + at, loaded.queries[held]);
            write_normalized(shared.keys + at, loaded.keys[held]);
        }
        if (warp() == 0) {
            static_assert(CHUNK == 2 * WARP, "two tokens per lane");
            const bool is_in[2] = {chunk.holds(2 * lane()), chunk.holds(2 * lane() + 1)};
            const float own[2] = {is_in[0] ? bounded_log(gates.log_kept(loaded.decay[0])) : 0.0f,
                                  is_in[1] ? bounded_log(gates.log_kept(loaded.decay[1])) : 0.0f};
            float sum = own[0] + own[1];
#pragma unroll
            for (uint32_t distance = 1; distance < WARP; distance *= 2) {
                const float before = __shfl_up_sync(ALL_LANES, sum, distance);
                sum += lane() >= distance ? before : 0.0f;
            }
            *reinterpret_cast<float2*>(shared.sums + 2 * lane()) = make_float2(sum - own[1], sum);
            *reinterpret_cast<float2*>(shared.strengths + 2 * lane()) =
                make_float2(is_in[0] ? HeadGates::strength(loaded.update[0]) : 0.0f,
                            is_in[1] ? HeadGates::strength(loaded.update[1]) : 0.0f);
        }
    }

    // The products of this warp's tokens with all tokens up to them: of keys in the first half, of
    // queries in the second half.
    __device__ __forceinline__ void multiply_tokens() const {
        const __half* rows = is_first_half() ? shared.keys : shared.queries;
        float products[2 * BLOCKS][4] = {};
#pragma unroll
        for (uint32_t k = 0; k < KEY_DIM; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, rows, KEY_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t other = 0; other < BLOCKS; ++other) {
                if (other <= block()) {
                    load_b_transposed(b, shared.keys, KEY_ROW, other * TILE, k);
                    multiply_add_two(products[2 * other], products[2 * other + 1], a, b);
                }
            }
        }
        const float scale = rsqrtf(static_cast<float>(KEY_DIM));
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t i = token(half);
            const float sum = shared.sums[i], factor = is_first_half() ? shared.strengths[i] : scale;
#pragma unroll
            for (uint32_t tile = 0; tile < 2 * BLOCKS; ++tile) {
                if (tile / 2 > block()) {
                    continue;
                }
                float values[2];
#pragma unroll
                for (uint32_t next = 0; next < 2; ++next) {
                    const uint32_t j = tile * 8 + column() + next;
                    const bool is_seen = is_first_half() ? j < i : j <= i;
                    values[next] = is_seen ? factor * products[tile][2 * half + next] * __expf(sum - shared.sums[j]) : 0.0f;
                }
                const uint32_t j = tile * 8 + column();
                if (!is_first_half()) {
                    store_pair(shared.of_queries + i * TOKEN_ROW + j, values[0], values[1]);
                } else if (tile / 2 < block()) {
                    store_pair(shared.among_keys + i * TOKEN_ROW + j, values[0], values[1]);
                } else {
                    *reinterpret_cast<float2*>(&shared.diagonal[block()][i % TILE][j % TILE]) =
                        make_float2(values[0], values[1]);
                }
            }
        }
    }

    // Writes T. Run by the first half.
    __device__ __forceinline__ void invert() const {
        // Each lane has one column of the inverse of this warp's diagonal block; half of the lanes
        // repeat the other half's work.
        const uint32_t j = lane() % TILE;
        float inverse[TILE];
#pragma unroll
        for (uint32_t i = 0; i < TILE; ++i) {
            inverse[i] = i == j ? 1.0f : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < i; ++k) {
                inverse[i] -= shared.diagonal[block()][i][k] * inverse[k];
            }
            if (lane() < TILE) {
                shared.inverse[(block() * TILE + i) * TOKEN_ROW + block() * TILE + j] = __float2half_rn(inverse[i]);
            }
        }
        first_half_barrier();
        // This warp's column of blocks, from top to bottom, transposed: T_IJ^T = -(sum of T_KJ^T
        // A_IK^T) T_II^T.
        const uint32_t own = block() * TILE;
#pragma unroll 1
        for (uint32_t row = own + TILE; row < CHUNK; row += TILE) {
            float sums[2][4] = {}, result[2][4] = {};
            uint32_t a[4], b[4];
#pragma unroll 1
            for (uint32_t k = own; k < row; k += TILE) {
                load_a_transposed(a, shared.inverse, TOKEN_ROW, k, own);
                load_b_transposed(b, shared.among_keys, TOKEN_ROW, row, k);
                multiply_add_two(sums[0], sums[1], a, b);
            }
            const uint32_t left[4] = {pack(sums[0][0], sums[0][1]), pack(sums[0][2], sums[0][3]),
                                      pack(sums[1][0], sums[1][1]), pack(sums[1][2], sums[1][3])};
            load_b_transposed(b, shared.inverse, TOKEN_ROW, row, row);
            multiply_add_two(result[0], result[1], left, b);
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i) {
                const uint32_t to = row + i / 4 * 8 + column() + i % 2, from = own + lane() / 4 + i % 4 / 2 * 8;
                shared.inverse[to * TOKEN_ROW + from] = __float2half_rn(-result[i / 4][i % 4]);
            }
            __syncwarp();
        }
    }

    // The products of this warp's tokens with the old state. Writes the inputs of T, and returns
    // the part of the output. Run by the second half.
    __device__ __forceinline__ void multiply_state(const Loaded& loaded, float (&out)[VALUE_TILES][4]) const {
        float of_keys[VALUE_TILES][4] = {};
#pragma unroll
        for (uint32_t k = 0; k < KEY_DIM; k += TILE) {
            uint32_t key[4], query[4], b[4];
            load_a(key, shared.keys, KEY_ROW, block() * TILE, k);
            load_a(query, shared.queries, KEY_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; tile += 2) {
                load_b_transposed(b, shared.state, KEY_ROW, tile * 8, k);
                multiply_add_two(of_keys[tile], of_keys[tile + 1], key, b);
                multiply_add_two(out[tile], out[tile + 1], query, b);
            }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t i = token(half);
            const float kept = __expf(shared.sums[i]), strength = shared.strengths[i];
            const float scale = kept * rsqrtf(static_cast<float>(KEY_DIM));
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                const float2 value = pair_to_floats<Element>(loaded.values[half][tile]);
                float(&of_key)[4] = of_keys[tile];
                store_pair(shared.inputs + i * VALUE_ROW + tile * 8 + column(),
                           limited(strength * (value.x - kept * of_key[2 * half])),
                           limited(strength * (value.y - kept * of_key[2 * half + 1])));
                out[tile][2 * half] *= scale;
                out[tile][2 * half + 1] *= scale;
            }
        }
    }

    // Writes V' of this warp's tokens, for half of the values.
    __device__ __forceinline__ void find_changes() const {
        constexpr uint32_t TILES = VALUE_TILES / 2;
        const uint32_t first = is_first_half() ? 0 : TILES;
        float changes[TILES][4] = {};
#pragma unroll 1
        for (uint32_t k = 0; k <= block() * TILE; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, shared.inverse, TOKEN_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; tile += 2) {
                load_b(b, shared.inputs, VALUE_ROW, k, (first + tile) * 8);
                multiply_add_two(changes[tile], changes[tile + 1], a, b);
            }
        }
        const float last = shared.sums[CHUNK - 1];
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t i = token(half);
            const float kept = __expf(last - shared.sums[i]);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
                const float low = limited(changes[tile][2 * half]), high = limited(changes[tile][2 * half + 1]);
                const uint32_t at = i * VALUE_ROW + (first + tile) * 8 + column();
                store_pair(shared.changes + at, low, high);
                store_pair(shared.decayed + at, kept * low, kept * high);
            }
        }
    }

    // Adds the products with the changes to the output of this warp's tokens, and writes it. Run by
    // the second half.
    __device__ __forceinline__ void write_output(const Chunk& chunk, float (&out)[VALUE_TILES][4]) const {
#pragma unroll 1
        for (uint32_t k = 0; k <= block() * TILE; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, shared.of_queries, TOKEN_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; tile += 2) {
                load_b(b, shared.changes, VALUE_ROW, k, tile * 8);
                multiply_add_two(out[tile], out[tile + 1], a, b);
            }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            if (chunk.holds(token(half))) {
                Element* to = output_at(chunk.from + token(half)) + column();
#pragma unroll
                for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                    *reinterpret_cast<uint32_t*>(to + tile * 8) =
                        pair_from_floats<Element>(out[tile][2 * half], out[tile][2 * half + 1]);
                }
            }
        }
    }

    // The first of this block's values in a row of the output.
    __device__ __forceinline__ Element* output_at(uint32_t row) const {
        return call.out + (static_cast<uint64_t>(part.first_row + row) * call.value_heads + head) * call.value_dim
            + first_value;
    }
};

// The state of CHUNK_VALUES values, transposed: warp w of the first half has the keys 32 w to 32 w + 32.
struct State {
    static constexpr uint32_t ROWS = CHUNK_VALUES / TILE, COLUMNS = KEY_DIM / HALF_WARPS / 8;
    float tiles[ROWS][COLUMNS][4];

    // Calls `step(value, key, low, high)` for each pair of adjacent elements.
    template <typename Step>
    __device__ __forceinline__ void each(const Step& step) {
        const uint32_t lane = threadIdx.x % WARP, first_key = threadIdx.x / WARP * COLUMNS * 8 + lane % 4 * 2;
#pragma unroll
        for (uint32_t row = 0; row < ROWS; ++row) {
#pragma unroll
            for (uint32_t column = 0; column < COLUMNS; ++column) {
#pragma unroll
                for (uint32_t half = 0; half < 2; ++half) {
                    float(&tile)[4] = tiles[row][column];
                    step(row * TILE + lane / 4 + 8 * half, first_key + column * 8, tile[2 * half], tile[2 * half + 1]);
                }
            }
        }
    }

    // `matrix` is this block's first row of a slot's matrix, or null for zeros.
    __device__ __forceinline__ void read(const float* matrix) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            float2 both = make_float2(0.0f, 0.0f);
            if (matrix != nullptr) {
                both = *reinterpret_cast<const float2*>(matrix + value * KEY_DIM + key);
            }
            low = both.x;
            high = both.y;
        });
    }

    __device__ __forceinline__ void write(float* matrix) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            *reinterpret_cast<float2*>(matrix + value * KEY_DIM + key) = make_float2(low, high);
        });
    }

    __device__ __forceinline__ void write_operand(Shared& shared) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            store_pair(shared.state + value * KEY_ROW + key, limited(low), limited(high));
        });
    }

    // Multiplies the state by `kept` and adds the products of changes and keys.
    __device__ __forceinline__ void advance(const Shared& shared, float kept) {
        each([&](uint32_t, uint32_t, float& low, float& high) {
            low *= kept;
            high *= kept;
        });
        const uint32_t first_key = threadIdx.x / WARP * COLUMNS * 8;
#pragma unroll
        for (uint32_t k = 0; k < CHUNK; k += TILE) {
            uint32_t a[ROWS][4], b[4];
#pragma unroll
            for (uint32_t row = 0; row < ROWS; ++row) {
                load_a_transposed(a[row], shared.decayed, VALUE_ROW, k, row * TILE);
            }
#pragma unroll
            for (uint32_t column = 0; column < COLUMNS; column += 2) {
                load_b(b, shared.keys, KEY_ROW, k, first_key + column * 8);
#pragma unroll
                for (uint32_t row = 0; row < ROWS; ++row) {
                    multiply_add_two(tiles[row][column], tiles[row][column + 1], a[row], b);
                }
            }
        }
    }
};

template <typename Element>
__device__ __forceinline__ void gated_delta_chunked(const Delta<Element>& call) {
    extern __shared__ __align__(16) char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    let_next_kernel_start();
    const uint32_t slices = call.value_dim / CHUNK_VALUES, head = blockIdx.x / slices;
    const StatePart part = state_part(call.sequences, call.slots, call.first_sequence + blockIdx.y);
    const Chunks<Element> chunks = {call, part, shared, head, blockIdx.x % slices * CHUNK_VALUES, head_gates(call, head)};
    wait_for_previous_kernel();
    if (part.is_padding) {
        for (uint32_t item = threadIdx.x; item < part.rows * CHUNK_VALUES; item += CHUNK_THREADS) {
            chunks.output_at(item / CHUNK_VALUES)[item % CHUNK_VALUES] = from_float<Element>(0.0f);
        }
        return;
    }
    const uint64_t of_state = call.of_matrix(head, chunks.first_value);
    Loaded loaded;
    Chunk chunk = chunk_at(part, 0);
    chunks.fetch(chunk, loaded);
    State state;
    if (chunks.is_first_half()) {
        state.read(part.read == nullptr ? nullptr : call.matrices(part.read) + of_state);
        state.write_operand(shared);
    }
    while (chunk.from < chunk.to) {
        chunks.write_operands(chunk, loaded);
        const Chunk next = chunk_at(part, chunk.to);
        __syncthreads();
        chunks.multiply_tokens();
        float out[VALUE_TILES][4] = {};
        __syncthreads();
        if (chunks.is_first_half()) {
            chunks.invert();
        } else {
            chunks.multiply_state(loaded, out);
        }
        chunks.fetch(next, loaded);
        __syncthreads();
        chunks.find_changes();
        __syncthreads();
        if (chunks.is_first_half()) {
            state.advance(shared, expf(shared.sums[CHUNK - 1]));
            state.write_operand(shared);
            part.each_written([&](uint32_t rows, char* slot) {
                if (rows == chunk.to) {
                    state.write(call.matrices(slot) + of_state);
                }
            });
        } else {
            chunks.write_output(chunk, out);
        }
        chunk = next;
        __syncthreads();
    }
}

}  // namespace

#define KERNEL(name, Element)                                                                                         \
    extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 2) gated_delta_chunked_##name(                           \
        const Element* qkv, uint32_t qkv_pitch, const Element* update, uint32_t update_pitch, const Element* decay,   \
        uint32_t decay_pitch, const float* log_decay, const float* bias, uint32_t key_heads, uint32_t value_heads,    \
        uint32_t key_dim, uint32_t value_dim, StateSequences sequences, StateSlots slots, uint32_t first_sequence,    \
        Element* out) {                                                                                               \
        gated_delta_chunked(Delta<Element>{qkv, qkv_pitch, update, update_pitch, decay, decay_pitch, log_decay, bias, \
                                           key_heads, value_heads, key_dim, value_dim, sequences, slots,              \
                                           first_sequence, out});                                                     \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (value_heads * value_dim / CHUNK_VALUES, sequences from first_sequence on), block
// CHUNK_THREADS, dynamic shared memory CHUNK_SHARED_BYTES. The out rows must be aligned to 4 bytes.
