// Weights: how likely a token is beside the likeliest, in whole numbers.
//
// A weight is exp((logit - largest) / temperature) in units of 2^-44, so that sums are exact and their order, the slices
// and the batch change nothing. What is less likely than 2^-45 of the likeliest has weight 0 and is never drawn; that is
// 2^-26 of the whole at most, in the largest vocabulary of 2^19, whose weights still fit 64 bits.
#pragma once

#include <stdint.h>

constexpr float WEIGHT_UNITS = 17592186044416.0f;
// Its exponential is under half a unit.
constexpr float WEIGHTLESS = -32.0f;

// 1 / temperature in two floats, so that a product has the error of one rounding.
struct Softening {
    float high;
    float low;
};

__device__ __forceinline__ Softening softening_of(double temperature) {
    const double inverse = 1.0 / temperature;
    // Colder than 2^-126 is as cold as that.
    const float high = static_cast<float>(fmin(inverse, 3.0e38));
    const float low = inverse < 3.0e38 ? static_cast<float>(inverse - static_cast<double>(high)) : 0.0f;
    return {high, low};
}

// `difference` = logit - largest, 0 at most.
__device__ __forceinline__ float likelihood(float difference, Softening softening) {
    const float exponent = difference * softening.high;
    // Not only fast: far below there are infinities of both signs.
    if (!(exponent > WEIGHTLESS)) {
        return 0.0f;
    }
    return expf(fmaf(difference, softening.high, difference * softening.low));
}

__device__ __forceinline__ uint64_t weight_of(float difference, Softening softening) {
    return __float2ull_rn(likelihood(difference, softening) * WEIGHT_UNITS);
}

// The number of `weights` at which `share` of them is reached: at least one, all at most.
__device__ __forceinline__ uint64_t threshold_of(double share, uint64_t weights) {
    const double threshold = ceil(share * static_cast<double>(weights));
    const uint64_t whole = threshold < 1.0 ? 1 : static_cast<uint64_t>(threshold);
    return whole < weights ? whole : weights;
}

// Where a draw falls: the first candidate whose running sum is larger is drawn.
__device__ __forceinline__ uint64_t target_of(double uniform, uint64_t weights) {
    const uint64_t target = static_cast<uint64_t>(uniform * static_cast<double>(weights));
    return target < weights ? target : weights - 1;
}
