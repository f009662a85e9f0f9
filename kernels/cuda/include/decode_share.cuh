// Distribution of the key blocks of all sequences over the thread blocks of one launch. It is
// computed on the device, because a captured graph fixes the launch arguments, such as the number
// of sequences, but the lengths of the sequences change from step to step.
//
// All work is laid out along one line: the sequences in order, in each sequence its KV heads, for
// each KV head the tiles of eight query vectors, and for each tile the key blocks in order. One key
// block takes one place on the line. The key blocks of one tile and KV head, which have one output,
// are a `run`. The line is cut into equal shares, so that a context of 100,000 tokens is spread
// over all thread blocks even if all other contexts have one token (as in Stream-K, Osama et al.
// 2023, arXiv 2301.03598). A run that lies in several shares is added up from parts
// (Flash-Decoding, Dao et al. 2023).
#pragma once

#include <stdint.h>

#include "contract.cuh"
#include "reduce.cuh"

using contract::common::BLOCK_TOKENS;
using contract::attention_decode::TILE_QUERIES;

// The largest number of warps in a thread block. Each warp has a ring buffer, and the buffers of
// this many warps fill the shared memory of a multiprocessor.
constexpr uint32_t DECODE_WARPS_MAX = contract::attention_decode::WARPS_MAX;

// The sequences of a launch.
struct DecodeBatch {
    const uint32_t* query_starts;     // [sequences + 1]
    const uint32_t* context_lengths;  // [sequences]
    const uint32_t* block_tables;     // [sequences, table_blocks]
    uint32_t sequences, table_blocks;
    uint32_t rows;   // of the batch
    uint32_t group;  // query heads that share a KV head
    uint32_t kv_heads;
    uint32_t window;  // the most tokens that a row attends to
};

// One sequence, clamped to the batch and the block table, even if the inputs are invalid. Blocks
// and tokens before `first_block`, which no row attends to, do not count in `context` and `blocks`.
struct DecodeSequence {
    uint32_t first_row, rows, context;
    uint32_t first_block;  // the block with the first token that a row attends to
    uint32_t blocks;       // at least one: a sequence without a context still has zeros to write
    uint32_t runs;         // 0 if the sequence has no row
};

// Tiles for the query vectors of `rows` rows that share one KV head.
__device__ __forceinline__ uint32_t tiles_of(const DecodeBatch& batch, uint32_t rows) {
    return (rows * batch.group + TILE_QUERIES - 1) / TILE_QUERIES;
}

// The first block that a sequence of `rows` rows reads. Its first row attends to the `window`
// tokens before token `context - rows + 1`.
__device__ __forceinline__ uint32_t first_block_of(const DecodeBatch& batch, uint32_t context, uint32_t rows) {
    const uint32_t end = context + 1, least = rows + batch.window;
    return end > least ? (end - least) / BLOCK_TOKENS : 0;
}

// Key blocks of a context.
__device__ __forceinline__ uint32_t blocks_of(uint32_t context) {
    return max(1u, (context + BLOCK_TOKENS - 1) / BLOCK_TOKENS);
}

// A context, which is truncated at the end of its table.
__device__ __forceinline__ uint32_t context_of(const DecodeBatch& batch, uint32_t context) {
    return min(context, batch.table_blocks * BLOCK_TOKENS);
}

__device__ __forceinline__ DecodeSequence sequence_of(const DecodeBatch& batch, uint32_t sequence) {
    DecodeSequence found;
    found.first_row = min(batch.query_starts[sequence], batch.rows);
    const uint32_t end = min(batch.query_starts[sequence + 1], batch.rows);
    found.rows = end > found.first_row ? end - found.first_row : 0;
    found.context = context_of(batch, batch.context_lengths[sequence]);
    found.first_block = first_block_of(batch, found.context, found.rows);
    found.context -= found.first_block * BLOCK_TOKENS;
    found.blocks = blocks_of(found.context);
    found.runs = tiles_of(batch, found.rows) * batch.kv_heads;
    return found;
}

// One thread block's share of the line.
struct DecodeShare {
    uint32_t length;    // in places; the last shares of the line may be shorter or empty
    uint32_t start, end;
    uint32_t sequence;  // the sequence in which `start` lies
    uint32_t before;    // start of that sequence on the line
    // A run takes one place per key block, rounded up to a multiple of `multiple`, plus `gap`.
    uint32_t multiple, gap;
    // Number of key blocks of all runs. If find_even_share does not apply, their gaps are included.
    uint32_t all;

    // Places on the line that a run of the sequence takes.
    __device__ __forceinline__ uint32_t run_length(const DecodeSequence& of) const {
        return round_up(of.blocks, multiple) + gap;
    }

    static __device__ __forceinline__ uint32_t round_up(uint32_t blocks, uint32_t multiple) {
        return blocks <= multiple ? multiple : (blocks + multiple - 1) / multiple * multiple;
    }
};

// If the longest run has at most this many key blocks, find_even_share does not cut runs.
constexpr uint32_t UNCUT = 12;

// The number of pieces for a run of `blocks` key blocks if there are few runs. Each piece takes
// time to be added up, and the output waits for the longest piece, so the best number grows with
// the square root of the length: 5 pieces for 36 blocks, 10 for 125 and 16 for 375 on an H200.
__device__ __forceinline__ uint32_t pieces_of(uint32_t blocks, uint32_t piece) {
    const uint32_t best = static_cast<uint32_t>(sqrtf(0.7f * blocks) + 0.5f);
    return blocks <= UNCUT ? 1 : min((blocks + piece - 1) / piece, best);
}

// Finds this thread block's share in the simple case: there are at most 256 sequences of one row
// each and no more runs than thread blocks, and either the pieces have at most `piece` key blocks
// or the longest run is at most a quarter longer than the mean. All runs are cut into the same
// number of pieces, one piece per thread block. A decoding step waits for this code before it reads
// the first key, so the code is short, and each warp does all of it.
//
// Returns false if the case is not simple. Otherwise, `share` is set; it is empty if there is no
// work left for this thread block.
__device__ __forceinline__ bool find_even_share(const DecodeBatch& batch, uint32_t piece, DecodeShare& share) {
    constexpr uint32_t EACH = 8;  // sequences per lane
    const uint32_t lane = threadIdx.x % WARP;
    const uint32_t runs_each = batch.kv_heads * tiles_of(batch, 1), runs = batch.sequences * runs_each;
    if (batch.sequences > EACH * WARP || batch.sequences > batch.rows || runs > gridDim.x) {
        return false;
    }
    uint32_t contexts[EACH], ends[EACH];
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
        const uint32_t sequence = min(i * WARP + lane, batch.sequences - 1);
        contexts[i] = batch.context_lengths[sequence];
        ends[i] = batch.query_starts[sequence + 1];
    }
    bool is_plain = batch.query_starts[0] == 0;
    uint32_t longest = 0, blocks = 0;
#pragma unroll
    for (uint32_t i = 0; i < EACH; ++i) {
        const uint32_t sequence = i * WARP + lane;
        if (sequence < batch.sequences) {
            const uint32_t context = context_of(batch, contexts[i]);
            const uint32_t own = blocks_of(context) - first_block_of(batch, context, 1);
            is_plain &= ends[i] == sequence + 1;
            longest = max(longest, own);
            blocks += own;
        }
    }
#pragma unroll
    for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
        longest = max(longest, __shfl_xor_sync(ALL_LANES, longest, distance));
        blocks += __shfl_xor_sync(ALL_LANES, blocks, distance);
    }
    const uint32_t pieces = min(gridDim.x / runs, pieces_of(longest, piece)), length = (longest + pieces - 1) / pieces;
    // If pieces are short, it does not matter how much the lengths of runs differ.
    const bool are_alike = length <= piece || 4 * longest * batch.sequences <= 5 * blocks;
    if (!__all_sync(ALL_LANES, is_plain) || !are_alike) {
        return false;
    }
    share.all = blocks * runs_each;
    share.length = length;
    share.multiple = pieces * length;
    share.gap = 0;
    share.sequence = blockIdx.x / (pieces * runs_each);
    share.before = share.sequence * runs_each * share.multiple;
    share.start = blockIdx.x * length;
    share.end = share.sequence < batch.sequences ? share.start + length : share.start;
    return true;
}

// Number of piece sizes that are tried. The smallest is `piece`, and each next one
// is twice as long.
constexpr uint32_t PIECES = 3;

// A way to cut the line: the piece size, and the number of places of this thread's sequences, of
// the sequences before them, and of all sequences.
struct DecodeCut {
    uint32_t piece;  // in places; 0 if there is no such cut
    uint32_t own, before, places;
};

// Cuts each run into at most gridDim.x / runs pieces, so that there are never more pieces than
// thread blocks. The piece size is the smallest size at which that many pieces cover the longest
// run, but at least `piece`. There is no such cut if there are more runs than thread blocks, or if
// the size is `below` or larger. This thread has the sequences `first` to `last` (exclusive). If
// `alone`, the threads of each warp together have all sequences; otherwise, the threads of the
// block together have them. Must be called by all threads; has barriers unless `alone`.
__device__ __forceinline__ DecodeCut fitting_cut(const DecodeBatch& batch, uint32_t piece, uint32_t below, bool alone,
                                                 uint32_t first, uint32_t last) {
    __shared__ uint32_t of_warps[DECODE_WARPS_MAX][2];
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    uint32_t longest = 0, runs = 0;
#pragma unroll 1
    for (uint32_t sequence = first; sequence < last; ++sequence) {
        const DecodeSequence next = sequence_of(batch, sequence);
        longest = max(longest, next.runs > 0 ? next.blocks : 0);
        runs += next.runs;
    }
#pragma unroll
    for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
        longest = max(longest, __shfl_xor_sync(ALL_LANES, longest, distance));
        runs += __shfl_xor_sync(ALL_LANES, runs, distance);
    }
    if (!alone) {
        of_warps[warp][0] = longest;
        of_warps[warp][1] = runs;
        __syncthreads();
        longest = runs = 0;
        for (uint32_t other = 0; other < warps; ++other) {
            longest = max(longest, of_warps[other][0]);
            runs += of_warps[other][1];
        }
    }
    DecodeCut cut = {};
    if (runs == 0 || runs > gridDim.x) {
        return cut;
    }
    const uint32_t of_a_run = gridDim.x / runs;  // maximum number of pieces of a run
    const uint32_t fitting = max(piece, (longest + of_a_run - 1) / of_a_run);
    if (fitting >= below) {
        return cut;
    }
    cut.piece = fitting;
#pragma unroll 1
    for (uint32_t sequence = first; sequence < last; ++sequence) {
        const DecodeSequence next = sequence_of(batch, sequence);
        cut.own += next.runs * DecodeShare::round_up(next.blocks, fitting);
    }
    uint32_t up_to = cut.own;
#pragma unroll
    for (uint32_t distance = 1; distance < WARP; distance *= 2) {
        const uint32_t lower = __shfl_up_sync(ALL_LANES, up_to, distance);
        up_to += lane >= distance ? lower : 0;
    }
    cut.before = up_to - cut.own;
    if (alone) {
        cut.places = __shfl_sync(ALL_LANES, up_to, WARP - 1);
        return cut;
    }
    __syncthreads();
    if (lane == WARP - 1) {
        of_warps[warp][0] = up_to;
    }
    __syncthreads();
    for (uint32_t other = 0; other < warps; ++other) {
        cut.before += other < warp ? of_warps[other][0] : 0;
        cut.places += of_warps[other][0];
    }
    return cut;
}

// Finds this thread block's share; returns false if there is no work left for it. Must be
// called by all threads.
//
// The line is first cut into pieces of a few key blocks that belong to one run each. If there are
// no more pieces than thread blocks, each thread block gets one piece: short runs stay whole, and
// no output waits for a thread block that processes two pieces. (Each run then takes a whole number
// of pieces on the line, and the places after its last key block are empty.) PIECES sizes are
// tried: `piece`, twice `piece`, and so on. The shortest size with no more pieces than thread
// blocks is taken. If a size longer than `piece` is taken and runs are still cut, fitting_cut looks
// for a shorter size that fits.
//
// If none of these sizes fits, the size of fitting_cut is taken, unless it is more than a quarter
// longer than an equal share, which happens if the lengths of runs differ. In that case, and if
// fitting_cut finds no size, all shares are equal. Each run then has empty places after it, which
// represent the time that beginning and ending a run takes. Without these places, a share of many
// short runs would be the last to finish. Each run has as many empty places as the thread block has
// warps, which is about right on an H200 (3 us).
__device__ __forceinline__ bool find_share(const DecodeBatch& batch, uint32_t piece, DecodeShare& share) {
    if (find_even_share(batch, piece, share)) {
        return share.start < share.end;
    }
    constexpr uint32_t WAYS = PIECES + 1;  // the last way is equal shares
    __shared__ uint32_t of_warps[DECODE_WARPS_MAX][WAYS];
    __shared__ uint32_t found_sequence, found_before;
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    // Each thread has consecutive sequences, so that one thread can step through its sequences to
    // find the start of the share. If a warp has a lane for each sequence, each warp does all of
    // the work, and no warp waits for another.
    const bool alone = batch.sequences <= WARP;
    const uint32_t threads = alone ? WARP : blockDim.x, thread = alone ? lane : threadIdx.x;
    const uint32_t each = (batch.sequences + threads - 1) / threads;
    const uint32_t first = min(thread * each, batch.sequences), last = min(first + each, batch.sequences);
    uint32_t own[WAYS] = {}, up_to[WAYS], total[WAYS] = {};  // places on the line
#pragma unroll 1
    for (uint32_t sequence = first; sequence < last; ++sequence) {
        const DecodeSequence next = sequence_of(batch, sequence);
        // Doubling the size halves the number of pieces, rounded up.
        uint32_t pieces = (next.blocks + piece - 1) / piece;
#pragma unroll
        for (uint32_t way = 0; way < PIECES; ++way) {
            own[way] += next.runs * pieces * (piece << way);
            pieces = (pieces + 1) / 2;
        }
        own[PIECES] += next.runs * (next.blocks + warps);
    }
#pragma unroll
    for (uint32_t way = 0; way < WAYS; ++way) {
        up_to[way] = own[way];
#pragma unroll
        for (uint32_t distance = 1; distance < WARP; distance *= 2) {
            const uint32_t lower = __shfl_up_sync(ALL_LANES, up_to[way], distance);
            up_to[way] += lane >= distance ? lower : 0;
        }
        if (alone) {
            total[way] = __shfl_sync(ALL_LANES, up_to[way], WARP - 1);
        } else if (lane == WARP - 1) {
            of_warps[warp][way] = up_to[way];
        }
    }
    if (!alone) {
        __syncthreads();
#pragma unroll 1
        for (uint32_t other = 0; other < warps; ++other) {
#pragma unroll
            for (uint32_t way = 0; way < WAYS; ++way) {
                const uint32_t next = of_warps[other][way];
                up_to[way] += other < warp ? next : 0;
                total[way] += next;
            }
        }
    }
    uint32_t places = total[PIECES], own_places = own[PIECES], before = up_to[PIECES] - own_places;
    share.all = places;
    share.multiple = 1;
    share.gap = warps;
    share.length = max(piece, (places + gridDim.x - 1) / gridDim.x);
#pragma unroll
    for (uint32_t way = PIECES; way-- > 0;) {
        if (total[way] <= gridDim.x * (piece << way)) {
            places = total[way];
            own_places = own[way];
            before = up_to[way] - own_places;
            share.multiple = share.length = piece << way;
            share.gap = 0;
        }
    }
    // The number of runs if each sequence has one row. If no run is cut, the search for a fitting
    // piece takes as long as it saves.
    const uint32_t runs = batch.rows * batch.kv_heads * tiles_of(batch, 1);
    if (share.length > piece && places > runs * share.length) {
        const uint32_t below = share.gap > 0 ? share.length + share.length / 4 + 1 : share.length;
        const DecodeCut cut = fitting_cut(batch, piece, below, alone, first, last);
        if (cut.piece > 0) {
            places = cut.places;
            own_places = cut.own;
            before = cut.before;
            share.multiple = share.length = cut.piece;
            share.gap = 0;
        }
    }
    share.start = blockIdx.x * share.length;
    share.end = min(share.start + share.length, places);
    if (share.start >= places) {
        return false;
    }
    const bool is_here = before <= share.start && share.start - before < own_places;
    if (alone) {
        // Each lane has at most one sequence.
        share.sequence = __ffs(__ballot_sync(ALL_LANES, is_here)) - 1;
        share.before = __shfl_sync(ALL_LANES, before, share.sequence);
        return true;
    }
    if (is_here) {
        uint32_t sequence = first;
#pragma unroll 1
        for (;; ++sequence) {
            const DecodeSequence next = sequence_of(batch, sequence);
            const uint32_t taken = next.runs * share.run_length(next);
            if (share.start - before < taken) {
                break;
            }
            before += taken;
        }
        found_sequence = sequence;
        found_before = before;
    }
    __syncthreads();
    share.sequence = found_sequence;
    share.before = found_before;
    return true;
}
