// Shared by rms_norm.cu and layer_norm.cu: the arguments of a launch, the vectors of a row that a
// thread keeps in registers, and the prefetch of the next row.
#pragma once

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

// The largest number of vectors of a row that a thread keeps in registers.
constexpr uint32_t HELD = 2;

template <typename Element>
struct Rows {
    const Element* x;
    uint32_t x_pitch;
    const Element *weight, *bias;  // a root-mean-square norm has no bias
    uint32_t rows, hidden;
    float epsilon;
    Element* out;
    float weight_offset = 0.0f;  // of a root-mean-square norm
};

// Calls `step(slot, column)` for each vector of `WIDTH` elements of a row that this thread keeps in
// registers.
template <uint32_t WIDTH, typename Step>
__device__ __forceinline__ void each_held(uint32_t vectors, Step step) {
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        if (vector < vectors) {
            step(slot, vector * WIDTH);
        }
    }
}

// Starts to read a row into registers, without converting it.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void fetch_row(const Rows<Element>& call, uint32_t vectors, uint64_t row,
                                          Words<WIDTH, Element> (&ahead)[HELD]) {
    each_held<WIDTH>(vectors, [&](uint32_t slot, uint32_t column) {
        ahead[slot] = load_words<WIDTH>(call.x + row * call.x_pitch + column);
    });
}

// Normalizes every gridDim.x-th row, `WIDTH` elements at a time. rms_norm.cu and layer_norm.cu each
// define this function.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_rows(const Rows<Element>& call);

// Normalizes the rows of a launch, with 16-byte accesses if all addresses allow them.
template <typename Element>
__device__ __forceinline__ void norm(const Rows<Element>& call) {
    let_next_kernel_start();
    const uint64_t starts = reinterpret_cast<uint64_t>(call.x) | reinterpret_cast<uint64_t>(call.out)
        | reinterpret_cast<uint64_t>(call.weight) | reinterpret_cast<uint64_t>(call.bias);
    const uint64_t steps = call.x_pitch | call.hidden;
    if (aligned_to(starts, 16) && steps % VECTOR<Element> == 0) {
        norm_rows<VECTOR<Element>>(call);
    } else {
        norm_rows<1>(call);
    }
}
