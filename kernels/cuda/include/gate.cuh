// The tanh approximation of GELU, and the activations of a gated MLP's gates, in f32.
#pragma once

#include "logistic.cuh"

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) (Hendrycks and Gimpel 2016, arXiv
// 1606.08415). (1 + tanh(y)) / 2 is the logistic function of 2 * y; 1.5957691 is 2 * sqrt(2 / pi).
__device__ __forceinline__ float gelu_tanh(float x) { return times_logistic(x, 1.5957691f * (x + 0.044715f * x * x * x)); }

enum class Gate { SILU, GELU_TANH };

template <Gate GATE>
__device__ __forceinline__ float activation(float gate) {
    if constexpr (GATE == Gate::SILU) {
        return silu(gate);
    } else {
        return gelu_tanh(gate);
    }
}
