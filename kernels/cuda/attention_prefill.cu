// Attention of many query rows with an online softmax, so that no matrix of scores is ever stored
// (FlashAttention-2, Dao 2023, arXiv 2307.08691). Activations are bf16 or f16, sums f32. Head sizes
// D are 32, 64, 80 and 128; 72 for packed rows only; 256 and 512 over the cache only.
//
// attention_paged_<type>_d<D>: over the paged cache (PagedAttention, Kwon et al. 2023, arXiv
// 2309.06180), causal except for `key_ends`.
//   queries          [rows, heads * D], rows `query_pitch` elements apart
//   layer            [blocks, 2 (keys, values), kv_heads, 16 tokens, D], contiguous; E4M3 in
//                    attention_paged_e4m3
//   scales           [2, kv_heads] f32, factors of E4M3 keys and values; not read otherwise
//   query_starts     [sequences + 1] u32: sequence s has the rows query_starts[s] ..
//                    query_starts[s + 1]
//   context_lengths  [sequences] u32: tokens of s in the cache, including this step's rows
//   block_tables     [sequences, blocks_max] u32: the blocks of s in order; entries past its
//                    context are not read, and neither are entries before the block with the first
//                    token that a row of s attends to
//   window           the most tokens that a row attends to, at least 1; NO_WINDOW for all
//   key_ends         [rows] u32, or null: row r of the batch also attends to the later tokens of its
//                    sequence before token key_ends[r]; does not decrease within a sequence
//   out              [rows, heads * D], rows `out_pitch` elements apart
// Row r of a sequence's n rows attends to the last `window` of the first context - n + r + 1
// tokens, and to later tokens before token key_ends[r]. A row that attends to no token has an
// output of zeros. Query head h uses KV head h / (heads / kv_heads). The kernel does not write the
// output of sequences before `first_sequence` and of rows that belong to no sequence. A sequence
// may have any number of rows, including 0 and 1.
//
// attention_packed_<type>_d<D>: bidirectional; each row attends to all rows of its sequence. A
// sequence is a run of consecutive rows.
//   qkv              [rows, 3 * heads * D] (queries, keys, values), rows `pitch` elements apart
//   starts           [sequences + 1] u32: sequence s has the rows starts[s] .. starts[s + 1]
//   out              [rows, heads * D], rows `out_pitch` elements apart; rows that belong to no
//                    sequence are not written
//
// attention_windows_<type>_d<D> (D <= 80): attention_packed for many sequences of at most 64 rows.
// If a sequence is longer, only its first 64 rows are read and written.
//
// Scores are multiplied by `scale` (> 0). Weights are rounded to the type of the operands before
// they are multiplied by the values: f16 with a cache in E4M3, otherwise the type of the
// activations. Pointers are aligned to 16 bytes, pitches are multiples of 8 elements, heads is a
// multiple of kv_heads. A token that no row may attend to is never added, even if it is a NaN,
// which the cache may contain past the end of a context. A NaN that a row attends to makes that
// head of that row NaN. A masked NaN value can also make other rows of its sequence NaN (0 * NaN):
// rows up to 64 tokens earlier (32 with heads of 256, 16 with heads of 512) and, with a window, rows up to the same
// number of tokens later. Starts are clamped to `rows`, a context to blocks_max * 16 tokens, and a
// block id >= `blocks` reads as zeros, so nothing outside the arguments is accessed.
//
// The same code serves sm_75 (f16 only: compile with -DBURSAR_NO_BF16) and all later targets.
// For Hopper see attention_prefill_hopper.cu.

#include "include/attention_tiles.cuh"
#include "include/cached_operand.cuh"
#include "include/contract.cuh"
#include "include/online_softmax.cuh"
#include "include/tensor_core.cuh"

namespace {

// A thread has too few registers for the queries and sums of 16 heads of 512 elements. Several warps
// therefore share the 16 query vectors. Each of them has the queries and the sums of a slice of the
// elements, and they add up their partial scores.
template <int D>
constexpr int SLICES = D > 256 ? contract::attention_prefill::WIDE_SLICES : 1;
template <int D>
constexpr int THREADS = SLICES<D> > 1 ? contract::attention_prefill::WIDE_THREADS : contract::attention_prefill::THREADS;
// Query vectors per tile.
template <int D>
constexpr int QUERIES =
    SLICES<D> > 1 ? contract::attention_prefill::WIDE_TILE_QUERIES : contract::attention_prefill::TILE_QUERIES;
// Keys per step. With more keys of 256 or 512 elements, the keys and values of a step would not fit
// into 48 KiB.
template <int D>
constexpr int KEYS = D > 256 ? 16 : D > 128 ? 32 : 64;
static_assert(QUERIES<80> * SLICES<80> == THREADS<80> / 32 * 16 && QUERIES<512> * SLICES<512> == THREADS<512> / 32 * 16,
              "a warp multiplies 16 query vectors");
static_assert(KEYS<80> == contract::attention_prefill::WINDOW_ROWS && QUERIES<80> == KEYS<80>,
              "a window is one tile and one step");
using contract::common::BLOCK_TOKENS;
constexpr float LOG2_E = 1.4426950408889634f;

// Location of the keys and values of one sequence and head in the cache.
template <typename Cached, int D>
struct PagedKeys {
    using Element = Cached;
    const Cached* head;     // this head's keys in block 0
    const uint32_t* table;  // [blocks_max]
    uint32_t blocks;
    size_t block_pitch;   // elements from block to block
    size_t values_after;  // elements from a block's keys to its values

    __device__ __forceinline__ const Cached* row(uint32_t token, bool& valid) const {
        const uint32_t block = valid ? __ldg(table + token / BLOCK_TOKENS) : 0u;
        valid = valid && block < blocks;
        return valid ? head + block * block_pitch + (token % BLOCK_TOKENS) * D : head;
    }
};

// Location of the keys and values of a sequence in the packed rows.
template <typename T, int D>
struct PackedKeys {
    using Element = T;
    const T* head;  // this head's keys in the sequence's first row
    size_t pitch;
    size_t values_after;

    __device__ __forceinline__ const T* row(uint32_t token, bool& valid) const {
        return valid ? head + token * pitch : head;
    }
};

// The query vectors of a tile, each of them one head of one row.
struct QueryPlaces {
    uint32_t first_query;
    uint32_t queries;  // number of query vectors of the whole sequence
    uint32_t group;
    uint32_t first_head;
    uint32_t first_row;

    __device__ __forceinline__ bool holds(uint32_t index) const { return first_query + index < queries; }
    __device__ __forceinline__ uint32_t row(uint32_t index) const { return (first_query + index) / group; }
    __device__ __forceinline__ size_t element(uint32_t index, size_t pitch, uint32_t head_dim) const {
        const uint32_t query = first_query + index;
        return (first_row + query / group) * pitch + (first_head + query % group) * head_dim;
    }
};

// Number of columns of a head in shared memory: D, rounded up to the depth of a tensor core
// instruction, which is 16. Zeros fill the additional columns.
template <int D>
constexpr int WIDE = (D + 15) / 16 * 16;

// Columns of a head in one slice.
template <int D>
constexpr int SLICE = WIDE<D> / SLICES<D>;

// Row of this warp's first query vector in the tile.
template <int D>
__device__ __forceinline__ uint32_t own_queries() {
    return threadIdx.x / 32 % (QUERIES<D> / 16) * 16;
}
// Index of this warp's slice.
template <int D>
__device__ __forceinline__ uint32_t own_slice() {
    return SLICES<D> > 1 ? threadIdx.x / 32 / (QUERIES<D> / 16) : 0;
}

// Number of elements from row to row in shared memory. A row has 16 additional bytes, so that 8
// rows start in 8 different groups of banks.
template <int D>
constexpr int ROW = WIDE<D> + 8;

// Starts the copy of eight adjacent elements, or of zeros if not `valid`. E4M3 elements are
// converted and stored before this function returns.
template <typename Cached>
__device__ __forceinline__ void copy_neighbours(uint32_t destination, const Cached* from, bool valid) {
    if constexpr (std::is_same_v<Cached, E4m3>) {
        const uint2 raw = valid ? __ldg(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0);
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(&raw);
        store_16_bytes(destination, make_uint4(to_operand<Cached>(pairs[0]), to_operand<Cached>(pairs[1]),
                                               to_operand<Cached>(pairs[2]), to_operand<Cached>(pairs[3])));
    } else {
        copy_16_bytes(destination, from, valid);
    }
}

// Starts the copy of keys or values first_key .. first_key + KEYS. Keys or values from index `keys`
// on become zeros.
template <typename T, int D, typename Keys>
__device__ __forceinline__ void copy_keys(T* shared, const Keys& source, size_t offset, uint32_t first_key,
                                          uint32_t keys) {
    constexpr int PIECES = WIDE<D> / 8;
    static_assert(KEYS<D> * PIECES % THREADS<D> == 0, "every thread copies the same number of pieces");
#pragma unroll
    for (int i = 0; i < KEYS<D> * PIECES / THREADS<D>; ++i) {
        const uint32_t piece = threadIdx.x + i * THREADS<D>;
        const uint32_t key = piece / PIECES;
        const uint32_t column = piece % PIECES * 8;
        bool valid = first_key + key < keys;
        const auto* row = source.row(first_key + key, valid);
        const bool is_of_head = column < D;
        copy_neighbours(shared_address(shared + key * ROW<D> + column), row + offset + (is_of_head ? column : 0),
                        valid && is_of_head);
    }
}

// Starts the copy of a tile's query vectors; after the last vector, zeros are written.
template <typename T, int D>
__device__ __forceinline__ void copy_queries(T* shared, const T* queries, size_t pitch, const QueryPlaces& places) {
    constexpr int PIECES = WIDE<D> / 8;
#pragma unroll
    for (int i = 0; i < QUERIES<D> * PIECES / THREADS<D>; ++i) {
        const uint32_t piece = threadIdx.x + i * THREADS<D>;
        const uint32_t index = piece / PIECES;
        const uint32_t column = piece % PIECES * 8;
        const bool valid = places.holds(index) && column < D;
        const T* piece_at = valid ? queries + places.element(index, pitch, D) + column : queries;
        copy_16_bytes(shared_address(shared + index * ROW<D> + column), piece_at, valid);
    }
}

// Loads columns 16 * k to 16 * k + 15 of the warp's slice of its 16 query vectors.
template <typename T, int D>
__device__ __forceinline__ void load_query(uint32_t (&query)[4], const T* shared, int k) {
    const uint32_t row = own_queries<D>() + threadIdx.x % 16, column = own_slice<D>() * SLICE<D> + k * 16;
    load_quarters(query, shared_address(shared + row * ROW<D> + column + threadIdx.x % 32 / 16 * 8));
}

// Adds the products of queries and keys over the 16 columns from 16 * k of the slice on.
template <typename T, int D>
__device__ __forceinline__ void add_scores(float (&scores)[KEYS<D> / 8][4], const uint32_t (&query)[4], const T* shared,
                                           int k) {
    const uint32_t lane = threadIdx.x % 32, column = own_slice<D>() * SLICE<D> + k * 16;
#pragma unroll
    for (int tile = 0; tile < KEYS<D> / 8; tile += 2) {
        uint32_t key[4];
        const uint32_t row = tile * 8 + lane / 16 * 8 + lane % 8;
        load_quarters(key, shared_address(shared + row * ROW<D> + column + lane / 8 % 2 * 8));
        TensorCoreElement<T>::multiply_add(scores[tile], query, key[0], key[1]);
        TensorCoreElement<T>::multiply_add(scores[tile + 1], query, key[2], key[3]);
    }
}

// Sums the partial scores of all warps that share the query vectors. Every warp adds them in the same
// order and gets the same result. `partial` has space for the scores of all warps. All threads must
// call this function.
template <int D>
__device__ __forceinline__ void add_slices(float (&scores)[KEYS<D> / 8][4], float4* partial) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr uint32_t TILES = KEYS<D> / 8, GROUPS = QUERIES<D> / 16;
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
        partial[(warp * TILES + tile) * 32 + lane] =
            make_float4(scores[tile][0], scores[tile][1], scores[tile][2], scores[tile][3]);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
        scores[tile][0] = scores[tile][1] = scores[tile][2] = scores[tile][3] = 0.0f;
#pragma unroll
        for (uint32_t slice = 0; slice < SLICES<D>; ++slice) {
            const float4 other = partial[((slice * GROUPS + warp % GROUPS) * TILES + tile) * 32 + lane];
            scores[tile][0] += other.x;
            scores[tile][1] += other.y;
            scores[tile][2] += other.z;
            scores[tile][3] += other.w;
        }
    }
}

// Adds the products of weights and the slice's values.
template <typename T, int D>
__device__ __forceinline__ void add_values(float (&gathered)[SLICE<D> / 8][4], const float (&weights)[KEYS<D> / 8][4],
                                           const T* shared) {
    using Element = TensorCoreElement<T>;
    const uint32_t lane = threadIdx.x % 32, first_column = own_slice<D>() * SLICE<D>;
#pragma unroll
    for (int k = 0; k < KEYS<D> / 16; ++k) {
        const uint32_t weight[4] = {Element::pack(weights[2 * k][0], weights[2 * k][1]),
                                    Element::pack(weights[2 * k][2], weights[2 * k][3]),
                                    Element::pack(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                                    Element::pack(weights[2 * k + 1][2], weights[2 * k + 1][3])};
#pragma unroll
        for (int tile = 0; tile < SLICE<D> / 8; tile += 2) {
            uint32_t value[4];
            const uint32_t row = k * 16 + lane % 16, column = first_column + tile * 8;
            load_quarters_transposed(value, shared_address(shared + row * ROW<D> + column + lane / 16 * 8));
            Element::multiply_add(gathered[tile], weight, value[0], value[1]);
            Element::multiply_add(gathered[tile + 1], weight, value[2], value[3]);
        }
    }
}

// Writes the slice of a warp's 16 rows. They pass through shared memory that no other warp uses, so that each
// lane writes 16 bytes at a time.
template <typename T, int D>
__device__ __forceinline__ void store(T* out, size_t pitch, const QueryPlaces& places,
                                      const float (&gathered)[SLICE<D> / 8][4], const OnlineSoftmax& softmax,
                                      float value_scale, T* shared) {
    const float inverse[2] = {softmax.inverse(0) * value_scale, softmax.inverse(1) * value_scale};
    __syncwarp();  // the warp's earlier reads of this shared memory are done
    // Without slices, the columns past the head's last column are not written.
    constexpr int COLUMNS = SLICES<D> > 1 ? SLICE<D> : D;
    const uint32_t first_row = own_queries<D>(), first_column = own_slice<D>() * SLICE<D>;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < COLUMNS / 8; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t both = TensorCoreElement<T>::pack(gathered[tile][2 * half] * inverse[half],
                                                             gathered[tile][2 * half + 1] * inverse[half]);
            const uint32_t row = first_row + lane / 4 + 8 * half;
            *reinterpret_cast<uint32_t*>(shared + row * ROW<D> + first_column + tile * 8 + lane % 4 * 2) = both;
        }
    }
    __syncwarp();
    constexpr int PIECES = COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < (16 * PIECES + 31) / 32; ++i) {
        const uint32_t piece = lane + i * 32;
        const uint32_t index = first_row + piece / PIECES;
        const uint32_t column = first_column + piece % PIECES * 8;
        if (piece < 16 * PIECES && places.holds(index)) {
            *reinterpret_cast<uint4*>(out + places.element(index, pitch, D) + column) =
                *reinterpret_cast<const uint4*>(shared + index * ROW<D> + column);
        }
    }
}

// Processes one tile: its query vectors over the keys 0 .. keys. If `CAUSAL`, row r of the sequence
// attends only to the last `window` of the first visible + r keys, and to the keys after them that
// come before end_of(r, visible + r).
template <typename T, int D, bool CAUSAL, typename Keys, typename EndOf>
__device__ __forceinline__ void attend(const T* queries, size_t query_pitch, T* out, size_t out_pitch,
                                       const QueryPlaces& places, const Keys& source, int32_t keys, int32_t visible,
                                       int32_t window, const EndOf& end_of, float scale, float value_scale) {
    using Cached = typename Keys::Element;
    using Operand = Multiplied<T, Cached>;
    __shared__ __align__(16) Operand rows[2 * KEYS<D> * ROW<D>];
    __shared__ float4 partial[SLICES<D> > 1 ? THREADS<D> * KEYS<D> / 8 : 1];
    Operand *key_rows = rows, *value_rows = rows + KEYS<D> * ROW<D>;
    const uint32_t lane = threadIdx.x % 32;

    // The queries pass through the shared memory of the values into registers. If they do not fit
    // there, they also take the memory of the keys, and the first keys are copied after them.
    constexpr bool ARE_TOGETHER = QUERIES<D> > KEYS<D>;
    static_assert(QUERIES<D> <= 2 * KEYS<D>, "the queries fit into the memory of keys and values");
    const int32_t steps = (keys + KEYS<D> - 1) / KEYS<D>;
    T* query_rows = reinterpret_cast<T*>(ARE_TOGETHER ? rows : value_rows);
    copy_queries<T, D>(query_rows, queries, query_pitch, places);
    if (!ARE_TOGETHER && steps > 0) {
        copy_keys<Operand, D>(key_rows, source, 0, (steps - 1) * KEYS<D>, keys);
    }
    wait_for_copies();
    __syncthreads();
    uint32_t query[SLICE<D> / 16][4];
#pragma unroll
    for (int k = 0; k < SLICE<D> / 16; ++k) {
        load_query<T, D>(query[k], query_rows, k);
#pragma unroll
        for (uint32_t& pair : query[k]) {
            pair = query_operand<Cached, T>(pair);
        }
    }
    __syncthreads();
    if (ARE_TOGETHER && steps > 0) {
        copy_keys<Operand, D>(key_rows, source, 0, (steps - 1) * KEYS<D>, keys);
        wait_for_copies();
        __syncthreads();
    }

    int32_t causal[2] = {keys, keys};  // key ends under a causal mask
    int32_t limit[2] = {keys, keys};
    int32_t first_causal = keys;
    int32_t seen_by_all = keys;
    if (CAUSAL) {
        const uint32_t own = own_queries<D>() + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t row = places.row(own + 8 * i);
            causal[i] = min(keys, visible + static_cast<int32_t>(row));
            limit[i] = min(keys, end_of(row, causal[i]));
        }
        first_causal = min(keys, visible + static_cast<int32_t>(places.row(0)));
        seen_by_all = min(keys, end_of(places.row(0), first_causal));
    }
    OnlineSoftmax softmax;
    softmax.begin();
    float gathered[SLICE<D> / 8][4] = {};
    for (int32_t step = steps - 1; step >= 0; --step) {
        copy_keys<Operand, D>(value_rows, source, source.values_after, step * KEYS<D>, keys);
        float scores[KEYS<D> / 8][4] = {};
#pragma unroll
        for (int k = 0; k < SLICE<D> / 16; ++k) {
            add_scores<Operand, D>(scores, query[k], key_rows, k);
        }
        if constexpr (SLICES<D> > 1) {
            add_slices<D>(scores, partial);
        }
        if ((step + 1) * KEYS<D> > seen_by_all) {
            OnlineSoftmax::mask(scores, step * KEYS<D> + static_cast<int32_t>(lane % 4 * 2), limit);
        }
        // A tile has at most QUERIES rows. Only the steps with the lowest keys, which run last,
        // have keys before a row's window.
        if (CAUSAL && step * KEYS<D> < first_causal + QUERIES<D> - 1 - window) {
            const int32_t first[2] = {causal[0] - window, causal[1] - window};
            OnlineSoftmax::mask_before(scores, step * KEYS<D> + static_cast<int32_t>(lane % 4 * 2), first);
        }
        float shrink[2];
        softmax.step(scores, scale * LOG2_E, shrink);
#pragma unroll
        for (int tile = 0; tile < SLICE<D> / 8; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                gathered[tile][i] *= shrink[i / 2];
            }
        }
        wait_for_copies();
        __syncthreads();  // the values have arrived, and no warp needs these keys anymore
        if (step > 0) {
            copy_keys<Operand, D>(key_rows, source, 0, (step - 1) * KEYS<D>, keys);
        }
        add_values<Operand, D>(gathered, scores, value_rows);
        wait_for_copies();
        __syncthreads();  // the next keys have arrived, and no warp needs these values anymore
    }
    softmax.finish();
    store<T, D>(out, out_pitch, places, gathered, softmax, value_scale, reinterpret_cast<T*>(rows));
}

// Processes one tile of at most KEYS keys that all its queries attend to. Everything is copied at
// once and few registers are used, so that many blocks share an SM and their copies overlap.
template <typename T, int D, typename Keys>
__device__ __forceinline__ void attend_once(const T* queries, size_t query_pitch, T* out, size_t out_pitch,
                                            const QueryPlaces& places, const Keys& source, int32_t keys, float scale) {
    static_assert(SLICES<D> == 1, "a warp has all columns");
    __shared__ __align__(16) T query_rows[QUERIES<D> * ROW<D>];
    __shared__ __align__(16) T key_rows[KEYS<D> * ROW<D>];
    __shared__ __align__(16) T value_rows[KEYS<D> * ROW<D>];
    copy_queries<T, D>(query_rows, queries, query_pitch, places);
    copy_keys<T, D>(key_rows, source, 0, 0, keys);
    copy_keys<T, D>(value_rows, source, source.values_after, 0, keys);
    wait_for_copies();
    __syncthreads();
    float scores[KEYS<D> / 8][4] = {};
#pragma unroll
    for (int k = 0; k < WIDE<D> / 16; ++k) {
        uint32_t query[4];
        load_query<T, D>(query, query_rows, k);
        add_scores<T, D>(scores, query, key_rows, k);
    }
    if (keys < KEYS<D>) {
        const int32_t limit[2] = {keys, keys};
        OnlineSoftmax::mask(scores, static_cast<int32_t>(threadIdx.x % 4 * 2), limit);
    }
    OnlineSoftmax softmax;
    softmax.begin();
    float shrink[2];
    softmax.step(scores, scale * LOG2_E, shrink);
    float gathered[WIDE<D> / 8][4] = {};
    add_values<T, D>(gathered, scores, value_rows);
    softmax.finish();
    store<T, D>(out, out_pitch, places, gathered, softmax, 1.0f, query_rows);
}

template <typename T, typename Cached, int D>
__device__ __forceinline__ void attention_paged(T* out, const T* queries, const Cached* layer,
                                                const uint32_t* query_starts, const uint32_t* context_lengths,
                                                const uint32_t* block_tables, uint32_t out_pitch, uint32_t query_pitch,
                                                uint32_t rows, uint32_t sequences, uint32_t first_sequence,
                                                uint32_t heads, uint32_t kv_heads, uint32_t blocks, uint32_t blocks_max,
                                                uint32_t window, const uint32_t* key_ends, const float* scales,
                                                float scale) {
    const uint32_t group = heads / kv_heads;
    const uint32_t kv_head = blockIdx.x % kv_heads;
    TileCursor cursor = {first_sequence, 0};
    AttentionTile tile;
    if (!find_tile<QUERIES<D>>(blockIdx.x / kv_heads, query_starts, cursor, sequences, rows, group, tile)) {
        return;
    }
    const int32_t context =
        static_cast<int32_t>(min(__ldg(context_lengths + tile.sequence), blocks_max * BLOCK_TOKENS));
    // Number of keys that row 0 of the sequence attends to if there is no window.
    int32_t visible = context - static_cast<int32_t>(tile.rows) + 1;
    // From here on, blocks and keys are counted from the tile's first block.
    const int32_t first_block = first_block_of(visible + static_cast<int32_t>(tile.first_query / group), window);
    const int32_t skipped = first_block * static_cast<int32_t>(BLOCK_TOKENS);
    visible -= skipped;
    const QueryPlaces places = {tile.first_query, tile.rows * group, group, kv_head * group, tile.first_row};
    const int32_t last_row = min((tile.first_query + QUERIES<D> - 1) / group, tile.rows - 1);
    PagedKeys<Cached, D> source;
    source.values_after = static_cast<size_t>(kv_heads) * BLOCK_TOKENS * D;
    source.block_pitch = 2 * source.values_after;
    source.head = layer + static_cast<size_t>(kv_head) * BLOCK_TOKENS * D;
    source.table = block_tables + static_cast<size_t>(tile.sequence) * blocks_max + first_block;
    source.blocks = blocks;
    float value_scale = 1.0f;
    if constexpr (std::is_same_v<Cached, E4m3>) {
        scale *= __ldg(scales + kv_head);
        value_scale = __ldg(scales + kv_heads + kv_head);
    }
    const auto end_of = [&](uint32_t row, int32_t causal) {
        row = tile.first_row + min(row, tile.rows - 1);
        return key_end(key_ends, row, causal + skipped, context) - skipped;
    };
    const int32_t keys = max(end_of(last_row, visible + last_row), 0);
    attend<T, D, true>(queries, query_pitch, out, out_pitch, places, source, keys, visible,
                       static_cast<int32_t>(window), end_of, scale, value_scale);
}

// With `WINDOWS`, each sequence is one tile.
template <typename T, int D, bool WINDOWS>
__device__ __forceinline__ void attention_packed(T* out, const T* qkv, const uint32_t* starts, uint32_t out_pitch,
                                                 uint32_t pitch, uint32_t rows, uint32_t sequences, uint32_t heads,
                                                 float scale) {
    const uint32_t head = blockIdx.x % heads;
    const uint32_t wanted = blockIdx.x / heads;
    TileCursor cursor = {};
    AttentionTile tile = {};
    if (WINDOWS) {
        if (wanted >= sequences) {
            return;
        }
        tile.rows = rows_of(starts, wanted, rows, tile.first_row);
    } else if (!find_tile<QUERIES<D>>(wanted, starts, cursor, sequences, rows, 1, tile)) {
        return;
    }
    const QueryPlaces places = {tile.first_query, tile.rows, 1, head, tile.first_row};
    PackedKeys<T, D> source;
    source.pitch = pitch;
    source.values_after = static_cast<size_t>(heads) * D;
    source.head = qkv + tile.first_row * source.pitch + source.values_after + head * D;
    const int32_t keys = static_cast<int32_t>(tile.rows);
    if (WINDOWS) {
        attend_once<T, D>(qkv, pitch, out, out_pitch, places, source, keys, scale);
    } else {
        const auto end_of = [](uint32_t, int32_t causal) { return causal; };
        attend<T, D, false>(qkv, pitch, out, out_pitch, places, source, keys, 0, 0, end_of, scale, 1.0f);
    }
}

}  // namespace

// Minimum number of resident blocks per SM: as many as registers allow without spilling.
template <int D>
constexpr int RESIDENT = D == 32 ? 4 : D >= 128 ? 2 : 3;

#define ATTENTION_PAGED(TYPE, CACHED, NAME, D)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS<D>, RESIDENT<D>) attention_paged_##NAME##_d##D(               \
        TYPE* out, const TYPE* queries, const CACHED* layer, const uint32_t* query_starts,                          \
        const uint32_t* context_lengths, const uint32_t* block_tables, uint32_t out_pitch, uint32_t query_pitch,    \
        uint32_t rows, uint32_t sequences, uint32_t first_sequence, uint32_t heads, uint32_t kv_heads,              \
        uint32_t blocks, uint32_t blocks_max, uint32_t window, const uint32_t* key_ends, const float* scales,       \
        float scale) {                                                                                              \
        attention_paged<TYPE, CACHED, D>(out, queries, layer, query_starts, context_lengths, block_tables,          \
                                         out_pitch, query_pitch, rows, sequences, first_sequence, heads, kv_heads,  \
                                         blocks, blocks_max, window, key_ends, scales, scale);                      \
    }

#define ATTENTION_PACKED(TYPE, NAME, D)                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS<D>, RESIDENT<D>) attention_packed_##NAME##_d##D(         \
        TYPE* out, const TYPE* qkv, const uint32_t* starts, uint32_t out_pitch, uint32_t pitch, uint32_t rows, \
        uint32_t sequences, uint32_t heads, float scale) {                                                     \
        attention_packed<TYPE, D, false>(out, qkv, starts, out_pitch, pitch, rows, sequences, heads, scale);   \
    }

#define ATTENTION_WINDOWS(TYPE, NAME, D)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS<D>) attention_windows_##NAME##_d##D(                     \
        TYPE* out, const TYPE* qkv, const uint32_t* starts, uint32_t out_pitch, uint32_t pitch, uint32_t rows, \
        uint32_t sequences, uint32_t heads, float scale) {                                                     \
        attention_packed<TYPE, D, true>(out, qkv, starts, out_pitch, pitch, rows, sequences, heads, scale);    \
    }

#define ATTENTION_ALL(TYPE, NAME)                          \
    FOR_EACH_HEAD_DIM(ATTENTION_PAGED, TYPE, TYPE, NAME)   \
    FOR_EACH_PACKED_HEAD_DIM(ATTENTION_PACKED, TYPE, NAME) \
    FOR_EACH_HEAD_DIM_OF_WINDOWS(ATTENTION_WINDOWS, TYPE, NAME)

ATTENTION_ALL(__half, f16)
#if !defined(BURSAR_NO_BF16)
ATTENTION_ALL(__nv_bfloat16, bf16)
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
FOR_EACH_HEAD_DIM(ATTENTION_PAGED, __half, E4m3, e4m3_f16)
FOR_EACH_HEAD_DIM(ATTENTION_PAGED, __nv_bfloat16, E4m3, e4m3_bf16)
#endif

// Launch. Block THREADS, or WIDE_THREADS for heads of 512, no dynamic shared memory (static: at most
// 41,472 bytes), no scratch.
//   attention_paged:   grid x = kv_heads * ((rows * (heads / kv_heads) + (tile - 1) * (sequences -
//                      first_sequence)) / tile), where tile is TILE_QUERIES or, for heads of 512,
//                      WIDE_TILE_QUERIES. If the host knows query_starts, `rows` may count
//                      only the rows from query_starts[first_sequence] on.
//   attention_packed:  grid x = heads * ((rows + 63 * sequences) / 64), or heads times the exact
//                      number of tiles of 64 rows, if the host knows the sequences.
//   attention_windows: grid x = heads * sequences.
// These are upper bounds: a block that finds no tile returns. A grid of 0 must not be launched.
