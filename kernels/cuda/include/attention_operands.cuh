// Loads of operands for attention_prefill_hopper.cu: one warp copies keys and values, and three
// warps copy queries. If the cache is in E4M3, a warpgroup converts keys and values to f16.
#pragma once

#include "attention_jobs.cuh"
#include "cached_operand.cuh"
#include "hopper_copy.cuh"
#include "tensor_core.cuh"
#include "wgmma.cuh"

namespace {

constexpr uint32_t QUERY_THREADS = 96;  // three warps

struct Barriers {
    uint64_t queries_full[STAGES];
    uint64_t queries_empty[STAGES];
    uint64_t keys_full[STAGES];
    uint64_t keys_empty[STAGES];
    uint64_t values_full[STAGES];
    uint64_t values_empty[STAGES];
    // Only with a cache in E4M3: barriers for keys and values as stored. The barriers above are
    // then for keys and values after conversion to f16.
    uint64_t raw_full[STAGES];
    uint64_t raw_empty[STAGES];
    uint32_t raw_is[STAGES];  // RAW_KEYS, RAW_VALUES or RAW_END
};

constexpr uint32_t RAW_KEYS = 0, RAW_VALUES = 1, RAW_END = 2;

// Copies keys and values of all jobs to the rings, step by step. Run by one warp.
template <typename S>
__device__ __forceinline__ void copy_steps(const TensorMap& map, const Arguments& arguments, uint32_t shared,
                                           Barriers& barriers) {
    const uint32_t lane = threadIdx.x % 32;
    constexpr int STEP_BLOCKS = S::KEYS / BLOCK_TOKENS;
    if (lane == 0) {
        fetch_map(map);
    }
    // Lane i copies block i of a step. For a block that does not exist, the copy reads past the
    // map's end, which returns zeros.
    const auto block_of = [&](const Job& job, int32_t step) {
        const int32_t place = step * STEP_BLOCKS + static_cast<int32_t>(lane);
        uint32_t block = arguments.blocks;
        if (S::PAGED && job.found && lane < STEP_BLOCKS && place < static_cast<int32_t>(whole_blocks(job.keys))) {
            block = min(__ldg(arguments.block_tables + job.table + place), block);
        }
        return block;
    };
    const auto copy = [&](const Job& job, uint32_t to, uint64_t& full, int32_t step, uint32_t block, uint32_t which) {
        const uint32_t barrier = shared_address(&full);
        if (lane == 0) {
            barrier_arrive_expecting(barrier, S::E4M3 ? S::RAW_BYTES : S::STEP_BYTES);
        }
        __syncwarp();
        if (S::E4M3) {
            if (lane < STEP_BLOCKS) {
                copy_box(to + lane * BLOCK_TOKENS * S::D, map, barrier, 0, 0,
                         static_cast<int32_t>((block * 2 + which) * arguments.kv_heads + job.head));
            }
        } else if (S::PAGED) {
            if (lane < STEP_BLOCKS) {
                copy_box(to + lane * BLOCK_TOKENS * S::WIDE * 2, map, barrier, 0, 0, 0, 0,
                         static_cast<int32_t>((block * 2 + which) * arguments.kv_heads + job.head));
            }
        } else if (lane < S::CHUNKS) {
            // Lane i copies chunk i of all rows of the step.
            copy_box(to + lane * S::ACROSS, map, barrier, static_cast<int32_t>(lane) * S::CHUNK,
                     static_cast<int32_t>(job.first_row) + step * S::KEYS,
                     static_cast<int32_t>((1 + which) * arguments.kv_heads + job.head));
        }
    };
    Ring<STAGES> keys, values, raw;
    // Lane 0 writes the kind of the data and later arrives at the barrier of the stage, which
    // orders the write before the reads.
    const auto announce = [&](uint32_t what) {
        barrier_wait(shared_address(&barriers.raw_empty[raw.stage]), raw.parity ^ 1);
        if (lane == 0) {
            barriers.raw_is[raw.stage] = what;
        }
    };
    const auto copy_raw = [&](const Job& job, int32_t step, uint32_t block, uint32_t which) {
        announce(which);
        copy(job, shared + S::RAW_AT + raw.stage * S::RAW_BYTES, barriers.raw_full[raw.stage], step, block, which);
        raw.advance();
    };
    const auto copy_keys = [&](const Job& job, int32_t step, uint32_t block) {
        if (S::E4M3) {
            copy_raw(job, step, block, RAW_KEYS);
            return;
        }
        barrier_wait(shared_address(&barriers.keys_empty[keys.stage]), keys.parity ^ 1);
        copy(job, shared + S::KEYS_AT + keys.stage * S::STEP_BYTES, barriers.keys_full[keys.stage], step, block, 0);
        keys.advance();
    };
    const auto copy_values = [&](const Job& job, int32_t step, uint32_t block) {
        if (S::E4M3) {
            copy_raw(job, step, block, RAW_VALUES);
            return;
        }
        barrier_wait(shared_address(&barriers.values_empty[values.stage]), values.parity ^ 1);
        copy(job, shared + S::VALUES_AT + values.stage * S::STEP_BYTES, barriers.values_full[values.stage], step, block,
             1);
        values.advance();
    };

    Jobs<S> jobs(arguments);
    Job job = jobs.next();
    uint32_t block = block_of(job, job.last_step);
    while (job.found) {
        int32_t step = job.last_step;
        copy_keys(job, step, block);
        // The next job and its first blocks are looked up while the copies of this job are in
        // progress.
        const Job next = jobs.next();
        const uint32_t first_of_next = block_of(next, next.last_step);
        // Values are copied one step after the keys, in the order in which they are needed.
        while (step > job.first_step) {
            const uint32_t below = block_of(job, step - 1);
            copy_keys(job, step - 1, below);
            copy_values(job, step, block);
            block = below;
            step -= 1;
        }
        copy_values(job, step, block);
        job = next;
        block = first_of_next;
    }
    if (S::E4M3) {
        announce(RAW_END);
        if (lane == 0) {
            barrier_arrive(shared_address(&barriers.raw_full[raw.stage]));
        }
    }
}

// Converts the keys and values that `copy_steps` has copied from E4M3 to f16, and writes them to
// the stages of the multiplying warpgroups. Run by one warpgroup.
template <typename S>
__device__ __forceinline__ void widen_steps(uint32_t shared, Barriers& barriers) {
    static_assert(!S::E4M3 || (S::D == 128 && S::CHUNK == 64), "the assignment of lanes below assumes these sizes");
    const uint32_t thread = threadIdx.x % WARPGROUP;
    // Eight lanes read 64 bytes of each of two rows: the left half of one row and the right half of
    // the other row, so that there are never bank conflicts in shared memory.
    const uint32_t quarter = thread % 4, odd = thread / 4 % 2;
    Ring<STAGES> raw, keys, values;
    const auto widen = [&](uint32_t to, uint64_t (&full)[STAGES], uint64_t (&empty)[STAGES], Ring<STAGES>& ring) {
        const uint32_t from = shared + S::RAW_AT + raw.stage * S::RAW_BYTES;
        barrier_wait(shared_address(&empty[ring.stage]), ring.parity ^ 1);
        constexpr uint32_t AT_ONCE = 2, APART = WARPGROUP / 8;
#pragma unroll 1
        for (uint32_t first = thread / 8; first < S::KEYS; first += AT_ONCE * APART) {
            uint4 bytes[AT_ONCE];
            const auto row = [&](uint32_t i) { return (first + i * APART) / 2 * 2 + odd; };
            const uint32_t chunk = first % 2 ^ odd;
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                bytes[i] = load_16_bytes(from + row(i) * S::D + chunk * 64 + quarter * 16);
            }
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                const uint16_t* pairs = reinterpret_cast<const uint16_t*>(&bytes[i]);
                const uint32_t line = to + ring.stage * S::STEP_BYTES + row(i) / 8 * S::DOWN + chunk * S::ACROSS;
#pragma unroll
                for (uint32_t half = 0; half < 2; ++half) {
                    const uint16_t* four = pairs + 4 * half;
                    store_16_bytes(line + Swizzle<S::CHUNK>::place(row(i) % 8, 2 * quarter + half),
                                   make_uint4(to_operand<E4m3>(four[0]), to_operand<E4m3>(four[1]),
                                              to_operand<E4m3>(four[2]), to_operand<E4m3>(four[3])));
                }
            }
        }
        barrier_arrive(shared_address(&barriers.raw_empty[raw.stage]));
        publish_writes();
        barrier_arrive(shared_address(&full[ring.stage]));
        ring.advance();
    };
    while (true) {
        barrier_wait(shared_address(&barriers.raw_full[raw.stage]), raw.parity);
        const uint32_t what = barriers.raw_is[raw.stage];
        if (what == RAW_END) {
            return;
        }
        if (what == RAW_KEYS) {
            widen(shared + S::KEYS_AT, barriers.keys_full, barriers.keys_empty, keys);
        } else {
            widen(shared + S::VALUES_AT, barriers.values_full, barriers.values_empty, values);
        }
        raw.advance();
    }
}

// Copies the queries of all jobs, and passes the jobs to the multiplying warpgroups.
// Run by three warps.
template <typename S, typename T>
__device__ __forceinline__ void copy_queries(const T* queries, const Arguments& arguments, uint32_t shared,
                                             Barriers& barriers, Job (&shared_jobs)[STAGES]) {
    const uint32_t thread = threadIdx.x - 32;
    // A thread copies the same piece of every `ROUND`th query vector.
    constexpr uint32_t PIECES = S::WIDE / 8;
    constexpr uint32_t ROUND = QUERY_THREADS / PIECES;
    const uint32_t piece = thread % PIECES;
    const uint32_t chunk = piece / (S::CHUNK / 8);
    const bool is_of_head = piece < S::D / 8;  // otherwise, the piece is zeros after the head
    const uint32_t round_rows = ROUND / arguments.group;
    const uint32_t round_heads = ROUND % arguments.group;
    Jobs<S> jobs(arguments);
    Ring<S::QUERY_STAGES> ring;
    while (true) {
        const Job job = jobs.next();
        uint32_t index = thread / PIECES;
        uint32_t row = (job.first_query + index) / arguments.group;
        uint32_t head = (job.first_query + index) % arguments.group;
        const T* source = queries + static_cast<size_t>(job.first_row) * arguments.query_pitch +
                          job.head * arguments.group * S::D + piece * 8;
        const uint32_t place = shared + ring.stage * S::QUERY_BYTES + chunk * S::QUERY_ACROSS;
        const uint32_t full = shared_address(&barriers.queries_full[ring.stage]);
        barrier_wait(shared_address(&barriers.queries_empty[ring.stage]), ring.parity ^ 1);
        if (thread == 0) {
            shared_jobs[ring.stage] = job;
        }
        if (!job.found) {
            barrier_arrive(full);
            return;
        }
        for (index = thread < ROUND * PIECES ? index : S::QUERIES; index < S::QUERIES; index += ROUND) {
            const bool valid = is_of_head && row < job.rows;
            copy_16_bytes(
                place + index / 64 * (64 * S::WIDE * 2) + Swizzle<S::CHUNK>::place(index % 64, piece % (S::CHUNK / 8)),
                valid ? source + static_cast<size_t>(row) * arguments.query_pitch + head * S::D : queries, valid);
            row += round_rows;
            head += round_heads;
            if (head >= arguments.group) {
                head -= arguments.group;
                row += 1;
            }
        }
        wait_for_copies();
        if (S::E4M3 && !std::is_same_v<T, __half>) {
            // Each thread converts the pieces that it has copied itself, so it need not
            // wait for other threads.
            for (index = thread < ROUND * PIECES ? thread / PIECES : S::QUERIES; index < S::QUERIES; index += ROUND) {
                const uint32_t at =
                    place + index / 64 * (64 * S::WIDE * 2) + Swizzle<S::CHUNK>::place(index % 64, piece % (S::CHUNK / 8));
                const uint4 words = load_16_bytes(at);
                store_16_bytes(at, make_uint4(query_operand<E4m3, T>(words.x), query_operand<E4m3, T>(words.y),
                                              query_operand<E4m3, T>(words.z), query_operand<E4m3, T>(words.w)));
            }
        }
        publish_writes();
        barrier_arrive(full);
        ring.advance();
    }
}

}  // namespace
