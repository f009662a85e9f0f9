// Output of a warp for a tile of an expert's places, with several adjacent features per store
// (sm_90a).
#pragma once

#include "expert_tiles.cuh"
#include "tensor_core.cuh"

// Transposes an 8 x 8 matrix of 16-bit elements; each lane has two elements of a row.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Four lanes have the eight pairs of a row, each lane the pairs `lane % 4` and 4 + `lane % 4`.
// Returns the two adjacent pairs from 2 * (lane % 4) on.
__device__ __forceinline__ uint2 adjacent_pairs(uint32_t low, uint32_t high) {
    const uint32_t lane = threadIdx.x % 32;
    const bool is_behind = lane & 2, is_odd = lane & 1;
    const uint32_t from_half = __shfl_xor_sync(0xffffffffu, is_behind ? low : high, 2);
    const uint32_t first = is_behind ? from_half : low, second = is_behind ? high : from_half;
    const uint32_t from_pair = __shfl_xor_sync(0xffffffffu, is_odd ? first : second, 1);
    return is_odd ? make_uint2(from_pair, second) : make_uint2(first, from_pair);
}

// Writes the products of a warp's 16 weight rows with GROUPS * 8 places. `c` has the layout of
// tensor_core.cuh. If gated, the 16 rows are eight rows of gate and the same eight rows
// of up, to which `gated` is applied. Otherwise, each product is multiplied by the factor of its
// place in `by`. The sums are rounded and packed into words; then words with one feature of two
// places are transposed into words with two features of one place, and a lane stores four features at
// once (two if gated).
// `out` is aligned to eight bytes, and `features` is a multiple of 8.
template <typename Element, uint32_t GROUPS, bool GATED>
__device__ __forceinline__ void write_places(const float (&c)[GROUPS][4], const float (&by)[GROUPS][2], const Tile& tile,
                                             uint32_t first_feature, uint32_t warp, uint32_t features,
                                             const GatedProduct& gated, Element* out) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t feature = first_feature + warp * (GATED ? 8 : 16) + lane % 4 * (GATED ? 2 : 4);
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; ++group) {
        const float(&sums)[4] = c[group];
        const uint32_t place = tile.first + group * 8 + lane / 4;
        const bool is_there = place < tile.end && feature < features;
        Element* to = out + static_cast<uint64_t>(place) * features + feature;
        if constexpr (GATED) {
            const uint32_t packed = TensorCoreElement<Element>::pack(gated(sums[0], sums[2]), gated(sums[1], sums[3]));
            const uint32_t pair = transposed(packed);
            if (is_there) {
                *reinterpret_cast<uint32_t*>(to) = pair;
            }
        } else {
            const uint32_t low = TensorCoreElement<Element>::pack(by[group][0] * sums[0], by[group][1] * sums[1]);
            const uint32_t high = TensorCoreElement<Element>::pack(by[group][0] * sums[2], by[group][1] * sums[3]);
            const uint2 pairs = adjacent_pairs(transposed(low), transposed(high));
            if (is_there) {
                *reinterpret_cast<uint2*>(to) = pairs;
            }
        }
    }
}
