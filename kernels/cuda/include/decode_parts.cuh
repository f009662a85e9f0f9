// Adding up the results of several warps or thread blocks for the same eight query
// vectors over different keys.
//
// A part is [8, head_dim + 2] f32. For each query vector, a part has the sum of the values weighted
// by 2^(score - highest), the highest score (as an exponent of 2) and the sum of the weights. Query
// vector q is in row `part_row(q)`, so that lanes with adjacent query vectors write to different
// banks of shared memory.
#pragma once

#include "decode_share.cuh"
#include "element.cuh"
#include "online_softmax.cuh"

template <uint32_t HEAD_DIM>
constexpr uint32_t PART_PITCH = HEAD_DIM + 2;
template <uint32_t HEAD_DIM>
constexpr uint32_t PART_FLOATS = contract::attention_decode::PART_NUMBERS<HEAD_DIM>;

__device__ __forceinline__ uint32_t part_row(uint32_t query) { return query % 2 * (TILE_QUERIES / 2) + query / 2; }

// The factor that converts a part's weights, which are relative to the score `highest`, to weights
// relative to the score `from`. The factor of a part without keys is 0. A part whose sum is NaN
// must make the result NaN, whatever its highest score is.
__device__ __forceinline__ float part_factor(float highest, float sum, float from) {
    return sum == 0.0f ? 0.0f : power_of_two(highest - from);
}

// The highest score of each query vector in each warp. Warps agree on the overall highest score
// before they write their parts, so that adding up the parts takes only additions.
struct Highest {
    float of_warps[DECODE_WARPS_MAX][TILE_QUERIES];

    __device__ __forceinline__ float among(uint32_t warps, uint32_t query) const {
        float highest = -INFINITY;
#pragma unroll 4
        for (uint32_t warp = 0; warp < warps; ++warp) {
            highest = fmaxf(highest, of_warps[warp][query]);
        }
        return highest;
    }
};

// The elements of a query vector that one thread adds up: two adjacent elements of each quarter.
// Adjacent lanes have adjacent pairs, so that they never have bank conflicts in shared memory.
template <uint32_t HEAD_DIM>
struct Slice {
    static constexpr uint32_t COUNT = HEAD_DIM / 8, PAIRS = 4;
    float2 values[PAIRS] = {};
    float highest = -INFINITY, sum = 0.0f;

    static __device__ __forceinline__ uint32_t element(uint32_t slice, uint32_t pair) { return 2 * (slice + pair * COUNT); }
};

// Adds up the parts of `count` warps in shared memory. The parts are `pitch` floats apart, and
// their weights are relative to the same highest scores. Calls `finish(query, index of the slice,
// slice)`. All threads share the work.
template <uint32_t HEAD_DIM, typename Finish>
__device__ __forceinline__ void add_parts(const float* parts, uint32_t pitch, uint32_t count, uint32_t queries,
                                          Finish finish) {
    using Part = Slice<HEAD_DIM>;
#pragma unroll 1
    for (uint32_t item = threadIdx.x; item < queries * Part::COUNT; item += blockDim.x) {
        const uint32_t query = item / Part::COUNT, slice = item % Part::COUNT;
        const float* row = parts + part_row(query) * PART_PITCH<HEAD_DIM>;
        Part all;
        all.highest = row[HEAD_DIM];
#pragma unroll 4
        for (uint32_t part = 0; part < count; ++part) {
#pragma unroll
            for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                const float2 own = *reinterpret_cast<const float2*>(row + Part::element(slice, pair));
                all.values[pair].x += own.x;
                all.values[pair].y += own.y;
            }
            all.sum += row[HEAD_DIM + 1];
            row += pitch;
        }
        finish(query, slice, all);
    }
}

// Adds up `count` parts in global memory at the addresses `part_at(i)`, each relative to its own
// highest scores, and calls `finish` as `add_parts` does. Other thread blocks wrote the parts, so
// loads bypass the L1 cache. Eight parts are loaded at a time.
template <uint32_t HEAD_DIM, typename PartAt, typename Finish>
__device__ __forceinline__ void gather_parts(PartAt part_at, uint32_t count, uint32_t queries, Finish finish) {
    using Part = Slice<HEAD_DIM>;
    constexpr uint32_t AHEAD = 8;
#pragma unroll 1
    for (uint32_t item = threadIdx.x; item < queries * Part::COUNT; item += blockDim.x) {
        const uint32_t query = item / Part::COUNT, slice = item % Part::COUNT;
        Part all;
#pragma unroll 1
        for (uint32_t first = 0; first < count; first += AHEAD) {
            float2 values[AHEAD][Part::PAIRS], scales[AHEAD];
            float highest = all.highest;
#pragma unroll
            for (uint32_t part = 0; part < AHEAD; ++part) {
                scales[part] = make_float2(-INFINITY, 0.0f);
                if (first + part < count) {
                    const float* row = part_at(first + part) + part_row(query) * PART_PITCH<HEAD_DIM>;
                    scales[part] = __ldcg(reinterpret_cast<const float2*>(row + HEAD_DIM));
#pragma unroll
                    for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                        values[part][pair] =
                            __ldcg(reinterpret_cast<const float2*>(row + Part::element(slice, pair)));
                    }
                }
            }
#pragma unroll
            for (uint32_t part = 0; part < AHEAD; ++part) {
                highest = fmaxf(highest, scales[part].x);
            }
            const float old = part_factor(all.highest, all.sum, highest);
            all.highest = highest;
            all.sum *= old;
#pragma unroll
            for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                all.values[pair].x *= old;
                all.values[pair].y *= old;
            }
#pragma unroll
            for (uint32_t part = 0; part < AHEAD; ++part) {
                if (first + part < count) {
                    const float factor = part_factor(scales[part].x, scales[part].y, highest);
                    all.sum += factor * scales[part].y;
#pragma unroll
                    for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                        all.values[pair].x += factor * values[part][pair].x;
                        all.values[pair].y += factor * values[part][pair].y;
                    }
                }
            }
        }
        finish(query, slice, all);
    }
}

// Counts one of `all` arrivals and returns the number of earlier arrivals. Data that this thread
// block wrote before the preceding barrier is visible to thread blocks that arrive later. Data of
// thread blocks that arrived earlier is visible after the following barrier. The last arrival
// resets the counter to zero.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t all) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(all - 1) : "memory");
    return before;
}
