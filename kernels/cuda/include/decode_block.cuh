// A warp's ring of cache blocks in shared memory, and loads from the ring into registers, as
// operands of the tensor cores.
//
// The elements of a head may be summed in any order, as long as keys and queries use the same
// order. Output elements may be in any order, as long as the code that writes them uses the same
// order. Each of the lanes that share a row therefore has portions of 16 adjacent bytes of the row
// (`LaneRow`). If a lane's number of bytes is not a multiple of 16, its last portions have 8, 4 or
// 2 bytes. The elements of a portion count as adjacent in a lane's fragment. `group` is lane / 4,
// and `pair` is lane % 4:
//
// - keys: operand A [16 keys, 16 elements]. A lane has elements of the keys `group` and
//   `group + 8`; four lanes share each row. In operand B, the lane has the same elements of query
//   `group`.
// - values: operand A [16 elements, 16 keys]. A lane has the keys 2 * pair, 2 * pair + 1,
//   2 * pair + 8 and 2 * pair + 9; eight lanes share each row. Two rows of A, `group` and
//   `group + 8`, are a pair of adjacent elements of the lane.
#pragma once

#include "cached_operand.cuh"
#include "contract.cuh"
#include "element.cuh"
#include "tensor_core.cuh"

using contract::common::BLOCK_TOKENS;
static_assert(BLOCK_TOKENS == 16, "the keys of a block are the 16 rows of a product");

// Starts the copy of 16 bytes. With READ_ONCE, they are the first to be evicted from the L2
// cache. (An explicit hint of normal priority differs from no hint: with it, 256 sequences took
// 84 us instead of 76.)
template <bool READ_ONCE>
__device__ __forceinline__ void copy_16_bytes_from_cache(uint32_t destination, const void* source) {
#if __CUDA_ARCH__ >= 800
    if constexpr (READ_ONCE) {
        uint64_t first_to_go;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_go));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(destination),
                     "l"(__cvta_generic_to_global(source)), "l"(first_to_go)
                     : "memory");
        return;
    }
#endif
    copy_16_bytes(destination, source, true);
}

// Sixteen keys or values of one head in shared memory. If rows are a multiple of 128 bytes, the
// 16-byte chunks of each row are permuted, so that the eight lanes that read together (adjacent
// chunks of two keys or of four keys) never have bank conflicts. Otherwise, chunks are in their
// original order.
template <uint32_t HEAD_DIM, typename Cached>
struct HalfBlock {
    static constexpr uint32_t ROW_BYTES = sizeof(Cached) * HEAD_DIM, BYTES = BLOCK_TOKENS * ROW_BYTES;

    static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t byte) {
        const uint32_t exchange = ROW_BYTES % 128 == 0 ? (row & 6) ^ ((row & 1) << 2) : 0;
        return row * ROW_BYTES + (byte ^ 16 * exchange);
    }

    // Starts the warp's copy of the sixteen keys or values, which are contiguous at `from`.
    template <bool READ_ONCE>
    static __device__ __forceinline__ void copy(const char* from, uint32_t to, uint32_t lane) {
#pragma unroll
        for (uint32_t byte = 16 * lane; byte < BYTES; byte += 16 * 32) {
            copy_16_bytes_from_cache<READ_ONCE>(to + place(byte / ROW_BYTES, byte % ROW_BYTES), from + byte);
        }
    }
};

// The ring for blocks that are being copied for one warp.
template <uint32_t HEAD_DIM, typename Cached>
struct Ring {
    static constexpr uint32_t BYTES = contract::attention_decode::RING_BYTES<HEAD_DIM>;
    static constexpr uint32_t BLOCK_BYTES = 2 * HalfBlock<HEAD_DIM, Cached>::BYTES;
    static constexpr uint32_t STAGES = BYTES / BLOCK_BYTES;
    static_assert(BYTES % BLOCK_BYTES == 0, "a ring holds whole blocks");
};

// Ends a group of copies. The group may be empty.
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of this thread's copies except the last `LEFT` have completed.
template <uint32_t LEFT>
__device__ __forceinline__ void wait_for_all_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// Adjacent bytes of a row that belong to one lane: `SIZE` bytes, starting at byte `START` of the
// lane's bytes.
template <uint32_t HEAD_DIM, uint32_t LANES, typename Cached, uint32_t START, uint32_t SIZE>
struct Portion {
    static constexpr uint32_t FIRST_WORD = START / (2 * sizeof(Cached)), WORDS = SIZE / (2 * sizeof(Cached));

    static __device__ __forceinline__ uint32_t byte(uint32_t lane) { return START * LANES + SIZE * lane; }

    using Raw = typename Word<SIZE>::Type;

    static __device__ __forceinline__ Raw load(const char* half, uint32_t row, uint32_t lane) {
        return *reinterpret_cast<const Raw*>(half + HalfBlock<HEAD_DIM, Cached>::place(row, byte(lane)));
    }

    // Pairs of adjacent elements, as operands.
    static __device__ __forceinline__ void operands(const Raw& raw, uint32_t (&words)[WORDS]) {
        using Pair = typename Word<2 * sizeof(Cached)>::Type;
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            words[word] = to_operand<Cached>(reinterpret_cast<const Pair*>(&raw)[word]);
        }
    }
};

// A lane's elements of a row that `LANES` lanes share.
template <uint32_t HEAD_DIM, uint32_t LANES, typename Cached>
struct LaneRow {
    static constexpr uint32_t BYTES = sizeof(Cached) * HEAD_DIM / LANES, WORDS = HEAD_DIM / LANES / 2;

    // The size of the portion that starts at byte `start`.
    static __host__ __device__ constexpr uint32_t size_at(uint32_t start) {
        const uint32_t left = BYTES - start;
        return left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : 2;
    }

    // Index of the first of the two elements in a word of the lane.
    static __device__ __forceinline__ constexpr uint32_t element(uint32_t lane, uint32_t word) {
        const uint32_t byte = 2 * sizeof(Cached) * word;
        uint32_t start = 0;
        while (start + size_at(start) <= byte) {
            start += size_at(start);
        }
        return (start * LANES + size_at(start) * lane + byte - start) / sizeof(Cached);
    }

    // Calls `work(portion)` for each portion.
    template <uint32_t START = 0, typename Work>
    static __device__ __forceinline__ void for_each_portion(const Work& work) {
        if constexpr (START < BYTES) {
            constexpr uint32_t SIZE = size_at(START);
            work(Portion<HEAD_DIM, LANES, Cached, START, SIZE>{});
            for_each_portion<START + SIZE>(work);
        }
    }
};

// The query vectors of a tile in a lane's registers: operand B of the products with keys.
template <uint32_t HEAD_DIM, typename Element, typename Cached>
struct Queries {
    using Row = LaneRow<HEAD_DIM, 4, Cached>;
    uint32_t words[Row::WORDS];

    // `row` is in global memory; null means zeros.
    __device__ __forceinline__ void load(const char* row, uint32_t lane) {
        Row::for_each_portion([&](auto portion) {
            constexpr uint32_t WORDS = portion.WORDS, AT_ONCE = WORDS < 4 ? WORDS : 4;
            using Raw = typename Word<4 * AT_ONCE>::Type;
            const Raw* from = reinterpret_cast<const Raw*>(row + 2 * portion.byte(lane % 4) / sizeof(Cached));
#pragma unroll
            for (uint32_t some = 0; some < WORDS / AT_ONCE; ++some) {
                Raw raw = Raw{};
                if (row != nullptr) {
                    raw = from[some];
                }
#pragma unroll
                for (uint32_t word = 0; word < AT_ONCE; ++word) {
                    words[portion.FIRST_WORD + some * AT_ONCE + word] =
                        query_operand<Cached, Element>(reinterpret_cast<const uint32_t*>(&raw)[word]);
                }
            }
        });
    }
};

// Multiplies the keys of a block by queries: [16 keys, 8 queries]. Products are added to two sums
// alternately, so that a product does not wait for the previous one.
template <uint32_t HEAD_DIM, typename Element, typename Cached>
__device__ __forceinline__ void multiply_keys(const char* keys, const Queries<HEAD_DIM, Element, Cached>& queries,
                                              uint32_t lane, float (&scores)[4]) {
    using Core = TensorCoreElement<Multiplied<Element, Cached>>;
    float sums[2][4] = {};
    LaneRow<HEAD_DIM, 4, Cached>::for_each_portion([&](auto portion) {
        uint32_t low[portion.WORDS], high[portion.WORDS];
        portion.operands(portion.load(keys, lane / 4, lane % 4), low);
        portion.operands(portion.load(keys, lane / 4 + 8, lane % 4), high);
#pragma unroll
        for (uint32_t word = 0; word < portion.WORDS; word += 2) {
            const uint32_t* query = queries.words + portion.FIRST_WORD + word;
            Core::multiply_add(sums[word / 2 % 2], {low[word], high[word], low[word + 1], high[word + 1]}, query[0],
                               query[1]);
        }
    });
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        scores[i] = sums[0][i] + sums[1][i];
    }
}

// Adds weights [16 keys, 8 queries] times values to `gathered` [head_dim, 8 queries]. Values of
// keys from `limit` on count as zeros: memory that was never written may contain NaN, which a zero
// weight would not remove.
template <uint32_t HEAD_DIM, typename Element, typename Cached>
__device__ __forceinline__ void add_values(const char* values, const uint32_t (&weights)[2], uint32_t limit,
                                           uint32_t lane, float (&gathered)[HEAD_DIM / 16][4]) {
    using Core = TensorCoreElement<Multiplied<Element, Cached>>;
    LaneRow<HEAD_DIM, 8, Cached>::for_each_portion([&](auto portion) {
        typename decltype(portion)::Raw raw[4];
        uint32_t of[4][portion.WORDS];
        const auto key = [&](uint32_t i) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; };
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            raw[i] = portion.load(values, key(i), lane / 4);
        }
        if (limit < BLOCK_TOKENS) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                raw[i] = key(i) < limit ? raw[i] : typename decltype(portion)::Raw{};
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            portion.operands(raw[i], of[i]);
        }
#pragma unroll
        for (uint32_t word = 0; word < portion.WORDS; ++word) {
            Core::multiply_add(gathered[portion.FIRST_WORD + word],
                               {__byte_perm(of[0][word], of[1][word], 0x5410), __byte_perm(of[0][word], of[1][word], 0x7632),
                                __byte_perm(of[2][word], of[3][word], 0x5410), __byte_perm(of[2][word], of[3][word], 0x7632)},
                               weights[0], weights[1]);
        }
    });
}

// Transposes an 8 x 8 matrix of 16-bit elements, one word per lane.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}
