// One block of the cache in a warp's registers: sixteen keys or values of one head, loaded in the layout in which the
// tensor cores want them, so that shared memory is not needed at all.
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

#include "element.cuh"

// Reads past the first cache: keys and values are used once.
__device__ __forceinline__ void load_once(const void* from, uint32_t (&words)[4]) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
}
__device__ __forceinline__ void load_once(const void* from, uint32_t (&words)[2]) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
}
__device__ __forceinline__ void load_once(const void* from, uint32_t (&words)[1]) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
}

// A lane's elements of one vector of `COUNT`, which `LANES` lanes share: pieces of 16 bytes each, and a smaller one at
// the end.
template <uint32_t COUNT, uint32_t LANES>
struct Pieces {
    static constexpr uint32_t WHOLE = COUNT / (8 * LANES), TAIL = COUNT % (8 * LANES) / LANES / 2;  // pieces, words
    static constexpr uint32_t WORDS = COUNT / LANES / 2;
    static_assert(COUNT % (2 * LANES) == 0 && (TAIL == 0 || TAIL == 1 || TAIL == 2), "words, and a tail of one piece");

    static __device__ __forceinline__ void load(const void* vector, uint32_t lane, uint32_t (&words)[WORDS]) {
        const char* bytes = static_cast<const char*>(vector);
#pragma unroll
        for (uint32_t piece = 0; piece + 1 <= WHOLE; ++piece) {
            uint32_t loaded[4];
            load_once(bytes + 16 * (piece * LANES + lane), loaded);
#pragma unroll
            for (uint32_t word = 0; word < 4; ++word) {
                words[4 * piece + word] = loaded[word];
            }
        }
        if constexpr (TAIL > 0) {
            uint32_t loaded[TAIL];
            load_once(bytes + 16 * WHOLE * LANES + 4 * TAIL * lane, loaded);
#pragma unroll
            for (uint32_t word = 0; word < TAIL; ++word) {
                words[4 * WHOLE + word] = loaded[word];
            }
        }
    }

    // The first of the two elements in a lane's word.
    static __device__ __forceinline__ uint32_t element(uint32_t lane, uint32_t word) {
        return word + 1 <= 4 * WHOLE ? 8 * (word / 4 * LANES + lane) + 2 * (word % 4)
                                : 8 * WHOLE * LANES + 2 * (TAIL * lane + word - 4 * WHOLE);
    }
};

template <uint32_t HEAD_DIM>
struct KeyBlock {
    using Row = Pieces<HEAD_DIM, 4>;
    uint32_t low[Row::WORDS], high[Row::WORDS];  // keys `group` and `group + 8`

    __device__ __forceinline__ void load(const char* block, uint32_t lane) {
        const char* own = block + lane / 4 * HEAD_DIM * 2;
        Row::load(own, lane % 4, low);
        Row::load(own + 8 * HEAD_DIM * 2, lane % 4, high);
    }
};

template <uint32_t HEAD_DIM>
struct ValueBlock {
    using Row = Pieces<HEAD_DIM, 8>;
    uint32_t keys[4][Row::WORDS];  // 2 * pair, 2 * pair + 1, 2 * pair + 8, 2 * pair + 9

    static __device__ __forceinline__ uint32_t key(uint32_t lane, uint32_t i) {
        return 2 * (lane % 4) + i % 2 + i / 2 * 8;
    }

    __device__ __forceinline__ void load(const char* block, uint32_t lane) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            Row::load(block + key(lane, i) * HEAD_DIM * 2, lane / 4, keys[i]);
        }
    }

    // Zeros for the keys from `limit` on: what was never written may be no number, and no weight makes that a zero.
    __device__ __forceinline__ void forget_from(uint32_t limit, uint32_t lane) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
            for (uint32_t word = 0; word < Row::WORDS; ++word) {
                keys[i][word] = key(lane, i) < limit ? keys[i][word] : 0;
            }
        }
    }

    // A of the output's rows that word `word` of each key holds.
    __device__ __forceinline__ void rows(uint32_t word, uint32_t (&a)[4]) const {
        a[0] = __byte_perm(keys[0][word], keys[1][word], 0x5410);
        a[1] = __byte_perm(keys[0][word], keys[1][word], 0x7632);
        a[2] = __byte_perm(keys[2][word], keys[3][word], 0x5410);
        a[3] = __byte_perm(keys[2][word], keys[3][word], 0x7632);
    }
};

// An 8 x 8 matrix of 16-bit elements, one word a lane, turned over its diagonal.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
    uint32_t turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}
