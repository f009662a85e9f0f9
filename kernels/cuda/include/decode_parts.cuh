// Adding up what several warps, or several thread blocks, found for the same eight query vectors over different keys.
//
// A part is [8, head_dim + 2] f32: for each query vector its values weighted by 2^(score - highest), the highest score
// (in powers of two) and the sum of the weights. Query vector q stands in row `part_row(q)`, so that the lanes that hold
// neighbours write to different banks of shared memory.
#pragma once

#include "decode_share.cuh"
#include "element.cuh"
#include "online_softmax.cuh"

template <uint32_t HEAD_DIM>
constexpr uint32_t PART_PITCH = HEAD_DIM + 2;
template <uint32_t HEAD_DIM>
constexpr uint32_t PART_FLOATS = TILE_QUERIES * PART_PITCH<HEAD_DIM>;

__device__ __forceinline__ uint32_t part_row(uint32_t query) { return query % 2 * (TILE_QUERIES / 2) + query / 2; }

// What to multiply a part by whose weights are measured from `highest`, where the common ones are measured from `from`.
// A part without a key counts nothing; one with a sum that is no number must show, whatever its highest score is.
__device__ __forceinline__ float part_factor(float highest, float sum, float from) {
    return sum == 0.0f ? 0.0f : power_of_two(highest - from);
}

// Some parts of shared memory become one: calls `finish(query, element, value of it, value of the next, highest, sum)`
// for each pair of neighbours. All threads share the work.
template <uint32_t HEAD_DIM, typename Finish>
__device__ __forceinline__ void add_parts(const float* parts, uint32_t count, uint32_t queries, Finish finish) {
    constexpr uint32_t PAIRS = HEAD_DIM / 2;
    for (uint32_t item = threadIdx.x; item < queries * PAIRS; item += blockDim.x) {
        const uint32_t query = item / PAIRS, element = item % PAIRS * 2;
        const float* row = parts + part_row(query) * PART_PITCH<HEAD_DIM>;
        float highest = -INFINITY, sum = 0.0f;
        for (uint32_t part = 0; part < count; ++part) {
            highest = fmaxf(highest, row[part * PART_FLOATS<HEAD_DIM> + HEAD_DIM]);
        }
        float2 value = make_float2(0.0f, 0.0f);
        for (uint32_t part = 0; part < count; ++part) {
            const float* own = row + part * PART_FLOATS<HEAD_DIM>;
            const float2 of_part = *reinterpret_cast<const float2*>(own + element);
            const float2 scale = *reinterpret_cast<const float2*>(own + HEAD_DIM);
            const float factor = part_factor(scale.x, scale.y, highest);
            value.x += factor * of_part.x;
            value.y += factor * of_part.y;
            sum += factor * scale.y;
        }
        finish(query, element, value, highest, sum);
    }
}

// Each warp adds up every `warps`-th of the parts that `part_at(i)` names in global memory, and leaves one part in shared
// memory. Other thread blocks wrote them: the first cache is passed by.
template <uint32_t HEAD_DIM, typename PartAt>
__device__ __forceinline__ void gather_parts(PartAt part_at, uint32_t count, uint32_t queries, float* own) {
    constexpr uint32_t PAIRS = HEAD_DIM / 2, STEPS = (PAIRS + WARP - 1) / WARP;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    float2 values[TILE_QUERIES][STEPS], scales[TILE_QUERIES];
#pragma unroll
    for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
        scales[query] = make_float2(-INFINITY, 0.0f);
#pragma unroll
        for (uint32_t step = 0; step < STEPS; ++step) {
            values[query][step] = make_float2(0.0f, 0.0f);
        }
    }
    for (uint32_t part = warp; part < count; part += warps) {
        const float* from = part_at(part);
#pragma unroll
        for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
            if (query >= queries) {
                break;
            }
            const float2* row = reinterpret_cast<const float2*>(from + part_row(query) * PART_PITCH<HEAD_DIM>);
            const float2 scale = __ldcg(row + PAIRS);
            const float highest = fmaxf(scale.x, scales[query].x);
            const float old = part_factor(scales[query].x, scales[query].y, highest);
            const float added = part_factor(scale.x, scale.y, highest);
            scales[query] = make_float2(highest, old * scales[query].y + added * scale.y);
#pragma unroll
            for (uint32_t step = 0; step < STEPS; ++step) {
                if (step * WARP + lane < PAIRS) {
                    const float2 next = __ldcg(row + step * WARP + lane);
                    values[query][step].x = old * values[query][step].x + added * next.x;
                    values[query][step].y = old * values[query][step].y + added * next.y;
                }
            }
        }
    }
#pragma unroll
    for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
        float2* row = reinterpret_cast<float2*>(own + part_row(query) * PART_PITCH<HEAD_DIM>);
#pragma unroll
        for (uint32_t step = 0; step < STEPS; ++step) {
            if (step * WARP + lane < PAIRS) {
                row[step * WARP + lane] = values[query][step];
            }
        }
        if (lane == 0) {
            row[PAIRS] = scales[query];
        }
    }
}
