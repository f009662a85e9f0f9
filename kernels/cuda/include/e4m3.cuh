// FP8 in the E4M3 format, for weights and activations (Micikevicius et al. 2022, arXiv
// 2209.05433). GPUs from sm_89 on have conversion instructions; for older GPUs, the conversion
// works on the bits of f32 numbers.
#pragma once

#include <stdint.h>

#include "contract.cuh"

// An 8-bit number, as an operand of GEMMs.
struct E4m3 {
    uint8_t bits;
};

// E4M3_MAX is the largest E4M3 number. With scales by groups and blocks, GROUP columns of a row of
// activations, and of a block of a weight, have a common scale.
constexpr float E4M3_MAX = 448.0f;
using contract::fp8::GROUP;

// The scale for numbers whose largest magnitude is `largest`. It is never zero.
__device__ __forceinline__ float e4m3_scale(float largest) { return fmaxf(__fdiv_rn(largest, E4M3_MAX), 1.17549435e-38f); }

// Rounds to the nearest number, ties to even, and limits the magnitude to 448. NaN stays NaN.
// `E4m3::from_f32` in kernels/src/e4m3.rs does the same.
__device__ __forceinline__ uint32_t e4m3_by_bits(float value) {
    const uint32_t bits = __float_as_uint(value), size = bits & 0x7fffffffu;
    // Below 2^-6, the last bit of the sum with 2^14 is worth 2^-9, so the addition rounds. From
    // 2^-6 on, the last 20 bits are dropped, with rounding to even, and the bias of the exponent
    // changes from 127 to 7.
    const uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(size), 16384.0f)) & 0xffu;
    const uint32_t normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    uint32_t code = size < 0x3c800000u ? small : normal;
    code = size >= 0x43e00000u ? 0x7eu : code;
    code = size > 0x7f800000u ? 0x7fu : code;
    return (bits >> 24 & 0x80u) | code;
}

// Rounds two numbers to the nearest, ties to even, and limits magnitudes to 448. The first number
// is in the low byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    return e4m3_by_bits(low) | e4m3_by_bits(high) << 8;
#else
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

// Converts two E4M3 numbers to f16, which represents every E4M3 number exactly. Requires sm_89.
__device__ __forceinline__ uint32_t e4m3_pair_to_halves(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

// The larger magnitude. NaN is ignored.
__device__ __forceinline__ float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }
