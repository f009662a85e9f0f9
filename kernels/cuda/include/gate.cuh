// The tanh approximation of GELU, and the activations of a gated MLP's gates, in f32.
#pragma once

#include <stdint.h>

#include "contract.cuh"
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

// activation(gate) * up, with the activation chosen at launch: x * logistic(x * (linear + cubic *
// x^2)). The factors 1 and 0 are SiLU, with the same bits as silu(). For GELU, the factors are those
// of gelu_tanh().
struct GatedProduct {
    float linear, cubic;

    __device__ __forceinline__ explicit GatedProduct(uint32_t activation) {
        const bool is_gelu = activation == contract::gate::GELU_TANH;
        linear = is_gelu ? 1.5957691f : 1.0f;
        cubic = is_gelu ? 1.5957691f * 0.044715f : 0.0f;
    }
    __device__ __forceinline__ float operator()(float gate, float up) const {
        // The square is kept finite, because 0 * infinity would be NaN.
        const float square = fminf(gate * gate, 1e30f);
        return times_logistic(gate, gate * fmaf(cubic, square, linear)) * up;
    }
};
