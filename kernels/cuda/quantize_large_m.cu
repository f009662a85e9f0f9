// Quantization of many rows of activations to E4M3 on Hopper. The results are bit-identical to the
// results of quantize.cu. Operands are as in quantize.cu, with `rows` in addition.
//
// quantize_large_m_<held>_<type>, rms_norm_rounded_large_m_<held>_<type>
//   A block processes every gridDim.x-th row. The next row is loaded while the current row is
//   rounded, and weights stay in registers. A thread keeps `held` vectors of a row.
// quantize_long_<threads>_<type>, silu_mul_rounded_long_<threads>_<type>
//   A block processes one row, which is read once. These kernels have no `rows` operand, and each
//   row has one scale. A thread keeps LONG_HELD vectors of a row.
//
// Pointers and rows are aligned to 16 bytes.

// Targets: sm_90a

#include "kernel_order.cuh"
#include "logistic.cuh"
#include "rounding.cuh"

using contract::fp8::LONG_HELD;
using contract::fp8::LONGER_THREADS_MAX;
using contract::fp8::LONG_THREADS_MAX;
using contract::fp8::THREADS_MAX;

template <bool IS_NORM, uint32_t HELD, typename Element>
__device__ __forceinline__ void round_rows(const Element* x, uint32_t x_pitch, const Element* weight, NormTerms terms,
                                           uint32_t rows, const Target<Element>& target) {
    // Indexed by `turn`, so that the array of one row can be read while the array of the next row
    // is written.
    __shared__ float partial_squares[2][WARPS_MAX], partial_largest[2][WARPS_MAX];
    using Kept = Words<WIDTH, Element>;
    const uint32_t vectors = target.columns / WIDTH, groups = (target.columns + GROUP - 1) / GROUP;
    Kept weights[HELD], fetched[HELD];
    const auto each = [&](auto step) { each_held<HELD>(vectors, step); };
    const auto fetch = [&](uint64_t row) {
        each([&](uint32_t slot, uint32_t vector, bool is_in) {
            if (is_in) {
                fetched[slot] = load_words<WIDTH>(x + row * x_pitch + vector * WIDTH);
            }
        });
    };
    let_next_kernel_start();
    if constexpr (IS_NORM) {
        // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
        each([&](uint32_t slot, uint32_t vector, bool is_in) {
            if (is_in) {
                weights[slot] = load_words<WIDTH>(weight + vector * WIDTH);
            }
        });
    }
    wait_for_previous_kernel();
    fetch(blockIdx.x);
    uint32_t turn = 0;
    for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        float values[HELD][WIDTH] = {}, squares = 0.0f, largest = 0.0f;
        each([&](uint32_t slot, uint32_t, bool is_in) {
            if (!is_in) {
                return;
            }
            widen<WIDTH, Element>(fetched[slot], values[slot]);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                squares += values[slot][i] * values[slot][i];
            }
        });
        if (row + gridDim.x < rows) {
            fetch(row + gridDim.x);
        }
        if constexpr (IS_NORM) {
            const float factor = 1.0f / sqrtf(block_sum(squares, partial_squares[turn]) / target.columns + terms.epsilon);
            each([&](uint32_t slot, uint32_t, bool is_in) {
                if (is_in) {
                    float by[WIDTH];
                    widen<WIDTH, Element>(weights[slot], by);
#pragma unroll
                    for (uint32_t i = 0; i < WIDTH; ++i) {
                        values[slot][i] = values[slot][i] * factor * (by[i] + terms.weight_offset);
                    }
                }
            });
        }
        float of_row = target.fixed;
        if (target.kind == BY_ROWS) {
            each([&](uint32_t slot, uint32_t, bool) { largest = fmaxf(largest, largest_of(values[slot])); });
            of_row = e4m3_scale(largest_of_block(largest, partial_largest[turn]));
            if (threadIdx.x == 0) {
                target.scales[row] = of_row;
            }
        }
        each([&](uint32_t slot, uint32_t vector, bool is_in) {
            float scale = of_row;
            if (target.kind == BY_GROUPS) {
                scale = e4m3_scale(largest_of_lanes<GROUP_LANES>(largest_of(values[slot])));
                if (vector % GROUP_LANES == 0 && is_in) {
                    target.scales[row * groups + vector / GROUP_LANES] = scale;
                }
            }
            if (is_in) {
                write(target, row, vector * WIDTH, scale, values[slot]);
            }
        });
    }
}

// If IS_GATE, a row of x has gates and then the same number of ups. Otherwise, it has the numbers
// to round.
template <bool IS_GATE, typename Element>
__device__ __forceinline__ void round_long_row(const Element* x, uint32_t x_pitch, const Target<Element>& target) {
    __shared__ float partial[WARPS_MAX];
    const uint32_t vectors = target.columns / WIDTH;
    const uint64_t row = blockIdx.x;
    Words<WIDTH, Element> fetched[LONG_HELD], ups[LONG_HELD];
    let_next_kernel_start();
    wait_for_previous_kernel();
    each_held<LONG_HELD>(vectors, [&](uint32_t slot, uint32_t vector, bool is_in) {
        if (is_in) {
            fetched[slot] = load_words<WIDTH>(x + row * x_pitch + vector * WIDTH);
            if constexpr (IS_GATE) {
                ups[slot] = load_words<WIDTH>(x + row * x_pitch + target.columns + vector * WIDTH);
            }
        }
    });
    float values[LONG_HELD][WIDTH] = {}, largest = 0.0f;
    each_held<LONG_HELD>(vectors, [&](uint32_t slot, uint32_t, bool is_in) {
        if (!is_in) {
            return;
        }
        widen<WIDTH, Element>(fetched[slot], values[slot]);
        if constexpr (IS_GATE) {
            float up[WIDTH];
            widen<WIDTH, Element>(ups[slot], up);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                values[slot][i] = silu(values[slot][i]) * up[i];
            }
        }
        largest = fmaxf(largest, largest_of(values[slot]));
    });
    const float scale = e4m3_scale(largest_of_block(largest, partial));
    if (threadIdx.x == 0) {
        target.scales[row] = scale;
    }
    each_held<LONG_HELD>(vectors, [&](uint32_t slot, uint32_t vector, bool is_in) {
        if (is_in) {
            write(target, row, vector * WIDTH, scale, values[slot]);
        }
    });
}

#define MANY(HELD, name, Element)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 4 - HELD)                                              \
        quantize_large_m_##HELD##_##name(const Element* x, uint32_t x_pitch, uint32_t rows, uint32_t columns,           \
                                      Element* plain, uint32_t kind, float fixed, uint8_t* data, float* scales) {    \
        round_rows<false, HELD, Element>(x, x_pitch, nullptr, NormTerms{}, rows,                                            \
                                         Target<Element>{columns, plain, kind, fixed, data, scales});                \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 4 - HELD)                                              \
        rms_norm_rounded_large_m_##HELD##_##name(const Element* x, uint32_t x_pitch, const Element* weight,             \
                                              float epsilon, float weight_offset, uint32_t rows, uint32_t columns,   \
                                              Element* plain, uint32_t kind, float fixed, uint8_t* data,             \
                                              float* scales) {                                                       \
        round_rows<true, HELD>(x, x_pitch, weight, NormTerms{epsilon, weight_offset}, rows,                          \
                               Target<Element>{columns, plain, kind, fixed, data, scales});                          \
    }
#define LONG(THREADS, BLOCKS, name, Element)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                    \
        quantize_long_##THREADS##_##name(const Element* x, uint32_t x_pitch, uint32_t columns, Element* plain,       \
                                         uint32_t kind, float fixed, uint8_t* data, float* scales) {                 \
        round_long_row<false>(x, x_pitch, Target<Element>{columns, plain, kind, fixed, data, scales});               \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                    \
        silu_mul_rounded_long_##THREADS##_##name(const Element* gate_up, uint32_t x_pitch, uint32_t columns,         \
                                                 Element* plain, uint32_t kind, float fixed, uint8_t* data,          \
                                                 float* scales) {                                                    \
        round_long_row<true>(gate_up, x_pitch, Target<Element>{columns, plain, kind, fixed, data, scales});          \
    }
#define KERNELS(name, Element)  \
    MANY(1, name, Element)      \
    MANY(2, name, Element)      \
    LONG(640, 2, name, Element) \
    LONG(1024, 1, name, Element)
FOR_EACH_ACTIVATION(KERNELS)
static_assert(LONG_THREADS_MAX == 640 && LONGER_THREADS_MAX == 1024, "the kernels above have these launch bounds");

// Launch:
//   Many rows:   block as in quantize.cu, so that sums have the same order; columns <= held * 8 *
//                block; any grid of at most rows
//   Long rows:   grid (rows), block (columns / 8 / LONG_HELD, rounded up to whole warps, at most
//                <threads>), kind BY_ROWS
