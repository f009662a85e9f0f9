// The Gaussian error linear unit, exact form (Hendrycks and Gimpel 2016, arXiv 1606.08415).
//
// x = x / 2 * (1 + erf(x / sqrt(2))), in place
//
// x [rows, columns]   rows pitch elements apart
//
// f32 inside, one rounding at the end. Any number of columns and any alignment; 16-byte accesses when a row is aligned
// to it, 8-byte ones where it is aligned to those (3420 columns).

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void gelu_row(Element* x, uint32_t columns) {
    const uint32_t vectors = columns / WIDTH, stride = gridDim.y * blockDim.x;
    for (uint32_t vector = blockIdx.y * blockDim.x + threadIdx.x; vector < vectors; vector += stride) {
        float values[WIDTH];
        load<WIDTH>(x + vector * WIDTH, values);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = 0.5f * values[i] * (1.0f + erff(values[i] * 0.70710678f));
        }
        store<WIDTH>(x + vector * WIDTH, values);
    }
}

template <typename Element>
__device__ __forceinline__ void gelu(Element* x, uint32_t pitch, uint32_t columns) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * pitch;
    if (aligned_to(x, 16) && columns % VECTOR<Element> == 0) {
        gelu_row<VECTOR<Element>>(x, columns);
    } else if (aligned_to(x, 8) && columns % (VECTOR<Element> / 2) == 0) {
        gelu_row<VECTOR<Element> / 2>(x, columns);
    } else {
        gelu_row<1>(x, columns);
    }
}

#define KERNEL(name, Element)                                             \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS) \
        gelu_##name(Element* x, uint32_t pitch, uint32_t columns) {       \
        gelu(x, pitch, columns);                                          \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of contract::gate), no dynamic shared
// memory. rows > 0. Any second grid size is right; few rows want more blocks.
