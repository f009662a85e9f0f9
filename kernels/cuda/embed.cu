// Embedding lookup.
//
// embed:        out[t] = table[id of t]
// embed_scaled: out[t] = table[id of t] * scale, in f32, rounded once
//
// table    [count, hidden]         activations' type, rows contiguous: the tokens first .. first +
//                                  count of the vocabulary
// ids      [tokens] u32            a token id or, if bit 31 is set, an index into `previous`, whose
//                                  token is used
// previous [previous_count] u32    tokens that the previous step chose and the host has not seen
//                                  yet; may be null if the count is 0
// out      [tokens, hidden]        contiguous
//
// If the previous step chose no token (argmax or sampling found none), the row is zeros: the
// sequence has ended, and the host detects this later. A token of the vocabulary that the table
// does not contain also gives zeros. An id >= `vocabulary` or an index >= `previous_count` gives a
// row of NaN, so that the error is visible, and nothing outside the tensors is read. Any alignment;
// accesses are 16 bytes wide when table, out and rows are aligned to 16 bytes.

#include "contract.cuh"
#include "copy_row.cuh"
#include "kernel_order.cuh"

using contract::common::NO_CHOICE;
using contract::common::PREVIOUS;

// Multiplies a row by `scale` with one block.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void scale_row(const Element* from, Element* to, uint32_t hidden, float scale) {
    for (uint32_t vector = threadIdx.x; vector < hidden / WIDTH; vector += blockDim.x) {
        float values[WIDTH];
        load<WIDTH>(from + vector * WIDTH, values);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] *= scale;
        }
        store<WIDTH>(to + vector * WIDTH, values);
    }
}

template <bool SCALES, typename Element>
__device__ __forceinline__ void embed(const Element* table, uint32_t first, uint32_t count, uint32_t vocabulary,
                                      uint32_t hidden, const uint32_t* ids, const uint32_t* previous, uint32_t previous_count, Element* out,
                                      float scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t token = blockIdx.x;
    uint32_t id = ids[token];
    bool none = false;
    if (id & PREVIOUS) {
        const uint32_t place = id & ~PREVIOUS;
        id = place < previous_count ? previous[place] : NO_CHOICE;
        none = place < previous_count && id == NO_CHOICE;
    }
    Element* row = out + static_cast<uint64_t>(token) * hidden;
    const uint32_t bytes = hidden * sizeof(Element);
    // For an id before `first`, the subtraction wraps to a number far above `count`.
    if (id < vocabulary && id - first < count) {
        const Element* from = table + static_cast<uint64_t>(id - first) * hidden;
        if constexpr (!SCALES) {
            copy_row(from, row, bytes);
        } else if (aligned_to(reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(row) | bytes, 16)) {
            scale_row<VECTOR<Element>>(from, row, hidden, scale);
        } else {
            scale_row<1>(from, row, hidden, scale);
        }
    } else {
        fill_row(row, bytes, none || id < vocabulary ? 0 : ALL_ONES);
    }
}

#define KERNEL(name, Element)                                                                                         \
    extern "C" __global__ void __launch_bounds__(contract::copy_rows::THREADS)                                        \
        embed_##name(const Element* table, uint32_t first, uint32_t count, uint32_t vocabulary, uint32_t hidden,      \
                     const uint32_t* ids, const uint32_t* previous, uint32_t previous_count, Element* out) {          \
        embed<false>(table, first, count, vocabulary, hidden, ids, previous, previous_count, out, 1.0f);              \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(contract::copy_rows::THREADS)                                        \
        embed_scaled_##name(const Element* table, uint32_t first, uint32_t count, uint32_t vocabulary,                \
                            uint32_t hidden, const uint32_t* ids, const uint32_t* previous, uint32_t previous_count,  \
                            Element* out, float scale) {                                                              \
        embed<true>(table, first, count, vocabulary, hidden, ids, previous, previous_count, out, scale);              \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch (tokens > 0): grid (tokens), block (THREADS of contract::copy_rows), no dynamic shared
// memory. vocabulary < 2^31, first + count <= vocabulary.
