// E4M3 scales for groups of columns, in GEMMs with few rows. They are copied to shared memory along
// with each step. An earlier version, in which each thread loaded its scales from device
// memory, took more instructions for the loads than for the rest of a step, and the step waited for
// them.
#pragma once

#include "contract.cuh"

// Copies 4, 8 or 16 bytes to shared memory, or writes zeros if `is_there` is false.
template <uint32_t BYTES>
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, bool is_there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(from), "r"(is_there ? BYTES : 0), "n"(BYTES)
                 : "memory");
}

// Arrives at a barrier once all copies that this thread has started with copy_bytes have
// completed. The barrier's count must include this arrival.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Scales for a step in which each chunk of columns has its own scales: their layout in shared
// memory, and the copies that a warp makes.
template <uint32_t ROWS, uint32_t CHUNKS>
struct StepScales {
    // The largest number of scales that a tile's rows have in one group of columns.
    static constexpr uint32_t WEIGHT_ROWS = contract::gemm_small_m::TILE_ROWS / contract::fp8::BLOCK_ROWS_MIN + 1;
    static constexpr uint32_t X_BYTES = CHUNKS * ROWS * sizeof(float);  // [CHUNKS, ROWS]
    static constexpr uint32_t BYTES = X_BYTES + CHUNKS * WEIGHT_ROWS * sizeof(float);  // [WEIGHT_ROWS, CHUNKS]

    // Copies the scales of x, which has `rows` rows.
    template <typename Scales>
    static __device__ __forceinline__ void copy_x(uint32_t to, const Scales& scales, uint32_t rows, uint32_t group) {
        constexpr uint32_t OWN = (CHUNKS * ROWS + 31) / 32;
#pragma unroll
        for (uint32_t i = 0; i < OWN; ++i) {
            const uint32_t at = threadIdx.x % 32 + i * 32, row = at % ROWS;
            if (at < CHUNKS * ROWS) {
                const uint32_t from = row * scales.groups + existing(scales, group + at / ROWS);
                copy_bytes<4>(to + at * sizeof(float), scales.x + (row < rows ? from : 0), row < rows);
            }
        }
    }
    // Copies `rows` rows of the weight's scales, from `first_row` on.
    template <typename Scales>
    static __device__ __forceinline__ void copy_weight(uint32_t to, const Scales& scales, uint32_t first_row,
                                                       uint32_t rows, uint32_t group) {
        for (uint32_t at = threadIdx.x % 32; at < CHUNKS * rows; at += 32) {
            const uint64_t from = static_cast<uint64_t>(first_row + at / CHUNKS) * scales.groups;
            copy_bytes<4>(to + X_BYTES + at * sizeof(float), scales.weight + from + existing(scales, group + at % CHUNKS), true);
        }
    }

private:
    // All products of columns past the last are zero, so the scale of any existing group can be
    // used.
    template <typename Scales>
    static __device__ __forceinline__ uint32_t existing(const Scales& scales, uint32_t group) {
        return min(group, scales.groups - 1);
    }
};

// The scales for one thread's sums of a group of columns: the scales of two features, and of two of
// every eight rows of x.
template <uint32_t ROWS>
struct GroupScales {
    float weight[2];
    float2 x[ROWS / 8];

    // Reads the scales of chunk `chunk` from the step's scales at `at`. `rows` has the row of
    // scales of each feature, relative to the tile's first row of scales.
    template <uint32_t CHUNKS>
    __device__ __forceinline__ void read(uint32_t at, const uint32_t (&rows)[2], uint32_t chunk) {
        const uint32_t x_at = at + chunk * ROWS * sizeof(float) + threadIdx.x % 4 * sizeof(float2);
#pragma unroll
        for (uint32_t own = 0; own < 2; ++own) {
            const uint32_t from = at + StepScales<ROWS, CHUNKS>::X_BYTES + (rows[own] * CHUNKS + chunk) * sizeof(float);
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(weight[own]) : "r"(from) : "memory");
        }
#pragma unroll
        for (uint32_t eight = 0; eight < ROWS / 8; ++eight) {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(x[eight].x), "=f"(x[eight].y)
                         : "r"(x_at + eight * 32)
                         : "memory");
        }
    }
    // Adds the scaled sums of the group to `c`.
    __device__ __forceinline__ void add(float (&c)[ROWS / 8][4], const float (&sums)[ROWS / 8][4]) const {
#pragma unroll
        for (uint32_t eight = 0; eight < ROWS / 8; ++eight) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                c[eight][i] += sums[eight][i] * ((i % 2 == 0 ? x[eight].x : x[eight].y) * weight[i / 2]);
            }
        }
    }
};
