// Row scatter: `out[rows[i]] = x[i]`. Rows are copied as bits, so any type of 2 or
// 4 bytes is supported.
//
// x    [chosen, columns]     rows x_pitch elements apart
// rows [chosen] u32          rows of out, each at most once
// out  [out_rows, columns]   rows out_pitch elements apart; all other rows keep their contents
//
// If rows[i] >= out_rows, the row is skipped. If `rows` names a row twice, that row holds one of
// the two source rows or a mixture of both. Any alignment; copies are 16 bytes wide when addresses,
// pitches and columns are multiples of 16 bytes.

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

// Launch (chosen > 0): grid (chosen), block (THREADS of contract::copy_rows), no dynamic shared
// memory. element_bytes is 2 or 4.
