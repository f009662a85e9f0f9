// A warp's own ring of cache blocks in shared memory, and their way from there into the tensor cores' registers.
//
// A product does not care in which order the elements of a head are added, as long as keys and queries agree, nor in
// which order the elements of an output stand, as long as whoever writes it knows. So each lane reads 16 neighbouring
// bytes and calls them what suits it. With `group = lane / 4` and `pair = lane % 4`:
//
// - keys: A [16 keys, 16 elements], a lane has elements of keys `group` and `group + 8`; of every 32 elements its own are
//   the 8 from 8 * pair on, of a tail of 16 the 4 from 4 * pair on. Queries, B, have the same elements of query `group`.
// - values: A [16 elements, 16 keys], a lane has the keys 2 * pair, 2 * pair + 1, and those 8 further; of every 64
//   elements its own are the 8 from 8 * group on, of a tail of 32 the 4 from 4 * group on, of a tail of 16 the 2 from
//   2 * group on. Two rows of A, `group` and `group + 8`, are a pair of neighbours among them.
#pragma once

#include "contract.cuh"
#include "element.cuh"
#include "tensor_core.cuh"

using contract::common::BLOCK_TOKENS;
static_assert(BLOCK_TOKENS == 16, "keys along the 16 rows of a product");

// Starts the copy of 16 bytes; with READ_ONCE they are the first to go from the L2 cache. (The hint to keep them as long as
// anything else is not the same as none: with it 256 sequences took 84 us instead of 76.)
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

// Sixteen keys or values of one head in shared memory, 16-byte chunks as they come, but rows of whole 128 bytes have
// theirs exchanged so that the eight lanes which read together, two keys' neighbours or four keys' beginnings, never meet
// in a bank.
template <uint32_t HEAD_DIM>
struct HalfBlock {
    static constexpr uint32_t ROW_BYTES = 2 * HEAD_DIM, BYTES = BLOCK_TOKENS * ROW_BYTES, CHUNKS = ROW_BYTES / 16;

    static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t chunk) {
        const uint32_t exchange = HEAD_DIM % 64 == 0 ? (row & 6) ^ ((row & 1) << 2) : 0;
        return row * ROW_BYTES + 16 * (chunk ^ exchange);
    }

    // A warp begins to copy the half from where it lies in one piece.
    template <bool READ_ONCE>
    static __device__ __forceinline__ void copy(const char* from, uint32_t to, uint32_t lane) {
#pragma unroll
        for (uint32_t chunk = lane; chunk < BLOCK_TOKENS * CHUNKS; chunk += 32) {
            copy_16_bytes_from_cache<READ_ONCE>(to + place(chunk / CHUNKS, chunk % CHUNKS), from + 16 * chunk);
        }
    }
};

// The blocks on their way to one warp.
template <uint32_t HEAD_DIM>
struct Ring {
    static constexpr uint32_t BLOCK_BYTES = 2 * HalfBlock<HEAD_DIM>::BYTES;
    static constexpr uint32_t STAGES = contract::attention_decode::RING_STAGES<HEAD_DIM>;
    static constexpr uint32_t BYTES = STAGES * BLOCK_BYTES;
    static_assert(BYTES == contract::attention_decode::RING_BYTES<HEAD_DIM>, "the launch gives so many to each warp");
};

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void end_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all groups of this thread but the last `LEFT` have landed.
template <uint32_t LEFT>
__device__ __forceinline__ void wait_for_all_but() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// A lane's elements of one row, which `LANES` lanes share: pieces of 16 bytes each, and a smaller one at the end.
template <uint32_t HEAD_DIM, uint32_t LANES>
struct Pieces {
    static constexpr uint32_t WHOLE = HEAD_DIM / (8 * LANES), TAIL = HEAD_DIM % (8 * LANES) / LANES / 2;  // pieces, words
    static constexpr uint32_t TAIL_BYTES = 16 * WHOLE * LANES;  // where it begins
    static_assert(TAIL == 0 || TAIL == 1 || TAIL == 2, "a tail is one load");

    // The first of the two elements in a lane's word.
    static __device__ __forceinline__ uint32_t element(uint32_t lane, uint32_t word) {
        return word + 1 <= 4 * WHOLE ? 8 * (word / 4 * LANES + lane) + 2 * (word % 4)
                                     : 8 * WHOLE * LANES + 2 * (TAIL * lane + word - 4 * WHOLE);
    }

    static __device__ __forceinline__ uint4 piece(const char* half, uint32_t row, uint32_t lane, uint32_t piece) {
        return *reinterpret_cast<const uint4*>(half + HalfBlock<HEAD_DIM>::place(row, piece * LANES + lane));
    }

    // The smaller one; words that it lacks are not to be used.
    static __device__ __forceinline__ uint4 tail(const char* row, uint32_t lane) {
        const char* from = row + TAIL_BYTES + 4 * TAIL * lane;
        uint4 words = make_uint4(0, 0, 0, 0);
        if constexpr (TAIL == 1) {
            words.x = *reinterpret_cast<const uint32_t*>(from);
        } else {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            words.x = both.x;
            words.y = both.y;
        }
        return words;
    }
};

// The query vectors of a tile in a lane's registers, B of the keys' products.
template <uint32_t HEAD_DIM>
struct Queries {
    using Row = Pieces<HEAD_DIM, 4>;
    uint4 words[Row::WHOLE + (Row::TAIL > 0)];

    // `row` lies in global memory; null is zeros.
    __device__ __forceinline__ void load(const char* row, uint32_t lane) {
#pragma unroll
        for (uint32_t piece = 0; piece < Row::WHOLE; ++piece) {
            words[piece] = make_uint4(0, 0, 0, 0);
            if (row != nullptr) {
                words[piece] = *reinterpret_cast<const uint4*>(row + 16 * (4 * piece + lane % 4));
            }
        }
        if constexpr (Row::TAIL > 0) {
            words[Row::WHOLE] = row != nullptr ? Row::tail(row, lane % 4) : make_uint4(0, 0, 0, 0);
        }
    }
};

// Keys of a block times queries: [16 keys, 8 queries], in two sums so that the products do not all wait for one another.
template <uint32_t HEAD_DIM, typename Element>
__device__ __forceinline__ void multiply_keys(const char* keys, const Queries<HEAD_DIM>& queries, uint32_t lane,
                                              float (&scores)[4]) {
    using Core = TensorCoreElement<Element>;
    using Row = Pieces<HEAD_DIM, 4>;
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (uint32_t piece = 0; piece < Row::WHOLE; ++piece) {
        const uint4 low = Row::piece(keys, lane / 4, lane % 4, piece);
        const uint4 high = Row::piece(keys, lane / 4 + 8, lane % 4, piece);
        Core::multiply_add(even, {low.x, high.x, low.y, high.y}, queries.words[piece].x, queries.words[piece].y);
        Core::multiply_add(odd, {low.z, high.z, low.w, high.w}, queries.words[piece].z, queries.words[piece].w);
    }
    if constexpr (Row::TAIL > 0) {
        const char* own = keys + lane / 4 * HalfBlock<HEAD_DIM>::ROW_BYTES;
        const uint4 low = Row::tail(own, lane % 4), high = Row::tail(own + 8 * HalfBlock<HEAD_DIM>::ROW_BYTES, lane % 4);
        Core::multiply_add(even, {low.x, high.x, low.y, high.y}, queries.words[Row::WHOLE].x,
                           queries.words[Row::WHOLE].y);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        scores[i] = even[i] + odd[i];
    }
}

// Adds weights [16 keys, 8 queries] times values to `gathered` [head_dim, 8 queries]. Values of keys from `limit` on count
// as zeros: what was never written may be no number, and no weight makes that a zero.
template <uint32_t HEAD_DIM, typename Element>
__device__ __forceinline__ void add_values(const char* values, const uint32_t (&weights)[2], uint32_t limit,
                                           uint32_t lane, float (&gathered)[HEAD_DIM / 16][4]) {
    using Core = TensorCoreElement<Element>;
    using Row = Pieces<HEAD_DIM, 8>;
    const auto key = [&](uint32_t i) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; };
    const auto known = [&](uint4 words, uint32_t i) { return key(i) < limit ? words : make_uint4(0, 0, 0, 0); };
    const auto add = [&](const uint32_t (&word)[4], float(&to)[4]) {
        Core::multiply_add(to, {__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[0], word[1], 0x7632),
                                __byte_perm(word[2], word[3], 0x5410), __byte_perm(word[2], word[3], 0x7632)},
                           weights[0], weights[1]);
    };
#pragma unroll
    for (uint32_t piece = 0; piece + 1 <= Row::WHOLE; ++piece) {
        uint4 of[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            of[i] = Row::piece(values, key(i), lane / 4, piece);
        }
        if (limit < BLOCK_TOKENS) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                of[i] = known(of[i], i);
            }
        }
        add({of[0].x, of[1].x, of[2].x, of[3].x}, gathered[4 * piece]);
        add({of[0].y, of[1].y, of[2].y, of[3].y}, gathered[4 * piece + 1]);
        add({of[0].z, of[1].z, of[2].z, of[3].z}, gathered[4 * piece + 2]);
        add({of[0].w, of[1].w, of[2].w, of[3].w}, gathered[4 * piece + 3]);
    }
    if constexpr (Row::TAIL > 0) {
        uint4 of[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            of[i] = known(Row::tail(values + key(i) * HalfBlock<HEAD_DIM>::ROW_BYTES, lane / 4), i);
        }
        add({of[0].x, of[1].x, of[2].x, of[3].x}, gathered[4 * Row::WHOLE]);
        if constexpr (Row::TAIL == 2) {
            add({of[0].y, of[1].y, of[2].y, of[3].y}, gathered[4 * Row::WHOLE + 1]);
        }
    }
}

// An 8 x 8 matrix of 16-bit elements, one word a lane, turned over its diagonal.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}
