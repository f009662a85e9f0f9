// Changes to a slice of logits: grammar, minimum length, biases and penalties.
//
// Order and rounding are as in kernels/src/sampling/changes.rs. Expressions that the compiler could
// contract to fused multiply-adds are written with `__fmul_rn` and similar intrinsics.
#pragma once

#include <float.h>
#include <stdint.h>

#include "request.cuh"
#include "slice.cuh"

// Bit of a token's tally that is set if there is a repetition penalty and the token occurs in the
// prompt. The lower bits count how often the token was produced.
constexpr uint32_t IN_PROMPT = 0x80000000u;

// Kinds of lists, in the order in which the host writes the starts of the lists.
enum List : uint32_t {
    FORBIDDEN = contract::sampling::LIST_FORBIDDEN,
    BIASED = contract::sampling::LIST_BIASED,
    BIASES = contract::sampling::LIST_BIASES,
    PROMPT = contract::sampling::LIST_PROMPT,
    PRODUCED = contract::sampling::LIST_PRODUCED,
};

struct RowLists {
    const uint32_t* words;    // the whole request buffer (`asked`), with all lists and masks
    const uint32_t* starts;   // [kinds, starts_pitch] first word of each row's list, then the last list's end
    uint32_t starts_pitch;    // elements from one kind to the next
    const uint32_t* previous; // [previous_count]
    uint32_t previous_count;

    __device__ __forceinline__ uint32_t start(List list, uint32_t row) const {
        return starts[list * starts_pitch + row];
    }
    __device__ __forceinline__ uint32_t count(List list, uint32_t row) const {
        return start(list, row + 1) - start(list, row);
    }
};

// If this bit of a produced token is set, the other bits are an index into `previous`, which
// contains the token.
using contract::common::PREVIOUS;

// Logits of a slice while they are changed, and a tally for each of its tokens.
struct Bench {
    float logits[SLICE];
    uint32_t tally[SLICE];
};

__device__ __forceinline__ bool changes(const SampleRow& wanted, const RowLists& row_lists, uint32_t row) {
    if (is_given(wanted)) {
        return false;
    }
    const auto any_of = [&](List list) { return row_lists.count(list, row) > 0; };
    const bool penalised = wanted.repetition != 1.0f ? any_of(PROMPT) || any_of(PRODUCED)
                                                     : penalizes(wanted) && any_of(PRODUCED);
    return penalised || wanted.allowed != NONE || any_of(FORBIDDEN) || any_of(BIASED);
}

// Clamps the logit to the finite range, because the distribution is undefined if a logit is
// infinite. Minus infinity (a forbidden token) stays minus infinity.
__device__ __forceinline__ float bounded(float logit) {
    return logit == -INFINITY ? logit : fminf(fmaxf(logit, -FLT_MAX), FLT_MAX);
}

__device__ __forceinline__ float penalised(float logit, uint32_t tally, const SampleRow& wanted) {
    const float repeated =
        logit < 0.0f ? __fmul_rn(logit, wanted.repetition) : __fdiv_rn(logit, wanted.repetition);
    const uint32_t times = tally & ~IN_PROMPT;
    const double frequency = __dmul_rn(wanted.frequency, static_cast<double>(times));
    const double presence = times > 0 ? wanted.presence : 0.0;
    return bounded(__fsub_rn(repeated, static_cast<float>(__dadd_rn(frequency, presence))));
}

// Calls `visit(index in the slice, index in the list)` for each token of a row's list that lies in
// the slice. Other blocks process the other slices, and no block processes ids beyond the
// vocabulary. `read` converts a list entry to a token.
template <typename Visit, typename Read>
__device__ __forceinline__ void for_each_listed(const RowLists& row_lists, List list, uint32_t row, uint32_t first,
                                                uint32_t length, Visit visit, Read read) {
    const uint32_t count = row_lists.count(list, row);
    const uint32_t* tokens = row_lists.words + row_lists.start(list, row);
    const auto look = [&](uint32_t listed, uint32_t at) {
        const uint32_t token = read(listed);
        if (token - first < length) {
            visit(token - first, at);
        }
    };
    // Reads four entries at a time, from the first entry that is aligned to 16 bytes: a list can be
    // long, and reading it is bound by latency.
    const uint32_t ahead = min((4 - static_cast<uint32_t>(reinterpret_cast<uint64_t>(tokens) / 4 % 4)) % 4, count);
    const uint32_t fours = (count - ahead) / 4, behind = ahead + 4 * fours;
    if (threadIdx.x < ahead) {
        look(tokens[threadIdx.x], threadIdx.x);
    }
#pragma unroll 2
    for (uint32_t four = threadIdx.x; four < fours; four += SLICE_THREADS) {
        const uint4 token = reinterpret_cast<const uint4*>(tokens + ahead)[four];
        const uint32_t at = ahead + 4 * four;
        look(token.x, at), look(token.y, at + 1), look(token.z, at + 2), look(token.w, at + 3);
    }
    if (threadIdx.x < count - behind) {
        look(tokens[behind + threadIdx.x], behind + threadIdx.x);
    }
}

template <typename Visit>
__device__ __forceinline__ void for_each_listed(const RowLists& row_lists, List list, uint32_t row, uint32_t first,
                                                uint32_t length, Visit visit) {
    for_each_listed(row_lists, list, row, first, length, visit, [](uint32_t token) { return token; });
}

// All threads of the block must call this function.
__device__ __forceinline__ void change_slice(Held& held, Bench& bench, const SampleRow& wanted, const RowLists& row_lists,
                                             uint32_t row, uint32_t slice, uint32_t vocabulary) {
    const uint32_t first = slice * SLICE;
    const uint32_t length = min(SLICE, vocabulary - first);
    const bool counted = penalizes(wanted);
#pragma unroll
    for (uint32_t load = 0; load < LOADS; ++load) {
        const uint32_t place = place_of(load);
        uint32_t allowed = 0xfu;
        if (wanted.allowed != NONE && place < length) {
            allowed = row_lists.words[wanted.allowed + (first + place) / 32] >> place % 32;
        }
#pragma unroll
        for (uint32_t one = 0; one < AT_ONCE; ++one) {
            bench.logits[place + one] = allowed >> one & 1 ? held.logit[load][one] : -INFINITY;
            bench.tally[place + one] = 0;
        }
    }
    __syncthreads();
    for_each_listed(row_lists, FORBIDDEN, row, first, length,
                    [&](uint32_t place, uint32_t) { bench.logits[place] = -INFINITY; });
    if (counted) {
        if (wanted.repetition != 1.0f) {
            for_each_listed(row_lists, PROMPT, row, first, length,
                            [&](uint32_t place, uint32_t) { atomicOr(&bench.tally[place], IN_PROMPT); });
        }
        const auto read = [&](uint32_t token) {
            const uint32_t place = token & ~PREVIOUS;
            return !(token & PREVIOUS)            ? token
                   : place < row_lists.previous_count ? row_lists.previous[place]
                                                   : NONE;
        };
        const auto count = [&](uint32_t place, uint32_t) { atomicAdd(&bench.tally[place], 1u); };
        for_each_listed(row_lists, PRODUCED, row, first, length, count, read);
    }
    __syncthreads();
    const uint32_t* biases = row_lists.words + row_lists.start(BIASES, row);
    for_each_listed(row_lists, BIASED, row, first, length, [&](uint32_t place, uint32_t at) {
        bench.logits[place] = bounded(__fadd_rn(bench.logits[place], __uint_as_float(biases[at])));
    });
    __syncthreads();
#pragma unroll
    for (uint32_t load = 0; load < LOADS; ++load) {
#pragma unroll
        for (uint32_t one = 0; one < AT_ONCE; ++one) {
            const uint32_t place = place_of(load) + one;
            const uint32_t tally = bench.tally[place];
            const float logit = bench.logits[place];
            held.logit[load][one] = tally > 0 ? penalised(logit, tally, wanted) : logit;
        }
    }
}
