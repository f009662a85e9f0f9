// Tiles of places (Hopper). A place is a position in the list of all choices sorted by expert
// (experts.cu), and all places of a tile belong to one expert. Every block computes the list of
// tiles itself.
#pragma once

#include "contract.cuh"
#include "expert_tiles.cuh"
#include "hopper_copy.cuh"

// ID of the named barrier of the block's first 128 threads, which count the tiles.
constexpr uint32_t WARPGROUP_MEETS = 1;

// For each expert, the sum of the counts of all experts before it. `sum_up` defines the count.
struct ExpertSums {
    static constexpr uint32_t EXPERTS_MAX = contract::experts::EXPERTS_MAX;
    static constexpr uint32_t COUNTERS = 128;

    uint32_t before[EXPERTS_MAX + 1];  // the sum before each expert
    uint32_t of_warp[COUNTERS / 32];

    // Computes the prefix sums of `count(places)` over the experts, where `places` is the expert's
    // number of places. Called by the first threads of the block, each of which handles consecutive
    // experts. The results are visible to other threads after a barrier of the block.
    template <typename Count>
    __device__ __forceinline__ void sum_up(const uint32_t* starts, uint32_t experts, Count count) {
        constexpr uint32_t OF_THREAD = EXPERTS_MAX / COUNTERS;
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t own[OF_THREAD], sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < OF_THREAD; ++i) {
            const uint32_t expert = threadIdx.x * OF_THREAD + i;
            own[i] = 0;
            if (expert < experts) {
                own[i] = count(starts[expert + 1] - starts[expert]);
            }
            sum += own[i];
        }
        uint32_t until = sum;
#pragma unroll
        for (uint32_t distance = 1; distance < 32; distance *= 2) {
            const uint32_t more = __shfl_up_sync(0xffffffffu, until, distance);
            until += lane >= distance ? more : 0;
        }
        if (lane == 31) {
            of_warp[warp] = until;
        }
        part_sync(WARPGROUP_MEETS, COUNTERS);
        uint32_t now = until - sum;
        for (uint32_t other = 0; other < warp; ++other) {
            now += of_warp[other];
        }
#pragma unroll
        for (uint32_t i = 0; i < OF_THREAD; ++i) {
            before[threadIdx.x * OF_THREAD + i] = now;
            now += own[i];
        }
        if (threadIdx.x == COUNTERS - 1) {
            before[EXPERTS_MAX] = now;
        }
    }

    // The last expert for which `tiles_before` returns at most `tiles`.
    template <typename TilesBefore>
    static __device__ __forceinline__ uint32_t last_with(uint32_t tiles, uint32_t experts, TilesBefore tiles_before) {
        uint32_t low = 0, high = experts;
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (tiles_before(middle) <= tiles) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

// The tiles of all experts, one expert after the other.
struct Tiles : ExpertSums {
    // Counts tiles of PLACES places. Must be called by the same threads as `sum_up`.
    template <uint32_t PLACES>
    __device__ __forceinline__ void count(const uint32_t* starts, uint32_t experts) {
        sum_up(starts, experts, [](uint32_t places) { return (places + PLACES - 1) / PLACES; });
    }

    // The expert of a tile.
    __device__ __forceinline__ uint32_t expert_of(uint32_t tile, uint32_t experts) const {
        return last_with(tile, experts, [&](uint32_t expert) { return before[expert]; });
    }

    // Tile `number`, which must belong to `expert`.
    template <uint32_t PLACES>
    __device__ __forceinline__ Tile tile(uint32_t number, uint32_t expert, const uint32_t* starts) const {
        const uint32_t first = starts[expert] + (number - before[expert]) * PLACES;
        return {expert, first, min(starts[expert + 1], first + PLACES)};
    }
};
