// The gated delta rule (Yang et al. 2024, arXiv 2412.06464), token by token. Each value head has a
// state S [key_dim, value_dim]. For each token of a sequence:
//
//   decay = exp(-exp(log_decay) * softplus(a + bias))
//   S     = decay * S
//   S     = S + k (sigmoid(b) * (v - k^T S))^T
//   out   = q^T S
//
// q and k are divided by their L2 norms, and q is multiplied by key_dim^-0.5. Value head h uses key
// head h / (value_heads / key_heads).
//
// qkv        [tokens, channels]            activations, rows qkv_pitch elements apart: queries and
//                                          keys [key_heads, key_dim], then values
//                                          [value_heads, value_dim]
// update     [tokens, value_heads]         activations: b
// decay      [tokens, value_heads]         activations: a
// log_decay  [value_heads] f32
// bias       [value_heads] f32
// sequences, slots                         see state_sequences.cuh. A matrix is
//                                          [value_dim, key_dim] in f32 or bf16, S transposed
// out        [tokens, value_heads * value_dim]  contiguous; the rows of padding are zeros, and rows
//                                          that belong to no sequence are not written
//
// Arithmetic is f32; out is rounded once. A bf16 state is rounded once per sequence and step, when
// it is written. A sequence's result does not depend on the batch. With f32 matrices, it also does
// not depend on how its tokens are divided into steps, up to the order of additions that the
// compiler chooses. A NaN affects only its own sequence. key_dim is a multiple of 16 and at most
// KEY_DIM_MAX; slots are aligned to 16 bytes; activations have any alignment. The arrays of
// `sequences` are read before the previous kernel has ended (programmatic dependent launch); that
// kernel must not write them.
//
// Method: eight lanes share a row of the matrix (one value element), of which each lane keeps every
// eighth vector of four elements in registers. The products with the key and with the query are
// computed from the old state: with d = sigmoid(b) * (v - decay * k^T S), the output is
// decay * q^T S + (q . k) d. The state is therefore read only once, and all sums over lanes are
// independent. The sums are multiplied by the norms of q and k afterward. Nothing is shared
// between warps. Decoding is bound by the reads and writes of the states.

#include "delta_gates.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

using contract::gated_delta::GROUPS;
using contract::gated_delta::ROW_LANES;
using contract::gated_delta::ROW_THREADS;

constexpr uint32_t PIECE = 4;  // elements of a 16-byte vector of f32

// The part of a token's operands for one value head that this lane holds: pieces of query and key,
// a value for each of its rows, and the gates.
template <uint32_t PIECES, uint32_t HELD, typename Element>
struct Token {
    Words<PIECE, Element> query[PIECES], key[PIECES];
    float values[HELD];
    float update, decay;
};

// Four adjacent elements. Unaligned elements are loaded one by one.
template <typename Element>
__device__ __forceinline__ Words<PIECE, Element> load_piece(const Element* from, bool aligned) {
    if (aligned) {
        return load_words<PIECE>(from);
    }
    Words<PIECE, Element> words;
    Element* elements = reinterpret_cast<Element*>(&words);
#pragma unroll
    for (uint32_t i = 0; i < PIECE; ++i) {
        elements[i] = from[i];
    }
    return words;
}

// Four adjacent elements of a matrix, as f32.
__device__ __forceinline__ float4 load_four(const float* from) { return *reinterpret_cast<const float4*>(from); }
__device__ __forceinline__ float4 load_four(const __nv_bfloat16* from) {
    float values[PIECE];
    load<PIECE>(from, values);
    return make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void store_four(float* to, const float4& four) { *reinterpret_cast<float4*>(to) = four; }
__device__ __forceinline__ void store_four(__nv_bfloat16* to, const float4& four) {
    store<PIECE>(to, {four.x, four.y, four.z, four.w});
}

// The sum over the lanes of a row, returned to each of them.
__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
    for (uint32_t distance = ROW_LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// A thread block processes matrix rows of one head of one sequence. Each group of lanes holds
// `HELD` of these rows. With `WHOLE`, key_dim is exactly PIECES * PIECE * ROW_LANES. With `SINGLE`,
// no sequence has more than one row, and no registers are spent on fetching the next token.
template <uint32_t PIECES, bool WHOLE, uint32_t HELD, bool SINGLE, typename Element, typename Stored>
__device__ __forceinline__ void gated_delta(const Delta<Element, Stored>& call) {
    let_next_kernel_start();
    constexpr uint32_t SLICE = HELD * GROUPS;
    const uint32_t slices = (call.value_dim + SLICE - 1) / SLICE;
    const uint32_t head = blockIdx.x / slices, lane = threadIdx.x % ROW_LANES;
    const uint32_t first_value = blockIdx.x % slices * SLICE + threadIdx.x / ROW_LANES;
    const auto value_of = [&](uint32_t held) { return first_value + held * GROUPS; };
    const auto is_value = [&](uint32_t held) { return value_of(held) < call.value_dim; };
    const auto column_of = [&](uint32_t piece) { return (piece * ROW_LANES + lane) * PIECE; };
    const auto is_column = [&](uint32_t piece) { return WHOLE || column_of(piece) < call.key_dim; };
    const StatePart part = state_part(call.sequences, call.slots, call.first_sequence + blockIdx.y);
    const uint32_t columns = call.value_heads * call.value_dim;
    Element* out = call.out + static_cast<uint64_t>(part.first_row) * columns + head * call.value_dim;
    if (part.is_padding) {
        wait_for_previous_kernel();
        for (uint32_t row = 0; row < part.rows; ++row) {
#pragma unroll
            for (uint32_t held = 0; held < HELD; ++held) {
                if (lane == held % ROW_LANES && is_value(held)) {
                    out[static_cast<uint64_t>(row) * columns + value_of(held)] = from_float<Element>(0.0f);
                }
            }
        }
        return;
    }
    const HeadGates gates = head_gates(call, head);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // The state may be prefetched into the L2 cache while the previous kernel runs. It must not be
    // read yet, because an earlier kernel that has not ended may still write it.
    if (part.read != nullptr) {
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            if (lane < PIECES && is_value(held)) {
                const Stored* line = call.matrices(part.read) + call.of_matrix(head, value_of(held))
                    + min(lane * ROW_LANES * PIECE, call.key_dim - PIECE);
                asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
            }
        }
    }
#endif
    const uint64_t steps = reinterpret_cast<uint64_t>(call.qkv) | call.qkv_pitch * sizeof(Element);
    const bool aligned = aligned_to(steps, PIECE * sizeof(Element));
    const Element *query = call.row(part.first_row) + call.query_column(head),
                  *key = call.row(part.first_row) + call.key_column(head),
                  *value = call.row(part.first_row) + call.value_column(head);
    const auto fetch = [&](uint32_t row, Token<PIECES, HELD, Element>& token) {
        const uint64_t at = static_cast<uint64_t>(row) * call.qkv_pitch, batch_row = part.first_row + row;
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; ++piece) {
            token.query[piece] = token.key[piece] = {};
            if (is_column(piece)) {
                token.query[piece] = load_piece(query + at + column_of(piece), aligned);
                token.key[piece] = load_piece(key + at + column_of(piece), aligned);
            }
        }
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            token.values[held] = is_value(held) ? to_float(value[at + value_of(held)]) : 0.0f;
        }
        token.update = to_float(call.update[batch_row * call.update_pitch + head]);
        token.decay = to_float(call.decay[batch_row * call.decay_pitch + head]);
    };
    wait_for_previous_kernel();
    float4 state[HELD][PIECES];
#pragma unroll
    for (uint32_t held = 0; held < HELD; ++held) {
        const uint64_t at = call.of_matrix(head, value_of(held));
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; ++piece) {
            state[held][piece] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (part.read != nullptr && is_value(held) && is_column(piece)) {
                state[held][piece] = load_four(call.matrices(part.read) + at + column_of(piece));
            }
        }
    }
    const auto write_state = [&](char* slot) {
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            const uint64_t at = call.of_matrix(head, value_of(held));
#pragma unroll
            for (uint32_t piece = 0; piece < PIECES; ++piece) {
                if (is_value(held) && is_column(piece)) {
                    store_four(call.matrices(slot) + at + column_of(piece), state[held][piece]);
                }
            }
        }
    };
    const float query_scale = rsqrtf(static_cast<float>(call.key_dim));
    Token<PIECES, HELD, Element> token, next;
    if (part.rows > 0) {
        fetch(0, token);
    }
    const uint32_t rows = SINGLE ? min(part.rows, 1u) : part.rows;
    for (uint32_t row = 0; row < rows; ++row) {
        if (!SINGLE && row + 1 < rows) {
            fetch(row + 1, next);
        }
        float queries[PIECES][PIECE], keys[PIECES][PIECE];
        float of_queries = 0.0f, of_keys = 0.0f, of_both = 0.0f;
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; ++piece) {
            widen<PIECE, Element>(token.query[piece], queries[piece]);
            widen<PIECE, Element>(token.key[piece], keys[piece]);
#pragma unroll
            for (uint32_t i = 0; i < PIECE; ++i) {
                of_queries += queries[piece][i] * queries[piece][i];
                of_keys += keys[piece][i] * keys[piece][i];
                of_both += queries[piece][i] * keys[piece][i];
            }
        }
        const float query_factor = rsqrtf(row_sum(of_queries) + L2_EPSILON) * query_scale;
        const float key_factor = rsqrtf(row_sum(of_keys) + L2_EPSILON);
        const float both = row_sum(of_both) * query_factor * key_factor;
        const float kept = expf(gates.log_kept(token.decay)), strength = HeadGates::strength(token.update);
        float mine = 0.0f;
#pragma unroll
        for (uint32_t held = 0; held < HELD; ++held) {
            float remembered = 0.0f, read = 0.0f;
            const auto each = [&](const auto& step) {
#pragma unroll
                for (uint32_t piece = 0; piece < PIECES; ++piece) {
                    float4& four = state[held][piece];
                    step(four.x, piece, 0);
                    step(four.y, piece, 1);
                    step(four.z, piece, 2);
                    step(four.w, piece, 3);
                }
            };
            each([&](float& element, uint32_t piece, uint32_t i) {
                remembered += element * keys[piece][i];
                read += element * queries[piece][i];
            });
            remembered = row_sum(remembered) * key_factor;
            read = row_sum(read) * query_factor;
            const float change = strength * (token.values[held] - kept * remembered);
            const float result = kept * read + both * change, of_key = change * key_factor;
            each([&](float& element, uint32_t piece, uint32_t i) { element = kept * element + of_key * keys[piece][i]; });
            mine = lane == held % ROW_LANES ? result : mine;
        }
        static_assert(HELD <= ROW_LANES, "a lane writes at most one result");
        if (lane < HELD && value_of(lane) < call.value_dim) {
            out[static_cast<uint64_t>(row) * columns + value_of(lane)] = from_float<Element>(mine);
        }
        part.each_written([&](uint32_t rows, char* slot) {
            if (rows == row + 1) {
                write_state(slot);
            }
        });
        if (SINGLE) {
            break;
        }
        token = next;
    }
}

#define KERNEL_OF(name, Element, Stored, PIECES, WHOLE, HELD, SINGLE, RESIDENT)                                               \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS, RESIDENT) name(                                         \
        const Element* qkv, uint32_t qkv_pitch, const Element* update, uint32_t update_pitch, const Element* decay,   \
        uint32_t decay_pitch, const float* log_decay, const float* bias, uint32_t key_heads, uint32_t value_heads,    \
        uint32_t key_dim, uint32_t value_dim, StateSequences sequences, StateSlots slots, uint32_t first_sequence,    \
        Element* out) {                                                                                               \
        gated_delta<PIECES, WHOLE, HELD, SINGLE>(                                                                     \
            Delta<Element, Stored>{qkv, qkv_pitch, update, update_pitch, decay, decay_pitch, log_decay, bias, key_heads,      \
                           value_heads, key_dim, value_dim, sequences, slots, first_sequence, out});                  \
    }
#define KERNELS_OF(name, Element, Stored)                                                                             \
    KERNEL_OF(gated_delta_##name, Element, Stored, contract::gated_delta::KEY_DIM_MAX / 32, false, 1, false, 2)       \
    KERNEL_OF(gated_delta_128_##name, Element, Stored, 4, true, 1, false, 4)                                          \
    KERNEL_OF(gated_delta_128_held_##name, Element, Stored, 4, true, contract::gated_delta::HELD, true, 3)
#define KERNEL(name, Element) KERNELS_OF(name, Element, float) KERNELS_OF(stored_bf16_##name, Element, __nv_bfloat16)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (value_heads * slices, sequences from first_sequence on), where slices is
// div_ceil(value_dim, GROUPS * held); block ROW_THREADS, no dynamic shared memory.
//   gated_delta           held 1; any key_dim
//   gated_delta_128       held 1; key_dim 128; used if the grid would have few thread blocks, or if
//                         sequences have several rows
//   gated_delta_128_held  held HELD; key_dim 128; only sequences of one row. For many sequences and
//                         heads, where more loads in flight matter more than more blocks
// Each kernel has a variant for matrices in bf16, whose name has `_stored_bf16` before the type of
// activations.
