// The gate of a gated MLP (SwiGLU and GeGLU, Shazeer 2020, arXiv 2002.05202).
//
// silu_mul: out = gate / (1 + exp(-gate)) * up
// gelu_mul: out = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))) * up
//
// gate [rows, features]   rows gate_pitch elements apart
// up   [rows, features]   rows up_pitch elements apart
// out  [rows, features]   contiguous
//
// Arithmetic is f32, rounded once at the end. Any number of features and any alignment; accesses
// are 16 bytes wide if all parts of a row are aligned to 16 bytes, 8 bytes wide if they are only
// aligned to 8 bytes (3420 features: `up` starts 6840 bytes after `gate`).

#include "contract.cuh"
#include "element.cuh"
#include "gate.cuh"
#include "kernel_order.cuh"

// Number of vectors that a thread loads at once.
constexpr uint32_t HELD = 2;

template <Gate GATE, uint32_t WIDTH, typename Element>
__device__ __forceinline__ void gate_mul_row(const Element* gate, const Element* up, uint32_t features, Element* out) {
    const uint32_t vectors = features / WIDTH, stride = gridDim.y * blockDim.x;
    for (uint32_t first = blockIdx.y * blockDim.x + threadIdx.x; first < vectors; first += HELD * stride) {
        float gates[HELD][WIDTH], ups[HELD][WIDTH];
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * stride;
            if (vector < vectors) {
                load<WIDTH>(gate + vector * WIDTH, gates[slot]);
                load<WIDTH>(up + vector * WIDTH, ups[slot]);
            }
        }
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * stride;
            if (vector < vectors) {
                float values[WIDTH];
#pragma unroll
                for (uint32_t i = 0; i < WIDTH; ++i) {
                    values[i] = activation<GATE>(gates[slot][i]) * ups[slot][i];
                }
                store<WIDTH>(out + vector * WIDTH, values);
            }
        }
    }
}

template <Gate GATE, typename Element>
__device__ __forceinline__ void gate_mul(const Element* gate, uint32_t gate_pitch, const Element* up, uint32_t up_pitch,
                                         uint32_t features, Element* out) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    gate += static_cast<uint64_t>(blockIdx.x) * gate_pitch;
    up += static_cast<uint64_t>(blockIdx.x) * up_pitch;
    out += static_cast<uint64_t>(blockIdx.x) * features;
    const uint64_t together =
        reinterpret_cast<uint64_t>(gate) | reinterpret_cast<uint64_t>(up) | reinterpret_cast<uint64_t>(out);
    constexpr uint32_t HALF = VECTOR<Element> / 2;
    if (aligned_to(together, 16) && features % VECTOR<Element> == 0) {
        gate_mul_row<GATE, VECTOR<Element>>(gate, up, features, out);
    } else if (aligned_to(together, 8) && features % HALF == 0) {
        gate_mul_row<GATE, HALF>(gate, up, features, out);
    } else {
        gate_mul_row<GATE, 1>(gate, up, features, out);
    }
}

#define KERNEL_OF(operation, GATE, name, Element)                                                                 \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                         \
        operation##_##name(const Element* gate, uint32_t gate_pitch, const Element* up, uint32_t up_pitch,        \
                           uint32_t features, Element* out) {                                                     \
        gate_mul<GATE>(gate, gate_pitch, up, up_pitch, features, out);                                            \
    }
#define KERNEL(name, Element)                         \
    KERNEL_OF(silu_mul, Gate::SILU, name, Element)    \
    KERNEL_OF(gelu_mul, Gate::GELU_TANH, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(features, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any value of gridDim.y is correct; with few
// rows, more blocks per row are faster.
