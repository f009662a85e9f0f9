// What a row asks for. The host writes it; a captured graph finds the next step's in the same place.
#pragma once

#include <stdint.h>

#include "contract.cuh"

using contract::sampling::ROW_WORDS;
using contract::sampling::TOP_MAX;

// No token, and nothing that is asked for.
constexpr uint32_t NONE = contract::common::NO_CHOICE;
static_assert(contract::sampling::NO_REPORT == NONE && contract::sampling::NO_MASK == NONE
                  && contract::sampling::NONE_GIVEN == NONE,
              "the host says so");

// 8-byte aligned: Rust's `#[repr(C)]` has the same layout. Parameters are in the ranges of `SamplingParams::check`.
struct SampleRow {
    double temperature;       // 0 takes the likeliest
    double top_p;             // 1 is no limit
    double min_p_logarithm;   // ln(min_p); -infinity is no limit
    double presence;
    double frequency;
    uint64_t seed;
    uint64_t position;        // tokens produced so far
    float repetition;         // 1 changes nothing
    uint32_t top_k;           // 0 is no limit
    uint32_t top;             // log-probabilities: how many of the likeliest, at most TOP_MAX; NONE for no report at all
    uint32_t allowed;         // where among the words its grammar's mask begins; NONE for no grammar
    uint32_t ignored;         // 1: the row is padding of a captured batch, and gets NONE
    uint32_t given;           // the token that really followed: it is taken, and its lists are not read; NONE to choose one
};
static_assert(sizeof(SampleRow) == ROW_WORDS * 4, "the host writes this layout");

__device__ __forceinline__ bool is_given(const SampleRow& row) {
    return row.given != NONE;
}
// Whether nothing is drawn.
__device__ __forceinline__ bool is_greedy(const SampleRow& row) {
    return row.temperature == 0.0 || row.top_k == 1 || is_given(row);
}
__device__ __forceinline__ bool penalises(const SampleRow& row) {
    return row.repetition != 1.0f || row.presence != 0.0 || row.frequency != 0.0;
}
