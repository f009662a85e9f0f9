// Row gather: `out[i] = x[rows[i]]`, or `out[i] = x[i]`. Rows are copied as bits, so any type of 2 or
// 4 bytes is supported.
//
// x    [x_rows, columns]   rows x_pitch elements apart
// rows [chosen] u32, or null for all rows in order
// out  [chosen, columns]   rows out_pitch elements apart
//
// If rows[i] >= x_rows, nothing outside x is read; all bits of the output row are set to 1, which
// is a NaN in every float type, so that the error is visible. Any alignment; copies are 16 bytes
// wide when addresses, pitches and columns are multiples of 16 bytes.

#include "contract.cuh"
#include "copy_row.cuh"
#include "kernel_order.cuh"

extern "C" __global__ void __launch_bounds__(contract::copy_rows::THREADS)
    gather_rows(const char* x, uint32_t x_rows, uint32_t x_pitch, const uint32_t* rows, uint32_t columns,
                uint32_t element_bytes, char* out, uint32_t out_pitch) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t row = rows == nullptr ? blockIdx.x : rows[blockIdx.x], bytes = columns * element_bytes;
    char* target = out + static_cast<uint64_t>(blockIdx.x) * out_pitch * element_bytes;
    if (row < x_rows) {
        copy_row(x + static_cast<uint64_t>(row) * x_pitch * element_bytes, target, bytes);
    } else {
        fill_row(target, bytes, ALL_ONES);
    }
}

// Launch (chosen > 0): grid (chosen), block (THREADS of contract::copy_rows), no dynamic shared
// memory. element_bytes is 2 or 4.
