// Output rows of a norm that is part of a collective: in the element type, in E4M3, or in both.
#pragma once

#include "exchange.cuh"
#include "rounding.cuh"

// Replaces each of a thread's COUNT values, which must not be negative, by the largest value with
// the same index in the block. One barrier is enough for all COUNT values, as in block_sums.
template <uint32_t COUNT>
__device__ __forceinline__ void block_largests(float (&values)[COUNT], float (&partial)[COUNT][WARPS_MAX]) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        values[i] = largest_of_lanes<WARP>(values[i]);
        if (lane == 0) {
            partial[i][warp] = values[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        values[i] = largest_of_lanes<WARP>(lane < warps ? partial[i][lane] : 0.0f);
    }
}

template <typename Element>
struct Plain {
    uint32_t columns;
    Element* start;
};

// Multiplies a unit of `sum` by the row's factor and by the weights of the unit's columns. `offset`
// is added to each weight first.
template <typename Element>
__device__ __forceinline__ void normed(const uint4& sum, const uint4& by_words, float offset, float factor,
                                       float (&values)[WIDTH]) {
    float by[WIDTH];
    widen<WIDTH, Element>(sum, values);
    widen<WIDTH, Element>(by_words, by);
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        values[i] = values[i] * factor * (by[i] + offset);
    }
}

// Writes COUNT rows. The threads of the block together have all units of the rows, and this thread
// has unit `vector` of each row. `each(work)` calls `work(i, row)` for the rows that this thread
// writes; for the other rows, `sum` is zero. `squares` has the sum of squares of each row.
// `partial` may be overwritten, because all threads pass a barrier between two calls.
template <uint32_t COUNT, typename Element, typename Each>
__device__ __forceinline__ void write_normed(const Plain<Element>& out, const uint4 (&sum)[COUNT], const uint4& by_words,
                                             const float (&squares)[COUNT], NormTerms terms, uint32_t vector,
                                             float (&)[COUNT][WARPS_MAX], const Each& each) {
    each([&](uint32_t i, uint64_t row) {
        const float factor = 1.0f / sqrtf(squares[i] / out.columns + terms.epsilon);
        write_scaled<WIDTH>(sum[i], by_words, terms.weight_offset, factor, out.start + row * out.columns + vector * WIDTH);
    });
}

template <uint32_t COUNT, typename Element, typename Each>
__device__ __forceinline__ void write_normed(const Target<Element>& out, const uint4 (&sum)[COUNT], const uint4& by_words,
                                             const float (&squares)[COUNT], NormTerms terms, uint32_t vector,
                                             float (&partial)[COUNT][WARPS_MAX], const Each& each) {
    static_assert(VECTOR<Element> == WIDTH, "a unit has the values of one lane of a group");
    const auto values_of = [&](uint32_t i, float (&values)[WIDTH]) {
        const float factor = 1.0f / sqrtf(squares[i] / out.columns + terms.epsilon);
        normed<Element>(sum[i], by_words, terms.weight_offset, factor, values);
    };
    float scale[COUNT];
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        float values[WIDTH];
        values_of(i, values);
        scale[i] = largest_of(values);
    }
    if (out.kind == BY_ROWS) {
        block_largests(scale, partial);
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        // All lanes of a warp take part in the shuffles, even lanes that write nothing.
        const float largest = out.kind == BY_GROUPS ? largest_of_lanes<GROUP_LANES>(scale[i]) : scale[i];
        scale[i] = out.kind == contract::fp8::FIXED ? out.fixed : e4m3_scale(largest);
    }
    each([&](uint32_t i, uint64_t row) {
        const uint32_t groups = (out.columns + GROUP - 1) / GROUP;
        if (out.kind == BY_GROUPS && vector % GROUP_LANES == 0) {
            out.scales[row * groups + vector / GROUP_LANES] = scale[i];
        }
        if (out.kind == BY_ROWS && vector == 0) {
            out.scales[row] = scale[i];
        }
        float values[WIDTH];
        values_of(i, values);
        write(out, row, vector * WIDTH, scale[i], values);
    });
}
