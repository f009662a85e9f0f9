// FP8 as weights and activations have it: E4M3 (Micikevicius et al. 2022, arXiv 2209.05433), from sm_89 on.
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

// Two numbers rounded to the nearest, ties to even, at most 448 in size; the first in the low byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// The other way: two numbers as f16, which has all of them.
__device__ __forceinline__ uint32_t e4m3_pair_to_halves(uint16_t pair) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}

// The larger magnitude; what is no number counts for none.
__device__ __forceinline__ float larger_magnitude(float largest, float value) { return fmaxf(largest, fabsf(value)); }
