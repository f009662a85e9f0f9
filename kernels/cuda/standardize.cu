// Standardizes columns, in place: x = (x * factor - shift) * scale.
//
// x     [rows, columns]   rows pitch elements apart
// shift [columns] f32
// scale [columns] f32
//
// Arithmetic is f32, rounded once at the end: x * factor may exceed the range of f16. Any number of
// columns and any alignment.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

template <typename Element>
__device__ __forceinline__ void standardize(Element* x, uint32_t pitch, uint32_t columns, float factor,
                                            const float* shift, const float* scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * pitch;
    const uint32_t stride = gridDim.y * blockDim.x;
    for (uint32_t column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += stride) {
        const float changed[1] = {(to_float(x[column]) * factor - shift[column]) * scale[column]};
        store<1>(x + column, changed);
    }
}

#define KERNEL(name, Element)                                                                               \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                   \
        standardize_##name(Element* x, uint32_t pitch, uint32_t columns, float factor, const float* shift,  \
                           const float* scale) {                                                            \
        standardize(x, pitch, columns, factor, shift, scale);                                               \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any value of gridDim.y is correct.
