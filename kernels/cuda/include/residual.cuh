// What is added to a residual, and read again by what comes behind.
#pragma once

#include "element.cuh"

// Writes `residual + added` to `to`, rounded to the element, and gives it as it stands there.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ Words<COUNT, Element> add_residual(const Words<COUNT, Element>& added,
                                                              const Words<COUNT, Element>& residual, Element* to) {
    float values[COUNT], before[COUNT];
    widen<COUNT, Element>(added, values);
    widen<COUNT, Element>(residual, before);
#pragma unroll
    for (uint32_t i = 0; i < COUNT; ++i) {
        values[i] += before[i];
    }
    const auto sum = to_words<COUNT, Element>(values);
    *reinterpret_cast<Words<COUNT, Element>*>(to) = sum;
    return sum;
}
