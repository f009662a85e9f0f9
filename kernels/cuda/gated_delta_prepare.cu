// The first kernel of the gated delta rule in chunks (include/delta_chunks.cuh). It computes
// normalized keys and queries, gates, T and P of all chunks in parallel. Operands are as in
// gated_delta.cu; key_dim is KEY_DIM, and rows of qkv are aligned to 16 bytes.
//
// prepared  the results, in the layout of `Prepared`, aligned to 16 bytes; rows of padding and rows
//           that belong to no sequence are not written
//
// Method: a block computes the chunks of one value head that begin within a tile of CHUNK rows.
// Usually there is one such chunk. If a snapshot ends a chunk early, there may be more or none. The
// first of the value heads that share a key head also writes keys and queries. All warps normalize
// keys and queries. Then the first four warps compute K K^T and invert I + A: the diagonal blocks
// of 16 tokens by substitution, the others by T_IJ = -T_II (sum over K < I of A_IK T_KJ), one warp
// per column J. The other four warps compute Q K^T. Several blocks per SM hide the latency of the
// steps.

#include "attention_tiles.cuh"
#include "delta_chunks.cuh"

namespace {

struct Shared {
    __half queries[CHUNK * KEY_ROW], keys[CHUNK * KEY_ROW];
    __half among_keys[CHUNK * TOKEN_ROW];    // A, blocks below the diagonal
    __half inverse[CHUNK * TOKEN_ROW];       // T, blocks on and below the diagonal
    __half of_queries[CHUNK * TOKEN_ROW];    // P, blocks on and below the diagonal
    float diagonal[BLOCKS][TILE][TILE + 4];  // A, blocks on the diagonal
    float sums[CHUNK];                       // C
    float strengths[CHUNK];
};
static_assert(sizeof(Shared) == contract::gated_delta::PREPARE_SHARED_BYTES, "the host launches with this many bytes");

// Limits a log decay to at least -30, so that differences of running sums stay accurate. Without
// the limit, a token with a decay of almost 0 makes the running sum so large that later decays are
// lost in rounding. exp(-30) is below the rounding error of f32. A NaN stays a NaN.
__device__ __forceinline__ float bounded_log(float x) { return x < -30.0f ? -30.0f : x; }

// Barrier of the first four warps. Only these warps may call it.
__device__ __forceinline__ void first_half_barrier() {
    asm volatile("bar.sync 1, %0;" ::"n"(HALF_WARPS * WARP) : "memory");
}

template <typename Element>
struct Chunks : Role {
    const Delta<Element, float>& call;
    const StatePart& part;
    Shared& shared;
    uint32_t head;
    HeadGates gates;
    Prepared prepared;

    __device__ __forceinline__ Chunks(const Delta<Element, float>& call, const StatePart& part, Shared& shared, uint32_t head,
                                      __half* memory)
        : call(call), part(part), shared(shared), head(head), gates(head_gates(call, head)),
          prepared(Prepared::of_head(memory, call, head)) {}

    // Returns a piece of a row of queries or keys, divided by the row's L2 norm.
    static __device__ __forceinline__ uint4 normalized(const uint4& words) {
        float values[PIECE], squares = 0.0f;
        widen<PIECE, Element>(words, values);
#pragma unroll
        for (uint32_t i = 0; i < PIECE; ++i) {
            squares += values[i] * values[i];
        }
#pragma unroll
        for (uint32_t distance = KEY_PIECES / 2; distance > 0; distance /= 2) {
            squares += __shfl_xor_sync(ALL_LANES, squares, distance);
        }
        const float factor = rsqrtf(squares + L2_EPSILON);
#pragma unroll
        for (uint32_t i = 0; i < PIECE; ++i) {
            values[i] *= factor;
        }
        return to_words<PIECE, __half>(values);
    }

    __device__ __forceinline__ void write_operands(const Chunk& chunk) const {
        const Element* first = call.row(part.first_row + chunk.from) + threadIdx.x % KEY_PIECES * PIECE;
        uint4 queries[KEY_ROUNDS], keys[KEY_ROUNDS];
#pragma unroll
        for (uint32_t round = 0; round < KEY_ROUNDS; ++round) {
            const uint32_t row = round * KEY_ROWS_AT_ONCE + threadIdx.x / KEY_PIECES;
            queries[round] = keys[round] = make_uint4(0, 0, 0, 0);
            if (chunk.holds(row)) {
                const Element* from = first + static_cast<uint64_t>(row) * call.qkv_pitch;
                queries[round] = load_words<PIECE>(from + call.query_column(head));
                keys[round] = load_words<PIECE>(from + call.key_column(head));
            }
        }
        if (warp() == 0) {
            write_gates(chunk);
        }
        const bool is_first_of_group = head % (call.value_heads / call.key_heads) == 0;
#pragma unroll
        for (uint32_t round = 0; round < KEY_ROUNDS; ++round) {
            const uint32_t row = round * KEY_ROWS_AT_ONCE + threadIdx.x / KEY_PIECES;
            const uint32_t column = threadIdx.x % KEY_PIECES * PIECE;
            const uint4 query = normalized(queries[round]), key = normalized(keys[round]);
            *reinterpret_cast<uint4*>(shared.queries + row * KEY_ROW + column) = query;
            *reinterpret_cast<uint4*>(shared.keys + row * KEY_ROW + column) = key;
            if (is_first_of_group && chunk.holds(row)) {
                const uint64_t to = static_cast<uint64_t>(part.first_row + chunk.from + row) * KEY_DIM + column;
                *reinterpret_cast<uint4*>(prepared.queries + to) = query;
                *reinterpret_cast<uint4*>(prepared.keys + to) = key;
            }
        }
    }

    // Writes C and b. Run by one warp.
    __device__ __forceinline__ void write_gates(const Chunk& chunk) const {
        static_assert(CHUNK == 2 * WARP, "each lane writes two tokens");
        float own[2], strengths[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint64_t row = part.first_row + chunk.from + 2 * lane() + i;
            own[i] = strengths[i] = 0.0f;
            if (chunk.holds(2 * lane() + i)) {
                own[i] = bounded_log(gates.log_kept(to_float(call.decay[row * call.decay_pitch + head])));
                strengths[i] = HeadGates::strength(to_float(call.update[row * call.update_pitch + head]));
            }
        }
        float sum = own[0] + own[1];
#pragma unroll
        for (uint32_t distance = 1; distance < WARP; distance *= 2) {
            const float before = __shfl_up_sync(ALL_LANES, sum, distance);
            sum += lane() >= distance ? before : 0.0f;
        }
        const float sums[2] = {sum - own[1], sum};
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t token = 2 * lane() + i;
            shared.sums[token] = sums[i];
            shared.strengths[token] = strengths[i];
            if (chunk.holds(token)) {
                prepared.gates[part.first_row + chunk.from + token] = make_float2(sums[i], strengths[i]);
            }
        }
    }

    // Multiplies this warp's keys (first half of the warps) or queries (second half) with the keys
    // of all tokens. Blocks above the diagonal are multiplied but not written, because without
    // branches the loads for the next products overlap with the current products.
    __device__ __forceinline__ void multiply_tokens() const {
        const __half* rows = is_first_half() ? shared.keys : shared.queries;
        float products[2 * BLOCKS][4] = {};
#pragma unroll
        for (uint32_t k = 0; k < KEY_DIM; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, rows, KEY_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t other = 0; other < BLOCKS; ++other) {
                load_b_transposed(b, shared.keys, KEY_ROW, other * TILE, k);
                multiply_add_two(products[2 * other], products[2 * other + 1], a, b);
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

    // Writes T. Run by the first four warps.
    __device__ __forceinline__ void invert() const {
        // Each lane has one column of the inverse of this warp's diagonal block; half of the lanes
        // repeat the other half's work.
        const uint32_t j = lane() % TILE;
        float inverse[TILE];
#pragma unroll
        for (uint32_t i = 0; i < TILE; ++i) {
            inverse[i] = i == j ? 1.0f : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < i; k += 4) {
                const float4 among = *reinterpret_cast<const float4*>(&shared.diagonal[block()][i][k]);
                const float factors[4] = {among.x, among.y, among.z, among.w};
#pragma unroll
                for (uint32_t next = k; next < k + 4 && next < i; ++next) {
                    inverse[i] -= factors[next - k] * inverse[next];
                }
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

    // Writes T and P to the results.
    __device__ __forceinline__ void write_products(const Chunk& chunk) const {
#pragma unroll
        for (uint32_t round = 0; round < TOKEN_ROUNDS; ++round) {
            const uint32_t row = round * TOKEN_ROWS_AT_ONCE + threadIdx.x / TOKEN_PIECES;
            const uint32_t piece = threadIdx.x % TOKEN_PIECES;
            if (chunk.holds(row) && is_lower(row, piece)) {
                const uint32_t from = row * TOKEN_ROW + piece * PIECE;
                const uint64_t to = static_cast<uint64_t>(part.first_row + chunk.from + row) * CHUNK + piece * PIECE;
                *reinterpret_cast<uint4*>(prepared.inverse + to) =
                    *reinterpret_cast<const uint4*>(shared.inverse + from);
                *reinterpret_cast<uint4*>(prepared.of_queries + to) =
                    *reinterpret_cast<const uint4*>(shared.of_queries + from);
            }
        }
    }
};

template <typename Element>
__device__ __forceinline__ void gated_delta_prepare(const Delta<Element, float>& call, __half* memory) {
    extern __shared__ __align__(16) char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    let_next_kernel_start();
    const StateSequences& sequences = call.sequences;
    TileCursor cursor = {call.first_sequence, 0};
    AttentionTile tile;
    if (!find_tile<CHUNK>(blockIdx.y, sequences.query_starts, cursor, sequences.sequences, sequences.rows, 1, tile)) {
        wait_for_previous_kernel();
        return;
    }
    const StatePart part = state_part(sequences, call.slots, tile.sequence);
    const Chunks<Element> chunks(call, part, shared, blockIdx.x, memory);
    wait_for_previous_kernel();
    if (part.is_padding) {
        return;
    }
    Chunk chunk = chunk_at(part, chunk_start(part, tile.first_query));
    while (chunk.from < chunk.to && chunk.from < tile.first_query + CHUNK) {
        chunks.write_operands(chunk);
        __syncthreads();
        chunks.multiply_tokens();
        __syncthreads();
        if (Role::is_first_half()) {
            chunks.invert();
        }
        __syncthreads();
        chunks.write_products(chunk);
        chunk = chunk_at(part, chunk.to);
        __syncthreads();
    }
}

}  // namespace

#define KERNEL(name, Element)                                                                             \
    extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 3)                                        \
        gated_delta_prepare_##name(DELTA_PARAMETERS(Element)) {                                           \
        gated_delta_prepare(DELTA_CALL(Element, float), prepared);                                        \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (value_heads, tiles), where tiles is at least (rows + (CHUNK - 1) * sequences) /
// CHUNK over the sequences from first_sequence on; block CHUNK_THREADS, dynamic shared memory
// PREPARE_SHARED_BYTES.
