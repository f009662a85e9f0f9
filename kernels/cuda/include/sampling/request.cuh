// The request of a row. The host writes it; a captured graph reads the next step's request
// at the same address.
#pragma once

#include <stdint.h>

#include "contract.cuh"

using contract::sampling::ROW_WORDS;
using contract::sampling::TOP_MAX;

// Value that means no token, no report, no mask or no given token.
constexpr uint32_t NONE = contract::common::NO_CHOICE;
static_assert(contract::sampling::NO_REPORT == NONE && contract::sampling::NO_MASK == NONE
                  && contract::sampling::NONE_GIVEN == NONE,
              "the host says so");

// The request of one row, aligned to 8 bytes, in the layout that `SampleRow::to_words` in
// kernels/src/sampling/row.rs writes. Parameters are in the ranges that `SamplingParams::check`
// allows.
struct SampleRow {
    double temperature;       // 0: take the most likely token
    double top_p;             // 1: no limit
    double min_p_logarithm;   // ln(min_p); -infinity: no limit
    double presence;
    double frequency;
    uint64_t seed;
    uint64_t position;        // tokens produced so far
    float repetition;         // 1: no penalty
    uint32_t top_k;           // 0: no limit
    uint32_t top;             // number of most likely tokens to report, at most TOP_MAX; or NONE
    uint32_t allowed;         // first word of the grammar's mask in the request buffer; or NONE
    uint32_t ignored;         // 1: the row is padding of a captured batch; its token is NONE
    uint32_t given;           // token to take without reading the lists; NONE: choose one
};
static_assert(sizeof(SampleRow) == ROW_WORDS * 4, "the host writes this layout");

__device__ __forceinline__ bool is_given(const SampleRow& row) {
    return row.given != NONE;
}
// `true` if no random draw is needed.
__device__ __forceinline__ bool is_greedy(const SampleRow& row) {
    return row.temperature == 0.0 || row.top_k == 1 || is_given(row);
}
__device__ __forceinline__ bool penalizes(const SampleRow& row) {
    return row.repetition != 1.0f || row.presence != 0.0 || row.frequency != 0.0;
}
