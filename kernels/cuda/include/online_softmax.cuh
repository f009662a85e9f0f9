// Softmax of rows whose scores arrive tile by tile (Milakov and Gimelshein 2018, arXiv
// 1805.02867): a running maximum, a running sum, and a factor that scales the earlier results down
// when the maximum grows.
//
// A lane has two rows, in the layout of tensor_core.cuh: scores[j][0..2] belong to the first row
// and scores[j][2..4] to the second row, at column 8 * j + 2 * (lane % 4) and the next column. The
// four lanes of a quad share their two rows.
#pragma once

#include <cstdint>

__device__ __forceinline__ float power_of_two(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

struct OnlineSoftmax {
    float maximum[2];  // highest scores so far, unscaled; the same in all lanes of the quad
    float sum[2];      // sums of weights; until `finish`, only of this lane's columns

    __device__ __forceinline__ void begin() {
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
    }

    // Sets scores at columns at or past the row's limit to minus infinity. `column` is the column
    // of scores[0][0] in the sequence.
    template <int TILES>
    static __device__ __forceinline__ void mask(float (&scores)[TILES][4], int32_t column, const int32_t (&limit)[2]) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (column + tile * 8 + i % 2 >= limit[i / 2]) {
                    scores[tile][i] = -INFINITY;
                }
            }
        }
    }

    // Sets scores at columns before the row's first column to minus infinity.
    template <int TILES>
    static __device__ __forceinline__ void mask_before(float (&scores)[TILES][4], int32_t column,
                                                       const int32_t (&first)[2]) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (column + tile * 8 + i % 2 < first[i / 2]) {
                    scores[tile][i] = -INFINITY;
                }
            }
        }
    }

    // Converts scores to weights, 2^(factor * (score - maximum)), and returns in `shrink` the
    // factors for the earlier results. A NaN score makes a NaN weight and thus a NaN row. The sum
    // of a row without visible scores remains 0.
    template <int TILES>
    __device__ __forceinline__ void step(float (&scores)[TILES][4], float factor, float (&shrink)[2]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float highest = maximum[row];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                highest = fmaxf(highest, fmaxf(scores[tile][2 * row], scores[tile][2 * row + 1]));
            }
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            // Minus infinity minus itself is NaN, so the origin of a row that has seen
            // no scores is 0.
            const float origin = highest == -INFINITY ? 0.0f : highest * factor;
            shrink[row] = power_of_two(maximum[row] * factor - origin);
            maximum[row] = highest;
            float gathered = sum[row] * shrink[row];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int i = 2 * row; i < 2 * row + 2; ++i) {
                    scores[tile][i] = power_of_two(fmaf(scores[tile][i], factor, -origin));
                    gathered += scores[tile][i];
                }
            }
            sum[row] = gathered;
        }
    }

    // Adds up the sums of the quad.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
            sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
        }
    }

    // The factor for the gathered values of a finished row: 0 if the row saw no scores, and NaN if
    // its sum is NaN.
    __device__ __forceinline__ float inverse(int row) const { return sum[row] == 0.0f ? 0.0f : 1.0f / sum[row]; }
};
