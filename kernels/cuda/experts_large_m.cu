// GEMMs of many rows with expert weights of the activations' type: see experts_large_m_product.cuh.
//
// Targets: sm_90a

#include "experts_large_m_product.cuh"

#define KERNEL(name, Element)                                                                                              \
    extern "C" __global__ void IN_CLUSTERS                                                                                 \
        gated_experts_large_m_##name(const __grid_constant__ TensorMap weight, const Element* x, uint32_t x_pitch, \
                                  uint32_t in, uint32_t features, const uint32_t* choices, uint32_t top,                   \
                                  const uint32_t* starts, uint32_t experts, uint32_t activation, Element* out) { \
        large_m<true, PlainFormat<Element>>(weight, {x, choices, starts, nullptr, out, x_pitch, in, features, top, \
                                                     experts, activation, {}}); \
    }                                                                                                                      \
    extern "C" __global__ void IN_CLUSTERS                                                                                 \
        experts_large_m_##name(const __grid_constant__ TensorMap weight, const Element* x, uint32_t in, uint32_t features, \
                            const uint32_t* choices, uint32_t top, const uint32_t* starts, uint32_t experts,               \
                            const float* weights, Element* out) {                                                          \
        large_m<false, PlainFormat<Element>>(weight, {x, choices, starts, weights, out, in, in, features, top, \
                                                      experts, contract::gate::SILU, {}}); \
    }
FOR_EACH_ACTIVATION(KERNEL)
