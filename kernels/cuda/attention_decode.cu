// Attention of one new token a sequence over the paged cache (PagedAttention, Kwon et al. 2023, arXiv 2309.06180), the
// keys of long contexts split over the card (Flash-Decoding, Dao et al. 2023) with equal shares for all thread blocks
// (Stream-K, Osama et al. 2023, arXiv 2301.03598), so that contexts of 1 and of 100,000 may stand in one batch.
//
// queries         [rows, heads * head_dim]                    rows queries_pitch elements apart; heads = kv_heads * group
// cache           [blocks, 2, kv_heads, 16, head_dim]         one layer, keys then values, this step's included
// query_starts    [sequences + 1] u32                         row of sequence s is query_starts[s]
// context_lengths [sequences] u32                             tokens in the cache, this step's included
// block_tables    [sequences, table_blocks] u32               unused places are not read
// partials        [gridDim.x, 2, 8, head_dim + 2] f32         scratch; 8-byte aligned
// counters        [gridDim.x] u32                             zero before the first launch, zero again after each
// out             [rows, heads * head_dim]                    contiguous
//
// out = softmax(queries . keys * scale) . values for each head, sums in f32, weights rounded to the element before they
// meet the values. A sequence may have any number of rows n (speculation: a few): its r-th sees the first
// context - n + r + 1 tokens; every 8 query vectors read the keys again. A row that sees nothing, also that of a context
// of 0, is zeros. A sequence whose query_starts are equal, or lie at or past `rows`, writes nothing; rows of no sequence
// are not written. A context longer than its table is cut, a block at or past `blocks` is read as the last one: nothing
// outside is read. What lies in a block behind the context may be any bits. A NaN in a query
// makes NaNs of that head's output; a NaN in a key or value of those of its own sequence; and never of any other.
//
// queries, cache and their pitch are aligned to 16 bytes, out to 4. head_dim 32, 64, 80 or 128.
//
// How: a warp takes every n-th key block of a run, with its keys and values in registers as the tensor cores want them
// (decode_block.cuh), keys along the 16 rows of a product and query vectors along its 8 columns, and the next block's
// bytes on their way while this one's are worked on. The warps of a thread block meet in shared memory, thread blocks in
// `partials`: whoever of those that share a run comes last adds up. Who comes last changes, the order of adding does not:
// the same inputs give the same bits.

#include "decode_block.cuh"
#include "decode_parts.cuh"
#include "decode_share.cuh"
#include "kernel_order.cuh"
#include "tensor_core.cuh"

// Warps of a thread block at most. With twelve of them all registers of a multiprocessor are in use.
constexpr uint32_t DECODE_WARPS_MAX = 12;

struct DecodeCall {
    const void* queries;
    const void* cache;
    uint32_t queries_pitch, blocks;
    DecodeBatch batch;
    float scale;
};

// The keys of one run that one thread block works on.
struct Segment {
    DecodeSequence sequence;
    const uint32_t* table;
    uint32_t kv_head, first_query;  // of the tile, among the sequence's rows * group query vectors
    uint32_t queries;               // of the tile, up to 8
    uint32_t from, to;              // key blocks
};

// This warp's part of a segment: every `warps`-th of its blocks.
template <uint32_t HEAD_DIM, typename Element>
struct WarpPart {
    static constexpr uint32_t TILES = HEAD_DIM / 16;
    using Core = TensorCoreElement<Element>;
    using Values = ValueBlock<HEAD_DIM>;
    float gathered[TILES][4];  // columns: query vectors 2 * pair and the next; rows: two neighbouring elements
    float maximum[2], sum[2];  // of those query vectors; the sum of this lane's keys only

    // The query vectors of the tile; a column without one is zeros.
    static __device__ __forceinline__ void load_queries(const DecodeCall& call, const Segment& segment, uint32_t lane,
                                                        uint32_t (&words)[KeyBlock<HEAD_DIM>::Row::WORDS]) {
        const uint32_t query = segment.first_query + lane / 4, group = call.batch.group;
        if (lane / 4 < segment.queries) {
            const uint64_t row = segment.sequence.first_row + query / group;
            const uint32_t head = segment.kv_head * group + query % group;
            const char* from = static_cast<const char*>(call.queries) + (row * call.queries_pitch + head * HEAD_DIM) * 2;
            KeyBlock<HEAD_DIM>::Row::load(from, lane % 4, words);
        } else {
#pragma unroll
            for (uint32_t& word : words) {
                word = 0;
            }
        }
    }

    __device__ __forceinline__ void compute(const DecodeCall& call, const Segment& segment) {
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
        const uint32_t first = segment.from + warp;
        const uint32_t count = segment.sequence.context > 0 && first < segment.to
            ? (segment.to - first + warps - 1) / warps
            : 0;
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; ++tile) {
            gathered[tile][0] = gathered[tile][1] = gathered[tile][2] = gathered[tile][3] = 0.0f;
        }
        maximum[0] = maximum[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        if (count == 0) {
            return;
        }
        // Thirty-two places of the table at a time, and the next thirty-two ahead.
        const auto places = [&](uint32_t start) {
            return start + lane < count ? segment.table[first + (start + lane) * warps] : 0;
        };
        uint32_t ids = places(0), later = places(WARP);
        uint32_t queries[KeyBlock<HEAD_DIM>::Row::WORDS];
        load_queries(call, segment, lane, queries);
        constexpr uint32_t HEAD_BYTES = BLOCK_TOKENS * HEAD_DIM * 2;
        const uint32_t half_bytes = call.batch.kv_heads * HEAD_BYTES;
        const char* of_head = static_cast<const char*>(call.cache) + segment.kv_head * HEAD_BYTES;
        const auto block_at = [&](uint32_t id) {
            return of_head + static_cast<uint64_t>(min(id, call.blocks - 1)) * 2 * half_bytes;
        };
        KeyBlock<HEAD_DIM> keys;
        Values values;
        const char* block = block_at(__shfl_sync(ALL_LANES, ids, 0));
        keys.load(block, lane);
        values.load(block + half_bytes, lane);
        for (uint32_t step = 0; step < count; ++step) {
            float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
                const uint32_t a[4] = {keys.low[2 * tile], keys.high[2 * tile], keys.low[2 * tile + 1],
                                       keys.high[2 * tile + 1]};
                Core::multiply_add(scores, a, queries[2 * tile], queries[2 * tile + 1]);
            }
            const bool more = step + 1 < count;
            if (more) {
                if ((step + 1) % WARP == 0) {
                    ids = later;
                    later = places(step + 1 + WARP);
                }
                block = block_at(__shfl_sync(ALL_LANES, ids, (step + 1) % WARP));
                keys.load(block, lane);
            }
            const uint32_t token = (first + step * warps) * BLOCK_TOKENS;
            const uint32_t context = segment.sequence.context;
            // Only the last blocks have keys that some row does not see.
            if (token + BLOCK_TOKENS + segment.sequence.rows > context + 1) {
                mask(call, segment, token, lane, scores);
                values.forget_from(context - token, lane);
            }
            uint32_t weights[2];
            weigh(scores, call.scale, weights);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
                uint32_t a[4];
                values.rows(tile, a);
                Core::multiply_add(gathered[tile], a, weights[0], weights[1]);
            }
            if (more) {
                values.load(block + half_bytes, lane);
            }
        }
#pragma unroll
        for (uint32_t column = 0; column < 2; ++column) {
#pragma unroll
            for (uint32_t distance = 4; distance < WARP; distance *= 2) {
                sum[column] += __shfl_xor_sync(ALL_LANES, sum[column], distance);
            }
        }
    }

    // Minus infinity for the keys that a query vector does not see.
    static __device__ __forceinline__ void mask(const DecodeCall& call, const Segment& segment, uint32_t token,
                                                uint32_t lane, float (&scores)[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t key = token + lane / 4 + i / 2 * 8;
            const uint32_t row = (segment.first_query + 2 * (lane % 4) + i % 2) / call.batch.group;
            // Its row sees `context - rows + row + 1` keys, none if that is negative.
            if (key + segment.sequence.rows > segment.sequence.context + row) {
                scores[i] = -INFINITY;
            }
        }
    }

    // Scores become weights, in the layout of B for the values' product; what was gathered shrinks if a maximum grows.
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
            // Minus infinity less itself is no number: who has seen nothing measures from 0.
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

    // Leaves this part in shared memory for `add_parts`, measured from the highest scores among the first `filled` warps,
    // which are those with keys. Called by all threads; ends with a barrier.
    __device__ __forceinline__ void write(uint32_t filled, Highest& highest, float* parts) const {
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
                float* row = parts + warp * PART_FLOATS<HEAD_DIM> + part_row(query + column) * PART_PITCH<HEAD_DIM>;
#pragma unroll
                for (uint32_t tile = 0; tile < TILES; ++tile) {
                    *reinterpret_cast<float2*>(row + Values::Row::element(lane / 4, tile)) =
                        make_float2(factor * gathered[tile][column], factor * gathered[tile][2 + column]);
                }
                if (lane < 4) {
                    *reinterpret_cast<float2*>(row + HEAD_DIM) = make_float2(most, factor * sum[column]);
                }
            }
        }
        __syncthreads();
    }
};

template <uint32_t HEAD_DIM, typename Element>
__device__ __forceinline__ void attention_decode(const DecodeCall& call, uint32_t piece, float* partials,
                                                 uint32_t* counters, Element* out) {
    extern __shared__ __align__(16) float parts[];  // [warps, 8, head_dim + 2]
    __shared__ __align__(16) Highest highest;
    __shared__ uint32_t arrived;
    const DecodeBatch& batch = call.batch;
    const uint32_t warps = blockDim.x / WARP;
    let_next_kernel_start();
    DecodeShare share;
    const bool any = find_share(batch, piece, share);
    wait_for_previous_kernel();
    if (!any) {
        return;
    }
    Segment segment;
    segment.sequence = sequence_of(batch, share.sequence);
#pragma unroll 1
    for (uint32_t at = share.start; at < share.end;) {
        const uint32_t blocks = segment.sequence.blocks, run_length = share.run_length(segment.sequence);
        if (at - share.before >= segment.sequence.runs * run_length) {
            share.before += segment.sequence.runs * run_length;
            ++share.sequence;
            // The gap behind the last run may be all that is left.
            if (share.sequence == batch.sequences) {
                break;
            }
            segment.sequence = sequence_of(batch, share.sequence);
            continue;
        }
        const uint32_t run = (at - share.before) / run_length, run_start = share.before + run * run_length;
        const uint32_t tiles = segment.sequence.runs / batch.kv_heads;
        segment.table = batch.block_tables + static_cast<uint64_t>(share.sequence) * batch.table_blocks;
        segment.kv_head = run / tiles;
        segment.first_query = run % tiles * TILE_QUERIES;
        segment.queries = min(TILE_QUERIES, segment.sequence.rows * batch.group - segment.first_query);
        segment.from = at - run_start;
        segment.to = min(blocks, share.end - run_start);
        at = run_start + run_length;
        if (segment.from >= blocks) {
            continue;
        }
        const uint32_t filled = min(warps, segment.to - segment.from);
        {
            WarpPart<HEAD_DIM, Element> part;
            part.compute(call, segment);
            part.write(filled, highest, parts);
        }
        const auto finish = [&](uint32_t query, uint32_t element, float2 value, float, float sum) {
            const uint32_t vector = segment.first_query + query;
            const uint64_t row = segment.sequence.first_row + vector / batch.group;
            const uint32_t head = segment.kv_head * batch.group + vector % batch.group;
            const float inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
            *reinterpret_cast<uint32_t*>(out + (row * batch.kv_heads * batch.group + head) * HEAD_DIM + element) =
                pair_from_floats<Element>(value.x * inverse, value.y * inverse);
        };
        uint32_t to_add = filled;
        if (segment.from > 0 || segment.to < blocks) {
            // A share has at most two parts to give: one of a run that began before it or at its start, and one of a run
            // that begins inside and ends behind it.
            float* own = partials + (2 * blockIdx.x + (run_start > share.start)) * PART_FLOATS<HEAD_DIM>;
            add_parts<HEAD_DIM>(parts, filled, segment.queries,
                                [&](uint32_t query, uint32_t element, float2 value, float most, float sum) {
                                    float* row = own + part_row(query) * PART_PITCH<HEAD_DIM>;
                                    *reinterpret_cast<float2*>(row + element) = value;
                                    if (element == 0) {
                                        *reinterpret_cast<float2*>(row + HEAD_DIM) = make_float2(most, sum);
                                    }
                                });
            // A share begins at most one run that others end, so that the counter of the first is theirs.
            const uint32_t first = run_start / share.length, all = (run_start + blocks - 1) / share.length - first + 1;
            __syncthreads();
            if (threadIdx.x == 0) {
                arrived = arrive(counters + first, all);
            }
            __syncthreads();
            if (arrived + 1 < all) {
                continue;
            }
            const uint32_t begins_inside = run_start > first * share.length;
            const auto part_at = [&](uint32_t part) {
                return partials + (2 * (first + part) + (part == 0 && begins_inside)) * PART_FLOATS<HEAD_DIM>;
            };
            gather_parts<HEAD_DIM>(part_at, all, segment.queries, highest, parts);
            to_add = min(warps, all);
        }
        add_parts<HEAD_DIM>(parts, to_add, segment.queries, finish);
        __syncthreads();
    }
}

#define KERNEL_OF(name, Element, HEAD_DIM)                                                                            \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS_MAX * WARP, 1) attention_decode_##name##_d##HEAD_DIM(   \
        const Element* queries, uint32_t queries_pitch, uint32_t rows, const Element* cache, uint32_t blocks,         \
        uint32_t kv_heads, uint32_t group, const uint32_t* query_starts, const uint32_t* context_lengths,             \
        const uint32_t* block_tables, uint32_t sequences, uint32_t table_blocks, float scale, uint32_t piece,         \
        float* partials, uint32_t* counters, Element* out) {                                                          \
        const DecodeBatch batch = {query_starts, context_lengths, block_tables, sequences, table_blocks, rows, group, \
                                   kv_heads};                                                                         \
        /* Powers of two are cheaper than powers of e. */                                                             \
        const DecodeCall call = {queries, cache, queries_pitch, blocks, batch, scale * 1.44269504f};                  \
        attention_decode<HEAD_DIM>(call, piece, partials, counters, out);                                              \
    }
#define KERNEL(name, Element)    \
    KERNEL_OF(name, Element, 32) \
    KERNEL_OF(name, Element, 64) \
    KERNEL_OF(name, Element, 80) \
    KERNEL_OF(name, Element, 128)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (workers), block (32 * warps), dynamic shared memory warps * 8 * (head_dim + 2) * 4 bytes (above 48 KiB:
// raise the limit of the function first). TODO_LAUNCH
