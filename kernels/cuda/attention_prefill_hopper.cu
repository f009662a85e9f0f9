// The kernels of attention_prefill.cu for Hopper (sm_90a only), after FlashAttention-3 (Shah et al.
// 2024, arXiv 2407.08608): TMA loads keys and values, warpgroups multiply with wgmma, and the
// softmax of one warpgroup overlaps with the matrix multiplications of another warpgroup and with
// its own multiplication of weights and values. Semantics, tensors and limits are as in
// attention_prefill.cu, with the following differences.
//
// attention_paged_hopper_<type>_d<D> (D in {128, 256}) attention_packed_hopper_<type>_d<D> (D in
// {32, 64, 72, 80, 128}) The first argument is a tensor map, passed by value, through which keys
// and values are read (see Launch). The other arguments are as in attention_prefill.cu, without
// `layer`. A NaN in a masked value can make output rows NaN that are up to 128 tokens earlier in
// the same sequence and, with a window, up to 128 tokens later. A tile has 128 query vectors in the
// paged kernels and PACKED_QUERIES<D> (128 or 192) rows in the packed kernels. For packed rows,
// attention_windows (D <= 80) is therefore faster for sequences of up to 64 rows, and
// attention_packed for sequences of up to 128 rows. Heads of 72 elements are multiplied as heads of
// 80 whose last eight elements are zeros in shared memory: the tensor map ends a head after 72
// columns.
//
// attention_paged_hopper_e4m3_<type>_d128, attention_paged_hopper_split_e4m3_<type>_d128
//   Over a cache in E4M3: TMA copies the E4M3 data to shared memory, one warpgroup converts the
//   data to f16, and other warpgroups multiply in f16.
//
// attention_paged_hopper_split_<type>_d<D> For few rows with a long context, which would otherwise
// not fill the GPU. The keys of a tile are split among up to `splits` jobs (>= 1), which write
// partial results to `parts` [jobs, 128, D + 2] f32; the launch of attention_paged_combine.cu
// combines them into `out`. In the argument list, `parts` follows `block_tables`, and `splits`
// follows `window`.

// Targets: sm_90a

#include "include/attention_operands.cuh"
#include "include/online_softmax.cuh"
#include "include/tensor_core.cuh"
#include "include/wgmma.cuh"

namespace {

// IDs of named barriers: TURN + w gives warpgroup w its turn at the tensor cores, ALONE + w
// synchronizes only the threads of warpgroup w.
constexpr uint32_t TURN = 1;
constexpr uint32_t ALONE = 5;

// Transposes among four lanes. Before the call, each lane has two columns of each of four tiles.
// After the call, each lane has all eight columns of one tile.
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

// Stores the partial result of one split of the keys for attention_paged_combine.cu: the weighted
// sum of values, the maximum score and the sum of weights.
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

// Zeroes the values from `first` on. In the paged kernels, stops at the end of that block, because
// later blocks were copied as zeros. The weight of these values is 0, but a NaN or infinity times 0
// is NaN. Each warpgroup writes all of these zeros, so that it need not wait for another warpgroup.
template <typename S>
__device__ __forceinline__ void mend(uint32_t values, uint32_t first, uint32_t thread) {
    const uint32_t end = S::PAGED ? (first + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS : S::KEYS;
    constexpr uint32_t PIECES = S::CHUNK / 8;
#pragma unroll 1
    for (uint32_t item = thread; item < (end - first) * S::CHUNKS * PIECES; item += WARPGROUP) {
        const uint32_t piece = item % PIECES;
        const uint32_t chunk = item / PIECES % S::CHUNKS;
        const uint32_t row = first + item / (PIECES * S::CHUNKS);
        const uint32_t address = values + row / 8 * S::DOWN + chunk * S::ACROSS + row % 8 * (S::CHUNK * 2) + piece * 16;
        store_16_bytes(address, make_uint4(0, 0, 0, 0));
    }
    publish_writes();
}

// Processes all jobs of one multiplying warpgroup.
template <typename S, typename T>
__device__ __forceinline__ void multiply(T* out, float* parts, const Arguments& arguments, uint32_t shared,
                                         Barriers& barriers, const Job (&jobs)[STAGES], uint32_t warpgroup) {
    using Operand = std::conditional_t<S::E4M3, __half, T>;
    using Element = TensorCoreElement<Operand>;
    using Products = Warpgroup<Operand>;
    constexpr int TILES = S::KEYS / 8;
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t lane = threadIdx.x % 32;
    // This lane's query vectors in the tile are `own` and `own + 8`.
    const uint32_t own = warpgroup * 64 + thread / 32 * 16 + lane / 4;
    constexpr uint64_t QUERY_LAYOUT = matrix_layout<S::CHUNK>(16, S::QUERY_DOWN);
    constexpr uint64_t KEY_LAYOUT = matrix_layout<S::CHUNK>(16, S::DOWN);
    constexpr uint64_t VALUE_LAYOUT = matrix_layout<S::CHUNK>(S::ACROSS, S::DOWN);
    const uint32_t my_turn = TURN + warpgroup;
    const uint32_t next_turn = TURN + (warpgroup + 1) % S::MULTIPLIERS;
    if (warpgroup + 1 == S::MULTIPLIERS) {
        part_arrive(next_turn, 2 * WARPGROUP);  // the first warpgroup begins
    }

    // With one stage of queries, a tile's queries are copied after the previous tile's scores have
    // been computed.
    constexpr bool QUERIES_ARE_AHEAD = S::QUERY_STAGES > 1;
    Ring<S::QUERY_STAGES> queries;
    Ring<STAGES> keys, values;
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
    const auto await = [&](uint64_t (&full)[STAGES], const auto& ring) {
        barrier_wait(shared_address(&full[ring.stage]), ring.parity);
    };
    const auto release = [&](uint64_t (&empty)[STAGES], auto& ring) {
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
            limit[0] = min(job.keys, job.end(job.row_of(own, arguments), arguments));
            limit[1] = min(job.keys, job.end(job.row_of(own + 8, arguments), arguments));
            seen_by_all = min(job.keys, job.end(job.row_of(0, arguments), arguments));
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
            // A tile has at most QUERIES rows. Only the steps with the lowest keys, which run last,
            // have keys before a row's window.
            const int32_t window = static_cast<int32_t>(arguments.window);
            if (S::PAGED && step * S::KEYS < seen_by_all + S::QUERIES - 1 - window) {
                const int32_t first[2] = {job.causal(job.row_of(own, arguments)) - window,
                                          job.causal(job.row_of(own + 8, arguments)) - window};
                OnlineSoftmax::mask_before(scores, step * S::KEYS + static_cast<int32_t>(lane % 4 * 2), first);
            }
            softmax.step(scores, factor, shrink);
        };

        const auto await_keys_below = [&]() {
            if (step > job.first_step) {
                await(barriers.keys_full, keys);
            }
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
        if (job.ends_with_stale_keys) {
            await(barriers.values_full, values);
            mend<S>(shared + S::VALUES_AT + values.stage * S::STEP_BYTES, job.keys % S::KEYS, thread);
            part_sync(ALONE + warpgroup, WARPGROUP);
        }
        await_keys_below();
        for (step -= 1; step >= job.first_step; --step) {
            part_sync(my_turn, 2 * WARPGROUP);
            start_scores();
            await(barriers.values_full, values);
            start_gathering();
            part_arrive(next_turn, 2 * WARPGROUP);
            products_wait<1>();
            hold(scores);
            release(barriers.keys_empty, keys);
            weigh();
            // The wait for the keys is here and not just before their multiplication, because the
            // compiler does not move the softmax past the loop that waits for the keys. If that
            // loop were not here, the compiler would move the softmax after the wait for the
            // multiplication of weights and values, and the softmax and the multiplication would no
            // longer overlap.
            await_keys_below();
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
        if (!QUERIES_ARE_AHEAD) {
            // After this barrier, every thread has read the current job and queries, which the next
            // job and queries replace.
            part_sync(ALONE + warpgroup, WARPGROUP);
        }
        release(barriers.queries_empty, queries);

        Job next;
        const auto await_next = [&]() {
            await(barriers.queries_full, queries);
            next = jobs[queries.stage];
            if (next.found) {
                await(barriers.keys_full, keys);
            }
        };
        // With more than one stage of queries, the next tile's first scores are computed while this
        // tile is written out. After the last tile, these scores are computed from old keys and are
        // not used.
        if (QUERIES_ARE_AHEAD) {
            await_next();
        }
        await(barriers.values_full, values);
        part_sync(my_turn, 2 * WARPGROUP);
        start_gathering();
        if (QUERIES_ARE_AHEAD) {
            start_scores();
        }
        part_arrive(next_turn, 2 * WARPGROUP);
        softmax.finish();
        products_wait<QUERIES_ARE_AHEAD ? 1 : 0>();
        hold(gathered);
        release(barriers.values_empty, values);
        if (S::SPLIT) {
            store_part<S>(parts, job, gathered, softmax, own);
        } else {
            store<S>(out, job, arguments, gathered, softmax, own);
        }
        if (!QUERIES_ARE_AHEAD) {
            await_next();
            if (!next.found) {
                return;
            }
            start_scores();
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

#define ATTENTION_PAGED_HOPPER_OF(TYPE, NAME, D, E4M3)                                                                    \
    extern "C" __global__ void __launch_bounds__(Paged<D, false, E4M3>::THREADS, 1) attention_paged_hopper_##NAME##_d##D( \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* queries, const uint32_t* query_starts,              \
        const uint32_t* context_lengths, const uint32_t* block_tables, uint32_t out_pitch, uint32_t query_pitch,          \
        uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads, uint32_t kv_heads,                    \
        uint32_t blocks, uint32_t blocks_max, uint32_t window, const uint32_t* key_ends, const float* scales,             \
        float scale) {                                                                                                    \
        const Arguments arguments = {                                                                                     \
            query_starts,   context_lengths,  block_tables, out_pitch, query_pitch, rows, sequences,                      \
            first_sequence, heads / kv_heads, kv_heads,     blocks,    blocks_max,  window, 1, key_ends, scales, scale};  \
        attention<Paged<D, false, E4M3>>(map, out, nullptr, queries, arguments);                                          \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(Paged<D, true, E4M3>::THREADS, 1)                                        \
        attention_paged_hopper_split_##NAME##_d##D(                                                                       \
            const __grid_constant__ TensorMap map, TYPE* out, const TYPE* queries, const uint32_t* query_starts,          \
            const uint32_t* context_lengths, const uint32_t* block_tables, float* parts, uint32_t out_pitch,              \
            uint32_t query_pitch, uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads,             \
            uint32_t kv_heads, uint32_t blocks, uint32_t blocks_max, uint32_t window, uint32_t splits,                    \
            const uint32_t* key_ends, const float* scales, float scale) {                                                 \
        const Arguments arguments = {                                                                                     \
            query_starts,   context_lengths,  block_tables, out_pitch, query_pitch, rows,   sequences,                    \
            first_sequence, heads / kv_heads, kv_heads,     blocks,    blocks_max,  window, splits, key_ends, scales,      \
            scale};                                                                                                       \
        attention<Paged<D, true, E4M3>>(map, out, parts, queries, arguments);                                             \
    }

#define ATTENTION_PAGED_HOPPER(TYPE, NAME, D)                                              \
    static_assert(sizes::PAGED_AS_LAUNCHED<D>, "the sizes must equal those of the contract"); \
    ATTENTION_PAGED_HOPPER_OF(TYPE, NAME, D, false)

#define ATTENTION_PACKED_HOPPER(TYPE, NAME, D)                                                                         \
    static_assert(sizes::PACKED_AS_LAUNCHED<D>, "the sizes must equal those of the contract");                         \
    extern "C" __global__ void __launch_bounds__(Packed<D>::THREADS, 1) attention_packed_hopper_##NAME##_d##D(         \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* qkv, const uint32_t* starts, uint32_t out_pitch, \
        uint32_t pitch, uint32_t rows, uint32_t sequences, uint32_t heads, float scale) {                              \
        const Arguments arguments = {starts, nullptr, nullptr, out_pitch, pitch, rows, sequences,                      \
                                     0,      1,       heads,   0,         0,     0,    1,       nullptr, nullptr,      \
                                     scale};                                                                           \
        attention<Packed<D>>(map, out, nullptr, qkv, arguments);                                                       \
    }

#define ATTENTION_ALL(TYPE, NAME)                                  \
    FOR_EACH_HOPPER_HEAD_DIM(ATTENTION_PAGED_HOPPER, TYPE, NAME)   \
    ATTENTION_PAGED_HOPPER_OF(TYPE, e4m3_##NAME, 128, true)        \
    FOR_EACH_PACKED_HEAD_DIM(ATTENTION_PACKED_HOPPER, TYPE, NAME)

ATTENTION_ALL(__half, f16)
ATTENTION_ALL(__nv_bfloat16, bf16)

// Launch. Persistent: grid x = min(SMs, jobs), where jobs is an upper bound:
// attention_paged_hopper_<type>_d<D> block THREADS, dynamic shared memory SHARED_BYTES<D>; for E4M3
// E4M3_THREADS and E4M3_SHARED_BYTES jobs = kv_heads * ((rows * (heads / kv_heads) + 127 *
// (sequences - first_sequence)) / 128) attention_paged_hopper_split_<type>_d<D> the same block and
// shared memory, and `splits` times as many jobs. This kernel is faster if the kernel without
// splits would have jobs for at most half of the SMs, and if contexts reach a few thousand tokens.
// In that case, splits = min(SMs / jobs, keys / SPLIT_KEYS), with the number of jobs without splits
// and at most `window` keys. `parts` takes at most SMs * PART_NUMBERS<D> numbers.
// attention_packed_hopper_<type>_d<D> block PACKED_THREADS<D>, dynamic shared memory
// PACKED_SHARED_BYTES<D> jobs = heads * ((rows + (PACKED_QUERIES<D> - 1) * sequences) /
// PACKED_QUERIES<D>) A smaller grid is also correct, but slower. A grid of 0 must not be launched.
// The limit of dynamic shared memory must be raised once per function
// (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
//
// The tensor map comes from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element strides 1,
// interleave NONE, L2 promotion 128 bytes, out of bounds NONE (zeros), and
//   paged, over the layer:           rank 5, swizzle 128B
//     dimensions  {64, 8, D / 64, 2, blocks * 2 * kv_heads}: columns of a chunk, 8 tokens, chunks,
//                 the next 8 tokens, (block, keys or values, head)
//     strides     {2 * D, 128, 16 * D, 32 * D} bytes, of all dimensions but the first
//     box         {64, 8, D / 64, 2, 1}: 16 tokens of one head, keys or values, 32 * D bytes
//   paged, in E4M3 (type UINT8):     rank 3, no swizzle
//     dimensions  {128, 16, blocks * 2 * kv_heads}: columns, tokens, (block, keys or values, head)
//     strides     {128, 2048} bytes
//     box         {128, 16, 1}: 16 tokens of one head, keys or values, 2048 bytes
//   packed, over qkv:                rank 3, swizzle 128B if PACKED_CHUNK<D> is 64, else 32B
//     dimensions  {D, rows, 3 * heads}: columns of a head, rows, heads of queries, keys and values
//     strides     {2 * pitch, 2 * D} bytes
//     box         {PACKED_CHUNK<D>, PACKED_KEYS<D>, 1}: some columns of all rows of a step; zeros
//                 past a head's last column
// The map contains the address, so it belongs to one layer or one qkv; a captured graph keeps a
// copy of the map.
