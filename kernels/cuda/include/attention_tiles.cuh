// The rows that a thread block processes. They are found on the device: the host knows the numbers
// of rows and sequences, but not where one sequence ends and the next begins.
//
// Grouped query heads are packed: for each row, the `group` heads that share a KV head are
// consecutive. A sequence thus has `rows * group` query vectors to fill tiles with, and a tile
// reads the keys and values once for all of its query vectors. Query vector `q` of a sequence is
// head `q % group` of its row `q / group`.
#pragma once

#include <cstdint>

#include "contract.cuh"

struct AttentionTile {
    uint32_t sequence;
    uint32_t first_row;    // row of the batch at which the sequence begins
    uint32_t rows;         // number of rows of the sequence
    uint32_t first_query;  // first query vector of the tile, among the sequence's rows * group
};

// Returns the number of rows of a sequence and sets `first_row`. Both are clamped to the batch,
// even if `starts` contains invalid rows.
__device__ __forceinline__ uint32_t rows_of(const uint32_t* starts, uint32_t sequence, uint32_t rows,
                                            uint32_t& first_row) {
    first_row = min(__ldg(starts + sequence), rows);
    const uint32_t end = min(__ldg(starts + sequence + 1), rows);
    return end > first_row ? end - first_row : 0u;
}

// The first block of a sequence that a tile reads, if the tile's first row attends to the last
// `window` of the first `end` tokens.
__device__ __forceinline__ int32_t first_block_of(int32_t end, uint32_t window) {
    return max(end - static_cast<int32_t>(window), 0) / static_cast<int32_t>(contract::common::BLOCK_TOKENS);
}

// The number of keys, counted from the start of the sequence, up to the last key that row `row` of
// the batch attends to. `causal` is this number without `key_ends` [rows], which may be null. The
// token of a picture attends to later tokens of its picture, so its row has a larger number.
__device__ __forceinline__ int32_t key_end(const uint32_t* key_ends, uint32_t row, int32_t causal, int32_t context) {
    return key_ends == nullptr ? causal : min(max(causal, static_cast<int32_t>(__ldg(key_ends + row))), context);
}

// Progress of a search: the sequences before `base` have `passed` tiles.
struct TileCursor {
    uint32_t base;
    uint32_t passed;
};

// Finds tile number `wanted` of the sequences from the initial position of the cursor to `end`.
// Tiles are in the order of sequences; within a sequence, the last tile comes first, because it has
// the most work under a causal mask. The cursor moves forward, so that a search for a later tile
// need not start again. Returns false if there are not enough tiles; the cursor has then passed all
// of them. Called by whole warps.
template <uint32_t TILE_QUERIES>
__device__ __forceinline__ bool find_tile(uint32_t wanted, const uint32_t* starts, TileCursor& cursor, uint32_t end,
                                          uint32_t rows, uint32_t group, AttentionTile& tile) {
    const uint32_t lane = threadIdx.x % 32;
    for (; cursor.base < end; cursor.base += 32) {
        const uint32_t sequence = cursor.base + lane;
        uint32_t first_row = 0;
        uint32_t own_rows = 0;
        if (sequence < end) {
            own_rows = rows_of(starts, sequence, rows, first_row);
        }
        const uint32_t own_tiles = (own_rows * group + TILE_QUERIES - 1) / TILE_QUERIES;
        uint32_t up_to = own_tiles;
#pragma unroll
        for (uint32_t step = 1; step < 32; step *= 2) {
            const uint32_t before = __shfl_up_sync(0xffffffffu, up_to, step);
            up_to += lane >= step ? before : 0u;
        }
        up_to += cursor.passed;
        const uint32_t holders = __ballot_sync(0xffffffffu, wanted < up_to);
        if (holders != 0) {
            const int holder = __ffs(holders) - 1;
            tile.sequence = cursor.base + holder;
            tile.first_row = __shfl_sync(0xffffffffu, first_row, holder);
            tile.rows = __shfl_sync(0xffffffffu, own_rows, holder);
            tile.first_query = (__shfl_sync(0xffffffffu, up_to, holder) - 1 - wanted) * TILE_QUERIES;
            return true;
        }
        cursor.passed = __shfl_sync(0xffffffffu, up_to, 31);
    }
    return false;
}
