// The second launch of attention_paged_hopper_split_<type>_d<D>: combines the partial results of
// each query vector (Flash-Decoding, Dao et al. 2023).
//
// attention_paged_combine_<type>_d<D> (D in {128, 256})
//   parts   [jobs, 128 query vectors, D + 2] f32: the weighted sum of values, then the maximum of
//           the unscaled scores and the sum of weights; parts that the first launch did not write
//           are not read
//   out     [rows, heads * D], rows `out_pitch` elements apart
// All other arguments must have the same values as in the first launch. Invalid values in them are
// handled as in the first launch.
//
// Targets: sm_90a

#include "include/attention_jobs.cuh"
#include "include/online_softmax.cuh"
#include "include/tensor_core.cuh"

namespace {

constexpr uint32_t WARPS = contract::attention_paged_hopper::COMBINE_WARPS;

// A warp combines one query vector; each lane has two adjacent columns of every 64 columns.
template <int D, typename T>
__device__ __forceinline__ void combine(T* out, const float* parts, const Arguments& arguments) {
    using S = Paged<D, true>;
    constexpr int PIECES = D / 64;
    constexpr uint32_t BLOCKS_OF_TILE = S::QUERIES / WARPS;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t tile_and_head = blockIdx.x / BLOCKS_OF_TILE;
    const uint32_t index = blockIdx.x % BLOCKS_OF_TILE * WARPS + threadIdx.x / 32;
    TileCursor cursor = {arguments.first_sequence, 0};
    AttentionTile tile;
    if (!find_tile<S::QUERIES>(tile_and_head / arguments.kv_heads, arguments.starts, cursor, arguments.sequences,
                               arguments.rows, arguments.group, tile)) {
        return;
    }
    const uint32_t query = tile.first_query + index;
    if (query >= tile.rows * arguments.group) {
        return;
    }
    Job job;
    int32_t steps;
    const uint32_t count = measure<S>(job, arguments, tile, steps);
    const uint32_t kv_head = tile_and_head % arguments.kv_heads;
    const float factor = arguments.factor(kv_head);
    float maximum = -INFINITY;
    float sum = 0.0f;
    float2 gathered[PIECES] = {};
    for (uint32_t part = 0; part < count; ++part) {
        const size_t slot = static_cast<size_t>(tile_and_head) * arguments.splits + part;
        const float* row = parts + (slot * S::QUERIES + index) * (S::D + 2);
        float2 values[PIECES];
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            values[piece] = __ldg(reinterpret_cast<const float2*>(row + piece * 64) + lane);
        }
        const float2 weight = __ldg(reinterpret_cast<const float2*>(row + S::D));
        const float highest = fmaxf(maximum, weight.x);
        const float origin = highest == -INFINITY ? 0.0f : highest * factor;
        const float before = power_of_two(maximum * factor - origin);
        const float here = power_of_two(weight.x * factor - origin);
        maximum = highest;
        sum = sum * before + weight.y * here;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            gathered[piece].x = gathered[piece].x * before + values[piece].x * here;
            gathered[piece].y = gathered[piece].y * before + values[piece].y * here;
        }
    }
    const float inverse = sum == 0.0f ? 0.0f : arguments.value_scale(kv_head) / sum;
    const uint32_t head = kv_head * arguments.group + query % arguments.group;
    T* to = out + static_cast<size_t>(tile.first_row + query / arguments.group) * arguments.out_pitch + head * S::D;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        reinterpret_cast<uint32_t*>(to + piece * 64)[lane] =
            TensorCoreElement<T>::pack(gathered[piece].x * inverse, gathered[piece].y * inverse);
    }
}

}  // namespace

#define ATTENTION_PAGED_COMBINE(TYPE, NAME, D)                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_paged_combine_##NAME##_d##D(      \
        TYPE* out, const float* parts, const uint32_t* query_starts, const uint32_t* context_lengths,    \
        uint32_t out_pitch, uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads,  \
        uint32_t kv_heads, uint32_t blocks_max, uint32_t window, uint32_t splits,                        \
        const uint32_t* key_ends, const float* scales, float scale) {                                    \
        const Arguments arguments = {                                                                    \
            query_starts,   context_lengths,  nullptr,  out_pitch, 0,          rows,   sequences,        \
            first_sequence, heads / kv_heads, kv_heads, 0,         blocks_max, window, splits, key_ends,     \
            scales, scale};                                                                              \
        combine<D>(out, parts, arguments);                                                               \
    }

FOR_EACH_HOPPER_HEAD_DIM(ATTENTION_PAGED_COMBINE, __half, f16)
FOR_EACH_HOPPER_HEAD_DIM(ATTENTION_PAGED_COMBINE, __nv_bfloat16, bf16)

// Launch. Block 32 * COMBINE_WARPS, grid x = QUERIES / COMBINE_WARPS * (jobs of the first launch) /
// splits, no shared memory.
