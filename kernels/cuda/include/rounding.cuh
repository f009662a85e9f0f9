// Shared by the kernels that quantize rows of activations to E4M3: output addresses and the
// conversion of numbers to codes. See quantize.cu.
#pragma once

#include "contract.cuh"
#include "e4m3.cuh"
#include "element.cuh"
#include "reduce.cuh"

using contract::fp8::BY_GROUPS;
using contract::fp8::BY_ROWS;
constexpr uint32_t WIDTH = contract::fp8::VECTOR;
constexpr uint32_t GROUP_LANES = GROUP / WIDTH;  // lanes that share a group

template <typename Element>
struct Target {
    uint32_t columns;
    Element* plain;
    uint32_t kind;
    float fixed;
    uint8_t* data;
    float* scales;
};

// Calls `step(slot, vector, is_in_row)` for each vector of a row that this thread keeps in
// registers. `is_in_row` is false for vectors beyond the end of the row.
template <uint32_t HELD, typename Step>
__device__ __forceinline__ void each_held(uint32_t vectors, const Step& step) {
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        step(slot, vector, vector < vectors);
    }
}

__device__ __forceinline__ float largest_of(const float (&values)[WIDTH]) {
    float largest = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        largest = larger_magnitude(largest, values[i]);
    }
    return largest;
}

// The largest value among the aligned group of `LANES` lanes that contains this lane, returned to
// each lane of the group.
template <uint32_t LANES>
__device__ __forceinline__ float largest_of_lanes(float value) {
#pragma unroll
    for (uint32_t distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// The largest value of the block, which must consist of whole warps. No value may be negative.
__device__ __forceinline__ float largest_of_block(float value, float (&partial)[WARPS_MAX]) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    value = largest_of_lanes<WARP>(value);
    if (warps == 1) {
        return value;
    }
    if (lane == 0) {
        partial[warp] = value;
    }
    __syncthreads();
    return largest_of_lanes<WARP>(lane < warps ? partial[lane] : 0.0f);
}

// `value / scale` in f32, where the caller provides the inverse of `scale`. Multiplying by the
// inverse and correcting the product once gives the same E4M3 code as the correctly rounded
// quotient (Markstein 1990), which takes twice the instructions. The correction is written as a
// subtraction of the product's excess, not as an addition, so that -0 remains -0. Values far
// outside the range of E4M3, and NaN, are not corrected.
__device__ __forceinline__ float divided(float value, float scale, float inverse) {
    const float quotient = value * inverse;
    const float too_much = __fmaf_rn(quotient, scale, -value);
    const float corrected = __fmaf_rn(-too_much, inverse, quotient);
    return fabsf(quotient) < 2.0f * E4M3_MAX ? corrected : quotient;
}

// Calls `work(divide)`, where `divide(value)` rounds to the same E4M3 number
// as `value / scale` in f32.
template <typename Work>
__device__ __forceinline__ auto with_divisor(float scale, const Work& work) {
    // In this range, the inverse and the remainders are normal numbers.
    if (scale >= 0x1p-100f && scale <= 0x1p100f) {
        const float inverse = __frcp_rn(scale);
        return work([&](float value) { return divided(value, scale, inverse); });
    }
    return work([&](float value) { return __fdiv_rn(value, scale); });
}

// On targets without conversion instructions (before sm_89) this code is long, so the function is
// not inlined there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
__device__ __noinline__
#else
__device__ __forceinline__
#endif
uint2 rounded_eight(float a, float b, float c, float d, float e, float f, float g, float h, float scale) {
    return with_divisor(scale, [&](auto divide) {
        const auto pair = [&](float low, float high) { return e4m3_pair(divide(low), divide(high)); };
        return make_uint2(pair(a, b) | pair(c, d) << 16, pair(e, f) | pair(g, h) << 16);
    });
}

template <typename Element>
__device__ __forceinline__ void write(const Target<Element>& target, uint64_t row, uint32_t column, float scale,
                                      const float (&values)[WIDTH]) {
    const uint64_t at = row * target.columns + column;
    if (target.plain != nullptr) {
        store<WIDTH>(target.plain + at, values);
    }
    const uint2 eight = rounded_eight(values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], scale);
    *reinterpret_cast<uint2*>(target.data + at) = eight;
}
