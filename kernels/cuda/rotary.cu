// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) with one or several position axes
// (pictures need several: multimodal rotary positions of Qwen2-VL, arXiv 2409.12191), by itself and
// fused with the write into the KV cache.
//
// rotary
//   rotates the first `heads` heads of each row of x in place; later columns are not changed
// rotary_normed
//   as rotary, after each head has been divided by its root mean square and multiplied by the
//   norm's weights, to which `weight_offset` is added
// rotary_kv_write
//   rotates the queries in place, and writes the rotated keys and the values into the cache; keys
//   and values in the row are not changed
// rotary_kv_write_normed
//   as rotary_kv_write, after each query and key head has been divided by its root mean square and
//   multiplied by the norm's weights (Qwen3, arXiv 2505.09388), to which `weight_offset` is added.
//   `values` selects which values are written: the values of the row, the values of the row with
//   each head divided by its root mean square, or the keys before their norm and rotation with each
//   head divided by its root mean square (Gemma 4)
//
// x           [tokens, >= heads * head_dim], rows pitch elements apart
// qkv         [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values; rows pitch
//             elements apart. There are no values if `values` is VALUES_OF_KEYS
// positions   [axes, tokens] u32, rows positions_pitch elements apart
// frequencies [pairs] f32, radians per position
// sections    number of consecutive pairs that follow each axis; `pairs` in total, and no more axes
//             than positions has. If interleaved: pairs 1, 4, 7, ... below 3 * pairs[1] follow
//             the second axis, pairs 2, 5, 8, ... below 3 * pairs[2] follow the third axis, and all
//             other pairs follow the first axis (Qwen3-VL, arXiv 2511.21631)
// norms       weights of the query norm [head_dim] and of the key norm [head_dim]
// slots       [tokens] u32: a token's keys and values are written to position slot % 16 of block
//             slot / 16. If the slot is 0xffffffff, the keys and values are not written
// cache       [blocks, 2, kv_heads, 16, head_dim]: one layer; keys, then values
// scales      [2, kv_heads] f32, only for a cache in E4M3: keys and values are divided by the scale
//             of their head, rounded once, and limited to 448 in magnitude
//
// Elements i and i + pairs of a head are rotated as a pair by position * frequency[i] (the halves
// convention). `pairs` is at most head_dim / 2, and always head_dim / 2 in `rotary` and
// `rotary_normed`. Elements from 2 * pairs on are not rotated. The angle is an f32 product, as on
// the host. Whole turns are subtracted in f64, so that sine and cosine are accurate to 3e-7 even at position 2^17 and beyond,
// without the slow path of sincosf. Values are rounded once, when they are stored. Positions,
// frequencies, slots and norms are read before the previous kernel has ended (programmatic
// dependent launch); that kernel must not write them. If a slot is in no block of the cache, its
// keys and values are not written. head_dim is even and at most 512. Accesses are 16 bytes wide
// when addresses, pitch, pairs and head_dim / 2 are multiples of 16 bytes.

#include <type_traits>

#include "contract.cuh"
#include "e4m3.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

constexpr uint32_t PAIRS_MAX = 256;
using contract::common::BLOCK_TOKENS;

// The number of pairs of each axis, passed by value.
struct Sections {
    uint32_t pairs[contract::rotary::AXES_MAX];
    uint32_t is_interleaved;
};

// Norm weights of query and key heads.
template <typename Element>
struct Norms {
    const Element* query;  // [head_dim]
    const Element* key;    // [head_dim]
    float epsilon, weight_offset;
    uint32_t values;
};

template <typename Cached>
struct Cache {
    Cached* start;        // [blocks, 2, kv_heads, 16, head_dim]
    const float* scales;  // [2, kv_heads], for E4M3 only
    uint32_t blocks;
    uint32_t kv_heads;    // 0: no cache
};

__device__ __forceinline__ uint32_t axis_of(uint32_t pair, const Sections& sections) {
    if (sections.is_interleaved) {
        const uint32_t axis = pair % 3;
        return axis > 0 && pair < 3 * sections.pairs[axis] ? axis : 0;
    }
    const uint32_t second = sections.pairs[0], third = second + sections.pairs[1];
    return (pair >= second) + (pair >= third) + (pair >= third + sections.pairs[2]);
}

// Writes the cosines and sines of this token's angles. All threads must call this function; a
// barrier must follow.
__device__ __forceinline__ void find_angles(const uint32_t* positions, uint32_t positions_pitch,
                                            const float* frequencies, const Sections& sections, uint32_t pairs,
                                            float* cosines, float* sines) {
    for (uint32_t pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const uint32_t axis = axis_of(pair, sections);
        const float position = static_cast<float>(positions[axis * positions_pitch + blockIdx.x]);
        constexpr double TURNS_A_RADIAN = 0.15915494309189535;
        const double turns = __fmul_rn(position, frequencies[pair]) * TURNS_A_RADIAN;
        sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sines[pair], &cosines[pair]);
    }
}

// Writes the factor (inverse root mean square) of each of the first `heads` heads. All threads must
// call this function; a barrier must follow.
template <typename Element>
__device__ __forceinline__ void find_scales(const Element* row, uint32_t heads, uint32_t head_dim, float epsilon,
                                            float* scales) {
    for (uint32_t head = threadIdx.x / WARP; head < heads; head += blockDim.x / WARP) {
        float squares = 0.0f;
        for (uint32_t i = threadIdx.x % WARP; i < head_dim; i += WARP) {
            const float x = to_float(row[head * head_dim + i]);
            squares += x * x;
        }
        scales[head] = rsqrtf(warp_sum(squares) / head_dim + epsilon);
    }
}

// Writes adjacent values, divided by `scale`, as E4M3.
template <uint32_t COUNT>
__device__ __forceinline__ void store_e4m3(E4m3* to, const float (&values)[COUNT], float scale) {
    if constexpr (COUNT == 1) {
        to->bits = static_cast<uint8_t>(e4m3_pair(__fdiv_rn(values[0], scale), 0.0f));
    } else {
        Words<COUNT, E4m3> words;
        uint16_t* pairs = reinterpret_cast<uint16_t*>(&words);
#pragma unroll
        for (uint32_t pair = 0; pair < COUNT / 2; ++pair) {
            pairs[pair] = e4m3_pair(__fdiv_rn(values[2 * pair], scale), __fdiv_rn(values[2 * pair + 1], scale));
        }
        *reinterpret_cast<Words<COUNT, E4m3>*>(to) = words;
    }
}

// The two elements of a head that a thread processes together, starting with `pair`: a rotated
// pair, or one element of each half of the elements that are not rotated.
struct PairPlaces {
    bool is_turned;
    uint32_t left, right;

    __device__ __forceinline__ PairPlaces(uint32_t pair, uint32_t pairs, uint32_t half)
        : is_turned(pair < pairs), left(is_turned ? pair : pair + pairs), right(pair + (is_turned ? pairs : half)) {}
};

// Processes one token's row, `WIDTH` pairs per item. The heads after the queries (keys, then
// values) are in the same order in the cache, 16 vectors apart, so that one loop covers all heads;
// values are not rotated.
template <uint32_t WIDTH, bool NORMED, typename Element, typename Cached>
__device__ __forceinline__ void turn_row(Element* row, uint32_t heads, uint32_t half, uint32_t pairs, Cached* cached,
                                         const float* cache_scales, uint32_t kv_heads, const uint32_t* positions, uint32_t positions_pitch,
                                         const float* frequencies, const Sections& sections,
                                         const Norms<Element>& norms) {
    __shared__ float cosines[PAIRS_MAX], sines[PAIRS_MAX];
    const uint32_t steps = half / WIDTH, head_dim = 2 * half;
    const uint32_t items = (heads + 2 * kv_heads) * steps;
    Words<WIDTH, Element> left_words, right_words;
    // Maps an output head to the head of the row that it is read from. Value heads follow key heads.
    // With VALUES_OF_KEYS, a value head is read from its key head.
    const auto source = [&](uint32_t head) {
        const bool is_key = NORMED && norms.values == contract::rotary::VALUES_OF_KEYS && head >= heads + kv_heads;
        return is_key ? head - kv_heads : head;
    };
    const auto take = [&](uint32_t item) {
        const Element* from = row + source(item / steps) * head_dim;
        const PairPlaces places(item % steps * WIDTH, pairs, half);
        left_words = load_words<WIDTH>(from + places.left);
        right_words = load_words<WIDTH>(from + places.right);
    };
    // Angles and weights do not depend on the previous kernel.
    find_angles(positions, positions_pitch, frequencies, sections, pairs, cosines, sines);
    // True if the items of a head are in one warp, whose lanes can then add up the head's squares.
    const bool by_lanes = steps <= WARP && (steps & (steps - 1)) == 0;
    __shared__ float weights[NORMED ? 2 : 1][NORMED ? 2 * PAIRS_MAX : 1];
    __shared__ float scales[NORMED ? contract::rotary::NORMED_HEADS_MAX : 1];
    if constexpr (NORMED) {
        for (uint32_t i = threadIdx.x; i < head_dim; i += blockDim.x) {
            weights[0][i] = to_float(norms.query[i]) + norms.weight_offset;
            weights[1][i] = to_float(norms.key[i]) + norms.weight_offset;
        }
    }
    wait_for_previous_kernel();
    if (threadIdx.x < items) {
        take(threadIdx.x);
    }
    if constexpr (NORMED) {
        // This must happen before any thread changes the row.
        if (!by_lanes) {
            const uint32_t value_heads = norms.values == contract::rotary::VALUES_NORMALIZED ? kv_heads : 0;
            find_scales(row, heads + kv_heads + value_heads, head_dim, norms.epsilon, scales);
        }
    }
    __syncthreads();
    for (uint32_t item = threadIdx.x; item < items; item += blockDim.x) {
        if (item != threadIdx.x) {
            take(item);
        }
        const uint32_t head = item / steps, pair = item % steps * WIDTH;
        const PairPlaces places(pair, pairs, half);
        if (head >= heads && cached == nullptr) {
            break;
        }
        constexpr bool IS_E4M3 = std::is_same_v<Cached, E4m3>;
        const bool is_value = head >= heads + kv_heads;
        const bool is_normed = NORMED && (!is_value || norms.values != contract::rotary::VALUES_UNCHANGED);
        float left[WIDTH], right[WIDTH];
        if (IS_E4M3 || !is_value || is_normed) {
            widen<WIDTH, Element>(left_words, left);
            widen<WIDTH, Element>(right_words, right);
        }
        if (!is_value || is_normed) {
            if (is_normed) {
                float scale = 0.0f;
                if (by_lanes) {
                    float squares = 0.0f;
#pragma unroll
                    for (uint32_t i = 0; i < WIDTH; ++i) {
                        squares += left[i] * left[i] + right[i] * right[i];
                    }
                    const uint32_t lane = threadIdx.x % WARP;
                    const uint32_t lanes = steps == WARP ? ALL_LANES : ((1u << steps) - 1) << (lane - lane % steps);
                    for (uint32_t distance = steps / 2; distance > 0; distance /= 2) {
                        squares += __shfl_xor_sync(lanes, squares, distance);
                    }
                    scale = rsqrtf(squares / head_dim + norms.epsilon);
                } else {
                    scale = scales[source(head)];
                }
                const float* weight = weights[head >= heads];
#pragma unroll
                for (uint32_t i = 0; i < WIDTH; ++i) {
                    left[i] *= is_value ? scale : scale * weight[places.left + i];
                    right[i] *= is_value ? scale : scale * weight[places.right + i];
                }
            }
            if (places.is_turned && !is_value) {
#pragma unroll
                for (uint32_t i = 0; i < WIDTH; ++i) {
                    const float cosine = cosines[pair + i], sine = sines[pair + i], before = left[i];
                    left[i] = before * cosine - right[i] * sine;
                    right[i] = right[i] * cosine + before * sine;
                }
            }
            left_words = to_words<WIDTH, Element>(left);
            right_words = to_words<WIDTH, Element>(right);
        }
        const auto write = [&](Element* to) {
            *reinterpret_cast<Words<WIDTH, Element>*>(to + places.left) = left_words;
            *reinterpret_cast<Words<WIDTH, Element>*>(to + places.right) = right_words;
        };
        if (head < heads) {
            write(row + head * head_dim);
            continue;
        }
        Cached* to = cached + (head - heads) * BLOCK_TOKENS * head_dim;
        if constexpr (IS_E4M3) {
            store_e4m3<WIDTH>(to + places.left, left, cache_scales[head - heads]);
            store_e4m3<WIDTH>(to + places.right, right, cache_scales[head - heads]);
        } else {
            write(to);
        }
    }
}

template <bool NORMED, typename Element, typename Cached>
__device__ __forceinline__ void rotary(Element* x, uint32_t pitch, uint32_t heads, uint32_t head_dim, uint32_t pairs,
                                       const uint32_t* positions, uint32_t positions_pitch, const float* frequencies,
                                       Sections sections, const uint32_t* slots, Cache<Cached> cache,
                                       Norms<Element> norms) {
    let_next_kernel_start();
    const uint32_t token = blockIdx.x, half = head_dim / 2;
    // The address of this token's first key in the cache.
    Cached* cached = nullptr;
    if (cache.kv_heads > 0) {
        const uint32_t slot = slots[token], block = slot / BLOCK_TOKENS;
        if (block < cache.blocks) {
            cached = cache.start
                + (static_cast<uint64_t>(block) * 2 * cache.kv_heads * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
        }
    }
    Element* row = x + static_cast<uint64_t>(token) * pitch;
    if (aligned_to(row, 16) && aligned_to(cache.start, 16) && (half | pairs) % VECTOR<Element> == 0) {
        turn_row<VECTOR<Element>, NORMED>(row, heads, half, pairs, cached, cache.scales, cache.kv_heads, positions,
                                          positions_pitch, frequencies, sections, norms);
    } else {
        turn_row<1, NORMED>(row, heads, half, pairs, cached, cache.scales, cache.kv_heads, positions, positions_pitch,
                            frequencies, sections, norms);
    }
}

#define KERNEL(name, Element)                                                                                          \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                        \
        rotary_##name(Element* x, uint32_t pitch, uint32_t heads, uint32_t head_dim, const uint32_t* positions,        \
                      uint32_t positions_pitch, const float* frequencies, Sections sections) {                         \
        rotary<false>(x, pitch, heads, head_dim, head_dim / 2, positions, positions_pitch, frequencies, sections,      \
                      nullptr, Cache<Element>{}, Norms<Element>{});                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                        \
        rotary_normed_##name(Element* x, uint32_t pitch, uint32_t heads, uint32_t head_dim, const uint32_t* positions, \
                             uint32_t positions_pitch, const float* frequencies, Sections sections,                    \
                             const Element* norm, float epsilon, float weight_offset) {                                \
        rotary<true>(x, pitch, heads, head_dim, head_dim / 2, positions, positions_pitch, frequencies, sections,       \
                     nullptr, Cache<Element>{},                                                                        \
                     Norms<Element>{norm, norm, epsilon, weight_offset, contract::rotary::VALUES_UNCHANGED});          \
    }
FOR_EACH_ACTIVATION(KERNEL)

#define WRITE_KERNELS(name, Element, Cached)                                                                           \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                        \
        rotary_kv_write_##name(Element* qkv, uint32_t pitch, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,     \
                               uint32_t pairs, const uint32_t* positions, uint32_t positions_pitch,                    \
                               const float* frequencies, Sections sections, const uint32_t* slots,                                    \
                               Cached* cache, const float* scales, uint32_t blocks) {                                  \
        rotary<false>(qkv, pitch, heads, head_dim, pairs, positions, positions_pitch, frequencies, sections, slots,           \
                      Cache<Cached>{cache, scales, blocks, kv_heads}, Norms<Element>{});                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                        \
        rotary_kv_write_normed_##name(Element* qkv, uint32_t pitch, uint32_t heads, uint32_t kv_heads,                 \
                                      uint32_t head_dim, uint32_t pairs, const uint32_t* positions, uint32_t positions_pitch,          \
                                      const float* frequencies, Sections sections, const uint32_t* slots,              \
                                      Cached* cache, const float* scales, uint32_t blocks, const Element* query_norm,  \
                                      const Element* key_norm, float epsilon, float weight_offset,                     \
                                      uint32_t values) {                                                               \
        rotary<true>(qkv, pitch, heads, head_dim, pairs, positions, positions_pitch, frequencies, sections, slots,            \
                     Cache<Cached>{cache, scales, blocks, kv_heads},                                                   \
                     Norms<Element>{query_norm, key_norm, epsilon, weight_offset, values});                            \
    }
#define WRITE_PLAIN(name, Element) WRITE_KERNELS(name, Element, Element)
FOR_EACH_ACTIVATION(WRITE_PLAIN)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define WRITE_E4M3(name, Element) WRITE_KERNELS(e4m3_##name, Element, E4m3)
FOR_EACH_ACTIVATION(WRITE_E4M3)
#endif

// Launch: grid (tokens), no dynamic shared memory, block (clamp(round_up(items, 32), 64,
// THREADS_MAX)), where items is div_ceil(heads * head_dim, 16) for rotary and rotary_normed, and
// div_ceil((heads + 2 * kv_heads) * head_dim, 16) for the other kernels. tokens > 0. The host checks that the sections
// add up to `pairs` and name no axis that positions lacks.
