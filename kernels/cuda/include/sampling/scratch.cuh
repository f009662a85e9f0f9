// Scratch memory: one region per row, through which the four kernels pass their results on.
#pragma once

#include <stdint.h>

#include "request.cuh"
#include "weight.cuh"

using contract::sampling::BINS;   // bins of a histogram
using contract::sampling::GROUP;  // tokens of a group, for which one largest logit is stored
using contract::sampling::LIST;   // largest number of candidates in a list
using contract::sampling::SLICE;  // tokens of a slice, which one block processes
constexpr uint32_t GROUPS_OF_SLICE = SLICE / GROUP;
// In a row without top-k, the list's floor is the largest logit of the group that ranks
// LIST_GROUPS-th by its largest logit. Rows with a larger top-k than this are not listed.
constexpr uint32_t LIST_GROUPS = 512;

using contract::sampling::FAULT_IGNORED;
using contract::sampling::FAULT_NON_FINITE_LOGITS;
using contract::sampling::FAULT_NOTHING_ALLOWED;

// Facts about a slice. `raw_…` fields refer to the unchanged logits, the other fields to the logits
// after changes.
struct SliceFacts {
    uint32_t raw_largest;   // signless key
    uint32_t raw_finite;    // number of finite logits; if they are not counted: 0 for none, otherwise above 0
    float raw_sum;          // sum of exp(logit - raw_largest)
    uint32_t largest;       // signless key
    uint32_t first_largest; // id
    uint32_t least;         // key of the smallest finite logit if a histogram may be made; or NONE
    uint32_t finite;
    float sum;              // sum of exp((logit - largest) / temperature), if `least` is known
    uint32_t non_finite;    // 1 if there is NaN or +infinity
    uint32_t padding;
};

enum Way : uint32_t {
    WAY_DONE,        // the token is known, or no token can be chosen
    WAY_IN_ID_ORDER, // neither top-k nor top-p: draw from the whole vocabulary in the order of ids
    WAY_LISTED,      // list and sort the most likely tokens
    WAY_BINNED,      // possibly too many tokens to list: make a histogram
};

// Facts about a row, and how its token is found.
struct RowPlan {
    double raw_log_total;   // ln of the sum of exp(logit - raw_largest)
    Way way;
    uint32_t fault;
    uint32_t chosen;        // the token if `way` is WAY_DONE
    uint32_t changed;       // 1 if the logits have been changed
    float largest;
    float raw_largest;
    float least_difference; // min-p keeps a token if logit - largest is at least this
    Softening softening;
    float bins_per_unit;    // WAY_BINNED: bins per 1.0 of logit, from the largest downwards
    uint32_t top_k;         // 0 if top-k does not limit the row
    uint32_t floor;         // list the tokens with this key or a larger one
    uint32_t raw_floor;     // floor of the raw list, for the most likely tokens that are reported
    uint32_t reported;      // number of most likely tokens to report
    uint32_t listed;        // candidates offered to the list; if more than LIST, not all are in it
    uint32_t raw_listed;
    uint32_t least;         // no finite logit has a smaller key
    uint32_t padding[13];
};
static_assert(sizeof(RowPlan) == contract::sampling::PLAN_BYTES, "the host sizes scratch with this number");
static_assert(sizeof(SliceFacts) == contract::sampling::FACTS_BYTES, "the host sizes scratch with this number");

__host__ __device__ constexpr uint32_t slices_of(uint32_t vocabulary) {
    return (vocabulary + SLICE - 1) / SLICE;
}

// Scratch bytes of a row.
__host__ __device__ constexpr uint64_t row_bytes(uint32_t slices) {
    using namespace contract::sampling;
    static_assert(ROW_BYTES == sizeof(RowPlan) + 2 * LIST * 8 + BINS * 12, "the host sizes scratch for the layout of RowScratch");
    static_assert(SLICE_BYTES == 8 + sizeof(SliceFacts) + 2 * GROUPS_OF_SLICE * 4, "the host sizes scratch for the layout of RowScratch");
    return (ROW_BYTES + static_cast<uint64_t>(slices) * SLICE_BYTES + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT;
}

// Addresses of a row's scratch memory.
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

// The bin of a row's histogram for a logit. Bin 0 has the largest logit, and smaller logits never
// have a smaller bin.
__device__ __forceinline__ uint32_t bin_of(float logit, const RowPlan& plan) {
    const float bin = (plan.largest - logit) * plan.bins_per_unit;
    return bin < static_cast<float>(BINS - 1) ? static_cast<uint32_t>(bin) : BINS - 1;
}
