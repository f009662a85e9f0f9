// The depthwise causal convolution before a gated delta net, followed by SiLU, with the last inputs
// of each sequence in its state (as in Mamba, Gu and Dao 2023, arXiv 2312.00752).
//
// y[row] = sum over i of weight[i] * x[row - taps + 1 + i];  out = y / (1 + exp(-y))
//
// x         [tokens, channels]      activations, rows x_pitch elements apart
// weight    [channels, taps]        activations' type, contiguous
// sequences, slots                  see state_sequences.cuh. The inputs in a slot are
//                                   [taps - 1, channels] activations, the oldest first
// out       [tokens, channels]      contiguous; the rows of padding are zeros, and rows that belong
//                                   to no sequence are not written
//
// Rows before a sequence's first row in this step come from its state. The sums are f32 in the
// order of the taps, rounded once at the end, so that the result does not depend on how a prompt is
// divided into steps. taps is 2 to 4. The arrays of `sequences` are read before the previous kernel
// has ended (programmatic dependent launch); that kernel must not write them. Any alignment and any
// number of channels; accesses are 16 bytes wide when all addresses and pitches are multiples of 16
// bytes.
//
// Method: a block processes some channels of a tile of up to TILE_ROWS rows of one sequence. A
// thread has the same channels in all rows of the tile and keeps the last inputs in registers. The
// thread with a sequence's first rows is the only one that needs the old state, so it also writes
// the new state, after it has read the old state: both may be in one slot.

#include "attention_tiles.cuh"
#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "logistic.cuh"
#include "state_sequences.cuh"

using contract::causal_conv::THREADS;
using contract::causal_conv::TILE_ROWS;

// Rows that a thread loads at once.
constexpr uint32_t AHEAD = 4;

template <typename Element>
struct Conv {
    const Element* x;
    uint32_t x_pitch;
    const Element* weight;
    uint32_t channels;
    Element* out;
};

// Rows `from` to `to` (exclusive) of a sequence, for the channels `channel` to `channel + WIDTH`.
template <uint32_t WIDTH, uint32_t TAPS, typename Element>
__device__ __forceinline__ void convolve(const Conv<Element>& call, const StatePart& part, uint32_t from, uint32_t to,
                                         uint32_t channel) {
    constexpr uint32_t KEPT = TAPS - 1;
    using Held = Words<WIDTH, Element>;
    // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
    float by[TAPS][WIDTH];
#pragma unroll
    for (uint32_t i = 0; i < TAPS; ++i) {
        load<WIDTH>(call.weight + static_cast<uint64_t>(channel) * TAPS + i * WIDTH, by[i]);
    }
    const auto weight = [&](uint32_t tap, uint32_t i) { return by[(i * TAPS + tap) / WIDTH][(i * TAPS + tap) % WIDTH]; };
    wait_for_previous_kernel();
    const Element* x = call.x + static_cast<uint64_t>(part.first_row) * call.x_pitch + channel;
    const auto input = [&](uint32_t row) { return load_words<WIDTH>(x + static_cast<uint64_t>(row) * call.x_pitch); };
    Held kept[KEPT] = {};
    if (from == 0) {
        if (part.read != nullptr) {
            const Element* inputs = reinterpret_cast<const Element*>(part.read) + channel;
#pragma unroll
            for (uint32_t i = 0; i < KEPT; ++i) {
                kept[i] = load_words<WIDTH>(inputs + static_cast<uint64_t>(i) * call.channels);
            }
        }
        part.each_written([&](uint32_t rows, char* slot) {
            Element* inputs = reinterpret_cast<Element*>(slot) + channel;
#pragma unroll
            for (uint32_t i = 0; i < KEPT; ++i) {
                // Input number `rows + i`, counted from the oldest input in the state; this step's
                // inputs follow the old inputs.
                Held words = {};
                if (rows + i >= KEPT) {
                    words = input(rows + i - KEPT);
                }
#pragma unroll
                for (uint32_t old = 0; old < KEPT; ++old) {
                    words = rows + i == old ? kept[old] : words;
                }
                *reinterpret_cast<Held*>(inputs + static_cast<uint64_t>(i) * call.channels) = words;
            }
        });
    } else {
        // A tile after the first one starts at a row of at least TILE_ROWS.
        static_assert(TILE_ROWS >= KEPT, "only the first tile needs the state");
#pragma unroll
        for (uint32_t i = 0; i < KEPT; ++i) {
            kept[i] = input(from - KEPT + i);
        }
    }
    float window[TAPS][WIDTH];
#pragma unroll
    for (uint32_t i = 0; i < KEPT; ++i) {
        widen<WIDTH, Element>(kept[i], window[i]);
    }
    Element* out = call.out + static_cast<uint64_t>(part.first_row) * call.channels + channel;
    for (uint32_t first = from; first < to; first += AHEAD) {
        Held ahead[AHEAD];
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; ++i) {
            if (first + i < to) {
                ahead[i] = input(first + i);
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < AHEAD; ++i) {
            if (first + i < to) {
                widen<WIDTH, Element>(ahead[i], window[KEPT]);
                float values[WIDTH];
#pragma unroll
                for (uint32_t element = 0; element < WIDTH; ++element) {
                    float sum = 0.0f;
#pragma unroll
                    for (uint32_t tap = 0; tap < TAPS; ++tap) {
                        sum += window[tap][element] * weight(tap, element);
                        if (tap > 0) {
                            window[tap - 1][element] = window[tap][element];
                        }
                    }
                    values[element] = silu(sum);
                }
                store<WIDTH>(out + static_cast<uint64_t>(first + i) * call.channels, values);
            }
        }
    }
}

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void convolve_tile(const Conv<Element>& call, uint32_t taps, const StatePart& part,
                                              uint32_t from, uint32_t to) {
    const uint32_t vectors = call.channels / WIDTH;
    for (uint32_t vector = blockIdx.x * THREADS + threadIdx.x; vector < vectors; vector += gridDim.x * THREADS) {
        const uint32_t channel = vector * WIDTH;
        if (part.is_padding) {
            wait_for_previous_kernel();
            for (uint32_t row = from; row < to; ++row) {
                const float zeros[WIDTH] = {};
                store<WIDTH>(call.out + static_cast<uint64_t>(part.first_row + row) * call.channels + channel, zeros);
            }
        } else if (taps == 4) {
            convolve<WIDTH, 4>(call, part, from, to, channel);
        } else if (taps == 3) {
            convolve<WIDTH, 3>(call, part, from, to, channel);
        } else {
            convolve<WIDTH, 2>(call, part, from, to, channel);
        }
    }
}

template <typename Element>
__device__ __forceinline__ void causal_conv(const Conv<Element>& call, uint32_t taps, const StateSequences& sequences,
                                            const StateSlots& slots, uint32_t single_rows) {
    let_next_kernel_start();
    uint32_t sequence = blockIdx.y, from = 0, to = 1;
    if (sequence >= single_rows) {
        TileCursor cursor = {single_rows, 0};
        AttentionTile tile;
        if (!find_tile<TILE_ROWS>(blockIdx.y - single_rows, sequences.query_starts, cursor, sequences.sequences,
                                  sequences.rows, 1, tile)) {
            wait_for_previous_kernel();
            return;
        }
        sequence = tile.sequence;
        from = tile.first_query;
        to = from + TILE_ROWS;
    }
    const StatePart part = state_part(sequences, slots, sequence);
    to = min(to, part.rows);
    const uint64_t starts = reinterpret_cast<uint64_t>(call.x) | reinterpret_cast<uint64_t>(call.weight)
        | reinterpret_cast<uint64_t>(call.out) | reinterpret_cast<uint64_t>(slots.start) | slots.slot_bytes;
    const uint64_t steps = call.x_pitch | call.channels;
    if (aligned_to(starts, 16) && steps % VECTOR<Element> == 0) {
        convolve_tile<VECTOR<Element>>(call, taps, part, from, to);
    } else {
        convolve_tile<1>(call, taps, part, from, to);
    }
    // A thread without channels waits, too: all blocks must wait (see kernel_order.cuh).
    wait_for_previous_kernel();
}

#define KERNEL(name, Element)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                             \
        causal_conv_##name(const Element* x, uint32_t x_pitch, const Element* weight, uint32_t channels,              \
                           uint32_t taps, StateSequences sequences, StateSlots slots, uint32_t single_rows,           \
                           Element* out) {                                                                            \
        causal_conv(Conv<Element>{x, x_pitch, weight, channels, out}, taps, sequences, slots, single_rows);           \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (div_ceil(channels, 8 * THREADS), single_rows + tiles), where tiles is at least
// (rows + (TILE_ROWS - 1) * sequences) / TILE_ROWS over the sequences from `single_rows` on; block
// THREADS, no dynamic shared memory. Any first grid size is correct. The first `single_rows`
// sequences have one row each.
