// Scratch: what the four kernels hand on, one piece a row.
#pragma once

#include <stdint.h>

#include "request.cuh"
#include "weight.cuh"

using contract::sampling::BINS;   // of a histogram
using contract::sampling::GROUP;  // tokens, whose largest logit is remembered
using contract::sampling::LIST;   // candidates that fit
using contract::sampling::SLICE;  // tokens, which are one block's share of a row
constexpr uint32_t GROUPS_OF_SLICE = SLICE / GROUP;
// Groups whose largest logits make the list of a row without top-k; also the largest top-k that a list is made for.
constexpr uint32_t LIST_GROUPS = 512;

using contract::sampling::FAULT_IGNORED;
using contract::sampling::FAULT_NOT_NUMBERS;
using contract::sampling::FAULT_NOTHING_ALLOWED;

// What is known of a slice. "Raw" are the logits as they came, the others those that are chosen from.
struct SliceFacts {
    uint32_t raw_largest;   // signless key
    uint32_t raw_finite;    // how many; where none is counted, 0 only if there is none
    float raw_sum;          // of exp(logit - raw_largest)
    uint32_t largest;       // signless key
    uint32_t first_largest; // id
    uint32_t least;         // key of the least finite one, for rows that may need a histogram; else NONE
    uint32_t finite;
    float sum;              // of exp((logit - largest) / temperature), for the same rows
    uint32_t not_numbers;   // 1 if there is NaN or +infinity
    uint32_t padding;
};

enum Way : uint32_t {
    WAY_DONE,        // the token is known, or there is none
    WAY_IN_ID_ORDER, // neither top-k nor top-p: a draw from the vocabulary as it stands
    WAY_LISTED,      // the likeliest are listed and sorted
    WAY_BINNED,      // they may be too many to list: a histogram is made
};

// What is known of a row when its slices are.
struct RowPlan {
    double raw_log_total;   // ln of the sum of exp(logit - raw_largest)
    Way way;
    uint32_t fault;
    uint32_t chosen;        // for WAY_DONE
    uint32_t changed;       // 1 if the logits that are chosen from are not the raw ones
    float largest;
    float raw_largest;
    float least_difference; // min-p: logit - largest must be so much
    Softening softening;
    float bins_per_unit;    // WAY_BINNED: bins for each 1.0 of logit, from the largest downwards
    uint32_t top_k;         // 0 when it does not limit
    uint32_t floor;         // list what has this key or a larger one
    uint32_t raw_floor;     // the same for the likeliest that are reported
    uint32_t reported;      // how many of the likeliest are reported
    uint32_t listed;        // how many were offered to the lists; more than LIST of them do not fit
    uint32_t raw_listed;
    uint32_t least;         // no finite logit has a smaller key
    uint32_t padding[13];
};
static_assert(sizeof(RowPlan) == contract::sampling::PLAN_BYTES, "scratch has room for it");
static_assert(sizeof(SliceFacts) == contract::sampling::FACTS_BYTES, "scratch has room for it");

__host__ __device__ constexpr uint32_t slices_of(uint32_t vocabulary) {
    return (vocabulary + SLICE - 1) / SLICE;
}

// Bytes for a row.
__host__ __device__ constexpr uint64_t row_bytes(uint32_t slices) {
    using namespace contract::sampling;
    static_assert(ROW_BYTES == sizeof(RowPlan) + 2 * LIST * 8 + BINS * 12, "what RowScratch finds there");
    static_assert(SLICE_BYTES == 8 + sizeof(SliceFacts) + 2 * GROUPS_OF_SLICE * 4, "what RowScratch finds there");
    return (ROW_BYTES + static_cast<uint64_t>(slices) * SLICE_BYTES + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
}

// Where everything of a row stands.
struct RowScratch {
    RowPlan* plan;
    uint64_t* list;           // [LIST] candidates by order key
    uint64_t* raw_list;       // [LIST] candidates by signless key
    uint64_t* bin_weights;    // [BINS]
    uint32_t* bin_counts;     // [BINS]
    uint64_t* slice_weights;  // [slices]
    SliceFacts* facts;        // [slices]
    uint32_t* group_largest;  // [slices, GROUPS_OF_SLICE] signless keys
    uint32_t* raw_group_largest;

    __device__ __forceinline__ RowScratch(void* scratch, uint32_t row, uint32_t slices) {
        char* next = static_cast<char*>(scratch) + row * row_bytes(slices);
        plan = reinterpret_cast<RowPlan*>(next);
        list = reinterpret_cast<uint64_t*>(next += sizeof(RowPlan));
        raw_list = reinterpret_cast<uint64_t*>(next += LIST * 8);
        bin_weights = reinterpret_cast<uint64_t*>(next += LIST * 8);
        bin_counts = reinterpret_cast<uint32_t*>(next += BINS * 8);
        slice_weights = reinterpret_cast<uint64_t*>(next += BINS * 4);
        facts = reinterpret_cast<SliceFacts*>(next += slices * 8);
        group_largest = reinterpret_cast<uint32_t*>(next += slices * sizeof(SliceFacts));
        raw_group_largest = reinterpret_cast<uint32_t*>(next + slices * GROUPS_OF_SLICE * 4);
    }
};

// Which bin of a row's histogram a logit falls in: the first is the likeliest's. It never goes back as logits fall.
__device__ __forceinline__ uint32_t bin_of(float logit, const RowPlan& plan) {
    const float bin = (plan.largest - logit) * plan.bins_per_unit;
    return bin < static_cast<float>(BINS - 1) ? static_cast<uint32_t>(bin) : BINS - 1;
}
