// Means of consecutive rows, such as the average pooling of a picture's patches.
//
// out[r] = mean of x[count * r .. count * (r + 1)]
//
// x    [rows * count, columns]  rows `pitch` elements apart
// out  [rows, columns]          contiguous
//
// Arithmetic is f32, rounded once at the end. Any number of columns and any alignment; accesses are
// 16 bytes wide when addresses, pitch and columns are multiples of 16 bytes.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void mean(Element* out, const Element* x, uint32_t pitch, uint32_t columns, uint32_t count) {
    const float factor = 1.0f / static_cast<float>(count);
    const uint32_t vectors = columns / WIDTH, stride = gridDim.y * blockDim.x;
    for (uint32_t vector = blockIdx.y * blockDim.x + threadIdx.x; vector < vectors; vector += stride) {
        float sums[WIDTH] = {};
        for (uint32_t row = 0; row < count; ++row) {
            float values[WIDTH];
            load<WIDTH>(x + static_cast<uint64_t>(row) * pitch + vector * WIDTH, values);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                sums[i] += values[i];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            sums[i] *= factor;
        }
        store<WIDTH>(out + vector * WIDTH, sums);
    }
}

template <typename Element>
__device__ __forceinline__ void mean_rows(Element* out, const Element* x, uint32_t pitch, uint32_t columns,
                                          uint32_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    out += static_cast<uint64_t>(blockIdx.x) * columns;
    x += static_cast<uint64_t>(blockIdx.x) * count * pitch;
    const uint64_t together = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out);
    const bool is_whole = columns % VECTOR<Element> == 0 && pitch % VECTOR<Element> == 0;
    if (aligned_to(together, 16) && is_whole) {
        mean<VECTOR<Element>>(out, x, pitch, columns, count);
    } else {
        mean<1>(out, x, pitch, columns, count);
    }
}

#define KERNEL(name, Element)                                                                                    \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                        \
        mean_rows_##name(Element* out, const Element* x, uint32_t pitch, uint32_t columns, uint32_t count) {     \
        mean_rows(out, x, pitch, columns, count);                                                                \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, 2048)), block (THREADS of contract::gate), no dynamic
// shared memory. rows > 0, count > 0. Any second grid size is correct.
