// Tiles of one expert. A place is a position in the list of all choices sorted by expert
// (experts.cu). Defines a tile of places, and how a warp writes the output of a tile.
#pragma once

#include "element.cuh"
#include "gate.cuh"

// Consecutive places of one expert: `first` up to, but not including, `end`.
struct Tile {
    uint32_t expert;
    uint32_t first;
    uint32_t end;
};

// Writes the products of a warp's 16 weight rows with GROUPS * 8 places. `c` has the layout of
// tensor_core.cuh. If gated, the 16 rows are eight rows of gate and the same eight rows
// of up, to which `gated` is applied. Otherwise, each product is multiplied by the weight of its
// choice.
template <typename Element, uint32_t GROUPS, bool GATED>
__device__ __forceinline__ void write_tile(const float (&c)[GROUPS][4], const Tile& tile, uint32_t first_feature,
                                           uint32_t warp, uint32_t features, const uint32_t* choices, const float* weights,
                                           const GatedProduct& gated, Element* out) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t place = tile.first + group * 8 + lane % 4 * 2 + i;
            if (place >= tile.end) {
                continue;
            }
            Element* row = out + static_cast<uint64_t>(place) * features;
            if (GATED) {
                const uint32_t feature = first_feature + warp * 8 + lane / 4;
                if (feature < features) {
                    row[feature] = from_float<Element>(gated(c[group][i], c[group][2 + i]));
                }
            } else {
                const float by = weights[choices[place]];
#pragma unroll
                for (uint32_t half = 0; half < 2; ++half) {
                    const uint32_t feature = first_feature + warp * 16 + half * 8 + lane / 4;
                    if (feature < features) {
                        row[feature] = from_float<Element>(by * c[group][2 * half + i]);
                    }
                }
            }
        }
    }
}
