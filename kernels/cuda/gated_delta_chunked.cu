// The second kernel of the gated delta rule in chunks (include/delta_chunks.cuh): processes the
// chunks of each sequence in order, and writes outputs and states. Operands, slots and output are
// as in gated_delta.cu, and `prepared` has the results of gated_delta_prepare.cu; key_dim is
// KEY_DIM, value_dim a multiple of CHUNK_VALUES.
//
// Method: a block processes CHUNK_VALUES values of one head of one sequence. A chunk takes three
// steps, separated by barriers. First, the products with the old state: the first four warps
// multiply keys, the other warps multiply queries. Second, all warps compute V'. Third, the first
// four warps compute the new state, which they keep in registers, transposed as in a slot; at the
// same time, the other warps compute the output. Each barrier frees the memory of some operands.
// The copies of these operands for the next chunk start after the barrier, and have at least two
// steps to complete. Only keys are needed in both the first and the last step, so they have two
// buffers.

#include "delta_chunks.cuh"

using contract::gated_delta::CHUNK_VALUES;

namespace {

constexpr uint32_t VALUE_TILES = CHUNK_VALUES / 8, VALUE_ROW = CHUNK_VALUES + 8;

struct Shared {
    __half keys[2][CHUNK * KEY_ROW], queries[CHUNK * KEY_ROW];
    __half state[CHUNK_VALUES * KEY_ROW];  // [value, key]
    __half inverse[CHUNK * TOKEN_ROW];     // T
    __half of_queries[CHUNK * TOKEN_ROW];  // P
    __half inputs[CHUNK * VALUE_ROW];      // b (V - exp(C) K S)
    __half changes[CHUNK * VALUE_ROW];     // V'
    __half decayed[CHUNK * VALUE_ROW];     // exp(C_last - C) V'
};
static_assert(sizeof(Shared) == contract::gated_delta::CHUNK_SHARED_BYTES, "the host launches with this many bytes");

// Ends a group of copies: all copies that this thread has started since the previous call.
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all of this thread's copies except those of the last group have completed.
__device__ __forceinline__ void wait_for_earlier_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

// A chunk's operands that a thread has in registers.
struct Loaded {
    uint32_t values[2][VALUE_TILES];  // pairs, laid out as operand C; only in the first four warps
    float2 gates[2];                  // of two tokens
    float last;                       // C of the last token
};

template <typename Element, typename Stored>
struct Chunks : Role {
    const Delta<Element, Stored>& call;
    const StatePart& part;
    Shared& shared;
    uint32_t head, first_value;
    Prepared prepared;

    __device__ __forceinline__ Chunks(const Delta<Element, Stored>& call, const StatePart& part, Shared& shared,
                                      uint32_t head, uint32_t first_value, __half* memory)
        : call(call), part(part), shared(shared), head(head), first_value(first_value),
          prepared(Prepared::of_head(memory, call, head)) {}

    __device__ __forceinline__ void fetch(const Chunk& chunk, Loaded& loaded) const {
        const uint32_t first = part.first_row + chunk.from;
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const bool is_in = chunk.holds(token(half));
            loaded.gates[half] = is_in ? prepared.gates[first + token(half)] : make_float2(0.0f, 0.0f);
            if (is_first_half()) {
                const Element* from = call.row(first + token(half)) + call.value_column(head) + first_value + column();
#pragma unroll
                for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                    loaded.values[half][tile] = is_in ? *reinterpret_cast<const uint32_t*>(from + tile * 8) : 0;
                }
            }
        }
        loaded.last = chunk.from < chunk.to ? prepared.gates[part.first_row + chunk.to - 1].x : 0.0f;
    }

    // Starts the copy of a chunk's keys or queries. Rows after the end of the chunk become zeros.
    __device__ __forceinline__ void copy_keys(__half* to, const __half* from, const Chunk& chunk) const {
        const uint32_t first = threadIdx.x / KEY_PIECES, column = threadIdx.x % KEY_PIECES * PIECE;
        from += static_cast<uint64_t>(part.first_row + chunk.from + first) * KEY_DIM + column;
        const uint32_t at = shared_address(to + first * KEY_ROW + column);
#pragma unroll
        for (uint32_t row = 0; row < CHUNK; row += KEY_ROWS_AT_ONCE) {
            copy_16_bytes(at + row * KEY_ROW * sizeof(__half), from + row * KEY_DIM, chunk.holds(first + row));
        }
    }

    // Starts the copy of a chunk's T or P, without the blocks above the diagonal.
    __device__ __forceinline__ void copy_tokens(__half* to, const __half* from, const Chunk& chunk) const {
        const uint32_t first = threadIdx.x / TOKEN_PIECES, piece = threadIdx.x % TOKEN_PIECES;
        from += static_cast<uint64_t>(part.first_row + chunk.from + first) * CHUNK + piece * PIECE;
        const uint32_t at = shared_address(to + first * TOKEN_ROW + piece * PIECE);
#pragma unroll
        for (uint32_t row = 0; row < CHUNK; row += TOKEN_ROWS_AT_ONCE) {
            if (is_lower(first + row, piece)) {
                copy_16_bytes(at + row * TOKEN_ROW * sizeof(__half), from + row * CHUNK, chunk.holds(first + row));
            }
        }
    }

    // Fills the blocks above the diagonal, which no copy writes, with zeros.
    __device__ __forceinline__ void clear_tokens(__half* to) const {
        const uint32_t piece = threadIdx.x % TOKEN_PIECES;
#pragma unroll
        for (uint32_t round = 0; round < TOKEN_ROUNDS; ++round) {
            const uint32_t row = round * TOKEN_ROWS_AT_ONCE + threadIdx.x / TOKEN_PIECES;
            if (!is_lower(row, piece)) {
                *reinterpret_cast<uint4*>(to + row * TOKEN_ROW + piece * PIECE) = make_uint4(0, 0, 0, 0);
            }
        }
    }

    // The products of this warp's 16 rows of `rows` (the chunk's keys or queries), with the old
    // state.
    __device__ __forceinline__ void multiply_state(const __half* rows, float (&products)[VALUE_TILES][4]) const {
#pragma unroll
        for (uint32_t k = 0; k < KEY_DIM; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, rows, KEY_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; tile += 2) {
                load_b_transposed(b, shared.state, KEY_ROW, tile * 8, k);
                multiply_add_two(products[tile], products[tile + 1], a, b);
            }
        }
    }

    // Writes b (V - exp(C) K S), the matrix that T is multiplied by, from the products of keys and
    // the old state. Run by the first four warps.
    __device__ __forceinline__ void write_inputs(const Loaded& loaded, const float (&of_keys)[VALUE_TILES][4]) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const float kept = __expf(loaded.gates[half].x), strength = loaded.gates[half].y;
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                const float2 value = pair_to_floats<Element>(loaded.values[half][tile]);
                store_limited(shared.inputs + token(half) * VALUE_ROW + tile * 8 + column(),
                              strength * (value.x - kept * of_keys[tile][2 * half]),
                              strength * (value.y - kept * of_keys[tile][2 * half + 1]));
            }
        }
    }

    // Writes V' of this warp's tokens, for half of the values.
    __device__ __forceinline__ void find_changes(const Loaded& loaded) const {
        constexpr uint32_t TILES = VALUE_TILES / 2;
        const uint32_t first = is_first_half() ? 0 : TILES;
        float changes[TILES][4] = {};
#pragma unroll
        for (uint32_t k = 0; k < CHUNK; k += TILE) {
            uint32_t a[4], b[4];
            load_a(a, shared.inverse, TOKEN_ROW, block() * TILE, k);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; tile += 2) {
                load_b(b, shared.inputs, VALUE_ROW, k, (first + tile) * 8);
                multiply_add_two(changes[tile], changes[tile + 1], a, b);
            }
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const float kept = __expf(loaded.last - loaded.gates[half].x);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
                const float low = changes[tile][2 * half], high = changes[tile][2 * half + 1];
                const uint32_t at = token(half) * VALUE_ROW + (first + tile) * 8 + column();
                store_limited(shared.changes + at, low, high);
                store_limited(shared.decayed + at, kept * low, kept * high);
            }
        }
    }

    // Writes the output of this warp's tokens, from the products of queries and the old state. Run
    // by the last four warps.
    __device__ __forceinline__ void write_output(const Chunk& chunk, const Loaded& loaded,
                                                 float (&out)[VALUE_TILES][4]) const {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const float scale = __expf(loaded.gates[half].x) * rsqrtf(static_cast<float>(KEY_DIM));
#pragma unroll
            for (uint32_t tile = 0; tile < VALUE_TILES; ++tile) {
                out[tile][2 * half] *= scale;
                out[tile][2 * half + 1] *= scale;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < CHUNK; k += TILE) {
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

// Two adjacent elements of a matrix, as f32.
__device__ __forceinline__ float2 load_two(const float* from) { return *reinterpret_cast<const float2*>(from); }
__device__ __forceinline__ float2 load_two(const __nv_bfloat16* from) {
    return pair_to_floats<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(from));
}

__device__ __forceinline__ void store_two(float* to, float low, float high) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
__device__ __forceinline__ void store_two(__nv_bfloat16* to, float low, float high) {
    *reinterpret_cast<uint32_t*>(to) = pair_from_floats<__nv_bfloat16>(low, high);
}

// The state of CHUNK_VALUES values, transposed: warp w of the first four warps has 32 keys, from
// key 32 * w on.
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
    template <typename Stored>
    __device__ __forceinline__ void read(const Stored* matrix) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            float2 both = make_float2(0.0f, 0.0f);
            if (matrix != nullptr) {
                both = load_two(matrix + value * KEY_DIM + key);
            }
            low = both.x;
            high = both.y;
        });
    }

    template <typename Stored>
    __device__ __forceinline__ void write(Stored* matrix) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            store_two(matrix + value * KEY_DIM + key, low, high);
        });
    }

    __device__ __forceinline__ void write_operand(Shared& shared) {
        each([&](uint32_t value, uint32_t key, float& low, float& high) {
            store_limited(shared.state + value * KEY_ROW + key, low, high);
        });
    }

    // Multiplies the state by `kept` and adds the products of changes and keys.
    __device__ __forceinline__ void advance(const Shared& shared, const __half* keys, float kept) {
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
                load_b(b, keys, KEY_ROW, k, first_key + column * 8);
#pragma unroll
                for (uint32_t row = 0; row < ROWS; ++row) {
                    multiply_add_two(tiles[row][column], tiles[row][column + 1], a[row], b);
                }
            }
        }
    }
};

template <typename Element, typename Stored>
__device__ __forceinline__ void gated_delta_chunked(const Delta<Element, Stored>& call, __half* memory) {
    extern __shared__ __align__(16) char dynamic[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    let_next_kernel_start();
    const uint32_t slices = call.value_dim / CHUNK_VALUES, head = blockIdx.x / slices;
    const StatePart part = state_part(call.sequences, call.slots, call.first_sequence + blockIdx.y);
    const Chunks<Element, Stored> chunks(call, part, shared, head, blockIdx.x % slices * CHUNK_VALUES, memory);
    const Prepared& prepared = chunks.prepared;
    chunks.clear_tokens(shared.inverse);
    chunks.clear_tokens(shared.of_queries);
    wait_for_previous_kernel();
    if (part.is_padding) {
        for (uint32_t item = threadIdx.x; item < part.rows * CHUNK_VALUES; item += CHUNK_THREADS) {
            chunks.output_at(item / CHUNK_VALUES)[item % CHUNK_VALUES] = from_float<Element>(0.0f);
        }
        return;
    }
    const uint64_t of_state = call.of_matrix(head, chunks.first_value);
    Chunk chunk = chunk_at(part, 0);
    if (chunk.from == chunk.to) {
        return;
    }
    chunks.copy_keys(shared.keys[0], prepared.keys, chunk);
    chunks.copy_keys(shared.queries, prepared.queries, chunk);
    end_copies();
    chunks.copy_tokens(shared.inverse, prepared.inverse, chunk);
    end_copies();
    Loaded loaded;
    chunks.fetch(chunk, loaded);
    State state;
    if (Role::is_first_half()) {
        state.read(part.read == nullptr ? nullptr : call.matrices(part.read) + of_state);
        state.write_operand(shared);
    }
    uint32_t turn = 0;
    while (true) {
        const Chunk next = chunk_at(part, chunk.to);
        const bool is_last = next.from == next.to;
        const __half* keys = shared.keys[turn];
        wait_for_earlier_copies();
        __syncthreads();
        // Keys and queries have arrived, and the state is written.
        chunks.copy_tokens(shared.of_queries, prepared.of_queries, chunk);
        if (!is_last) {
            chunks.copy_keys(shared.keys[turn ^ 1], prepared.keys, next);
        }
        end_copies();
        float products[VALUE_TILES][4] = {};
        chunks.multiply_state(Role::is_first_half() ? keys : shared.queries, products);
        if (Role::is_first_half()) {
            chunks.write_inputs(loaded, products);
        }
        wait_for_earlier_copies();
        __syncthreads();
        // T has arrived, and its inputs are written.
        if (!is_last) {
            chunks.copy_keys(shared.queries, prepared.queries, next);
        }
        end_copies();
        const Loaded old = loaded;
        chunks.fetch(next, loaded);
        chunks.find_changes(old);
        wait_for_earlier_copies();
        __syncthreads();
        // P and the next keys have arrived, and V' is written.
        if (!is_last) {
            chunks.copy_tokens(shared.inverse, prepared.inverse, next);
        }
        end_copies();
        if (Role::is_first_half()) {
            state.advance(shared, keys, expf(old.last));
            state.write_operand(shared);
            part.each_written([&](uint32_t rows, char* slot) {
                if (rows == chunk.to) {
                    state.write(call.matrices(slot) + of_state);
                }
            });
        } else {
            chunks.write_output(chunk, old, products);
        }
        if (is_last) {
            break;
        }
        chunk = next;
        turn ^= 1;
    }
}

}  // namespace

#define KERNEL_OF(name, Element, Stored)                                                                  \
    extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 2)                                        \
        gated_delta_chunked_##name(DELTA_PARAMETERS(Element)) {                                           \
        gated_delta_chunked(DELTA_CALL(Element, Stored), prepared);                                       \
    }
#define KERNEL(name, Element) KERNEL_OF(name, Element, float) KERNEL_OF(stored_bf16_##name, Element, __nv_bfloat16)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: after gated_delta_prepare.cu; grid (value_heads * value_dim / CHUNK_VALUES, sequences
// from first_sequence on), block CHUNK_THREADS, dynamic shared memory CHUNK_SHARED_BYTES. The out
// rows must be aligned to 4 bytes. gated_delta_chunked_stored_bf16 is for matrices in bf16.
