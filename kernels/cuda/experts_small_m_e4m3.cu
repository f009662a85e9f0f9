// GEMMs of few rows with expert weights in E4M3: see experts_small_m_product.cuh. Scales are laid
// out as in small_m_formats.cuh, with the weight rows numbered consecutively over all experts.
//
// Targets: sm_90a

#include "experts_small_m_product.cuh"

#define EXPERTS_SMALL_M(scales, BLOCKS, name, Element, PLACES) \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_experts_small_m_e4m3_##scales##_##name##_r##PLACES( \
        const __grid_constant__ TensorMap weight, const E4m3* x, uint32_t x_pitch, uint32_t in, uint32_t features,        \
        const uint32_t* choices, uint32_t top, const uint32_t* starts, uint32_t experts, uint32_t activation, \
        Element* out, uint32_t stages, const float* weight_scales, const float* x_scales, float fixed, \
        uint32_t groups, uint32_t height) { \
        small_m<E4m3Format<Element, BLOCKS>, PLACES, true>( \
            weight, {x, choices, starts, nullptr, out, x_pitch, in, features, top, experts, activation, stages, \
                     {weight_scales, x_scales, fixed, groups, height}});                                                  \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS) experts_small_m_e4m3_##scales##_##name##_r##PLACES( \
        const __grid_constant__ TensorMap weight, const E4m3* x, uint32_t in, uint32_t features, const uint32_t* choices, \
        uint32_t top, const uint32_t* starts, uint32_t experts, const float* weights, Element* out, uint32_t stages,      \
        const float* weight_scales, const float* x_scales, float fixed, uint32_t groups, uint32_t height) {               \
        small_m<E4m3Format<Element, BLOCKS>, PLACES, false>( \
            weight, {x, choices, starts, weights, out, in, in, features, top, experts, contract::gate::SILU, \
                     stages, {weight_scales, x_scales, fixed, groups, height}}); \
    }
#define WITH(scales, BLOCKS, name, Element)          \
    EXPERTS_SMALL_M(scales, BLOCKS, name, Element, 8)    \
    EXPERTS_SMALL_M(scales, BLOCKS, name, Element, 16)   \
    EXPERTS_SMALL_M(scales, BLOCKS, name, Element, 24)   \
    EXPERTS_SMALL_M(scales, BLOCKS, name, Element, 32)
#define KERNEL(name, Element)           \
    WITH(blocks, true, name, Element)   \
    WITH(rows, false, name, Element)
FOR_EACH_ACTIVATION(KERNEL)
