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

// The highest score of each query vector in each warp: warps agree on it before they write their parts, so that adding
// those up is nothing but additions.
struct Highest {
    float of_warps[WARPS_MAX][TILE_QUERIES];

    __device__ __forceinline__ float among(uint32_t warps, uint32_t query) const {
        float highest = -INFINITY;
#pragma unroll 4
        for (uint32_t warp = 0; warp < warps; ++warp) {
            highest = fmaxf(highest, of_warps[warp][query]);
        }
        return highest;
    }
};

// Parts of `count` warps in shared memory, measured from the same highest scores, become one: calls
// `finish(query, element, value of it and of the next, highest, sum)`. All threads share the work.
template <uint32_t HEAD_DIM, typename Finish>
__device__ __forceinline__ void add_parts(const float* parts, uint32_t count, uint32_t queries, Finish finish) {
    constexpr uint32_t PAIRS = HEAD_DIM / 2;
#pragma unroll 1
    for (uint32_t item = threadIdx.x; item < queries * PAIRS; item += blockDim.x) {
        const uint32_t query = item / PAIRS, element = item % PAIRS * 2;
        const float* row = parts + part_row(query) * PART_PITCH<HEAD_DIM>;
        const float highest = row[HEAD_DIM];
        float2 value = make_float2(0.0f, 0.0f);
        float sum = 0.0f;
#pragma unroll 4
        for (uint32_t part = 0; part < count; ++part) {
            const float2 own = *reinterpret_cast<const float2*>(row + element);
            value.x += own.x;
            value.y += own.y;
            sum += row[HEAD_DIM + 1];
            row += PART_FLOATS<HEAD_DIM>;
        }
        finish(query, element, value, highest, sum);
    }
}

// Each warp adds up every n-th of the `count` parts that `part_at(i)` names in global memory, and leaves one part in
// shared memory for `add_parts`. Other thread blocks wrote them: the first cache is passed by. Ends with a barrier.
template <uint32_t HEAD_DIM, typename PartAt>
__device__ __forceinline__ void gather_parts(PartAt part_at, uint32_t count, uint32_t queries, Highest& highest,
                                             float* parts) {
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
#pragma unroll 1
    for (uint32_t part = warp; part < count; part += warps) {
        const float* from = part_at(part);
        float2 next[TILE_QUERIES][STEPS], next_scales[TILE_QUERIES];
        // Rows without a query vector were never written: whatever is read there stays in its own row.
#pragma unroll
        for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
            const float2* row = reinterpret_cast<const float2*>(from + part_row(query) * PART_PITCH<HEAD_DIM>);
            next_scales[query] = __ldcg(row + PAIRS);
#pragma unroll
            for (uint32_t step = 0; step < STEPS; ++step) {
                if (step * WARP + lane < PAIRS) {
                    next[query][step] = __ldcg(row + step * WARP + lane);
                }
            }
        }
#pragma unroll
        for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
            const float most = fmaxf(next_scales[query].x, scales[query].x);
            const float old = part_factor(scales[query].x, scales[query].y, most);
            const float added = part_factor(next_scales[query].x, next_scales[query].y, most);
            scales[query] = make_float2(most, old * scales[query].y + added * next_scales[query].y);
#pragma unroll
            for (uint32_t step = 0; step < STEPS; ++step) {
                if (step * WARP + lane < PAIRS) {
                    values[query][step].x = old * values[query][step].x + added * next[query][step].x;
                    values[query][step].y = old * values[query][step].y + added * next[query][step].y;
                }
            }
        }
    }
    if (lane == 0) {
#pragma unroll
        for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
            highest.of_warps[warp][query] = scales[query].x;
        }
    }
    __syncthreads();
    const uint32_t filled = min(warps, count);
    if (warp < filled) {
#pragma unroll
        for (uint32_t query = 0; query < TILE_QUERIES; ++query) {
            const float most = highest.among(filled, query);
            const float factor = part_factor(scales[query].x, scales[query].y, most);
            float2* row = reinterpret_cast<float2*>(parts + warp * PART_FLOATS<HEAD_DIM>
                                                    + part_row(query) * PART_PITCH<HEAD_DIM>);
#pragma unroll
            for (uint32_t step = 0; step < STEPS; ++step) {
                if (step * WARP + lane < PAIRS) {
                    row[step * WARP + lane] =
                        make_float2(factor * values[query][step].x, factor * values[query][step].y);
                }
            }
            if (lane == 0) {
                row[PAIRS] = make_float2(most, factor * scales[query].y);
            }
        }
    }
    __syncthreads();
}

// One more has arrived of `all`: gives how many had before. What this thread block wrote before the barrier in front is
// seen by whoever arrives later, and what those wrote who arrived earlier is seen behind the barrier that follows. The
// last one sets the counter back to zero.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter, uint32_t all) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(all - 1) : "memory");
    return before;
}
