// Argmax of logits that are computed only for the tokens of the best clusters of the vocabulary
// (Gemma 4 assistants, transformers 5.17, `Gemma4AssistantMaskedEmbedder`). Here, a cluster is a cluster
// of tokens. The cluster of thread blocks that shares a row is called the blocks of the row.
//
// x      [rows, columns]            rows x_pitch elements apart
// table  [vocabulary, columns]      contiguous; a token's logit is the dot product of the row of x and its row
// scores [rows, clusters] f32       rows score_pitch elements apart
// tokens [clusters, size] u32       the tokens of each cluster
// out    [rows] u32                 the token with the largest logit
//
// The candidates of a row are the tokens of all clusters whose score is at least the row's `top`-th
// largest score. A cluster whose score is NaN is never selected. Of equal logits, the smallest token wins. NaN logits
// are ignored; if there is no other logit, the result is 0xffffffff. A token outside the table is skipped.
//
// All blocks of a row (see best.cuh) build the same list of selected clusters, and each block computes
// the logits of a part of the list. A warp computes each logit. The order of the additions depends only on
// the alignment of the rows.

#include "best.cuh"
#include "block.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

constexpr uint32_t WARPS = THREADS / WARP;
// Number of table rows that a warp reads at once.
constexpr uint32_t ROWS = 8;
constexpr uint32_t CLUSTERS_MAX = 4096;
// Number of keys that a thread holds.
constexpr uint32_t KEYS = CLUSTERS_MAX / THREADS;
constexpr uint32_t KEY_BITS = 32;

// Maps a score to an integer with the same order. NaN has the key 0, below every number.
__device__ __forceinline__ uint32_t key_of(float score) {
    const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return isnan(score) ? 0 : (bits & 0x80000000u ? ~bits : bits | 0x80000000u);
}

// Writes the indices of the row's best clusters to `selected`. Their order depends only on the scores,
// because all blocks of the row must build the same list. Returns the length of the list to all threads.
__device__ __forceinline__ uint32_t select(const float* scores, uint32_t clusters, uint32_t top, uint32_t* selected) {
    __shared__ uint32_t reached[KEY_BITS], sums[LANES];
    uint32_t keys[KEYS];
#pragma unroll
    for (uint32_t i = 0; i < KEYS; ++i) {
        const uint32_t cluster = i * THREADS + threadIdx.x;
        keys[i] = cluster < clusters ? key_of(scores[cluster]) : 0;
    }
    if (threadIdx.x < KEY_BITS) {
        reached[threadIdx.x] = 0;
    }
    __syncthreads();
    // The largest threshold that at least `top` keys reach, bit by bit. A missing key is 0, which is below
    // every threshold that is tried.
    uint32_t threshold = 0;
    for (uint32_t bit = KEY_BITS; bit-- > 0;) {
        const uint32_t tried = threshold | 1u << bit;
        uint32_t count = 0;
#pragma unroll
        for (uint32_t i = 0; i < KEYS; ++i) {
            if (i * THREADS < clusters) {
                count += __popc(__ballot_sync(ALL_LANES, keys[i] >= tried));
            }
        }
        if (lane_of_thread() == 0 && count > 0) {
            atomicAdd(&reached[bit], count);
        }
        __syncthreads();
        threshold = reached[bit] >= top ? tried : threshold;
    }
    threshold = max(threshold, 1u); // the key of NaN is 0
    // A thread writes its clusters after those of the threads before it.
    uint32_t own = 0;
#pragma unroll
    for (uint32_t i = 0; i < KEYS; ++i) {
        own += i * THREADS + threadIdx.x < clusters && keys[i] >= threshold;
    }
    uint32_t place = block_running_sum(own, sums) - own;
    const uint32_t total = sums[WARPS - 1];
#pragma unroll
    for (uint32_t i = 0; i < KEYS; ++i) {
        const uint32_t cluster = i * THREADS + threadIdx.x;
        if (cluster < clusters && keys[i] >= threshold) {
            selected[place++] = cluster;
        }
    }
    __syncthreads();
    return total;
}

// The best token of the warp's part of the `count * size` candidates.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ Best best_token(const Element* x, uint32_t columns, const Element* table, uint32_t vocabulary,
                                           const uint32_t* tokens, uint32_t size, const uint32_t* selected, uint32_t count,
                                           uint32_t part) {
    const uint32_t lane = threadIdx.x % WARP, total = count * size, stride = BLOCKS_PER_ROW * WARPS * ROWS;
    Best best = {-INFINITY, NO_CHOICE};
    for (uint32_t first = (part * WARPS + threadIdx.x / WARP) * ROWS; first < total; first += stride) {
        uint32_t token[ROWS];
        float sum[ROWS];
#pragma unroll
        for (uint32_t i = 0; i < ROWS; ++i) {
            const uint32_t at = first + i;
            token[i] = at < total ? tokens[selected[at / size] * size + at % size] : NO_CHOICE;
            sum[i] = 0.0f;
        }
        for (uint32_t column = lane * WIDTH; column < columns; column += WARP * WIDTH) {
            Words<WIDTH, Element> held[ROWS];
#pragma unroll
            for (uint32_t i = 0; i < ROWS; ++i) {
                if (token[i] < vocabulary) {
                    held[i] = load_words<WIDTH>(table + static_cast<uint64_t>(token[i]) * columns + column);
                }
            }
            float input[WIDTH];
            load<WIDTH>(x + column, input);
#pragma unroll
            for (uint32_t i = 0; i < ROWS; ++i) {
                if (token[i] < vocabulary) {
                    float weight[WIDTH];
                    widen<WIDTH, Element>(held[i], weight);
#pragma unroll
                    for (uint32_t j = 0; j < WIDTH; ++j) {
                        sum[i] = fmaf(input[j], weight[j], sum[i]);
                    }
                }
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < ROWS; ++i) {
            const Best next = {warp_sum(sum[i]), token[i]};
            if (token[i] < vocabulary && !isnan(next.value) && beats(next, best)) {
                best = next;
            }
        }
    }
    return best;
}

template <typename Element>
__device__ __forceinline__ void clustered_argmax(const Element* x, uint32_t x_pitch, uint32_t columns, const Element* table,
                                                 uint32_t vocabulary, const float* scores, uint32_t score_pitch,
                                                 uint32_t clusters, uint32_t top, const uint32_t* tokens, uint32_t size,
                                                 uint32_t* out) {
    extern __shared__ uint32_t selected[];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t row = blockIdx.x / BLOCKS_PER_ROW, part = blockIdx.x % BLOCKS_PER_ROW;
    arrive_at_cluster_barrier();
    x += static_cast<uint64_t>(row) * x_pitch;
    const uint32_t count = select(scores + static_cast<uint64_t>(row) * score_pitch, clusters, top, selected);
    const bool aligned = aligned_to(x, 16) && aligned_to(table, 16) && columns % VECTOR<Element> == 0;
    Best best = aligned ? best_token<VECTOR<Element>>(x, columns, table, vocabulary, tokens, size, selected, count, part)
                        : best_token<1>(x, columns, table, vocabulary, tokens, size, selected, count, part);
    best = best_of_row(best, part);
    if (part == 0 && threadIdx.x == 0) {
        out[row] = best.index;
    }
}

#define KERNEL(name, Element)                                                                                          \
    extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS) clustered_argmax_##name(                      \
        const Element* x, uint32_t x_pitch, uint32_t columns, const Element* table, uint32_t vocabulary,               \
        const float* scores, uint32_t score_pitch, uint32_t clusters, uint32_t top, const uint32_t* tokens,            \
        uint32_t size, uint32_t* out) {                                                                                \
        clustered_argmax(x, x_pitch, columns, table, vocabulary, scores, score_pitch, clusters, top, tokens, size, out); \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: THREADS threads; rows * BLOCKS_PER_ROW blocks; 4 * clusters bytes of dynamic shared memory. rows, columns and size > 0;
// 0 < top <= clusters <= 4096.
