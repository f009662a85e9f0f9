// Sampling: from logits to one token per row, with every feature of `model/src/sampling` and
// without a decision on the host.
//
// Inputs, for `rows` rows of `vocabulary` tokens (1 to 524,288). `rows` is gridDim.y of the kernels
// that split a row into slices, and gridDim.x of the other kernels.
//   logits     [rows, vocabulary] f32, rows `pitch` elements apart; loads are 16 bytes wide if a
//              row is aligned to 16 bytes
//   asked      u32 words, 8-byte aligned, laid out by `kernels/src/sampling/layout.rs`:
//              - a SampleRow for each row of the whole batch (include/sampling/request.cuh);
//              - for each kind of list (change.cuh), the first word of each row's list among these
//                words, and the end of the last list;
//              - the lists and masks themselves, in any order.
//              The requests and the starts of lists have the same layout in each step, so a
//              captured graph finds the requests and starts of the next step at the same addresses.
//              The host checks that all lists and masks are within `asked`. An id beyond the
//              vocabulary is skipped, so placeholder ids of pictures are harmless. A biased token
//              occurs once per row, and there are as many biases as biased tokens; the other lists
//              may have duplicates.
//              A produced token with bit 31 is an index into `previous` [previous_count], the
//              tokens that the previous step chose and the host has not seen yet (as in embed.cu).
//              `previous` may be `chosen` itself, because it is read before `chosen` is written.
//              A `given` token is less than `vocabulary`, and becomes the row's token whatever the
//              logits are, unless the row has a fault. This is how a prompt is scored.
//   first      the row of the whole batch at which the launch begins; `batch_rows` is the number of
//              all rows
// Outputs:
//   chosen     [rows] u32; 0xffffffff if no token was chosen
//   faults     [rows] u32: 0: none; 1: NaN or +infinity among the logits; 2: all are -infinity or
//              forbidden; 3: padding
//   log_probabilities [rows] f32: log-probability of the chosen token; NaN if it is not requested
//     or no token was chosen
//   top_ids, top_log_probabilities [rows, top_pitch]: the most likely tokens, most likely first,
//     equally likely tokens by id. Entries beyond the requested number, or beyond the finite
//     logits, are 0xffffffff and NaN. top_pitch may be 0 if no row requests them.
//
// Rules, in the order of `Sampler::sample`:
// 1. Log-probabilities are computed from the unchanged logits (log-softmax).
// 2. The grammar forbids tokens. Then, the list FORBIDDEN forbids the end tokens of a reply that is
//    too short; the host leaves this list empty if the grammar must end.
// 3. Biases are added. Then, repetition, frequency and presence penalties are applied.
// 4. If the temperature is 0 or top-k is 1, the token is the first of the largest logits.
// 5. Otherwise, in this order: temperature, top-k (ties with the last kept token are kept), min-p,
//    top-p (a share of the remaining weight; the token that crosses the limit is kept), and a draw
//    with the Philox number of (seed, position). The draw visits the candidates in order: most
//    likely first if top-k or top-p limits them, otherwise by id.
// -0 and 0 are equal wherever comparisons of Hugging Face transformers treat them as equal.
//
// The same row, request and lists give the same token in any batch, at any grid position and in any
// run: weights are integers (weight.cuh), floating-point sums have a fixed order, and no result
// depends on the order of atomics. The CPU sampler chooses the same token, except where rounding
// decides (the CPU has f64 exponentials, this code f32): 10 of 921,600 draws differed, 9 of them
// draws from 93,000 tokens.
//
// Penalties count past tokens anew in each step: each block counts the occurrences of its 4096
// tokens in shared memory. A table kept for each sequence would avoid reading the past tokens (64
// rows of 8,000 tokens: 80 MB from L2), but would take vocabulary x sequences bytes and have to be
// rebuilt after every restart and preemption. A table built in each step would have to be cleared
// and read as a whole.
//
// Scratch, which need not be cleared:
//   changed    [rows, changed_pitch] f32, changed_pitch >= vocabulary and a multiple of 4. Only
//              rows that request changes are written. `changed` may be `logits` itself if no row of
//              the launch requests log-probabilities.
//   scratch    rows * row_bytes, 128-byte aligned, row_bytes of include/sampling/scratch.cuh

#include <math.h>
#include <stdint.h>

#include "contract.cuh"
#include "sampling/change.cuh"
#include "sampling/descent.cuh"
#include "sampling/floor.cuh"
#include "sampling/listed.cuh"

// 1. Reads the logits once, applies changes to them, and records the facts of each slice.
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, SLICE_BLOCKS)
sample_slices_f32(const float* logits, uint64_t pitch, uint32_t vocabulary, const uint32_t* asked,
                  uint32_t batch_rows, uint32_t first, const uint32_t* previous, uint32_t previous_count,
                  float* changed, uint64_t changed_pitch, void* scratch) {
    __shared__ Bench bench;
    __shared__ uint32_t largest_of_warp[2][SLICE_WARPS];
    __shared__ uint32_t counts[4];
    __shared__ uint32_t least_of_warp[SLICE_WARPS];
    __shared__ float sums[2][SLICE_WARPS];
    const uint32_t slice = blockIdx.x, row = blockIdx.y;
    const SampleRow wanted = reinterpret_cast<const SampleRow*>(asked)[first + row];
    if (wanted.ignored) {
        return;
    }
    const RowLists row_lists = {asked, asked + ROW_WORDS * batch_rows + first, batch_rows + 1, previous, previous_count};
    const RowScratch room(scratch, row, gridDim.x);
    const bool reported = wanted.top != NONE, drawn = !is_greedy(wanted);
    const bool is_changed = changes(wanted, row_lists, row);

    if (threadIdx.x < 4) {
        counts[threadIdx.x] = threadIdx.x == 3 ? NONE : 0;
    }
    Held held;
    load_slice(held, logits + row * pitch, slice, vocabulary);

    // Counting costs one instruction per logit, so it is done only for rows that need the count.
    const bool counted = reported || (drawn && wanted.top_k > 0);
    const bool ranged = drawn && (wanted.top_p < 1.0 || wanted.top_k > LIST_GROUPS);
    const auto finite_of_warp = [&] {
        uint32_t finite = 0;
        for_each_held(held, slice, [&](float logit, uint32_t) { finite += logit > -INFINITY; });
        return warp_count(finite);
    };
    float most_of_thread;
    const auto largest_of_groups = [&](uint32_t* groups) {
        uint32_t all = 0;
        most_of_thread = -INFINITY;
#pragma unroll
        for (uint32_t load = 0; load < LOADS; ++load) {
            const float* four = held.logit[load];
            const float most = fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3]));
            most_of_thread = fmaxf(most_of_thread, most);
            const uint32_t key = warp_largest(signless_key(most));
            all = max(all, key);
            if (lane_of_thread() == 0) {
                groups[slice * GROUPS_OF_SLICE + load * SLICE_WARPS + warp_of_thread()] = key;
            }
        }
        return all;
    };
    const auto largest_of_block = [&](const uint32_t* warps) {
        uint32_t key = 0;
#pragma unroll
        for (uint32_t warp = 0; warp < SLICE_WARPS; ++warp) {
            key = max(key, warps[warp]);
        }
        return key;
    };
    // A warp's sum of exponentials, relative to the slice's largest logit.
    const auto exponentials = [&](uint32_t key, auto of) {
        const float most = value_of(key);
        float sum[AT_ONCE] = {};
        if (key > KEY_OF_NOTHING) {
            for_each_held(held, slice, [&](float logit, uint32_t id) { sum[id % AT_ONCE] += of(logit - most); });
        }
        return warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    };

    bool non_finite = false;
    for_each_held(held, slice, [&](float logit, uint32_t) { non_finite |= !(logit < INFINITY); });
    const bool any_non_finite = __any_sync(EVERY_LANE, non_finite);
    uint32_t raw_largest = largest_of_groups(room.raw_group_largest);
    const uint32_t raw_finite = counted ? finite_of_warp() : raw_largest > KEY_OF_NOTHING;
    __syncthreads();
    if (lane_of_thread() == 0) {
        largest_of_warp[0][warp_of_thread()] = raw_largest;
        atomicAdd(&counts[0], raw_finite);
        atomicOr(&counts[2], any_non_finite ? 1u : 0u);
    }
    __syncthreads();
    raw_largest = largest_of_block(largest_of_warp[0]);
    uint32_t largest = raw_largest;
    if (reported) {
        const float sum = exponentials(raw_largest, [](float difference) { return expf(difference); });
        if (lane_of_thread() == 0) {
            sums[0][warp_of_thread()] = sum;
        }
    }
    if (is_changed) {
        change_slice(held, bench, wanted, row_lists, row, slice, vocabulary);
        store_slice(held, changed + row * changed_pitch, slice, vocabulary);
        largest = largest_of_groups(room.group_largest);
        const uint32_t finite = counted ? finite_of_warp() : largest > KEY_OF_NOTHING;
        if (lane_of_thread() == 0) {
            largest_of_warp[1][warp_of_thread()] = largest;
            atomicAdd(&counts[1], finite);
        }
        __syncthreads();
        largest = largest_of_block(largest_of_warp[1]);
    }
    // Finds the first of the largest logits, and, if `ranged`, the smallest finite logit.
    if (signless_key(most_of_thread) == largest) {
        const float most = value_of(largest);
        for_each_held(held, slice, [&](float logit, uint32_t id) {
            if (logit == most) {
                atomicMin(&counts[3], id);
            }
        });
    }
    if (ranged) {
        float least = INFINITY;
        for_each_held(held, slice, [&](float logit, uint32_t) { least = fminf(least, logit > -INFINITY ? logit : least); });
        const Softening softening = softening_of(wanted.temperature);
        const float sum =
            exponentials(largest, [&](float difference) { return likelihood(difference, softening); });
        const uint32_t least_key = warp_least(order_key(least));
        if (lane_of_thread() == 0) {
            sums[1][warp_of_thread()] = sum;
            least_of_warp[warp_of_thread()] = least_key;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        SliceFacts facts = {};
        facts.raw_largest = raw_largest;
        facts.raw_finite = counts[0];
        facts.largest = largest;
        facts.first_largest = counts[3];
        facts.finite = is_changed ? counts[1] : counts[0];
        facts.non_finite = counts[2];
        facts.least = NONE;
        for (uint32_t warp = 0; warp < SLICE_WARPS; ++warp) {
            facts.raw_sum += reported ? sums[0][warp] : 0.0f;
            facts.sum += ranged ? sums[1][warp] : 0.0f;
            facts.least = min(facts.least, ranged ? least_of_warp[warp] : NONE);
        }
        room.facts[slice] = facts;
        if (slice == 0) {
            room.plan->changed = is_changed;
        }
    }
}

using contract::sampling::PREVIOUS_THREADS;

// 2. Merges the facts of a row's slices, and decides how its token is found.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
sample_plan_f32(uint32_t vocabulary, const SampleRow* requests, void* scratch) {
    __shared__ uint32_t bins[KEY_BINS];
    __shared__ uint32_t sums[LANES];
    __shared__ uint32_t found[2];
    __shared__ RowPlan plan;
    __shared__ float row_sum;
    __shared__ float sums_of_warps[PLAN_THREADS / LANES];
    const uint32_t row = blockIdx.x, slices = slices_of(vocabulary), groups = slices * GROUPS_OF_SLICE;
    const RowScratch room(scratch, row, slices);
    const SampleRow wanted = requests[row];
    if (wanted.ignored) {
        if (threadIdx.x == 0) {
            room.plan->way = WAY_DONE;
            room.plan->fault = FAULT_IGNORED;
            room.plan->chosen = NONE;
            room.plan->reported = 0;
        }
        return;
    }
    if (warp_of_thread() == 0) {
        uint32_t raw_largest = 0, largest = 0, raw_finite = 0, finite = 0, non_finite = 0, least = NONE;
        for (uint32_t slice = lane_of_thread(); slice < slices; slice += LANES) {
            const SliceFacts& facts = room.facts[slice];
            raw_largest = max(raw_largest, facts.raw_largest);
            largest = max(largest, facts.largest);
            raw_finite += facts.raw_finite;
            finite += facts.finite;
            non_finite |= facts.non_finite;
            least = min(least, facts.least);
        }
        raw_largest = warp_largest(raw_largest);
        largest = warp_largest(largest);
        raw_finite = warp_count(raw_finite);
        finite = warp_count(finite);
        non_finite = warp_largest(non_finite);
        least = warp_least(least);
        const Softening softening = softening_of(wanted.temperature == 0.0 ? 1.0 : wanted.temperature);
        uint32_t first = NONE;
        double raw_sum = 0.0;
        float sum = 0.0f;
        for (uint32_t slice = lane_of_thread(); slice < slices; slice += LANES) {
            const SliceFacts& facts = room.facts[slice];
            first = min(first, facts.largest == largest ? facts.first_largest : NONE);
            const double apart =
                static_cast<double>(value_of(facts.raw_largest)) - static_cast<double>(value_of(raw_largest));
            raw_sum += facts.raw_finite > 0 ? facts.raw_sum * exp(apart) : 0.0;
            const float here = value_of(facts.largest) - value_of(largest);
            sum += facts.finite > 0 ? facts.sum * likelihood(here, softening) : 0.0f;
        }
        first = warp_least(first);
        raw_sum = warp_sum(raw_sum);
        sum = warp_sum(sum);
        if (lane_of_thread() == 0) {
            plan.raw_log_total = log(raw_sum);
            const uint32_t no_choice = finite == 0 || raw_finite == 0 ? FAULT_NOTHING_ALLOWED : 0;
            plan.fault = non_finite ? FAULT_NON_FINITE_LOGITS : no_choice;
            plan.chosen = plan.fault != 0 || !is_greedy(wanted) ? NONE : is_given(wanted) ? wanted.given : first;
            plan.top_k = wanted.top_k < finite ? wanted.top_k : 0;
            plan.way = plan.fault != 0 || is_greedy(wanted)         ? WAY_DONE
                       : plan.top_k == 0 && !(wanted.top_p < 1.0)   ? WAY_IN_ID_ORDER
                       : plan.top_k > LIST_GROUPS                   ? WAY_BINNED
                                                                    : WAY_LISTED;
            plan.changed = room.plan->changed;
            plan.largest = value_of(largest);
            plan.raw_largest = value_of(raw_largest);
            plan.least_difference = plan.way == WAY_DONE ? 0.0f : least_difference_of(wanted);
            plan.softening = softening;
            // Tokens of weight 0 need no separate bins, unless top-k counts them.
            const float whole = plan.largest - value_of(least);
            const float weighty = -WEIGHTLESS * static_cast<float>(wanted.temperature);
            const float range = plan.top_k > 0 ? whole : fminf(whole, weighty);
            plan.bins_per_unit = range > 0.0f && range < INFINITY ? static_cast<float>(BINS) / range : 0.0f;
            plan.reported = plan.fault != 0 || wanted.top == NONE ? 0 : min(min(wanted.top, TOP_MAX), raw_finite);
            plan.listed = 0;
            plan.raw_listed = 0;
            // If the smallest logit compared equal to 0, it may be -0, which has a smaller key.
            plan.least = least == NONE ? KEY_OF_LEAST : least == KEY_OF_ZERO ? KEY_OF_MINUS_ZERO : least;
            plan.floor = NONE;
            plan.raw_floor = NONE;
            row_sum = sum;
        }
    }
    __syncthreads();
    const Way way = plan.way;
    const uint32_t reported = plan.reported, top_k = plan.top_k;
    const uint32_t* chosen_from = plan.changed ? room.group_largest : room.raw_group_largest;
    if (reported > 0) {
        const uint32_t floor = floor_of(room.raw_group_largest, groups, reported, bins, sums, found);
        if (threadIdx.x == 0) {
            plan.raw_floor = floor;
        }
    }
    if (way == WAY_LISTED) {
        const uint32_t floor =
            floor_of(chosen_from, groups, top_k > 0 ? top_k : LIST_GROUPS, bins, sums, found);
        if (threadIdx.x == 0) {
            plan.floor = floor;
        }
        if (top_k == 0) {
            // If the largest tokens of the listed groups are enough for the nucleus, the list will
            // contain the nucleus. Otherwise, the list may lack part of the nucleus, and bins are
            // used, unless the list takes all tokens.
            float sum = 0.0f;
            for (uint32_t group = threadIdx.x; group < groups; group += PLAN_THREADS) {
                const uint32_t key = chosen_from[group];
                const bool listed = key >= floor && key > KEY_OF_NOTHING;
                sum += listed ? likelihood(value_of(key) - plan.largest, plan.softening) : 0.0f;
            }
            sum = warp_sum(sum);
            if (lane_of_thread() == 0) {
                sums_of_warps[warp_of_thread()] = sum;
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                float nucleus = 0.0f;
                for (uint32_t warp = 0; warp < PLAN_THREADS / LANES; ++warp) {
                    nucleus += sums_of_warps[warp];
                }
                const float needed = static_cast<float>(wanted.top_p) * row_sum * 1.0001f;
                plan.way = nucleus >= needed || floor == KEY_OF_LEAST ? WAY_LISTED : WAY_BINNED;
            }
        }
    }
    __syncthreads();
    if (plan.way == WAY_BINNED) {
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += PLAN_THREADS) {
            room.bin_weights[bin] = 0;
            room.bin_counts[bin] = 0;
        }
    }
    if (threadIdx.x == 0) {
        *room.plan = plan;
    }
}

// Appends the candidates of a warp's threads to a row's list, with one atomic per warp. Candidates
// that do not fit are still counted.
template <typename Belongs, typename KeyOf>
__device__ __forceinline__ void append(const Held& held, uint32_t slice, uint64_t* list, uint32_t* listed,
                                       KeyOf key_of_logit, Belongs belongs) {
    uint32_t own = 0;
    for_each_held(held, slice, [&](float logit, uint32_t) { own += belongs(key_of_logit(logit)); });
    if (!__any_sync(EVERY_LANE, own > 0)) {
        return;
    }
    const uint32_t running = warp_running_sum(own);
    uint32_t place = 0;
    if (lane_of_thread() == LANES - 1) {
        place = atomicAdd(listed, running);
    }
    place = __shfl_sync(EVERY_LANE, place, LANES - 1) + running - own;
    if (own == 0) {
        return;
    }
    for_each_held(held, slice, [&](float logit, uint32_t id) {
        const uint32_t key = key_of_logit(logit);
        if (belongs(key)) {
            if (place < LIST) {
                list[place] = candidate(key, id);
            }
            ++place;
        }
    });
}

// 3. Lists the most likely tokens, and sums the weights of each slice or of each bin.
extern "C" __global__ void __launch_bounds__(SLICE_THREADS, GATHER_BLOCKS)
sample_gather_f32(const float* logits, uint64_t pitch, const float* changed, uint64_t changed_pitch,
                  uint32_t vocabulary, const SampleRow* requests, void* scratch) {
    __shared__ uint32_t low[BINS], high[BINS], count[BINS];
    __shared__ uint64_t sums[LANES];
    const uint32_t slice = blockIdx.x, row = blockIdx.y;
    const RowScratch room(scratch, row, gridDim.x);
    const RowPlan& plan = *room.plan;
    const Way way = plan.way;
    const uint32_t reported = plan.reported;
    if (way == WAY_DONE && reported == 0) {
        return;
    }
    Held held;
    if (reported > 0) {
        load_slice(held, logits + row * pitch, slice, vocabulary);
        append(
            held, slice, room.raw_list, &room.plan->raw_listed, [](float logit) { return signless_key(logit); },
            [floor = plan.raw_floor](uint32_t key) { return key >= floor; });
    }
    if (way == WAY_DONE) {
        return;
    }
    if (reported == 0 || plan.changed) {
        const float* row_logits = plan.changed ? changed + row * changed_pitch : logits + row * pitch;
        load_slice(held, row_logits, slice, vocabulary);
    }
    const float largest = plan.largest;
    const Softening softening = plan.softening;
    if (way == WAY_LISTED) {
        append(
            held, slice, room.list, &room.plan->listed, [](float logit) { return order_key(logit); },
            [floor = plan.floor](uint32_t key) { return key >= floor; });
        if (plan.top_k > 0) {
            return;
        }
    }
    if (way == WAY_BINNED) {
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += SLICE_THREADS) {
            low[bin] = 0, high[bin] = 0, count[bin] = 0;
        }
        __syncthreads();
        for_each_held(held, slice, [&](float logit, uint32_t) {
            if (logit > -INFINITY) {
                const uint32_t bin = bin_of(logit, plan);
                atomicAdd(&count[bin], 1u);
                const uint64_t weight = weight_of(logit - largest, softening);
                if (weight > 0) {
                    add_wide(&low[bin], &high[bin], weight);
                }
            }
        });
        __syncthreads();
        for (uint32_t bin = threadIdx.x; bin < BINS; bin += SLICE_THREADS) {
            if (count[bin] > 0) {
                atomicAdd(&room.bin_counts[bin], count[bin]);
                const unsigned long long weights = static_cast<unsigned long long>(high[bin]) << 32 | low[bin];
                atomicAdd(reinterpret_cast<unsigned long long*>(&room.bin_weights[bin]), weights);
            }
        }
        return;
    }
    const float least = plan.least_difference;
    uint64_t weights = 0;
    for_each_held(held, slice, [&](float logit, uint32_t) {
        const float difference = logit - largest;
        weights += difference >= least ? weight_of(difference, softening) : 0;
    });
    weights = warp_sum(weights);
    if (lane_of_thread() == 0) {
        sums[warp_of_thread()] = weights;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        uint64_t all = 0;
        for (uint32_t warp = 0; warp < SLICE_WARPS; ++warp) {
            all += sums[warp];
        }
        room.slice_weights[slice] = all;
    }
}

// 4. Draws the token, and reports the most likely tokens.
extern "C" __global__ void __launch_bounds__(CHOICE_THREADS)
sample_choose_f32(const float* logits, uint64_t pitch, const float* changed, uint64_t changed_pitch,
                  uint32_t vocabulary, const SampleRow* requests, void* scratch, uint32_t* chosen, uint32_t* faults,
                  float* log_probabilities, uint32_t* top_ids, float* top_log_probabilities, uint32_t top_pitch) {
    __shared__ ChoiceRoom room;
    __shared__ RowPlan plan;
    const uint32_t row = blockIdx.x, slices = slices_of(vocabulary);
    const RowScratch kept(scratch, row, slices);
    if (threadIdx.x < sizeof(RowPlan) / 4) {
        reinterpret_cast<uint32_t*>(&plan)[threadIdx.x] = reinterpret_cast<const uint32_t*>(kept.plan)[threadIdx.x];
    }
    __syncthreads();
    const SampleRow wanted = requests[row];
    const float* raw = logits + row * pitch;
    const float* chosen_from = plan.changed ? changed + row * changed_pitch : raw;
    const uint32_t reported = min(plan.reported, top_pitch);
    uint32_t token = plan.chosen;
    Descents descents = {plan.way == WAY_BINNED,
                         reported > 0 && plan.raw_listed > LIST,
                         plan.way == WAY_BINNED,
                         chosen_from,
                         raw,
                         vocabulary,
                         reported};
    if (plan.way == WAY_IN_ID_ORDER) {
        token = draw_in_id_order(room, plan, wanted, chosen_from, kept.slice_weights, slices, vocabulary);
    } else if (plan.way == WAY_LISTED && plan.listed <= LIST) {
        const uint64_t weights = threadIdx.x < slices && plan.top_k == 0 ? kept.slice_weights[threadIdx.x] : 0;
        token = draw_from_list(room, plan, wanted, kept.list, block_sum(weights, room.sums));
        descents.draws = token == NONE;
    } else if (plan.way == WAY_LISTED) {
        descents.draws = true;
    }
    __syncthreads();
    if (descents.draws || descents.reports) {
        token = find_by_descent(room, plan, wanted, kept, descents, token);
    }
    const auto log_probability = [&](float logit) {
        const double apart = static_cast<double>(logit) - static_cast<double>(plan.raw_largest);
        return static_cast<float>(apart - plan.raw_log_total);
    };
    if (threadIdx.x == 0) {
        chosen[row] = token;
        faults[row] = plan.fault;
        const bool asked = token != NONE && wanted.top != NONE;
        log_probabilities[row] = asked ? log_probability(raw[token]) : NAN;
    }
    if (reported > 0) {
        const uint32_t count = descents.reports ? reported : plan.raw_listed;
        for (uint32_t place = threadIdx.x; place < count && !descents.reports; place += CHOICE_THREADS) {
            room.list[place] = kept.raw_list[place];
        }
        block_sort(room.list, count, power_of_two_from(count));
    }
    for (uint32_t place = threadIdx.x; place < top_pitch; place += CHOICE_THREADS) {
        const bool known = place < reported;
        const uint64_t at = static_cast<uint64_t>(row) * top_pitch + place;
        top_ids[at] = known ? id_of(room.list[place]) : NONE;
        top_log_probabilities[at] = known ? log_probability(raw[id_of(room.list[place])]) : NAN;
    }
}

// 0. Copies the tokens that the previous step chose, for a step whose rows are processed in several
// passes, because the first pass overwrites these tokens.
extern "C" __global__ void __launch_bounds__(PREVIOUS_THREADS)
sample_previous_u32(const uint32_t* chosen, uint32_t count, uint32_t* previous) {
    const uint32_t place = blockIdx.x * PREVIOUS_THREADS + threadIdx.x;
    if (place < count) {
        previous[place] = chosen[place];
    }
}

// Launch: these kernels in this order on one stream; no dynamic shared memory. slices =
// ceil(vocabulary / SLICE). Nothing is launched for 0 rows.
//   sample_previous_u32 grid (ceil(count / block))   block PREVIOUS_THREADS; first, and only with
//                                                    several passes
//   sample_slices_f32   grid (slices, rows)          block SLICE_THREADS
//   sample_plan_f32     grid (rows)                  block PLAN_THREADS
//   sample_gather_f32   grid (slices, rows)          block SLICE_THREADS
//   sample_choose_f32   grid (rows)                  block CHOICE_THREADS
