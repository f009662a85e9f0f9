// Zeros for the rows of padding: those before query_starts[0] and from query_starts[sequences] on.
//
// x            [rows, columns]        rows pitch elements apart, any type of 2 or 4 bytes
// query_starts [sequences + 1] u32    read on the device, so that a graph serves steps with different padding
//
// Rows of sequences are not touched. If the starts contradict themselves, some rows are zeroed that should not be;
// nothing outside x is written.

#include "copy_row.cuh"

extern "C" __global__ void __launch_bounds__(128)
    fill_zero_rows(char* x, uint32_t pitch, uint32_t columns, uint32_t element_bytes, const uint32_t* query_starts,
                   uint32_t sequences) {
    const uint32_t row = blockIdx.x;
    if (row < query_starts[0] || row >= query_starts[sequences]) {
        fill_row(x + static_cast<uint64_t>(row) * pitch * element_bytes, columns * element_bytes, 0);
    }
}

// Launch: grid (rows), block (128), no dynamic shared memory. rows > 0, element_bytes 2 or 4.
