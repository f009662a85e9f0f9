// GEMMs of many rows with expert weights in E4M3: see experts_large_m_product.cuh. Scales are laid
// out as in small_m_formats.cuh, with the weight rows numbered consecutively over all experts.
//
// Targets: sm_90a

#include "experts_large_m_product.cuh"

#define EXPERTS_LARGE_M(scales, BLOCKS_, name, Element) \
    extern "C" __global__ void IN_CLUSTERS gated_experts_large_m_e4m3_##scales##_##name( \
        const __grid_constant__ TensorMap weight, const E4m3* x, uint32_t x_pitch, uint32_t in, uint32_t features,         \
        const uint32_t* choices, uint32_t top, const uint32_t* starts, uint32_t experts, uint32_t activation, \
        Element* out, const float* weight_scales, const float* x_scales, float fixed, uint32_t groups, \
        uint32_t height) { \
        large_m<true, E4m3Format<Element, BLOCKS_>>(weight, {x, choices, starts, nullptr, out, x_pitch, in, features, top, \
                                                          experts, activation, \
                                                          {weight_scales, x_scales, fixed, groups, height}}); \
    }                                                                                                                      \
    extern "C" __global__ void IN_CLUSTERS experts_large_m_e4m3_##scales##_##name( \
        const __grid_constant__ TensorMap weight, const E4m3* x, uint32_t in, uint32_t features, const uint32_t* choices,  \
        uint32_t top, const uint32_t* starts, uint32_t experts, const float* weights, Element* out,                        \
        const float* weight_scales, const float* x_scales, float fixed, uint32_t groups, uint32_t height) {                \
        large_m<false, E4m3Format<Element, BLOCKS_>>(weight, {x, choices, starts, weights, out, in, in, features, top, \
                                                           experts, contract::gate::SILU, \
                                                           {weight_scales, x_scales, fixed, groups, height}}); \
    }
#define KERNEL(name, Element)                  \
    EXPERTS_LARGE_M(blocks, true, name, Element)  \
    EXPERTS_LARGE_M(rows, false, name, Element)
FOR_EACH_ACTIVATION(KERNEL)
