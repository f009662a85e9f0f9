// Logit softcapping (Gemma 2, arXiv 2408.00118), in place:
// x = cap * tanh(x / cap).
//
// x [rows, columns] f32   rows pitch elements apart
//
// Any number of columns and any alignment. An infinite element becomes cap with its sign, and NaN
// stays NaN.

#include "contract.cuh"
#include "kernel_order.cuh"

extern "C" __global__ void __launch_bounds__(contract::gate::THREADS)
    soft_cap(float* x, uint32_t pitch, uint32_t columns, float cap) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    x += static_cast<uint64_t>(blockIdx.x) * pitch;
    const uint32_t stride = gridDim.y * blockDim.x;
    for (uint32_t column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += stride) {
        x[column] = cap * tanhf(x[column] / cap);
    }
}

// Launch: grid (rows, div_ceil(columns, rows < 128 ? 2048 : 4096)), block (THREADS of
// contract::gate), no dynamic shared memory. rows > 0. Any value of gridDim.y is correct.
