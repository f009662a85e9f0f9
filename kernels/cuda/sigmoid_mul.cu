// Sigmoid gates of attention outputs (Qiu et al. 2025, arXiv 2505.06708) and of shared experts.
//
// x = x / (1 + exp(-gate)), in place
//
// x     [rows, columns]      rows x_pitch elements apart
// gate  [rows, columns]      rows gate_pitch elements apart; [rows, 1] in sigmoid_mul_rows: one
//                            gate for each row
//
// Arithmetic is f32, rounded once at the end. Any number of columns and any alignment; accesses are
// 16 bytes wide when addresses, pitches and columns are multiples of 16 bytes.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "logistic.cuh"

// Number of vectors that a thread loads at once.
constexpr uint32_t HELD = 2;

template <uint32_t WIDTH, bool BY_ROW, typename Element>
__device__ __forceinline__ void gate_row(Element* x, const Element* gate, uint32_t columns) {
    const uint32_t vectors = columns / WIDTH, stride = gridDim.y * blockDim.x;
    const float of_row = BY_ROW ? to_float(*gate) : 0.0f;
    for (uint32_t first = blockIdx.y * blockDim.x + threadIdx.x; first < vectors; first += HELD * stride) {
        float values[HELD][WIDTH], gates[HELD][WIDTH];
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * stride;
            if (vector < vectors) {
                load<WIDTH>(x + vector * WIDTH, values[slot]);
                if (!BY_ROW) {
                    load<WIDTH>(gate + vector * WIDTH, gates[slot]);
                }
            }
        }
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * stride;
            if (vector < vectors) {
#pragma unroll
                for (uint32_t i = 0; i < WIDTH; ++i) {
                    values[slot][i] = times_logistic(values[slot][i], BY_ROW ? of_row : gates[slot][i]);
                }
                store<WIDTH>(x + vector * WIDTH, values[slot]);
            }
        }
    }
}

template <bool BY_ROW, typename Element>
__device__ __forceinline__ void sigmoid_mul(Element* x, uint32_t x_pitch, const Element* gate, uint32_t gate_pitch,
                                            uint32_t columns) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * x_pitch;
    gate += static_cast<uint64_t>(blockIdx.x) * gate_pitch;
    const uint64_t together = reinterpret_cast<uint64_t>(x) | (BY_ROW ? 0 : reinterpret_cast<uint64_t>(gate));
    if (aligned_to(together, 16) && columns % VECTOR<Element> == 0) {
        gate_row<VECTOR<Element>, BY_ROW>(x, gate, columns);
    } else {
        gate_row<1, BY_ROW>(x, gate, columns);
    }
}

#define KERNEL(name, Element)                                                                                     \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                         \
        sigmoid_mul_##name(Element* x, uint32_t x_pitch, const Element* gate, uint32_t gate_pitch,                \
                           uint32_t columns) {                                                                    \
        sigmoid_mul<false>(x, x_pitch, gate, gate_pitch, columns);                                                \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                         \
        sigmoid_mul_rows_##name(Element* x, uint32_t x_pitch, const Element* gate, uint32_t gate_pitch,           \
                                uint32_t columns) {                                                               \
        sigmoid_mul<true>(x, x_pitch, gate, gate_pitch, columns);                                                 \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any value of gridDim.y is correct; with few
// rows, more blocks per row are faster.
