// The operations of attention_prefill.cu on Hopper (sm_90a only), as FlashAttention-3 does them (Shah et al. 2024, arXiv
// 2407.08608): the copy engine brings keys and values, warpgroups multiply with wgmma, one warpgroup's softmax runs
// beside another's products, and beside its own product of weights and values. Same meaning, tensors and limits as
// there, except what is said here.
//
// attention_paged_hopper_<type>_d128, attention_packed_hopper_<type>_d<D> (D in {32, 64, 72, 80, 128})
//   The first argument is a tensor map, by value: through it the keys and values are read, see Launch. The others are
//   those of attention_prefill.cu, less `layer`. A NaN value at a place that a row may not see can reach earlier rows of
//   its own sequence within 128 tokens.
//   Tiles are large (128 query vectors, 192 rows): attention_windows is faster for stretches of up to 64 rows,
//   attention_packed up to 128.
//   Heads of 72 are multiplied as if they had 80 elements, the last eight of which are zeros in shared memory: the copy
//   engine's map ends a head after 72 columns.
//
// attention_paged_hopper_e4m3_<type>_d128, attention_paged_hopper_split_e4m3_<type>_d128
//   Over a cache in E4M3: a warpgroup widens what the copy engine brings to f16, in which the others multiply.
//
// attention_paged_hopper_split_<type>_d128
//   The same for few rows that see a long past, which alone would not fill the card: the keys of a tile are split among
//   `splits` jobs (at least 1), whose results go to `parts` [jobs, 128, D + 2] f32 and from there, by the launch of
//   attention_paged_combine.cu, to `out`. `parts` stands after the other pointers, `splits` before `scale`.

// Targets: sm_90a

#include "include/attention_jobs.cuh"
#include "include/cached_operand.cuh"
#include "include/hopper_copy.cuh"
#include "include/online_softmax.cuh"
#include "include/tensor_core.cuh"
#include "include/wgmma.cuh"

namespace {

constexpr uint32_t QUERY_THREADS = 96;  // three warps
// Names of barriers: one a multiplying warpgroup for its turn at the tensor cores, one for itself.
constexpr uint32_t TURN = 1;
constexpr uint32_t ALONE = 5;

struct Barriers {
    uint64_t queries_full[STAGES];
    uint64_t queries_empty[STAGES];
    uint64_t keys_full[STAGES];
    uint64_t keys_empty[STAGES];
    uint64_t values_full[STAGES];
    uint64_t values_empty[STAGES];
    // In E4M3, keys and values as they come; those above are then of widened ones.
    uint64_t raw_full[STAGES];
    uint64_t raw_empty[STAGES];
    uint32_t raw_is[STAGES];  // of RAW_KEYS, RAW_VALUES and RAW_END
};

constexpr uint32_t RAW_KEYS = 0, RAW_VALUES = 1, RAW_END = 2;

// Keys and values of all jobs, step by step, into the rings. One warp.
template <typename S>
__device__ __forceinline__ void copy_steps(const TensorMap& map, const Arguments& arguments, uint32_t shared,
                                           Barriers& barriers) {
    const uint32_t lane = threadIdx.x % 32;
    constexpr int STEP_BLOCKS = S::KEYS / BLOCK_TOKENS;
    if (lane == 0) {
        fetch_map(map);
    }
    // Lane i copies block i of a step. A block that is none lies past the map's end: zeros.
    const auto block_of = [&](const Job& job, int32_t step) {
        const int32_t place = step * STEP_BLOCKS + static_cast<int32_t>(lane);
        uint32_t block = arguments.blocks;
        if (S::PAGED && job.found && lane < STEP_BLOCKS && place < static_cast<int32_t>(whole_blocks(job.keys))) {
            block =
                min(__ldg(arguments.block_tables + static_cast<size_t>(job.sequence) * arguments.blocks_max + place),
                    block);
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
    // The lane that says what comes also begins the phase in which it does.
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
        // The next job is found while there is time, and its first blocks.
        const Job next = jobs.next();
        const uint32_t first_of_next = block_of(next, next.last_step);
        // Values follow one step behind, as they are needed.
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

// What `copy_steps` brings, as f16 where the multiplying warpgroups look for it. One warpgroup.
template <typename S>
__device__ __forceinline__ void widen_steps(uint32_t shared, Barriers& barriers) {
    static_assert(!S::E4M3 || (S::D == 128 && S::CHUNK == 64), "lanes are dealt out so");
    const uint32_t thread = threadIdx.x % WARPGROUP;
    // Eight lanes take 64 bytes of two rows each, of one the left half and of the other the right one, so that they never
    // meet in a bank of shared memory.
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

// Queries of all jobs, and what the jobs are. Three warps.
template <typename S, typename T>
__device__ __forceinline__ void copy_queries(const T* queries, const Arguments& arguments, uint32_t shared,
                                             Barriers& barriers, Job (&shared_jobs)[STAGES]) {
    const uint32_t thread = threadIdx.x - 32;
    // A thread copies the same piece of every `ROUND`th query vector.
    constexpr uint32_t PIECES = S::WIDE / 8;
    constexpr uint32_t ROUND = QUERY_THREADS / PIECES;
    const uint32_t piece = thread % PIECES;
    const uint32_t chunk = piece / (S::CHUNK / 8);
    const bool is_of_head = piece < S::D / 8;  // or of the zeros behind it
    const uint32_t round_rows = ROUND / arguments.group;
    const uint32_t round_heads = ROUND % arguments.group;
    Jobs<S> jobs(arguments);
    Ring<STAGES> ring;
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
            // Each thread its own pieces, which it need not wait for.
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

// Four lanes hold two columns each of four tiles; afterwards each holds all eight columns of one.
__device__ __forceinline__ void exchange(uint32_t (&words)[4]) {
    const uint32_t lane = threadIdx.x % 4;
#pragma unroll
    for (uint32_t distance = 1; distance <= 2; distance *= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (uint32_t low = 0; low < 4; ++low) {
            if (low & distance) {
                continue;
            }
            const uint32_t high = low | distance;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[high], distance);
            words[low] = upper ? other : words[low];
            words[high] = upper ? words[high] : other;
        }
    }
}

template <typename S, typename T>
__device__ __forceinline__ void store(T* out, const Job& job, const Arguments& arguments,
                                      const float (&gathered)[S::WIDE / 8][4], const OnlineSoftmax& softmax,
                                      uint32_t own) {
    using Element = TensorCoreElement<T>;
    const uint32_t lane = threadIdx.x % 4;
    const float value_scale = S::E4M3 ? arguments.value_scale(job.head) : 1.0f;
    const float inverse[2] = {softmax.inverse(0) * value_scale, softmax.inverse(1) * value_scale};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t query = job.first_query + own + 8 * half;
        const bool valid = query < job.rows * arguments.group;
        T* row = out + static_cast<size_t>(job.first_row + query / arguments.group) * arguments.out_pitch +
                 (job.head * arguments.group + query % arguments.group) * S::D;
#pragma unroll
        for (int first = 0; first < S::D / 8; first += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int tile = first + i < S::D / 8 ? first + i : 0;
                words[i] = Element::pack(gathered[tile][2 * half] * inverse[half],
                                         gathered[tile][2 * half + 1] * inverse[half]);
            }
            exchange(words);
            if (valid && first + lane < S::D / 8) {
                *reinterpret_cast<uint4*>(row + (first + lane) * 8) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

// What one part of the keys gave, for attention_paged_combine.cu: the gathered values, the maximum and the sum.
template <typename S>
__device__ __forceinline__ void store_part(float* parts, const Job& job, const float (&gathered)[S::WIDE / 8][4],
                                           const OnlineSoftmax& softmax, uint32_t own) {
    const uint32_t lane = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* row = parts + (static_cast<size_t>(job.slot) * S::QUERIES + own + 8 * half) * (S::D + 2);
#pragma unroll
        for (int tile = 0; tile < S::D / 8; ++tile) {
            *reinterpret_cast<float2*>(row + tile * 8 + lane * 2) =
                make_float2(gathered[tile][2 * half], gathered[tile][2 * half + 1]);
        }
        if (lane == 0) {
            *reinterpret_cast<float2*>(row + S::D) = make_float2(softmax.maximum[half], softmax.sum[half]);
        }
    }
}

// Values from `first` on must be numbers: their weight is 0. Every warpgroup writes these zeros, and so need not wait for
// another.
template <typename S>
__device__ __forceinline__ void mend(uint32_t values, uint32_t first, uint32_t thread) {
    const uint32_t end = S::PAGED ? (first + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS : S::KEYS;
    constexpr uint32_t PIECES = S::CHUNK / 8;
    for (uint32_t item = thread; item < (end - first) * S::CHUNKS * PIECES; item += WARPGROUP) {
        const uint32_t piece = item % PIECES;
        const uint32_t chunk = item / PIECES % S::CHUNKS;
        const uint32_t row = first + item / (PIECES * S::CHUNKS);
        const uint32_t address = values + row / 8 * S::DOWN + chunk * S::ACROSS + row % 8 * (S::CHUNK * 2) + piece * 16;
        store_16_bytes(address, make_uint4(0, 0, 0, 0));
    }
    publish_writes();
}

// All jobs of one multiplying warpgroup.
template <typename S, typename T>
__device__ __forceinline__ void multiply(T* out, float* parts, const Arguments& arguments, uint32_t shared,
                                         Barriers& barriers, const Job (&jobs)[STAGES], uint32_t warpgroup) {
    using Operand = std::conditional_t<S::E4M3, __half, T>;
    using Element = TensorCoreElement<Operand>;
    using Products = Warpgroup<Operand>;
    constexpr int TILES = S::KEYS / 8;
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t own = warpgroup * 64 + thread / 32 * 16 + lane / 4;  // and own + 8
    constexpr uint64_t QUERY_LAYOUT = matrix_layout<S::CHUNK>(16, S::QUERY_DOWN);
    constexpr uint64_t KEY_LAYOUT = matrix_layout<S::CHUNK>(16, S::DOWN);
    constexpr uint64_t VALUE_LAYOUT = matrix_layout<S::CHUNK>(S::ACROSS, S::DOWN);
    const uint32_t my_turn = TURN + warpgroup;
    const uint32_t next_turn = TURN + (warpgroup + 1) % S::MULTIPLIERS;
    if (warpgroup + 1 == S::MULTIPLIERS) {
        part_arrive(next_turn, 2 * WARPGROUP);  // the first warpgroup begins
    }

    Ring<STAGES> queries, keys, values;
    float gathered[S::WIDE / 8][4];
    float scores[TILES][4];
    uint32_t weights[S::KEYS / 16][4];

    const auto start_scores = [&]() {
        const uint32_t query_address = shared + queries.stage * S::QUERY_BYTES + warpgroup * (64 * S::WIDE * 2);
        const uint32_t key_address = shared + S::KEYS_AT + keys.stage * S::STEP_BYTES;
        hold(scores);
        products_begin();
#pragma unroll
        for (int k = 0; k < S::WIDE / 16; ++k) {
            const uint32_t chunk = k * 16 / S::CHUNK;
            const uint32_t within = k * 16 % S::CHUNK * 2;
            Products::multiply(scores, matrix_at(QUERY_LAYOUT, query_address + chunk * S::QUERY_ACROSS + within),
                             matrix_at(KEY_LAYOUT, key_address + chunk * S::ACROSS + within), k > 0);
        }
        products_end();
    };
    const auto start_gathering = [&]() {
        const uint32_t value_address = shared + S::VALUES_AT + values.stage * S::STEP_BYTES;
        hold(gathered);
        products_begin();
#pragma unroll
        for (int k = 0; k < S::KEYS / 16; ++k) {
            Products::gather(gathered, weights[k], matrix_at(VALUE_LAYOUT, value_address + k * 2 * S::DOWN));
        }
        products_end();
    };
    const auto round_weights = [&]() {
#pragma unroll
        for (int k = 0; k < S::KEYS / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                weights[k][i] = Element::pack(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
            }
        }
    };
    const auto await = [&](uint64_t (&full)[STAGES], const Ring<STAGES>& ring) {
        barrier_wait(shared_address(&full[ring.stage]), ring.parity);
    };
    const auto release = [&](uint64_t (&empty)[STAGES], Ring<STAGES>& ring) {
        if (thread == 0) {
            barrier_arrive(shared_address(&empty[ring.stage]));
        }
        ring.advance();
    };

    await(barriers.queries_full, queries);
    Job job = jobs[0];
    if (!job.found) {
        return;
    }
    await(barriers.keys_full, keys);
    start_scores();
    products_wait<0>();
    hold(scores);
    while (true) {
        int32_t limit[2] = {job.keys, job.keys};
        int32_t seen_by_all = job.keys;
        if (S::PAGED) {
            limit[0] = min(job.keys, job.visible + static_cast<int32_t>((job.first_query + own) / arguments.group));
            limit[1] = min(job.keys, job.visible + static_cast<int32_t>((job.first_query + own + 8) / arguments.group));
            seen_by_all = min(job.keys, job.visible + static_cast<int32_t>(job.first_query / arguments.group));
        }
        const float factor = S::E4M3 ? arguments.factor(job.head) : arguments.scale * LOG2_E;
        OnlineSoftmax softmax;
        softmax.begin();
        float shrink[2];
        int32_t step = job.last_step;
        const auto weigh = [&]() {
            if ((step + 1) * S::KEYS > seen_by_all) {
                OnlineSoftmax::mask(scores, step * S::KEYS + static_cast<int32_t>(lane % 4 * 2), limit);
            }
            softmax.step(scores, factor, shrink);
        };

        release(barriers.keys_empty, keys);
        weigh();
        round_weights();
#pragma unroll
        for (int tile = 0; tile < S::WIDE / 8; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                gathered[tile][i] = 0.0f;
            }
        }
        if (job.torn) {
            await(barriers.values_full, values);
            mend<S>(shared + S::VALUES_AT + values.stage * S::STEP_BYTES, job.keys % S::KEYS, thread);
            part_sync(ALONE + warpgroup, WARPGROUP);
        }
        for (step -= 1; step >= job.first_step; --step) {
            await(barriers.keys_full, keys);
            part_sync(my_turn, 2 * WARPGROUP);
            start_scores();
            await(barriers.values_full, values);
            start_gathering();
            part_arrive(next_turn, 2 * WARPGROUP);
            products_wait<1>();
            hold(scores);
            release(barriers.keys_empty, keys);
            weigh();
            products_wait<0>();
            hold(gathered);
            release(barriers.values_empty, values);
            round_weights();
#pragma unroll
            for (int tile = 0; tile < S::WIDE / 8; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    gathered[tile][i] *= shrink[i / 2];
                }
            }
        }
        release(barriers.queries_empty, queries);

        // The next tile's first scores are computed while this one is written out; after the last one, of old keys.
        await(barriers.queries_full, queries);
        const Job next = jobs[queries.stage];
        if (next.found) {
            await(barriers.keys_full, keys);
        }
        await(barriers.values_full, values);
        part_sync(my_turn, 2 * WARPGROUP);
        start_gathering();
        start_scores();
        part_arrive(next_turn, 2 * WARPGROUP);
        softmax.finish();
        products_wait<1>();
        hold(gathered);
        release(barriers.values_empty, values);
        if (S::SPLIT) {
            store_part<S>(parts, job, gathered, softmax, own);
        } else {
            store<S>(out, job, arguments, gathered, softmax, own);
        }
        products_wait<0>();
        hold(scores);
        if (!next.found) {
            return;
        }
        job = next;
    }
}

template <typename S, typename T>
__device__ __forceinline__ void attention(const TensorMap& map, T* out, float* parts, const T* queries,
                                          const Arguments& arguments) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Barriers barriers;
    __shared__ Job jobs[STAGES];
    const uint32_t shared = shared_address(tiles_of_shared);
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&barriers.queries_full[stage]), QUERY_THREADS);
            barrier_init(shared_address(&barriers.queries_empty[stage]), S::MULTIPLIERS);
            const uint32_t bringers = S::E4M3 ? WARPGROUP : 1;
            barrier_init(shared_address(&barriers.keys_full[stage]), bringers);
            barrier_init(shared_address(&barriers.keys_empty[stage]), S::MULTIPLIERS);
            barrier_init(shared_address(&barriers.values_full[stage]), bringers);
            barrier_init(shared_address(&barriers.values_empty[stage]), S::MULTIPLIERS);
            barrier_init(shared_address(&barriers.raw_full[stage]), 1);
            barrier_init(shared_address(&barriers.raw_empty[stage]), WARPGROUP);
        }
        barrier_init_done();
    }
    __syncthreads();
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (S::E4M3 && warpgroup == 1) {
        give_registers<S::HELPER_REGISTERS>();
        widen_steps<S>(shared, barriers);
    } else if (warpgroup == 0) {
        give_registers<S::HELPER_REGISTERS>();
        if (threadIdx.x < 32) {
            copy_steps<S>(map, arguments, shared, barriers);
        } else {
            copy_queries<S>(queries, arguments, shared, barriers, jobs);
        }
    } else {
        take_registers<S::MULTIPLY_REGISTERS>();
        multiply<S>(out, parts, arguments, shared, barriers, jobs, warpgroup - S::HELPERS);
    }
}

}  // namespace

#define ATTENTION_PREFILL_HOPPER(TYPE, NAME, WHOLE, SPLIT)                                                             \
    extern "C" __global__ void __launch_bounds__(WHOLE::THREADS, 1) attention_paged_hopper_##NAME##_d128(              \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* queries, const uint32_t* query_starts,           \
        const uint32_t* context_lengths, const uint32_t* block_tables, uint32_t out_pitch, uint32_t query_pitch,       \
        uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads, uint32_t kv_heads,                 \
        uint32_t blocks, uint32_t blocks_max, const float* scales, float scale) {                                      \
        const Arguments arguments = {                                                                                  \
            query_starts,   context_lengths,  block_tables, out_pitch, query_pitch, rows, sequences,                   \
            first_sequence, heads / kv_heads, kv_heads,     blocks,    blocks_max,  1,    scales,    scale};           \
        attention<WHOLE>(map, out, nullptr, queries, arguments);                                                       \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(SPLIT::THREADS, 1) attention_paged_hopper_split_##NAME##_d128(        \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* queries, const uint32_t* query_starts,           \
        const uint32_t* context_lengths, const uint32_t* block_tables, float* parts, uint32_t out_pitch,               \
        uint32_t query_pitch, uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads,              \
        uint32_t kv_heads, uint32_t blocks, uint32_t blocks_max, uint32_t splits, const float* scales, float scale) {  \
        const Arguments arguments = {                                                                                  \
            query_starts,   context_lengths,  block_tables, out_pitch, query_pitch, rows,   sequences,                 \
            first_sequence, heads / kv_heads, kv_heads,     blocks,    blocks_max,  splits, scales,    scale};         \
        attention<SPLIT>(map, out, parts, queries, arguments);                                                         \
    }

#define ATTENTION_PACKED_HOPPER(TYPE, NAME, D)                                                                         \
    static_assert(sizes::AS_LAUNCHED<D>, "as the contract says");                                                      \
    extern "C" __global__ void __launch_bounds__(Packed<D>::THREADS, 1) attention_packed_hopper_##NAME##_d##D(         \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* qkv, const uint32_t* starts, uint32_t out_pitch, \
        uint32_t pitch, uint32_t rows, uint32_t stretches, uint32_t heads, float scale) {                              \
        const Arguments arguments = {starts, nullptr, nullptr, out_pitch, pitch, rows, stretches,                      \
                                     0,      1,       heads,   0,         0,     1,    nullptr, scale};                \
        attention<Packed<D>>(map, out, nullptr, qkv, arguments);                                                       \
    }

#define ATTENTION_ALL(TYPE, NAME)                                                   \
    ATTENTION_PREFILL_HOPPER(TYPE, NAME, Paged128, PagedSplit128)                   \
    ATTENTION_PREFILL_HOPPER(TYPE, e4m3_##NAME, PagedE4m3, PagedSplitE4m3)          \
    FOR_EACH_PACKED_HEAD_DIM(ATTENTION_PACKED_HOPPER, TYPE, NAME)

ATTENTION_ALL(__half, f16)
ATTENTION_ALL(__nv_bfloat16, bf16)

// Launch. Persistent: grid x = min(multiprocessors, jobs), with an upper bound of the jobs in
//   attention_paged_hopper_<type>_d128   block PAGED_THREADS, dynamic shared memory PAGED_SHARED_BYTES; of E4M3 block
//     PAGED_E4M3_THREADS and PAGED_E4M3_SHARED_BYTES
//     jobs = kv_heads * ((rows * (heads / kv_heads) + 127 * (sequences - first_sequence)) / 128)
//   attention_paged_hopper_split_<type>_d128   the same, with splits times as many jobs
//     Worth it if the jobs of the other would be at most half of the multiprocessors and contexts reach some thousand
//     tokens: splits = min(multiprocessors / jobs, keys / SPLIT_KEYS), `parts` at most multiprocessors * 66,560 bytes.
//   attention_packed_hopper_<type>_d<D>   block PACKED_THREADS<D>, dynamic shared memory PACKED_SHARED_BYTES<D>
//     jobs = heads * ((rows + (PACKED_QUERIES<D> - 1) * stretches) / PACKED_QUERIES<D>)
// A smaller grid is right too, only slower; a grid of 0 is not launched. The limit of dynamic shared memory must be raised
// once per function (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
//
// The tensor map comes from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE, L2
// promotion 128 bytes, out of bounds NONE (zeros), and
//   paged, D = 128, over the layer:  rank 5, swizzle 128B
//     dimensions  {64, 8, 2, 2, blocks * 2 * kv_heads}   columns of a half, 8 tokens, halves, the next 8 tokens, pieces
//     strides     {256, 128, 2048, 4096} bytes           of all dimensions but the first
//     box         {64, 8, 2, 2, 1}                       16 tokens of one head, keys or values: 4096 bytes
//   the same in E4M3 (type UINT8):   rank 3, no swizzle
//     dimensions  {128, 16, blocks * 2 * kv_heads}       columns, tokens, pieces
//     strides     {128, 2048} bytes
//     box         {128, 16, 1}                           16 tokens of one head, keys or values: 2048 bytes
//   packed, over qkv:                rank 3, swizzle 128B where PACKED_CHUNK<D> is 64, else 32B
//     dimensions  {D, rows, 3 * heads}               columns of a head, rows, heads of queries, keys and values
//     strides     {2 * pitch, 2 * D} bytes
//     box         {PACKED_CHUNK<D>, PACKED_KEYS<D>, 1}   some columns of all rows of a step; past a head's last: zeros
// It holds the address, so it belongs to one layer or one qkv; a captured graph keeps a copy.
