// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) with the several axes that pictures need (multimodal
// rotary positions of Qwen2-VL, arXiv 2409.12191), alone and with the write into the cache.
//
// rotary:          turns the first `heads` heads of each row of x in place; columns behind them stay as they are
// rotary_kv_write: turns the queries in place, turns the keys on their way into the cache and copies the values there;
//                  keys and values in the row stay as they are
//
// x           [tokens, at least heads * head_dim]               rows pitch elements apart
// qkv         [tokens, (heads + 2 * kv_heads) * head_dim]       queries, keys, values; rows pitch elements apart
// positions   [axes, tokens] u32                                rows positions_pitch elements apart
// frequencies [head_dim / 2] f32                                radians a position
// sections    how many consecutive pairs follow each axis; together head_dim / 2, no more axes than positions has
// slots       [tokens] u32                                      where a token's keys and values go: place slot % 16 of
//                                                               block slot / 16; 0xffffffff writes nothing
// cache       [blocks, 2, kv_heads, 16, head_dim]               one layer, keys then values
//
// Elements i and i + head_dim / 2 of a head turn as a pair by position * frequency[i] (the halves convention). The
// angle is an f32 product, as on the host; whole turns are taken off it in f64, so its sine and cosine are right to
// 3e-7 also at position 2^17 and beyond, without the slow path of sincosf. Rounding happens once, at the store.
// Positions, frequencies and slots are read ahead of the kernel in front (programmatic dependent launch), which must not
// write them. A slot in no block of the cache writes nothing. head_dim is even and at most 256. 16-byte accesses when addresses,
// pitch and head_dim / 2 are aligned to it.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

constexpr uint32_t PAIRS_MAX = 128;
using contract::common::BLOCK_TOKENS;

// Pairs of each axis, by value.
struct Sections {
    uint32_t pairs[contract::rotary::AXES_MAX];
};

struct Cache {
    void* start;        // [blocks, 2, kv_heads, 16, head_dim]
    uint32_t blocks;
    uint32_t kv_heads;  // 0: there is none
};

// Writes the angles of this token. All threads call it; a barrier follows.
__device__ __forceinline__ void find_angles(const uint32_t* positions, uint32_t positions_pitch,
                                            const float* frequencies, const Sections& sections, uint32_t half,
                                            float* cosines, float* sines) {
    for (uint32_t pair = threadIdx.x; pair < half; pair += blockDim.x) {
        const uint32_t second = sections.pairs[0], third = second + sections.pairs[1];
        const uint32_t axis = (pair >= second) + (pair >= third) + (pair >= third + sections.pairs[2]);
        const float position = static_cast<float>(positions[axis * positions_pitch + blockIdx.x]);
        constexpr double TURNS_A_RADIAN = 0.15915494309189535;
        const double turns = __fmul_rn(position, frequencies[pair]) * TURNS_A_RADIAN;
        sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sines[pair], &cosines[pair]);
    }
}

// One token's row, `WIDTH` pairs an item. The heads behind the queries, keys then values, stand in the cache in the same
// order and 16 vectors apart, so that all heads are one loop; values do not turn.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void turn_row(Element* row, uint32_t heads, uint32_t half, Element* cached,
                                         uint32_t kv_heads, const uint32_t* positions, uint32_t positions_pitch,
                                         const float* frequencies, const Sections& sections) {
    __shared__ float cosines[PAIRS_MAX], sines[PAIRS_MAX];
    const uint32_t steps = half / WIDTH, head_dim = 2 * half;
    const uint32_t items = (heads + 2 * kv_heads) * steps;
    Words<WIDTH, Element> left_words, right_words;
    const auto take = [&](uint32_t item) {
        const Element* from = row + item / steps * head_dim + item % steps * WIDTH;
        left_words = load_words<WIDTH>(from);
        right_words = load_words<WIDTH>(from + half);
    };
    // Angles need nothing of the kernel in front.
    find_angles(positions, positions_pitch, frequencies, sections, half, cosines, sines);
    wait_for_previous_kernel();
    if (threadIdx.x < items) {
        take(threadIdx.x);
    }
    __syncthreads();
    for (uint32_t item = threadIdx.x; item < items; item += blockDim.x) {
        if (item != threadIdx.x) {
            take(item);
        }
        const uint32_t head = item / steps, pair = item % steps * WIDTH;
        if (head >= heads && cached == nullptr) {
            break;
        }
        Element* to = head < heads ? row + head * head_dim : cached + (head - heads) * BLOCK_TOKENS * head_dim;
        if (head < heads + kv_heads) {
            float left[WIDTH], right[WIDTH];
            widen<WIDTH, Element>(left_words, left);
            widen<WIDTH, Element>(right_words, right);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                const float cosine = cosines[pair + i], sine = sines[pair + i], before = left[i];
                left[i] = before * cosine - right[i] * sine;
                right[i] = right[i] * cosine + before * sine;
            }
            left_words = to_words<WIDTH, Element>(left);
            right_words = to_words<WIDTH, Element>(right);
        }
        *reinterpret_cast<Words<WIDTH, Element>*>(to + pair) = left_words;
        *reinterpret_cast<Words<WIDTH, Element>*>(to + pair + half) = right_words;
    }
}

template <typename Element>
__device__ __forceinline__ void rotary(Element* x, uint32_t pitch, uint32_t heads, uint32_t head_dim,
                                       const uint32_t* positions, uint32_t positions_pitch, const float* frequencies,
                                       Sections sections, const uint32_t* slots, Cache cache) {
    let_next_kernel_start();
    const uint32_t token = blockIdx.x, half = head_dim / 2;
    // Where the first key of this token goes.
    Element* cached = nullptr;
    if (cache.kv_heads > 0) {
        const uint32_t slot = slots[token], block = slot / BLOCK_TOKENS;
        if (block < cache.blocks) {
            cached = static_cast<Element*>(cache.start)
                + (static_cast<uint64_t>(block) * 2 * cache.kv_heads * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
        }
    }
    Element* row = x + static_cast<uint64_t>(token) * pitch;
    if (aligned_to(row, 16) && aligned_to(cache.start, 16) && half % VECTOR<Element> == 0) {
        turn_row<VECTOR<Element>>(row, heads, half, cached, cache.kv_heads, positions, positions_pitch,
                                   frequencies, sections);
    } else {
        turn_row<1>(row, heads, half, cached, cache.kv_heads, positions, positions_pitch, frequencies, sections);
    }
}

#define KERNEL(name, Element)                                                                                         \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                       \
        rotary_##name(Element* x, uint32_t pitch, uint32_t heads, uint32_t head_dim, const uint32_t* positions,       \
                      uint32_t positions_pitch, const float* frequencies, Sections sections) {                        \
        rotary(x, pitch, heads, head_dim, positions, positions_pitch, frequencies, sections, nullptr, Cache{});       \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(contract::rotary::THREADS_MAX)                                       \
        rotary_kv_write_##name(Element* qkv, uint32_t pitch, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,    \
                               const uint32_t* positions, uint32_t positions_pitch, const float* frequencies,         \
                               Sections sections, const uint32_t* slots, Element* cache, uint32_t blocks) {           \
        rotary(qkv, pitch, heads, head_dim, positions, positions_pitch, frequencies, sections, slots,                 \
               Cache{cache, blocks, kv_heads});                                                                       \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (tokens), no dynamic shared memory, block (clamp(round_up(items, 32), 64, THREADS_MAX)), where items is
// div_ceil(heads * head_dim, 16) for rotary and div_ceil((heads + 2 * kv_heads) * head_dim, 16) for rotary_kv_write.
// tokens > 0. The host checks that the sections make head_dim / 2 pairs and name no axis that positions lack.
