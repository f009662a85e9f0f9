// FP8 as weights and activations have it: E4M3 (Micikevicius et al. 2022, arXiv 2209.05433). Devices convert it from sm_89
// on; before, its numbers are made of those of others by their bits.
#pragma once

#include <stdint.h>

#include "contract.cuh"

// A number of eight bits, as an operand of products.
struct E4m3 {
    uint8_t bits;
};

// The largest, and columns of a row of activations, and of a weight's block, with a common scale.
constexpr float E4M3_MAX = 448.0f;
using contract::fp8::GROUP;

// The scale of numbers whose largest magnitude is `largest`: never zero.
__device__ __forceinline__ float e4m3_scale(float largest) { return fmaxf(__fdiv_rn(largest, E4M3_MAX), 1.17549435e-38f); }

// A number rounded to the nearest, ties to even, at most 448 in size; what is no number stays none. What `E4m3::from_f32`
// in src/e4m3.rs does.
__device__ __forceinline__ uint32_t e4m3_by_bits(float value) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    // Below 2^-6 a sum with 2^14 has a last bit that is worth 2^-9. Above, twenty bits go, rounded to even; the exponent's
    // bias falls from 127 to 7.
    const uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) & 0xffu;
    const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    uint32_t code = size < 0x3c800000u ? small : normal;
    code = size >= 0x43e00000u ? 0x7eu : code;
    code = size > 0x7f800000u ? 0x7fu : code;
    return (bits >> 24 & 0x80u) | code;
}

// Two numbers rounded to the nearest, ties to even, at most 448 in size; the first in the low byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return e4m3_by_bits(low) | e4m3_by_bits(high) << 8;
#else
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// The other way: two numbers as f16, which has all of them. From sm_89 on.
__device__ __forceinline__ uint32_t e4m3_pair_to_halves(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

// The larger magnitude; what is no number counts for none.
__device__ __forceinline__ float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }
