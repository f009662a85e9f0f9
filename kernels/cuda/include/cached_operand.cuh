// Keys and values as operands of the tensor cores: as they stand in the cache, or widened from E4M3 to f16. An f16 has all
// numbers of E4M3, and of a bf16 query all digits: those up to 65504, far beyond what queries are.
#pragma once

#include <type_traits>

#include "e4m3.cuh"
#include "element.cuh"

// The type in which cached numbers are multiplied.
template <typename Element, typename Cached>
using Multiplied = std::conditional_t<std::is_same_v<Cached, E4m3>, __half, Element>;

// Two neighbours of the cache, likewise.
template <typename Cached, typename Pair>
__device__ __forceinline__ uint32_t to_operand(Pair pair) {
    if constexpr (std::is_same_v<Cached, E4m3>) {
        return e4m3_pair_to_halves(pair);
    } else {
        return pair;
    }
}

// Two neighbours of a query; what is too large for an f16 becomes its largest.
template <typename Cached, typename Element>
__device__ __forceinline__ uint32_t query_operand(uint32_t pair) {
    if constexpr (std::is_same_v<Multiplied<Element, Cached>, Element>) {
        return pair;
    } else {
        const float2 both = pair_to_floats<Element>(pair);
        uint32_t halves;
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(both.y), "f"(both.x));
        return halves;
    }
}
