// Decode attention: one new token per sequence, over the paged KV cache (PagedAttention, Kwon et
// al. 2023, arXiv 2309.06180). With speculative decoding, the host passes each row of a sequence as
// a separate sequence of one row. The keys of long contexts are split over the whole GPU
// (Flash-Decoding, Dao et al. 2023), in equal shares for all thread blocks (Stream-K, Osama et al.
// 2023, arXiv 2301.03598), so that contexts of 1 and of 100,000 tokens may be in one batch.
//
// queries         [rows, heads * head_dim], rows queries_pitch elements apart;
//                 heads = kv_heads * group
// cache           [blocks, 2, kv_heads, 16, head_dim]: one layer; keys, then values. The keys and
//                 values of this step are already in the cache.
// query_starts    [sequences + 1] u32: the row of sequence s is query_starts[s]
// context_lengths [sequences] u32: tokens in the cache, including this step's tokens
// block_tables    [sequences, table_blocks] u32; unused entries are not read, and neither are
//                 entries before the block with the first token that a row attends to
// partials        [gridDim.x, 2, 8, head_dim + 2] f32: scratch, 8-byte aligned
// counters        [gridDim.x] u32: zero before the first launch, and zero again after each launch
// scales          [2, kv_heads] f32: scales of E4M3 keys and values; not read for other caches
// window          the most tokens that a row attends to, at least 1; NO_WINDOW for all
// flags           PAST_IS_THERE: the previous kernel writes no past tokens (see below);
//                 OTHERS_READ_ONCE: GEMMs read weights with the hint to evict them from the L2
//                 cache first
// out             [rows, heads * head_dim], contiguous
//
// out = softmax(queries . keys * scale) . values for each head. Sums are f32; weights are rounded
// to the type of the operands (f16 with a cache in E4M3, otherwise the element type) before they
// are multiplied by the values. The kernel supports any number of rows n per sequence, although the
// host passes one: row r attends to the last `window` of the first context - n + r + 1 tokens, and
// every 8 query vectors read the keys again. The output of a row that attends to no tokens (for
// example, with a context of 0) is zeros. A sequence whose two query_starts are equal, or are at or
// past `rows`, has no rows, so nothing is written for it. Rows that belong to no sequence are not
// written. A context longer than its table is truncated, and a block id at or past `blocks` is read
// as the last block, so nothing outside the cache is read. A block may contain any bits past the
// context. A NaN in a query makes NaNs in the output of that head; a NaN in a key or value makes
// NaNs in outputs of the same sequence. No other output is affected.
//
// queries, their pitch and cache are aligned to 16 bytes, out to 4 bytes. head_dim is 32, 64, 80,
// 128, 256 or 512.
//
// Method: a run is the key blocks of one KV head of a sequence for up to eight query vectors (see
// decode_share.cuh). With n warps in a thread block, a warp processes every n-th key block of a
// run. Each warp copies its blocks through its own ring in shared memory, so that warps do not wait
// for each other. Keys are along the 16 rows of a tensor core instruction, query vectors along its
// 8 columns (decode_block.cuh). The warps of a thread block combine their results in shared memory,
// and thread blocks combine theirs in `partials`. If several thread blocks share a run, the last
// block to finish adds up the results. Any of the blocks may be the last, but the order of the
// additions is fixed: the same inputs give the same bits.
//
// With programmatic dependent launch, everything up to the first read of queries and cache runs
// before the previous kernel has ended, so that kernel must not write query_starts, context_lengths
// or block_tables. With PAST_IS_THERE, the first whole blocks of past tokens are read early, too,
// so the previous kernel must not write tokens before a sequence's new rows.
//
// If GEMMs read weights with the hint to evict them from the L2 cache first, but keys and values
// are read without the hint, then keys and values fill the cache, stay until other keys and values
// replace them, and leave little space to the weights. With 64 sequences of 576 tokens, whose keys
// and values are too large to remain in the cache until the next step, a step with the GEMMs of
// gemm_small_m.cu took 4 us longer per layer. Large keys and values are therefore read with the
// same hint.

#pragma once

#include "contract.cuh"
#include "decode_block.cuh"
#include "decode_parts.cuh"
#include "decode_share.cuh"
#include "kernel_order.cuh"
#include "tensor_core.cuh"

using contract::attention_decode::OTHERS_READ_ONCE;
using contract::attention_decode::PARTS;
using contract::attention_decode::PAST_IS_THERE;

// MiB of a layer's keys and values above which they are read with the hint to evict them from the
// L2 cache first. READ_ONCE_MIB applies if GEMMs read weights with that hint,
// READ_ONCE_BESIDE_OTHERS_MIB if they read weights without it. Keys and values below the limit
// partly remain in the cache until the next step, which saves more time than the hint.
// READ_ONCE_MIB is between the measured sizes of 16 sequences of 576 tokens (18 MiB) and of 20 such
// sequences. With cuBLASLt's GEMMs, which read weights without the hint, reading keys and values
// with it cost 1 us per layer at 96 and 128 sequences and saved 3 us at 256.
constexpr uint32_t READ_ONCE_MIB = 20, READ_ONCE_BESIDE_OTHERS_MIB = 240;

struct DecodeCall {
    const void* queries;
    const void* cache;
    uint32_t queries_pitch, blocks;
    DecodeBatch batch;
    const float* scales;  // [2, kv_heads], for a cache in E4M3
    float scale;
    bool past_is_there, others_read_once;
};

// The keys of one run that one thread block processes.
struct Segment {
    DecodeSequence sequence;
    const uint32_t* table;
    // `first_query` is the tile's first query vector, among the sequence's rows * group.
    uint32_t kv_head, first_query;
    uint32_t queries;          // number of query vectors in the tile, at most 8
    uint32_t from, to;         // range of key blocks in the run
    float scale, value_scale;  // factors of scores and of the weighted sum of values
    bool is_read_once;
};

// This warp's part of a segment: every `warps`-th of its key blocks.
template <uint32_t HEAD_DIM, typename Element, typename Cached>
struct WarpPart {
    static constexpr uint32_t TILES = HEAD_DIM / 16;
    using Core = TensorCoreElement<Multiplied<Element, Cached>>;
    using Ring = ::Ring<HEAD_DIM, Cached>;
    using Half = HalfBlock<HEAD_DIM, Cached>;
    // Columns are the query vectors 2 * pair and 2 * pair + 1, rows are two adjacent elements.
    float gathered[TILES][4];
    // For these two query vectors. Until the end of `compute`, `sum` is over this lane's keys only.
    float maximum[2], sum[2];

    // The query vector of this lane's column of the tile, or null if the tile has fewer query
    // vectors.
    static __device__ __forceinline__ const char* query_at(const DecodeCall& call, const Segment& segment, uint32_t lane) {
        const uint32_t vector = segment.first_query + lane / 4, group = call.batch.group;
        if (lane / 4 >= segment.queries) {
            return nullptr;
        }
        const uint32_t later = segment.sequence.rows > 1 ? vector / group : 0;  // row
        const uint64_t row = segment.sequence.first_row + later;
        const uint32_t head = segment.kv_head * group + vector - later * group;
        return static_cast<const char*>(call.queries) + (row * call.queries_pitch + head * HEAD_DIM) * 2;
    }

    // `ring` belongs to this warp; it may be reused after all lanes have returned.
    __device__ __forceinline__ void compute(const DecodeCall& call, const Segment& segment, char* ring) {
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
        const uint32_t first = segment.from + warp, context = segment.sequence.context;
        const uint32_t count = context > 0 && first < segment.to ? (segment.to - first + warps - 1) / warps : 0;
        // Reads 32 entries of the block table at a time, and the next 32 in advance.
        const auto places = [&](uint32_t start) {
            return start + lane < count ? segment.table[first + (start + lane) * warps] : 0;
        };
        uint32_t ids = places(0), later = places(WARP);
        const char* query = query_at(call, segment, lane);
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; ++tile) {
            gathered[tile][0] = gathered[tile][1] = gathered[tile][2] = gathered[tile][3] = 0.0f;
        }
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        if (count == 0) {
            wait_for_previous_kernel();
            return;
        }
        const uint32_t half_bytes = call.batch.kv_heads * Half::BYTES, ring_address = shared_address(ring);
        const char* of_head = static_cast<const char*>(call.cache) + segment.kv_head * Half::BYTES;
        // Starts the copies of the keys and values of this warp's block `step`. Calls must be in
        // the order of `step`. Past the last block, nothing is copied.
        const auto copy = [&](uint32_t step, uint32_t stage) {
            if (step < count) {
                if (step > 0 && step % WARP == 0) {
                    ids = later;
                    later = places(step + WARP);
                }
                const uint32_t id = min(__shfl_sync(ALL_LANES, ids, step % WARP), call.blocks - 1);
                const char* from = of_head + static_cast<uint64_t>(id) * 2 * half_bytes;
                const uint32_t to = ring_address + stage * Ring::BLOCK_BYTES;
                if (segment.is_read_once) {
                    Half::template copy<true>(from, to, lane);
                    Half::template copy<true>(from + half_bytes, to + Half::BYTES, lane);
                } else {
                    Half::template copy<false>(from, to, lane);
                    Half::template copy<false>(from + half_bytes, to + Half::BYTES, lane);
                }
            }
            end_copies();
        };
        // Whole blocks of past tokens are complete while the previous kernel may still
        // write this step's keys.
        const uint32_t past = call.past_is_there ? (context - min(context, segment.sequence.rows)) / BLOCK_TOKENS : 0;
        const auto is_past = [&](uint32_t step) { return first + step * warps < past; };
#pragma unroll
        for (uint32_t step = 0; step < Ring::STAGES - 1; ++step) {
            if (is_past(step)) {
                copy(step, step);
            }
        }
        wait_for_previous_kernel();
#pragma unroll
        for (uint32_t step = 0; step < Ring::STAGES - 1; ++step) {
            if (!is_past(step)) {
                copy(step, step);
            }
        }
        Queries<HEAD_DIM, Element, Cached> queries;
        queries.load(query, lane);
        uint32_t stage = 0, free_stage = Ring::STAGES - 1;
#pragma unroll 1
        for (uint32_t step = 0; step < count; ++step) {
            wait_for_all_but<Ring::STAGES - 2>();
            // At this point, the copies of this block by all lanes have completed, and all lanes
            // have read the previous block, whose stage of the ring is the next to fill.
            __syncwarp();
            copy(step + Ring::STAGES - 1, free_stage);
            const char* keys = ring + stage * Ring::BLOCK_BYTES;
            float scores[4];
            multiply_keys<HEAD_DIM>(keys, queries, lane, scores);
            const uint32_t token = (first + step * warps) * BLOCK_TOKENS;
            // Only the last blocks and, with a window, the first blocks have keys that some rows do
            // not attend to.
            if (token + BLOCK_TOKENS + segment.sequence.rows > context + 1 || token + call.batch.window < context) {
                mask(call, segment, token, lane, scores);
            }
            uint32_t weights[2];
            weigh(scores, segment.scale, weights);
            add_values<HEAD_DIM, Element, Cached>(keys + Half::BYTES, weights, context - token, lane, gathered);
            free_stage = stage;
            stage = stage + 1 == Ring::STAGES ? 0 : stage + 1;
        }
#pragma unroll
        for (uint32_t column = 0; column < 2; ++column) {
#pragma unroll
            for (uint32_t distance = 4; distance < WARP; distance *= 2) {
                sum[column] += __shfl_xor_sync(ALL_LANES, sum[column], distance);
            }
        }
    }

    // Sets the scores to minus infinity for keys that a query vector does not attend to.
    static __device__ __forceinline__ void mask(const DecodeCall& call, const Segment& segment, uint32_t token,
                                                uint32_t lane, float (&scores)[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t key = token + lane / 4 + i / 2 * 8;
            const uint32_t row = (segment.first_query + 2 * (lane % 4) + i % 2) / call.batch.group;
            // This row attends to the last `window` of the first `context - rows + row + 1` keys,
            // or to no keys if that number is negative.
            const uint32_t end = segment.sequence.context + row, least = key + segment.sequence.rows;
            if (least > end || least + call.batch.window <= end) {
                scores[i] = -INFINITY;
            }
        }
    }

    // Converts scores to weights, in the layout of B for the product with the values. Scales
    // `gathered` down if a maximum grows.
    __device__ __forceinline__ void weigh(float (&scores)[4], float scale, uint32_t (&weights)[2]) {
        float shrink[2];
        bool grown = false;
#pragma unroll
        for (uint32_t column = 0; column < 2; ++column) {
            float highest = fmaxf(scores[column], scores[2 + column]);
#pragma unroll
            for (uint32_t distance = 4; distance < WARP; distance *= 2) {
                highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, distance));
            }
            highest = fmaxf(highest * scale, maximum[column]);
            // Minus infinity minus itself is NaN, so the origin of a row that has seen
            // no keys is 0.
            const float origin = highest == -INFINITY ? 0.0f : highest;
            shrink[column] = power_of_two(maximum[column] - origin);
            grown |= highest > maximum[column];
            maximum[column] = highest;
            scores[column] = power_of_two(fmaf(scores[column], scale, -origin));
            scores[2 + column] = power_of_two(fmaf(scores[2 + column], scale, -origin));
            sum[column] = sum[column] * shrink[column] + scores[column] + scores[2 + column];
        }
        if (__any_sync(ALL_LANES, grown)) {
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    gathered[tile][i] *= shrink[i % 2];
                }
            }
        }
        weights[0] = transposed(Core::pack(scores[0], scores[1]));
        weights[1] = transposed(Core::pack(scores[2], scores[3]));
    }

    // Writes this part to the start of this warp's ring for `add_parts`, relative to the highest
    // scores among the first `filled` warps, which are the warps with keys. Must be called by all
    // threads; ends with a barrier.
    __device__ __forceinline__ void write(uint32_t filled, float value_scale, Highest& highest, char* ring) const {
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, query = 2 * (lane % 4);
        if (lane < 4) {
            *reinterpret_cast<float2*>(&highest.of_warps[warp][query]) = make_float2(maximum[0], maximum[1]);
        }
        __syncthreads();
        if (warp < filled) {
#pragma unroll
            for (uint32_t column = 0; column < 2; ++column) {
                const float most = highest.among(filled, query + column);
                const float factor = part_factor(maximum[column], sum[column], most);
                const float of_values = factor * value_scale;
                float* row = reinterpret_cast<float*>(ring) + part_row(query + column) * PART_PITCH<HEAD_DIM>;
#pragma unroll
                for (uint32_t tile = 0; tile < TILES; ++tile) {
                    *reinterpret_cast<float2*>(row + LaneRow<HEAD_DIM, 8, Cached>::element(lane / 4, tile)) =
                        make_float2(of_values * gathered[tile][column], of_values * gathered[tile][2 + column]);
                }
                if (lane < 4) {
                    *reinterpret_cast<float2*>(row + HEAD_DIM) = make_float2(most, factor * sum[column]);
                }
            }
        }
        __syncthreads();
    }
};

static_assert(PART_FLOATS<128> * 4 <= Ring<128, E4m3>::BYTES && PART_FLOATS<32> * 4 <= Ring<32, E4m3>::BYTES,
              "a partial result fits in a ring");

template <uint32_t HEAD_DIM, typename Cached, typename Element>
__device__ __forceinline__ void attention_decode(const DecodeCall& call, uint32_t piece, float* partials,
                                                 uint32_t* counters, Element* out) {
    using Part = Slice<HEAD_DIM>;
    constexpr uint32_t RING = Ring<HEAD_DIM, Cached>::BYTES;
    extern __shared__ __align__(128) char rings[];  // one per warp
    __shared__ __align__(16) Highest highest;
    __shared__ uint32_t arrived;
    const DecodeBatch& batch = call.batch;
    const uint32_t warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    let_next_kernel_start();
    DecodeShare share;
    if (!find_share(batch, piece, share)) {
        // A block without work waits, too: the next kernel relies on both this kernel and the
        // previous one having ended.
        wait_for_previous_kernel();
        return;
    }
    Segment segment;
    const uint32_t most_kept = (call.others_read_once ? READ_ONCE_MIB : READ_ONCE_BESIDE_OTHERS_MIB) << 20;
    segment.is_read_once = share.all > most_kept / Ring<HEAD_DIM, Cached>::BLOCK_BYTES;
    segment.sequence = sequence_of(batch, share.sequence);
#pragma unroll 1
    for (uint32_t at = share.start; at < share.end;) {
        const uint32_t blocks = segment.sequence.blocks, run_length = share.run_length(segment.sequence);
        if (at - share.before >= segment.sequence.runs * run_length) {
            share.before += segment.sequence.runs * run_length;
            segment.sequence = sequence_of(batch, ++share.sequence);
            continue;
        }
        const uint32_t run = (at - share.before) / run_length, run_start = share.before + run * run_length;
        const uint32_t tiles = tiles_of(batch, segment.sequence.rows);
        segment.table = batch.block_tables + static_cast<uint64_t>(share.sequence) * batch.table_blocks +
                        segment.sequence.first_block;
        segment.kv_head = tiles > 1 ? run / tiles : run;
        segment.first_query = (run - segment.kv_head * tiles) * TILE_QUERIES;
        segment.queries = min(TILE_QUERIES, segment.sequence.rows * batch.group - segment.first_query);
        segment.scale = call.scale;
        segment.value_scale = 1.0f;
        if constexpr (std::is_same_v<Cached, E4m3>) {
            segment.scale *= __ldg(call.scales + segment.kv_head);
            segment.value_scale = __ldg(call.scales + batch.kv_heads + segment.kv_head);
        }
        segment.from = at - run_start;
        segment.to = min(blocks, share.end - run_start);
        at = run_start + run_length;
        if (segment.from >= blocks) {
            continue;
        }
        const uint32_t filled = min(warps, segment.to - segment.from);
        {
            WarpPart<HEAD_DIM, Element, Cached> part;
            part.compute(call, segment, rings + warp * RING);
            part.write(filled, segment.value_scale, highest, rings + warp * RING);
        }
        const float* parts = reinterpret_cast<const float*>(rings);
        const auto finish = [&](uint32_t query, uint32_t slice, const Part& all) {
            uint32_t row = 0, head = segment.first_query + query;
            if (segment.sequence.rows > 1) {
                row = head / batch.group;
                head -= row * batch.group;
            }
            const uint32_t heads = batch.kv_heads * batch.group;
            Element* to = out
                + (static_cast<uint64_t>(segment.sequence.first_row + row) * heads + segment.kv_head * batch.group + head)
                    * HEAD_DIM;
            const float inverse = all.sum == 0.0f ? 0.0f : __fdividef(1.0f, all.sum);
#pragma unroll
            for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                *reinterpret_cast<uint32_t*>(to + Part::element(slice, pair)) =
                    pair_from_floats<Element>(all.values[pair].x * inverse, all.values[pair].y * inverse);
            }
        };
        if (segment.from == 0 && segment.to == blocks) {
            add_parts<HEAD_DIM>(parts, RING / 4, filled, segment.queries, finish);
            __syncthreads();
            continue;
        }
        // At most two runs of a share continue in other shares: one run that begins before the
        // share or at its start, and one run that begins inside the share and ends after it. The
        // share contributes one part to each of them.
        float* own = partials + (PARTS * blockIdx.x + (run_start > share.start)) * PART_FLOATS<HEAD_DIM>;
        add_parts<HEAD_DIM>(parts, RING / 4, filled, segment.queries,
                            [&](uint32_t query, uint32_t slice, const Part& all) {
                                float* row = own + part_row(query) * PART_PITCH<HEAD_DIM>;
#pragma unroll
                                for (uint32_t pair = 0; pair < Part::PAIRS; ++pair) {
                                    *reinterpret_cast<float2*>(row + Part::element(slice, pair)) = all.values[pair];
                                }
                                if (slice == 0) {
                                    *reinterpret_cast<float2*>(row + HEAD_DIM) = make_float2(all.highest, all.sum);
                                }
                            });
        // At most one run begins in a share and ends in a later share. So each run uses the counter
        // of the share in which it begins.
        const uint32_t first = run_start / share.length, all = (run_start + blocks - 1) / share.length - first + 1;
        __syncthreads();
        if (threadIdx.x == 0) {
            arrived = arrive(counters + first, all);
        }
        __syncthreads();
        if (arrived + 1 == all) {
            const uint32_t begins_inside = run_start > first * share.length;
            const auto part_at = [&](uint32_t part) {
                return partials + (PARTS * (first + part) + (part == 0 && begins_inside)) * PART_FLOATS<HEAD_DIM>;
            };
            gather_parts<HEAD_DIM>(part_at, all, segment.queries, finish);
        }
    }
}

// `KERNEL_OF(name, Element, Cached, head_dim)` is an entry point.
#define KERNEL_OF(name, Element, Cached, HEAD_DIM)                                                                    \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS_MAX * WARP, 1) attention_decode_##name##_d##HEAD_DIM(   \
        const Element* queries, uint32_t queries_pitch, uint32_t rows, const Cached* cache, uint32_t blocks,          \
        uint32_t kv_heads, uint32_t group, const uint32_t* query_starts, const uint32_t* context_lengths,             \
        const uint32_t* block_tables, uint32_t sequences, uint32_t table_blocks, const float* scales, float scale,    \
        uint32_t window, uint32_t piece, uint32_t flags, float* partials, uint32_t* counters, Element* out) {         \
        const DecodeBatch batch = {query_starts, context_lengths, block_tables, sequences, table_blocks, rows, group, \
                                   kv_heads,     window};                                                             \
        /* Powers of two are cheaper than powers of e. */                                                             \
        const DecodeCall call = {queries, cache, queries_pitch, blocks, batch, scales, scale * 1.44269504f,           \
                                 (flags & PAST_IS_THERE) != 0, (flags & OTHERS_READ_ONCE) != 0};                      \
        attention_decode<HEAD_DIM, Cached>(call, piece, partials, counters, out);                                     \
    }

// Launch: block (32 * warps), grid (workers), dynamic shared memory warps * RING_BYTES
// (contract::attention_decode). Above 48 KiB, the function's limit must be raised first. Scratch is
// workers * PARTS * PART_NUMBERS f32 for `partials` and workers u32 for `counters`; all kernels of
// a stream may share it. The result is correct with any number of warps from 1 to WARPS_MAX, any
// number of workers and any piece > 0. The fastest values on an H200 are in the first line below
// whose condition holds for that line's own number of workers:
//
//   runs = sequences * kv_heads * div_ceil(rows of a sequence * group, 8)
//   workers = multiprocessors * 8 / warps
//   runs <= 32:                             warps 8, piece 8
//   runs are up to a third of workers:      warps 4, piece 8
//   runs are 70 to 100 percent of workers:  warps 8, piece 20
//   85 to 100 percent:                      warps 2, piece 20
//   90 to 100 percent:                      warps 1, piece 20
//   otherwise:                              warps 4, piece 20
//
// If a multiprocessor has too little shared memory (100 KiB on sm_86 and sm_89, 64 KiB on sm_75),
// use fewer warps and one worker per multiprocessor. May be launched with programmatic stream
// serialization. sequences, rows, blocks, table_blocks > 0.
