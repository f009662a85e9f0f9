// The operations of attention_prefill.cu on Hopper (sm_90a only), as FlashAttention-3 does them (Shah et al. 2024, arXiv
// 2407.08608): the copy engine brings keys and values, warpgroups multiply with wgmma, one warpgroup's softmax runs
// beside another's products, and beside its own product of weights and values. Same meaning, tensors and limits as
// there, except what is said here.
//
// attention_paged_hopper_<type>_d128, attention_packed_hopper_<type>_d80
//   The cache and the packed keys and values are read through a tensor map (the first argument, by value), see Launch.
//   A NaN value at a place that a row may not see can reach earlier rows of its own sequence within 128 tokens.
//   Tiles are large (128 query vectors, 192 rows): for many short stretches attention_prefill.cu is faster.

#include "include/attention_tiles.cuh"
#include "include/hopper_copy.cuh"
#include "include/online_softmax.cuh"
#include "include/tensor_core.cuh"
#include "include/wgmma.cuh"

namespace {

constexpr uint32_t BLOCK_TOKENS = 16;
constexpr uint32_t STAGES = 2;  // of queries, of keys, and of values
constexpr uint32_t WARPGROUP = 128;
// Names of barriers: one a multiplying warpgroup for its turn at the tensor cores, one for itself.
constexpr uint32_t TURN = 1;
constexpr uint32_t ALONE = 5;

// Sizes of one kernel. `MULTIPLIERS` warpgroups multiply 64 query vectors each; one more warpgroup copies.
template <int D_, int MULTIPLIERS_, int KEYS_, bool PAGED_>
struct Sizes {
    static constexpr int D = D_;
    static constexpr int MULTIPLIERS = MULTIPLIERS_;
    static constexpr bool PAGED = PAGED_;
    static constexpr int KEYS = KEYS_;  // of a step
    static constexpr int QUERIES = 64 * MULTIPLIERS;
    static constexpr int THREADS = WARPGROUP * (MULTIPLIERS + 1);
    static constexpr int CHUNK = D % 64 == 0 ? 64 : 16;  // columns
    static constexpr int CHUNKS = D / CHUNK;
    // From 8 rows to the next 8, and from chunk to chunk. A block of the cache comes as one box, 8 rows of all chunks
    // and then the next 8; packed rows come as one box for all keys of a step, chunk after chunk.
    static constexpr uint32_t DOWN = PAGED ? 8 * D * 2 : 8 * CHUNK * 2;
    static constexpr uint32_t ACROSS = PAGED ? 8 * CHUNK * 2 : KEYS * CHUNK * 2;
    static constexpr uint32_t QUERY_DOWN = 8 * CHUNK * 2;
    static constexpr uint32_t QUERY_ACROSS = 64 * CHUNK * 2;
    static constexpr uint32_t QUERY_BYTES = QUERIES * D * 2;
    static constexpr uint32_t STEP_BYTES = KEYS * D * 2;
    static constexpr uint32_t KEYS_AT = STAGES * QUERY_BYTES;
    static constexpr uint32_t VALUES_AT = KEYS_AT + STAGES * STEP_BYTES;
    static constexpr uint32_t SHARED_BYTES = VALUES_AT + STAGES * STEP_BYTES;
    static_assert(QUERY_BYTES % (16 * CHUNK) == 0 && STEP_BYTES % (16 * CHUNK) == 0, "a swizzle repeats after so many bytes");
    static_assert(SHARED_BYTES <= 226 * 1024, "a block's dynamic share of shared memory");
    // Registers of a thread, out of 65,536 for the block.
    static constexpr uint32_t COPY_REGISTERS = MULTIPLIERS == 3 ? 32 : 40;
    static constexpr uint32_t MULTIPLY_REGISTERS = MULTIPLIERS == 3 ? 160 : 232;
};

// What one turn of a thread block is about.
struct Job {
    uint32_t found;
    uint32_t first_row;    // of the sequence
    uint32_t rows;         // of the sequence
    uint32_t first_query;  // of the tile
    uint32_t head;         // of keys and values
    uint32_t sequence;
    int32_t keys;     // that any row of the tile sees
    int32_t visible;  // to row 0 of the sequence
    uint32_t torn;    // the last step of keys ends with some that must not be read
};

struct Arguments {
    const uint32_t* starts;           // [sequences + 1]
    const uint32_t* context_lengths;  // [sequences], paged only
    const uint32_t* block_tables;     // [sequences, blocks_max], paged only
    uint32_t out_pitch;
    uint32_t query_pitch;
    uint32_t rows;
    uint32_t sequences;
    uint32_t first_sequence;
    uint32_t group;
    uint32_t kv_heads;
    uint32_t blocks;
    uint32_t blocks_max;
    float scale;
};

struct Barriers {
    uint64_t queries_full[STAGES];
    uint64_t queries_empty[STAGES];
    uint64_t keys_full[STAGES];
    uint64_t keys_empty[STAGES];
    uint64_t values_full[STAGES];
    uint64_t values_empty[STAGES];
};

// A place in a ring of STAGES.
struct Ring {
    uint32_t stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

__device__ __forceinline__ uint32_t whole_blocks(int32_t keys) { return (keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

// Steps of a job; one of nothing but masked zeros if it has no keys.
template <typename S>
__device__ __forceinline__ int32_t steps_of(const Job& job) {
    return max((job.keys + S::KEYS - 1) / S::KEYS, 1);
}

// The job of turn number `turn`. Every second round of blocks runs backwards: who had the longest tile of a round has
// the shortest of the next. Called by whole warps; `tiles` is the number of all tiles (packed only).
template <typename S>
__device__ __forceinline__ void find_job(Job& job, uint32_t turn, const Arguments& arguments, uint32_t tiles) {
    const uint32_t order = turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
    AttentionTile tile;
    uint32_t wanted;
    if (S::PAGED) {
        // Heads next to each other: tiles come with falling work.
        job.head = order % arguments.kv_heads;
        wanted = order / arguments.kv_heads;
        job.found = 1;
    } else {
        // A head's tiles next to each other: its keys and values stay in the L2 cache.
        job.found = tiles > 0 && order / max(tiles, 1u) < arguments.kv_heads;
        job.head = order / max(tiles, 1u);
        wanted = order % max(tiles, 1u);
    }
    if (!job.found || !find_tile<S::QUERIES>(wanted, arguments.starts, arguments.first_sequence, arguments.sequences,
                                             arguments.rows, arguments.group, tile)) {
        job.found = 0;
        return;
    }
    job.sequence = tile.sequence;
    job.first_row = tile.first_row;
    job.rows = tile.rows;
    job.first_query = tile.first_query;
    if (S::PAGED) {
        const uint32_t context = min(__ldg(arguments.context_lengths + tile.sequence), arguments.blocks_max * BLOCK_TOKENS);
        const uint32_t last_row = min((tile.first_query + S::QUERIES - 1) / arguments.group, tile.rows - 1);
        job.visible = static_cast<int32_t>(context) - static_cast<int32_t>(tile.rows) + 1;
        job.keys = max(job.visible + static_cast<int32_t>(last_row), 0);
        // Blocks past the keys come as zeros; within the last block of the context stands what was there before.
        job.torn = whole_blocks(job.keys) * BLOCK_TOKENS > context;
    } else {
        job.visible = 0;
        job.keys = static_cast<int32_t>(tile.rows);
        job.torn = tile.rows % S::KEYS != 0;
    }
}

// Keys and values of all jobs, step by step, into the rings. One warp.
template <typename S>
__device__ __forceinline__ void copy_steps(const TensorMap& map, const Arguments& arguments, uint32_t tiles, uint32_t shared,
                                           Barriers& barriers) {
    const uint32_t lane = threadIdx.x % 32;
    constexpr int STEP_BLOCKS = S::KEYS / BLOCK_TOKENS;
    if (lane == 0) {
        fetch_map(map);
    }
    Ring keys, values;
    for (uint32_t turn = 0;; ++turn) {
        Job job;
        find_job<S>(job, turn, arguments, tiles);
        if (!job.found) {
            return;
        }
        const int32_t steps = steps_of<S>(job);
        const int32_t filled = static_cast<int32_t>(whole_blocks(job.keys));
        const uint32_t* table = S::PAGED ? arguments.block_tables + static_cast<size_t>(job.sequence) * arguments.blocks_max : nullptr;
        // Lane i copies block i of a step. A block that is none lies past the map's end: zeros.
        const auto piece = [&](int32_t step) {
            const int32_t place = step * STEP_BLOCKS + static_cast<int32_t>(lane);
            uint32_t block = arguments.blocks;
            if (S::PAGED && step >= 0 && lane < STEP_BLOCKS && place < filled) {
                block = min(__ldg(table + place), arguments.blocks);
            }
            return block * 2 * arguments.kv_heads + job.head;
        };
        const auto copy = [&](uint32_t to, uint64_t& full, int32_t step, uint32_t block, uint32_t which) {
            const uint32_t barrier = shared_address(&full);
            if (lane == 0) {
                barrier_arrive_expecting(barrier, S::STEP_BYTES);
            }
            __syncwarp();
            if (S::PAGED) {
                if (lane < STEP_BLOCKS) {
                    copy_box(to + lane * BLOCK_TOKENS * S::D * 2, map, barrier, 0, 0, 0, 0,
                             static_cast<int32_t>(block + which * arguments.kv_heads));
                }
            } else if (lane == 0) {
                copy_box(to, map, barrier, 0, static_cast<int32_t>(job.first_row) + step * S::KEYS,
                         static_cast<int32_t>(((1 + which) * arguments.kv_heads + job.head) * S::CHUNKS));
            }
        };
        // Values follow one step behind, as they are needed.
        uint32_t next = piece(steps - 1);
        uint32_t last = 0;
        for (int32_t step = steps - 1; step >= -1; --step) {
            const uint32_t now = next;
            next = piece(step - 1);
            if (step >= 0) {
                barrier_wait(shared_address(&barriers.keys_empty[keys.stage]), keys.parity ^ 1);
                copy(shared + S::KEYS_AT + keys.stage * S::STEP_BYTES, barriers.keys_full[keys.stage], step, now, 0);
                keys.advance();
            }
            if (step + 1 < steps) {
                barrier_wait(shared_address(&barriers.values_empty[values.stage]), values.parity ^ 1);
                copy(shared + S::VALUES_AT + values.stage * S::STEP_BYTES, barriers.values_full[values.stage], step + 1, last, 1);
                values.advance();
            }
            last = now;
        }
    }
}

// Queries of all jobs, and what the jobs are. Three warps.
template <typename S, typename T>
__device__ __forceinline__ void copy_queries(const T* queries, const Arguments& arguments, uint32_t tiles, uint32_t shared,
                                             Barriers& barriers, Job (&jobs)[STAGES]) {
    const uint32_t thread = threadIdx.x - 32;
    Ring ring;
    for (uint32_t turn = 0;; ++turn) {
        Job job;
        find_job<S>(job, turn, arguments, tiles);
        barrier_wait(shared_address(&barriers.queries_empty[ring.stage]), ring.parity ^ 1);
        const uint32_t full = shared_address(&barriers.queries_full[ring.stage]);
        if (thread == 0) {
            jobs[ring.stage] = job;
        }
        if (!job.found) {
            barrier_arrive(full);
            return;
        }
        constexpr uint32_t PIECES = S::D / 8;
        for (uint32_t item = thread; item < S::QUERIES * PIECES; item += 96) {
            const uint32_t index = item / PIECES;
            const uint32_t piece = item % PIECES;
            const uint32_t query = job.first_query + index;
            const bool valid = query < job.rows * arguments.group;
            const size_t element = static_cast<size_t>(job.first_row + query / arguments.group) * arguments.query_pitch +
                                   (job.head * arguments.group + query % arguments.group) * S::D + piece * 8;
            const uint32_t chunk = piece / (S::CHUNK / 8);
            const uint32_t place = index / 64 * (64 * S::D * 2) + chunk * S::QUERY_ACROSS +
                                   Swizzle<S::CHUNK>::place(index % 64, piece % (S::CHUNK / 8));
            copy_16_bytes(shared + ring.stage * S::QUERY_BYTES + place, valid ? queries + element : queries, valid);
        }
        wait_for_copies();
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
__device__ __forceinline__ void store(T* out, const Job& job, const Arguments& arguments, const float (&gathered)[S::D / 8][4],
                                      const float (&inverse)[2], uint32_t own) {
    using Element = TensorCoreElement<T>;
    const uint32_t lane = threadIdx.x % 4;
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
                words[i] = Element::pack(gathered[tile][2 * half] * inverse[half], gathered[tile][2 * half + 1] * inverse[half]);
            }
            exchange(words);
            if (valid && first + lane < S::D / 8) {
                *reinterpret_cast<uint4*>(row + (first + lane) * 8) = make_uint4(words[0], words[1], words[2], words[3]);
            }
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
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(0u) : "memory");
    }
    publish_writes();
}

// All jobs of one multiplying warpgroup.
template <typename S, typename T>
__device__ __forceinline__ void multiply(T* out, const Arguments& arguments, uint32_t shared, Barriers& barriers,
                                         const Job (&jobs)[STAGES], uint32_t warpgroup) {
    using Element = TensorCoreElement<T>;
    using Products = Warpgroup<T>;
    constexpr int TILES = S::KEYS / 8;
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t own = warpgroup * 64 + thread / 32 * 16 + lane / 4;  // and own + 8
    const float factor = arguments.scale * 1.4426950408889634f;
    constexpr uint64_t QUERY_LAYOUT = matrix_layout<S::CHUNK>(16, S::QUERY_DOWN);
    constexpr uint64_t KEY_LAYOUT = matrix_layout<S::CHUNK>(16, S::DOWN);
    constexpr uint64_t VALUE_LAYOUT = matrix_layout<S::CHUNK>(S::ACROSS, S::DOWN);
    const uint32_t my_turn = TURN + warpgroup;
    const uint32_t next_turn = TURN + (warpgroup + 1) % S::MULTIPLIERS;
    if (warpgroup + 1 == S::MULTIPLIERS) {
        part_arrive(next_turn, 2 * WARPGROUP);  // the first warpgroup begins
    }

    Ring queries, keys, values;
    float gathered[S::D / 8][4];
    float scores[TILES][4];
    uint32_t weights[S::KEYS / 16][4];

    const auto start_scores = [&]() {
        const uint32_t query_address = shared + queries.stage * S::QUERY_BYTES + warpgroup * (64 * S::D * 2);
        const uint32_t key_address = shared + S::KEYS_AT + keys.stage * S::STEP_BYTES;
        hold(scores);
        products_begin();
#pragma unroll
        for (int k = 0; k < S::D / 16; ++k) {
            const uint32_t chunk = k * 16 / S::CHUNK;
            const uint32_t within = k * 16 % S::CHUNK * 2;
            Products::scores(scores, matrix_at(QUERY_LAYOUT, query_address + chunk * S::QUERY_ACROSS + within),
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
    const auto await = [&](uint64_t (&full)[STAGES], const Ring& ring) {
        barrier_wait(shared_address(&full[ring.stage]), ring.parity);
    };
    const auto release = [&](uint64_t (&empty)[STAGES], Ring& ring) {
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
        OnlineSoftmax softmax;
        softmax.begin();
        float shrink[2];
        int32_t step = steps_of<S>(job) - 1;
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
        for (int tile = 0; tile < S::D / 8; ++tile) {
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
        for (step -= 1; step >= 0; --step) {
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
            for (int tile = 0; tile < S::D / 8; ++tile) {
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
        float inverse[2];
        softmax.finish(inverse);
        products_wait<1>();
        hold(gathered);
        release(barriers.values_empty, values);
        store<S>(out, job, arguments, gathered, inverse, own);
        products_wait<0>();
        hold(scores);
        if (!next.found) {
            return;
        }
        job = next;
    }
}

template <typename S, typename T>
__device__ __forceinline__ void attention(const TensorMap& map, T* out, const T* queries, const Arguments& arguments) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Barriers barriers;
    __shared__ Job jobs[STAGES];
    const uint32_t shared = shared_address(tiles_of_shared);
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            barrier_init(shared_address(&barriers.queries_full[stage]), 96);
            barrier_init(shared_address(&barriers.queries_empty[stage]), S::MULTIPLIERS);
            barrier_init(shared_address(&barriers.keys_full[stage]), 1);
            barrier_init(shared_address(&barriers.keys_empty[stage]), S::MULTIPLIERS);
            barrier_init(shared_address(&barriers.values_full[stage]), 1);
            barrier_init(shared_address(&barriers.values_empty[stage]), S::MULTIPLIERS);
        }
        barrier_init_done();
    }
    __syncthreads();
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        give_registers<S::COPY_REGISTERS>();
        uint32_t tiles = 0;
        if (!S::PAGED) {
            // All tiles that a search can pass over.
            AttentionTile none;
            uint32_t wanted = 0xffffffffu;
            find_tile<S::QUERIES>(wanted, arguments.starts, 0, arguments.sequences, arguments.rows, 1, none);
            tiles = 0xffffffffu - wanted;
        }
        if (threadIdx.x < 32) {
            copy_steps<S>(map, arguments, tiles, shared, barriers);
        } else {
            copy_queries<S>(queries, arguments, tiles, shared, barriers, jobs);
        }
    } else {
        take_registers<S::MULTIPLY_REGISTERS>();
        multiply<S>(out, arguments, shared, barriers, jobs, warpgroup - 1);
    }
}

using Paged128 = Sizes<128, 2, 128, true>;
using Packed80 = Sizes<80, 3, 112, false>;

}  // namespace

#define ATTENTION_PREFILL_HOPPER(TYPE, NAME)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Paged128::THREADS, 1) attention_paged_hopper_##NAME##_d128(                   \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* queries, const uint32_t* query_starts,                   \
        const uint32_t* context_lengths, const uint32_t* block_tables, uint32_t out_pitch, uint32_t query_pitch,               \
        uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads, uint32_t kv_heads, uint32_t blocks,        \
        uint32_t blocks_max, float scale) {                                                                                    \
        const Arguments arguments = {query_starts, context_lengths, block_tables,     out_pitch, query_pitch, rows,      sequences, \
                                     first_sequence, heads / kv_heads, kv_heads, blocks,    blocks_max,  scale};               \
        attention<Paged128>(map, out, queries, arguments);                                                                     \
    }                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(Packed80::THREADS, 1) attention_packed_hopper_##NAME##_d80(                   \
        const __grid_constant__ TensorMap map, TYPE* out, const TYPE* qkv, const uint32_t* starts, uint32_t out_pitch,         \
        uint32_t pitch, uint32_t rows, uint32_t stretches, uint32_t heads, float scale) {                                      \
        const Arguments arguments = {starts, nullptr, nullptr, out_pitch, pitch, rows, stretches, 0, 1, heads, 0, 0, scale};   \
        attention<Packed80>(map, out, qkv, arguments);                                                                         \
    }

ATTENTION_PREFILL_HOPPER(__half, f16)
ATTENTION_PREFILL_HOPPER(__nv_bfloat16, bf16)
