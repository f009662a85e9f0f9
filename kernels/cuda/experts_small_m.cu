// GEMMs of few rows with expert weights of the activations' type: see experts_small_m_product.cuh.
//
// Targets: sm_90a

#include "experts_small_m_product.cuh"

#define EXPERTS_SMALL_M(name, Element, PLACES) \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        gated_experts_small_m_##name##_r##PLACES(const __grid_constant__ TensorMap weight, const Element* x, uint32_t x_pitch, \
                                             uint32_t in, uint32_t features, const uint32_t* choices, uint32_t top,        \
                                             const uint32_t* starts, uint32_t experts, uint32_t activation, \
                                             Element* out, uint32_t stages) { \
        small_m<PlainFormat<Element>, PLACES, true>( \
            weight, {x, choices, starts, nullptr, out, x_pitch, in, features, top, experts, activation, stages, {}}); \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                  \
        experts_small_m_##name##_r##PLACES(const __grid_constant__ TensorMap weight, const Element* x, uint32_t in, \
                                       uint32_t features, const uint32_t* choices, uint32_t top, const uint32_t* starts,   \
                                       uint32_t experts, const float* weights, Element* out, uint32_t stages) {            \
        small_m<PlainFormat<Element>, PLACES, false>(weight, \
                                    {x, choices, starts, weights, out, in, in, features, top, experts, \
                                     contract::gate::SILU, stages, {}}); \
    }
#define KERNEL(name, Element)     \
    EXPERTS_SMALL_M(name, Element, 8)  \
    EXPERTS_SMALL_M(name, Element, 16) \
    EXPERTS_SMALL_M(name, Element, 24) \
    EXPERTS_SMALL_M(name, Element, 32)
FOR_EACH_ACTIVATION(KERNEL)
