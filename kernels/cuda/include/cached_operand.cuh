// Keys and values as operands of the tensor cores: as stored in the cache, or widened from E4M3 to
// f16, which represents every E4M3 number exactly. f16 also keeps all mantissa bits of a bf16 query
// with a magnitude from 2^-17 to 65504, the latter far above the magnitude of real queries.
#pragma once

#include <type_traits>

#include "e4m3.cuh"
#include "element.cuh"

// Type in which cached numbers are multiplied.
template <typename Element, typename Cached>
using Multiplied = std::conditional_t<std::is_same_v<Cached, E4m3>, __half, Element>;

// Two adjacent cached numbers, converted to the type in which they are multiplied.
template <typename Cached, typename Pair>
__device__ __forceinline__ uint32_t to_operand(Pair pair) {
    if constexpr (std::is_same_v<Cached, E4m3>) {
        return e4m3_pair_to_halves(pair);
    } else {
        return pair;
    }
}

// Two adjacent numbers of a query, converted to the type in which they are multiplied. Values that
// are too large for f16 become the largest f16 number.
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
