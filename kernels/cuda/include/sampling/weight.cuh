// Weights: the probability of a token relative to the most likely token, as an integer.
//
// A weight is exp((logit - largest) / temperature) in units of 2^-44. Sums of integers are exact,
// so they do not depend on the order of additions, the slices or the batch. A token that is less
// likely than 2^-45 times the most likely token has weight 0 and is never drawn. In the largest
// vocabulary, 2^19 tokens, such tokens have at most 2^-26 of the total probability, and the sum of
// all weights still fits in 64 bits.
#pragma once

#include <stdint.h>

constexpr float WEIGHT_UNITS = 17592186044416.0f;
// exp(WEIGHTLESS) is less than half a unit.
constexpr float WEIGHTLESS = -32.0f;

// 1 / temperature as the sum of two floats, so that a product with 1 / temperature has the error of
// only one rounding.
struct Softening {
    float high;
    float low;
};

__device__ __forceinline__ Softening softening_of(double temperature) {
    const double inverse = 1.0 / temperature;
    // Temperatures below 1 / 3e38 act like that temperature.
    const float high = static_cast<float>(fmin(inverse, 3.0e38));
    const float low = inverse < 3.0e38 ? static_cast<float>(inverse - static_cast<double>(high)) : 0.0f;
    return {high, low};
}

// `difference` = logit - largest, at most 0.
__device__ __forceinline__ float likelihood(float difference, Softening softening) {
    const float exponent = difference * softening.high;
    // This early return is not only an optimization: far below 0, the sum below would add
    // infinities of opposite signs.
    if (!(exponent > WEIGHTLESS)) {
        return 0.0f;
    }
    return expf(fmaf(difference, softening.high, difference * softening.low));
}

__device__ __forceinline__ uint64_t weight_of(float difference, Softening softening) {
    return __float2ull_rn(likelihood(difference, softening) * WEIGHT_UNITS);
}

// The sum at which the fraction `share` of `weights` is reached, from 1 to `weights`.
__device__ __forceinline__ uint64_t threshold_of(double share, uint64_t weights) {
    const double threshold = ceil(share * static_cast<double>(weights));
    const uint64_t whole = threshold < 1.0 ? 1 : static_cast<uint64_t>(threshold);
    return whole < weights ? whole : weights;
}

// The target of a draw: the first candidate whose running sum exceeds it is drawn.
__device__ __forceinline__ uint64_t target_of(double uniform, uint64_t weights) {
    const uint64_t target = static_cast<uint64_t>(uniform * static_cast<double>(weights));
    return target < weights ? target : weights - 1;
}
