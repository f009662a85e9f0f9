// Sizes of the attention kernels for Hopper, and the jobs of their thread blocks.
#pragma once

#include "attention_tiles.cuh"
#include "contract.cuh"

using contract::common::BLOCK_TOKENS;
using contract::attention_hopper::STAGES;  // stages of the rings of keys and of values
constexpr uint32_t WARPGROUP = 128;
constexpr float LOG2_E = 1.4426950408889634f;

// Sizes of one kernel. `MULTIPLIERS` warpgroups multiply 64 query vectors each; one more warpgroup
// copies. With `SPLIT`, the keys of a tile are split among several jobs. With `E4M3`, the cache is
// in E4M3, and another warpgroup converts it to f16.
template <int D_, int MULTIPLIERS_, int KEYS_, bool PAGED_, bool SPLIT_, bool E4M3_ = false>
struct Sizes {
    static constexpr int D = D_;
    static constexpr int WIDE = (D + 15) / 16 * 16;  // zero-padded: products are 16 columns deep
    static constexpr int MULTIPLIERS = MULTIPLIERS_;
    static constexpr bool PAGED = PAGED_;
    static constexpr bool SPLIT = SPLIT_;
    static constexpr bool E4M3 = E4M3_;
    // Two tiles of queries of more than 128 elements leave no space for keys and values.
    static constexpr uint32_t QUERY_STAGES = D > 128 ? 1 : STAGES;
    static constexpr int KEYS = KEYS_;  // per step
    static constexpr int QUERIES = 64 * MULTIPLIERS;
    static constexpr int HELPERS = E4M3 ? 2 : 1;  // warpgroups that do not multiply
    static constexpr int THREADS = WARPGROUP * (MULTIPLIERS + HELPERS);
    static constexpr int CHUNK = D % 64 == 0 ? 64 : 16;  // columns
    static constexpr int CHUNKS = WIDE / CHUNK;
    static_assert(!PAGED || WIDE == D, "a block of the cache has no padding");
    // DOWN: bytes from 8 rows to the next 8 rows. ACROSS: bytes from chunk to chunk. A block of the
    // cache is copied as one box: 8 rows of all chunks, and then the next 8 rows. Packed rows are
    // copied as one box per chunk, with all keys of a step.
    static constexpr uint32_t DOWN = PAGED ? 8 * D * 2 : 8 * CHUNK * 2;
    static constexpr uint32_t ACROSS = PAGED ? 8 * CHUNK * 2 : KEYS * CHUNK * 2;
    static constexpr uint32_t QUERY_DOWN = 8 * CHUNK * 2;
    static constexpr uint32_t QUERY_ACROSS = 64 * CHUNK * 2;
    static constexpr uint32_t QUERY_BYTES = QUERIES * WIDE * 2;
    static constexpr uint32_t STEP_BYTES = KEYS * WIDE * 2;
    static constexpr uint32_t KEYS_AT = QUERY_STAGES * QUERY_BYTES;
    static constexpr uint32_t VALUES_AT = KEYS_AT + STAGES * STEP_BYTES;
    static constexpr uint32_t RAW_AT = VALUES_AT + STAGES * STEP_BYTES;
    static constexpr uint32_t RAW_BYTES = E4M3 ? KEYS * D : 0;  // a step's keys or values in E4M3
    static constexpr uint32_t SHARED_BYTES = RAW_AT + STAGES * RAW_BYTES;
    static_assert(QUERY_BYTES % (16 * CHUNK) == 0 && STEP_BYTES % (16 * CHUNK) == 0,
                  "tiles must be whole periods of the swizzle");
    static_assert(SHARED_BYTES <= 226 * 1024, "the tiles must fit in the dynamic shared memory of a thread block");
    // Registers per thread. The block has 65,536 registers.
    static constexpr uint32_t HELPER_REGISTERS = MULTIPLIERS == 3 ? 32 : 40;
    static constexpr uint32_t MULTIPLY_REGISTERS = MULTIPLIERS == 3 ? 160 : E4M3 ? 216 : 232;
};

namespace sizes {
namespace paged = contract::attention_paged_hopper;
using namespace contract::attention_hopper;
template <int D, bool SPLIT, bool E4M3 = false>
using Paged = Sizes<D, paged::QUERIES / 64, paged::KEYS<D>, true, SPLIT, E4M3>;
template <int D>
constexpr bool PAGED_AS_LAUNCHED =
    Paged<D, false>::QUERIES == paged::QUERIES && Paged<D, false>::THREADS == paged::THREADS &&
    Paged<D, false>::SHARED_BYTES == paged::SHARED_BYTES<D> && paged::QUERIES * (D + 2) == paged::PART_NUMBERS<D>;
using PagedE4m3 = Paged<paged::E4M3_HEAD_DIM, false, true>;
static_assert(PagedE4m3::THREADS == paged::E4M3_THREADS && PagedE4m3::SHARED_BYTES == paged::E4M3_SHARED_BYTES,
              "the sizes must equal the sizes that the host launches with");
static_assert(PagedE4m3::D == 128, "the names of the kernels say d128");
template <int D>
using Packed = Sizes<D, PACKED_QUERIES<D> / 64, PACKED_KEYS<D>, false, false>;
template <int D>
constexpr bool PACKED_AS_LAUNCHED =
    Packed<D>::QUERIES == PACKED_QUERIES<D> && Packed<D>::THREADS == PACKED_THREADS<D> &&
    Packed<D>::SHARED_BYTES == PACKED_SHARED_BYTES<D> && Packed<D>::CHUNK == PACKED_CHUNK<D>;
}  // namespace sizes
using sizes::Packed;
using sizes::Paged;

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
    uint32_t window;  // the most tokens that a row attends to, paged only
    uint32_t splits;  // number of jobs that share a tile's keys; 1 unless `SPLIT`
    const uint32_t* key_ends;  // [rows], see attention_prefill.cu; may be null, paged only
    const float* scales;  // [2, kv_heads], for a cache in E4M3; null otherwise
    float scale;

    // Factor that converts the dot product of a query and a key of this head to an exponent of 2.
    __device__ __forceinline__ float factor(uint32_t head) const {
        return scale * LOG2_E * (scales == nullptr ? 1.0f : __ldg(scales + head));
    }
    // Scale of the head's values.
    __device__ __forceinline__ float value_scale(uint32_t head) const {
        return scales == nullptr ? 1.0f : __ldg(scales + kv_heads + head);
    }
};

// One unit of work of a thread block: a tile of query vectors, a head, and some or all steps of
// keys.
struct Job {
    uint32_t found;
    uint32_t slot;         // index of the job's partial result, if tiles are split
    uint32_t first_row;    // row of the batch at which the sequence begins
    uint32_t rows;         // number of rows of the sequence
    uint32_t first_query;  // first query vector of the tile
    uint32_t head;         // KV head
    // Index in `block_tables` of the first block that the tile reads. Keys count from that block.
    uint32_t table;
    int32_t keys;     // keys up to the last key that any row of the tile attends to
    int32_t visible;  // keys up to and including the token of row 0 of the sequence
    int32_t skipped;  // keys of the sequence before the tile's first block
    int32_t context;  // keys of the sequence from the tile's first block on
    int32_t first_step;
    int32_t last_step;
    uint32_t ends_with_stale_keys;  // 1 if the last step ends with keys that must not be used

    // The row of the sequence that a query vector of the tile belongs to.
    __device__ __forceinline__ uint32_t row_of(uint32_t query, const Arguments& arguments) const {
        return (first_query + query) / arguments.group;
    }
    // Keys up to and including the token of this row.
    __device__ __forceinline__ int32_t causal(uint32_t row) const { return visible + static_cast<int32_t>(row); }
    // Keys up to and including the last key that this row attends to.
    __device__ __forceinline__ int32_t end(uint32_t row, const Arguments& arguments) const {
        const uint32_t batch_row = first_row + min(row, rows - 1);
        return key_end(arguments.key_ends, batch_row, causal(row) + skipped, context + skipped) - skipped;
    }
};

__device__ __forceinline__ uint32_t whole_blocks(int32_t keys) { return (keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS; }

// Sets the keys and the steps of a tile. A tile without keys has one step of masked zeros.
// Returns the number of parts into which the steps are split, which is less than `splits` for a
// tile of few steps.
template <typename S>
__device__ __forceinline__ uint32_t measure(Job& job, const Arguments& arguments, const AttentionTile& tile,
                                            int32_t& steps) {
    job.first_row = tile.first_row;
    job.rows = tile.rows;
    job.first_query = tile.first_query;
    if (S::PAGED) {
        const uint32_t context =
            min(__ldg(arguments.context_lengths + tile.sequence), arguments.blocks_max * BLOCK_TOKENS);
        const uint32_t last_row = min((tile.first_query + S::QUERIES - 1) / arguments.group, tile.rows - 1);
        const int32_t visible = static_cast<int32_t>(context) - static_cast<int32_t>(tile.rows) + 1;
        const int32_t first_row = static_cast<int32_t>(tile.first_query / arguments.group);
        const int32_t first_block = first_block_of(visible + first_row, arguments.window);
        job.table = tile.sequence * arguments.blocks_max + first_block;
        job.skipped = first_block * static_cast<int32_t>(BLOCK_TOKENS);
        job.visible = visible - job.skipped;
        job.context = static_cast<int32_t>(context) - job.skipped;
        const int32_t keys = max(job.end(last_row, arguments) + job.skipped, 0);
        job.keys = keys - job.skipped;
        // Blocks past the keys are read as zeros, but the end of the context's last block contains
        // arbitrary old data.
        job.ends_with_stale_keys = whole_blocks(keys) * BLOCK_TOKENS > context;
    } else {
        job.keys = static_cast<int32_t>(tile.rows);
        job.ends_with_stale_keys = tile.rows % S::KEYS != 0;
    }
    steps = max((job.keys + S::KEYS - 1) / S::KEYS, 1);
    return S::SPLIT ? min(arguments.splits, static_cast<uint32_t>(steps)) : 1u;
}

// The jobs of this thread block, in the order in which it processes them. Every second round deals
// out jobs to the blocks in reverse order: within a sequence, the block that has the longest tile
// of one round has the shortest tile of the next round. Must be used by whole warps.
template <typename S>
struct Jobs {
    const Arguments& arguments;
    uint32_t tiles;  // number of tiles of one head; only for packed rows
    uint32_t turn;
    TileCursor cursor;

    __device__ __forceinline__ explicit Jobs(const Arguments& arguments) : arguments(arguments), tiles(0), turn(0) {
        rewind();
        if (!S::PAGED) {
            // A search for a tile that does not exist counts all tiles.
            AttentionTile none;
            find_tile<S::QUERIES>(0xffffffffu, arguments.starts, cursor, arguments.sequences, arguments.rows, 1, none);
            tiles = cursor.passed;
        }
    }

    __device__ __forceinline__ void rewind() { cursor = {arguments.first_sequence, 0}; }

    __device__ __forceinline__ Job next() {
        while (true) {
            Job job = {};
            job.slot = turn * gridDim.x + (turn % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
            turn += 1;
            uint32_t wanted;
            uint32_t part = 0;
            if (S::PAGED) {
                // Heads vary fastest, so that the tiles of a sequence are processed in order of
                // decreasing work.
                const uint32_t splits = S::SPLIT ? arguments.splits : 1u;
                part = job.slot % splits;
                job.head = job.slot / splits % arguments.kv_heads;
                wanted = job.slot / splits / arguments.kv_heads;
            } else {
                // A head's tiles are consecutive, so that its keys and values stay in the L2 cache.
                job.head = job.slot / max(tiles, 1u);
                wanted = job.slot % max(tiles, 1u);
                if (job.head >= arguments.kv_heads) {
                    return job;
                }
                rewind();
            }
            AttentionTile tile;
            if (!find_tile<S::QUERIES>(wanted, arguments.starts, cursor, arguments.sequences, arguments.rows,
                                       arguments.group, tile)) {
                return job;
            }
            int32_t steps;
            const uint32_t parts = measure<S>(job, arguments, tile, steps);
            if (part < parts) {
                job.found = 1;
                job.first_step = steps * part / parts;
                job.last_step = steps * (part + 1) / parts - 1;
                job.ends_with_stale_keys = job.ends_with_stale_keys && part + 1 == parts;
                return job;
            }
        }
    }
};
