// Conversion of block scales to the layouts that cuBLASLt reads
// (CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F and BLK128x128_32F).
// Targets: sm_90a
//
// turned[group, row] = x_scales[row, group]
// padded[block, group] = weight_scales[block, group], and zeros after the last group
//
// x_scales      [rows, groups] f32        as quantize.cu writes them
// turned        [groups, rows] f32        rows is a multiple of 4
// weight_scales [blocks, groups] f32
// padded        [blocks, padded_groups] f32. If groups is already a multiple of PADDED, padded is
//                                         null and is not written
// padded_groups groups, rounded up to PADDED

#include <stdint.h>

#include "contract.cuh"
#include "kernel_order.cuh"

using namespace contract::transpose_scales;

extern "C" __global__ void __launch_bounds__(THREADS)
    transpose_scales(const float* x_scales, float* turned, uint32_t rows, uint32_t groups, const float* weight_scales,
                float* padded, uint32_t blocks, uint32_t padded_groups) {
    let_next_kernel_start();
    // The previous kernel may use this kernel's outputs as its workspace.
    wait_for_previous_kernel();
    const uint32_t across = (groups + TILE - 1) / TILE, tiles = (rows + TILE - 1) / TILE * across;
    if (blockIdx.x < tiles) {
        __shared__ float tile[TILE][TILE + 1];
        const uint32_t first_row = blockIdx.x / across * TILE, first_group = blockIdx.x % across * TILE;
        for (uint32_t at = threadIdx.x; at < TILE * TILE; at += THREADS) {
            const uint32_t row = first_row + at / TILE, group = first_group + at % TILE;
            if (row < rows && group < groups) {
                tile[at / TILE][at % TILE] = x_scales[static_cast<uint64_t>(row) * groups + group];
            }
        }
        __syncthreads();
        for (uint32_t at = threadIdx.x; at < TILE * TILE; at += THREADS) {
            const uint32_t row = first_row + at % TILE, group = first_group + at / TILE;
            if (row < rows && group < groups) {
                turned[static_cast<uint64_t>(group) * rows + row] = tile[at % TILE][at / TILE];
            }
        }
    } else {
        const uint32_t at = (blockIdx.x - tiles) * THREADS + threadIdx.x;
        if (at < blocks * padded_groups) {
            const uint32_t block = at / padded_groups, group = at % padded_groups;
            padded[at] = group < groups ? weight_scales[static_cast<uint64_t>(block) * groups + group] : 0.0f;
        }
    }
}

// Launch: grid (div_ceil(rows, TILE) * div_ceil(groups, TILE), and with `padded` div_ceil(blocks *
// padded_groups, THREADS) more), block (THREADS of contract::transpose_scales), no dynamic shared
// memory. rows and groups > 0.
