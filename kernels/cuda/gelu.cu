// The Gaussian error linear unit (Hendrycks and Gimpel 2016, arXiv 1606.08415), in place:
//
// gelu        x / 2 * (1 + erf(x / sqrt(2)))
// gelu_tanh   x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
// gelu_quick  x / (1 + exp(-1.702 * x))
//
// x [rows, columns]   rows pitch elements apart
//
// Arithmetic is f32, rounded once at the end. Any number of columns and any alignment;
// accesses are 16 bytes wide if rows are aligned to 16 bytes, 8 bytes wide if rows are only
// aligned to 8 bytes (such as rows of 3,420 columns).

#include "contract.cuh"
#include "element.cuh"
#include "gate.cuh"
#include "kernel_order.cuh"

enum class Kind { ERF, TANH, QUICK };

template <Kind KIND>
__device__ __forceinline__ float unit(float x) {
    if constexpr (KIND == Kind::ERF) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    } else if constexpr (KIND == Kind::TANH) {
        return gelu_tanh(x);
    } else {
        return times_logistic(x, 1.702f * x);
    }
}

template <Kind KIND, uint32_t WIDTH, typename Element>
__device__ __forceinline__ void gelu_row(Element* x, uint32_t columns) {
    const uint32_t vectors = columns / WIDTH, stride = gridDim.y * blockDim.x;
    for (uint32_t vector = blockIdx.y * blockDim.x + threadIdx.x; vector < vectors; vector += stride) {
        float values[WIDTH];
        load<WIDTH>(x + vector * WIDTH, values);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = unit<KIND>(values[i]);
        }
        store<WIDTH>(x + vector * WIDTH, values);
    }
}

template <Kind KIND, typename Element>
__device__ __forceinline__ void gelu(Element* x, uint32_t pitch, uint32_t columns) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * pitch;
    if (aligned_to(x, 16) && columns % VECTOR<Element> == 0) {
        gelu_row<KIND, VECTOR<Element>>(x, columns);
    } else if (aligned_to(x, 8) && columns % (VECTOR<Element> / 2) == 0) {
        gelu_row<KIND, VECTOR<Element> / 2>(x, columns);
    } else {
        gelu_row<KIND, 1>(x, columns);
    }
}

#define KERNEL_OF(operation, KIND, name, Element)                          \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)  \
        operation##_##name(Element* x, uint32_t pitch, uint32_t columns) { \
        gelu<KIND>(x, pitch, columns);                                     \
    }
#define KERNEL(name, Element)                         \
    KERNEL_OF(gelu, Kind::ERF, name, Element)         \
    KERNEL_OF(gelu_tanh, Kind::TANH, name, Element)   \
    KERNEL_OF(gelu_quick, Kind::QUICK, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any second grid size is correct; with few
// rows, more blocks per row are faster.
