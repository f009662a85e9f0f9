// Routing of a mixture of experts: from the router's logits to each row's experts, and
// all choices sorted by expert for the expert GEMMs. Few rows take one launch, more
// rows two consecutive launches.
//
// route_small_m_f32  everything, for up to SMALL_M_ROWS rows
// route_choose_f32   each row's experts and weights, and the number of choices that each expert has
//                    in each block's rows
// route_sort_u32     the place of each choice in the sorted order, and the choice at each place
//
// logits   [rows, experts] f32       rows are `pitch` elements apart
// weights  [rows, top] f32           softmax of logit_scale * logits over all experts, or over the
//                                    row's chosen experts if `renormalized`. If expert_scales [experts]
//                                    is not null, each weight is multiplied by its expert's scale.
// places   [rows * top] u32          the place of each choice; between the two launches, the
//                                    expert of each choice
// choices  [rows * top] u32          the choice at each place: row * top + k for the row's k-th
//                                    expert
// starts   [experts + 1] u32         the first place of each expert, then the end of the last
//                                    expert
// loads    [experts] u32             counters, to which the kernels add the number of each expert's
//                                    choices
// slots    [rows] u32                rows of NO_SLOT are not counted in loads; null: all rows are
//                                    counted
// counts   [blocks, experts] u32     scratch; null if one block sorts, because that block counts
//                                    the choices itself
//
// Among equal logits, the expert with the lower index is first. A NaN comes last, and each weight
// whose softmax includes the NaN is NaN. The order of additions is fixed, so a row's bits do not
// depend on the other rows. The choices of an expert are in the order of their rows: the sort is a
// counting sort, and __match_any_sync gives the ranks within a warp.

#include "contract.cuh"
#include "kernel_order.cuh"
#include "route_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    route_small_m_f32(const float* logits, uint32_t pitch, uint32_t rows, uint32_t experts, uint32_t top,
                  uint32_t renormalized, float logit_scale, const float* expert_scales, float* weights,
                  uint32_t* places, uint32_t* choices, uint32_t* starts, uint32_t* loads, const uint32_t* slots) {
    __shared__ Sort sort;
    __shared__ uint32_t of_row[THREADS];
    let_next_kernel_start();
    sort.clear();
    wait_for_previous_kernel();
    route_small_m(sort, of_row, logits, pitch, {rows, experts, {top, renormalized != 0, logit_scale, expert_scales}},
                  {weights, places, choices, starts, loads, slots});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_choose_f32(const float* logits, uint32_t pitch, uint32_t rows, uint32_t experts, uint32_t top,
                     uint32_t renormalized, float logit_scale, const float* expert_scales, uint32_t block_rows,
                     float* weights, uint32_t* places, uint32_t* counts, uint32_t* loads, const uint32_t* slots) {
    __shared__ uint32_t count[EXPERTS_MAX];
    let_next_kernel_start();
    for (uint32_t expert = threadIdx.x; expert < EXPERTS_MAX; expert += blockDim.x) {
        count[expert] = 0;
    }
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t lane = threadIdx.x % LANES;
    const Rule rule{top, renormalized != 0, logit_scale, expert_scales};
    const uint32_t last = min(rows, (blockIdx.x + 1) * block_rows);
    for (uint32_t row = blockIdx.x * block_rows + threadIdx.x / LANES; row < last; row += blockDim.x / LANES) {
        float weight;
        const uint32_t own = choose(logits + static_cast<uint64_t>(row) * pitch, experts, rule, weight);
        if (lane < top) {
            weights[row * top + lane] = weight;
            places[row * top + lane] = own;
            atomicAdd(&count[own], 1u);
            count_off(slots, row, loads, own);
        }
    }
    if (counts == nullptr) {
        return;
    }
    __syncthreads();
    for (uint32_t expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        counts[blockIdx.x * experts + expert] = count[expert];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    route_sort_u32(uint32_t* places, uint32_t choices_count, uint32_t experts, uint32_t block_choices,
                   const uint32_t* counts, uint32_t* choices, uint32_t* starts, uint32_t* loads) {
    __shared__ Sort sort;
    let_next_kernel_start();
    sort.clear();
    wait_for_previous_kernel();
    __syncthreads();
    const uint32_t first = blockIdx.x * block_choices, last = min(choices_count, first + block_choices);
    const auto chosen = [&](uint32_t choice) { return places[choice]; };
    sort.run(first, last, experts, counts, chosen, places, choices, starts, loads);
}

// Launch: no dynamic shared memory; all kernels may be launched
// with programmatic stream serialization.
//   route_small_m_f32  grid (1), block (THREADS); rows <= SMALL_M_ROWS, and may be 0
//   route_choose_f32   grid (div_ceil(rows, block_rows)), block (any multiple of the warp size up
//                      to THREADS)
//   route_sort_u32     block (THREADS). With counts: the same grid, and block_choices = block_rows
//                      * top. Without counts: grid (1) and block_choices = choices_count
