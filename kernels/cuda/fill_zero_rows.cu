// Zeros for the rows of padding: those before query_starts[0] and from query_starts[sequences] on.
//
// x            [rows, columns]        rows pitch elements apart, any type of 2 or 4 bytes
// query_starts [sequences + 1] u32    read on the device, so that a graph serves steps with different padding
//
// Rows of sequences are not touched. If the starts contradict themselves, some rows are zeroed that should not be;
// nothing outside x is written.

#include "copy_row.cuh"
#include "kernel_order.cuh"

extern "C" __global__ void __launch_bounds__(128)
    fill_zero_rows(char* x, uint32_t pitch, uint32_t rows, uint32_t columns, uint32_t element_bytes,
                   const uint32_t* query_starts, uint32_t sequences) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    // Blocks go over the rows of padding alone: mostly there are none.
    const uint32_t first = min(query_starts[0], rows), end = max(first, min(query_starts[sequences], rows));
    for (uint32_t padding = blockIdx.x; padding < first + rows - end; padding += gridDim.x) {
        const uint32_t row = padding < first ? padding : end + padding - first;
        fill_row(x + static_cast<uint64_t>(row) * pitch * element_bytes, columns * element_bytes, 0);
    }
}

// Launch: grid (min(rows, 2 * multiprocessors)), block (128), no dynamic shared memory. Any grid is right. rows > 0,
// element_bytes 2 or 4.
