// Writing rows to chosen places: `out[rows[i]] = x[i]`. Bits are copied, so any type of 2 or 4 bytes will do.
//
// x    [chosen, columns]     rows x_pitch elements apart
// rows [chosen] u32          no place is named twice
// out  [out_rows, columns]   rows out_pitch elements apart; rows that are not named keep what they hold
//
// A place that is not below out_rows is skipped. If a place is named twice, one of the two rows or a mixture of both
// stands there. Any alignment; 16-byte copies when addresses, pitches and columns are aligned to it.

#include "contract.cuh"
#include "copy_row.cuh"
#include "kernel_order.cuh"

extern "C" __global__ void __launch_bounds__(contract::copy_rows::THREADS)
    scatter_rows(const char* x, uint32_t x_pitch, const uint32_t* rows, uint32_t columns, uint32_t element_bytes,
                 char* out, uint32_t out_rows, uint32_t out_pitch) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t row = rows[blockIdx.x];
    if (row < out_rows) {
        copy_row(x + static_cast<uint64_t>(blockIdx.x) * x_pitch * element_bytes,
                 out + static_cast<uint64_t>(row) * out_pitch * element_bytes, columns * element_bytes);
    }
}

// Launch: grid (chosen), block (THREADS of contract::copy_rows), no dynamic shared memory. chosen > 0, element_bytes 2 or 4.
