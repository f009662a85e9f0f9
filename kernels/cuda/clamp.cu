// Clamps elements to a range: out = min(max(x, bounds[0]), bounds[1]).
//
// x      [rows, columns]   rows pitch elements apart
// bounds [2] f32           the least and the largest element
// out    [rows, columns]   rows out_pitch elements apart; may be x itself
//
// Any number of columns and any alignment. Bounds are rounded to the type of the elements. NaN stays
// NaN.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

template <typename Element>
__device__ __forceinline__ void clamp(const Element* x, uint32_t pitch, uint32_t columns, const float* bounds,
                                      Element* out, uint32_t out_pitch) {
    let_next_kernel_start();
    // No kernel writes bounds.
    const float least = bounds[0], most = bounds[1];
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * pitch;
    out += static_cast<uint64_t>(blockIdx.x) * out_pitch;
    const uint32_t stride = gridDim.y * blockDim.x;
    for (uint32_t column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += stride) {
        const float value = to_float(x[column]);
        const float limited[1] = {value < least ? least : value > most ? most : value};
        store<1>(out + column, limited);
    }
}

#define KERNEL(name, Element)                                                                                \
    extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)                                    \
        clamp_##name(const Element* x, uint32_t pitch, uint32_t columns, const float* bounds, Element* out,  \
                     uint32_t out_pitch) {                                                                   \
        clamp(x, pitch, columns, bounds, out, out_pitch);                                                    \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any value of gridDim.y is correct.
