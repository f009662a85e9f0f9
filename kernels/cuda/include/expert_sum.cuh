// Sum of the outputs of a row's experts. The expert GEMMs have already multiplied the outputs by
// the routing weights.
#pragma once

#include "element.cuh"

// Number of products of a row's choices that are loaded at once.
constexpr uint32_t PRODUCTS_AT_ONCE = 8;

// Adds the products of a row's choices in the order of the choices. The product of choice `i` is
// row `places[i]` of `products`, for `i` below `top`. `each(step)` calls `step(slot, column)` for
// each vector of `WIDTH` elements in `sums`. Places for which `is_here` returns false are left out.
template <uint32_t WIDTH, uint32_t SLOTS, typename Element, typename Each, typename IsHere>
__device__ __forceinline__ void add_products(const Element* products, const uint32_t* places, uint32_t top,
                                             uint32_t columns, const Each& each, const IsHere& is_here,
                                             float (&sums)[SLOTS][WIDTH]) {
    for (uint32_t first = 0; first < top; first += PRODUCTS_AT_ONCE) {
        uint32_t at[PRODUCTS_AT_ONCE];
        Words<WIDTH, Element> more[SLOTS][PRODUCTS_AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < PRODUCTS_AT_ONCE; ++i) {
            at[i] = places[min(first + i, top - 1)];
        }
        each([&](uint32_t slot, uint32_t column) {
#pragma unroll
            for (uint32_t i = 0; i < PRODUCTS_AT_ONCE; ++i) {
                more[slot][i] = load_words<WIDTH>(products + static_cast<uint64_t>(at[i]) * columns + column);
            }
        });
        each([&](uint32_t slot, uint32_t) {
#pragma unroll
            for (uint32_t i = 0; i < PRODUCTS_AT_ONCE; ++i) {
                if (first + i < top && is_here(at[i])) {
                    float values[WIDTH];
                    widen<WIDTH, Element>(more[slot][i], values);
#pragma unroll
                    for (uint32_t j = 0; j < WIDTH; ++j) {
                        sums[slot][j] += values[j];
                    }
                }
            }
        });
    }
}

// The operands of a sum over a row's experts that is added to a residual.
template <typename Element>
struct ExpertSum {
    const Element* products;  // [rows * top, columns], contiguous, in the order of places
    const uint32_t* places;   // [rows * top], indexed by choice
    uint32_t top;
    Element* residual;  // [rows, columns], rows residual_pitch elements apart
    uint32_t residual_pitch;
    uint32_t columns;

    __device__ __forceinline__ Element* row_of_residual(uint64_t row) const {
        return residual + row * residual_pitch;
    }

    // Sums up a row's products and the previous contents of the residual: see `add_products`.
    template <uint32_t WIDTH, uint32_t SLOTS, typename Each>
    __device__ __forceinline__ void add(uint64_t row, const Each& each, float (&sums)[SLOTS][WIDTH]) const {
        each([&](uint32_t slot, uint32_t column) { load<WIDTH>(row_of_residual(row) + column, sums[slot]); });
        const auto all_are_here = [](uint32_t) { return true; };
        add_products<WIDTH>(products, places + row * top, top, columns, each, all_are_here, sums);
    }
};
