// GEMM with FP8 weights for GPU generations that no other FP8 kernel in this folder supports. From
// sm_89 on, the tensor cores multiply E4M3; on older GPUs they multiply f16, and E4M3 numbers are
// widened to f16 in registers.
// Targets: sm_75, sm_80, sm_89
//
// gemm_tiled_e4m3_small_m_r<ROWS>   a block computes 16 features of ROWS rows of x (8, 16 or 32);
//                                   its warps divide the columns
// gemm_tiled_e4m3_large_m           a block computes 128 features of 64 rows, through shared memory
//
// out = sum over groups of 128 columns of (x * weight^T) * (their scales)  (+ bias) (+ out)
//
// weight        [features, columns]  E4M3, contiguous
// x             [rows, columns]      E4M3, rows x_pitch elements apart
// weight_scales BY_BLOCKS: [div_ceil(features, height), groups] f32; else [features] f32
// x_scales      BY_BLOCKS: [rows, groups] f32; else [rows] f32, or null: all rows have the scale
//               `fixed`
// bias          [features]           activations' type, or null
// out           [rows, features]     activations' type or f32, rows out_pitch elements apart
// height        rows of the weight per scale block, any number > 0
// flags         BY_BLOCKS, ADD_TO_OUT, OUT_IS_F32, IS_BF16 of contract::gemm_tiled_e4m3
//
// After each group, its sum of E4M3 products is added to an f32 total (two-level accumulation,
// DeepSeek-V3's report, arXiv 2412.19437). A NaN in x or its scales affects only its row; a NaN in
// the weight or its scales affects only the features that use it. columns and x_pitch are multiples
// of 16, and rows of weight and x start at multiples of 16 bytes; out has any alignment.

#include <stdint.h>

#include "contract.cuh"
#include "e4m3.cuh"
#include "element.cuh"
#include "tensor_core.cuh"

using namespace contract::gemm_tiled_e4m3;

namespace {

constexpr uint32_t WARP = 32;
constexpr uint32_t FRAGMENT_FEATURES = 16, FRAGMENT_ROWS = 8;  // sizes of mma.sync's operands
constexpr uint32_t CHUNK = 16;                                 // bytes that a lane moves at once

struct Product {
    const uint8_t* weight;
    const uint8_t* x;
    const float* weight_scales;
    const float* x_scales;
    float fixed;
    const void* bias;
    void* out;
    uint32_t rows, features, columns, x_pitch, out_pitch, height, flags;

    __device__ __forceinline__ bool is(uint32_t flag) const { return (flags & flag) != 0; }
    __device__ __forceinline__ uint32_t groups() const { return (columns + GROUP - 1) / GROUP; }
};

// A lane's part of 16 features by 32 columns (`Features`) and of 8 rows by 32 columns (`Rows`). It
// does not matter which columns a register holds, as long as both operands have the same columns
// at the same position.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr float WIDENED = 1.0f;
constexpr int CHUNK_PAIRS_AT_ONCE = 4;

struct Features {
    uint32_t words[4];
    __device__ __forceinline__ Features(uint32_t a, uint32_t b, uint32_t c, uint32_t d) : words{a, b, c, d} {}
};

struct Rows {
    uint32_t words[2];
    __device__ __forceinline__ Rows(uint32_t a, uint32_t b) : words{a, b} {}
};

__device__ __forceinline__ void multiply_add(float (&c)[4], const Features& a, const Rows& b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]));
}
#else
// Factor for a product of two widened numbers: widening makes each number 2^8 times too small.
constexpr float WIDENED = 65536.0f;
// Only one pair of chunks, because widening makes the loop body long.
constexpr int CHUNK_PAIRS_AT_ONCE = 1;

// Widens two E4M3 numbers, which are the high bytes of the two halves of `placed`, to f16. Exponent
// and mantissa bits are kept, although the exponent bias of f16 is 8 larger. A NaN stays NaN: the
// addition carries into the top exponent bit only for the magnitude of NaN.
__device__ __forceinline__ uint32_t widened(uint32_t placed) {
    const uint32_t size = placed >> 1 & 0x3f803f80u;
    return (placed & 0x80008000u) | size | ((size + 0x00800080u) & 0x40004000u);
}
__device__ __forceinline__ uint32_t first_two(uint32_t word) { return widened(__byte_perm(word, 0u, 0x1404)); }
__device__ __forceinline__ uint32_t last_two(uint32_t word) { return widened(__byte_perm(word, 0u, 0x3424)); }

struct Features {
    uint32_t halves[2][4];
    __device__ __forceinline__ Features(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
        : halves{{first_two(a), first_two(b), last_two(a), last_two(b)},
                 {first_two(c), first_two(d), last_two(c), last_two(d)}} {}
};

struct Rows {
    uint32_t halves[2][2];
    __device__ __forceinline__ Rows(uint32_t a, uint32_t b)
        : halves{{first_two(a), last_two(a)}, {first_two(b), last_two(b)}} {}
};

__device__ __forceinline__ void multiply_add(float (&c)[4], const Features& a, const Rows& b) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        TensorCoreElement<__half>::multiply_add(c, a.halves[half], b.halves[half][0], b.halves[half][1]);
    }
}
#endif

// Factor for a feature's sum over a group as the tensor cores return it. With scales per row, the
// feature's scale is not included here; store_sum applies it.
__device__ __forceinline__ float feature_scale(const Product& product, uint32_t feature, uint32_t group) {
    if (!product.is(BY_BLOCKS) || feature >= product.features) {
        return WIDENED;
    }
    const uint64_t block = feature / product.height;
    return WIDENED * __ldg(product.weight_scales + block * product.groups() + group);
}

__device__ __forceinline__ float row_scale(const Product& product, uint32_t row, uint32_t group) {
    if (!product.is(BY_BLOCKS) || row >= product.rows) {
        return 1.0f;
    }
    return __ldg(product.x_scales + static_cast<uint64_t>(row) * product.groups() + group);
}

template <typename Element>
__device__ __forceinline__ void store_as(const Product& product, uint64_t at, float value) {
    Element* out = static_cast<Element*>(product.out) + at;
    *out = from_float<Element>(product.is(ADD_TO_OUT) ? value + to_float(*out) : value);
}

// Writes a sum, unless its position is outside the output.
__device__ __forceinline__ void store_sum(const Product& product, uint32_t row, uint32_t feature, float sum) {
    if (row >= product.rows || feature >= product.features) {
        return;
    }
    if (!product.is(BY_BLOCKS)) {
        sum *= product.weight_scales[feature] * (product.x_scales == nullptr ? product.fixed : product.x_scales[row]);
    }
    const uint64_t at = static_cast<uint64_t>(row) * product.out_pitch + feature;
    const bool has_bias = product.bias != nullptr;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (product.is(IS_BF16)) {
        sum += has_bias ? to_float(static_cast<const __nv_bfloat16*>(product.bias)[feature]) : 0.0f;
        return product.is(OUT_IS_F32) ? store_as<float>(product, at, sum) : store_as<__nv_bfloat16>(product, at, sum);
    }
#endif
    sum += has_bias ? to_float(static_cast<const __half*>(product.bias)[feature]) : 0.0f;
    product.is(OUT_IS_F32) ? store_as<float>(product, at, sum) : store_as<__half>(product, at, sum);
}

// Loads sixteen numbers of a row from `column` on; zeros outside the matrix.
__device__ __forceinline__ uint4 load_chunk(const uint8_t* row, bool is_there, uint32_t column, uint32_t columns) {
    return is_there && column < columns ? __ldg(reinterpret_cast<const uint4*>(row + column)) : make_uint4(0, 0, 0, 0);
}

// In a block, only one warp uses an element of the weight, so the element is loaded straight into
// that warp's registers. A lane loads sixteen consecutive numbers of a row; the four lanes that
// share a row thus have 64 columns, which two products of 32 columns use.
template <uint32_t TILES>
__device__ __forceinline__ void small_m(const Product& product) {
    constexpr uint32_t ROWS = TILES * FRAGMENT_ROWS, CHUNKS = GROUP / (4 * CHUNK);
    static_assert(SMALL_M_FEATURES == FRAGMENT_FEATURES && SMALL_M_THREADS == SMALL_M_WARPS * WARP,
                  "each warp multiplies the features of one fragment");
    __shared__ float parts[SMALL_M_WARPS][ROWS][SMALL_M_FEATURES + 1];
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, of_eight = lane / 4, pair = lane % 4;
    const uint32_t first_feature = blockIdx.x * SMALL_M_FEATURES, first_row = blockIdx.y * ROWS;
    const uint32_t groups = product.groups(), columns = product.columns;
    const uint32_t features[2] = {first_feature + of_eight, first_feature + of_eight + 8};
    const uint8_t* weights[2];
    const uint8_t* x[TILES];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        weights[half] = product.weight + static_cast<uint64_t>(min(features[half], product.features - 1)) * columns;
    }
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
        const uint32_t row = first_row + tile * FRAGMENT_ROWS + of_eight;
        x[tile] = product.x + static_cast<uint64_t>(min(row, product.rows - 1)) * product.x_pitch;
    }
    const auto column_of = [&](uint32_t group, uint32_t chunk) { return group * GROUP + (4 * chunk + pair) * CHUNK; };
    uint4 next[CHUNKS][2];
    const auto load_weights = [&](uint32_t group) {
#pragma unroll
        for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const bool is_there = group < groups && features[half] < product.features;
                next[chunk][half] = load_chunk(weights[half], is_there, column_of(group, chunk), columns);
            }
        }
    };
    float sums[TILES][4] = {};
    load_weights(warp);
#pragma unroll 1
    for (uint32_t group = warp; group < groups; group += SMALL_M_WARPS) {
        uint4 now[CHUNKS][2];
#pragma unroll
        for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
            now[chunk][0] = next[chunk][0];
            now[chunk][1] = next[chunk][1];
        }
        load_weights(group + SMALL_M_WARPS);
        float partial[TILES][4] = {};
#pragma unroll
        for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
            const uint4 &low = now[chunk][0], &high = now[chunk][1];
            const Features first(low.x, high.x, low.y, high.y), second(low.z, high.z, low.w, high.w);
#pragma unroll
            for (uint32_t tile = 0; tile < TILES; ++tile) {
                const bool is_there = first_row + tile * FRAGMENT_ROWS + of_eight < product.rows;
                const uint4 row = load_chunk(x[tile], is_there, column_of(group, chunk), columns);
                multiply_add(partial[tile], first, Rows(row.x, row.y));
                multiply_add(partial[tile], second, Rows(row.z, row.w));
            }
        }
        const float of_features[2] = {feature_scale(product, features[0], group), feature_scale(product, features[1], group)};
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; ++tile) {
            const uint32_t row = first_row + tile * FRAGMENT_ROWS + 2 * pair;
            const float of_rows[2] = {row_scale(product, row, group), row_scale(product, row + 1, group)};
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sums[tile][i] += partial[tile][i] * (of_features[i / 2] * of_rows[i % 2]);
            }
        }
    }
#pragma unroll
    for (uint32_t tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            parts[warp][tile * FRAGMENT_ROWS + 2 * pair + i % 2][of_eight + 8 * (i / 2)] = sums[tile][i];
        }
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < ROWS * SMALL_M_FEATURES; at += SMALL_M_THREADS) {
        const uint32_t row = at / SMALL_M_FEATURES, feature = at % SMALL_M_FEATURES;
        float sum = 0.0f;
#pragma unroll
        for (uint32_t part = 0; part < SMALL_M_WARPS; ++part) {
            sum += parts[part][row][feature];
        }
        store_sum(product, first_row + row, first_feature + feature, sum);
    }
}

// The warps of a block, four across the features and two across the rows, and each warp's
// part of the tile.
constexpr uint32_t WARPS_ACROSS = 4, WARP_FEATURES = LARGE_M_FEATURES / WARPS_ACROSS, WARP_ROWS = 32;
constexpr uint32_t FEATURE_TILES = WARP_FEATURES / FRAGMENT_FEATURES, ROW_TILES = WARP_ROWS / FRAGMENT_ROWS;
constexpr uint32_t ROW_CHUNKS = GROUP / CHUNK;
constexpr uint32_t STAGE_BYTES = (LARGE_M_FEATURES + LARGE_M_ROWS) * GROUP;
// Number of f32 elements from row to row. Lanes that write at once hit different banks.
constexpr uint32_t SUMS_PITCH = LARGE_M_FEATURES + 4;
static_assert(LARGE_M_THREADS == WARP * WARPS_ACROSS * (LARGE_M_ROWS / WARP_ROWS), "the warps cover the tile");
static_assert(LARGE_M_SHARED_BYTES == 2 * STAGE_BYTES && LARGE_M_ROWS * SUMS_PITCH * sizeof(float) <= LARGE_M_SHARED_BYTES,
              "the memory of the two stages is reused for the sums");

// Byte offset of a chunk of a 128-byte row. The same chunk of eight rows lies in different banks.
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t chunk) {
    return row * GROUP + (chunk ^ (row % ROW_CHUNKS)) * CHUNK;
}

// Starts the copies of a group's columns for `COUNT` rows from `first` on.
template <uint32_t COUNT>
__device__ __forceinline__ void copy_rows(uint32_t to, const uint8_t* from, uint32_t pitch, uint32_t first, uint32_t rows,
                                          uint32_t group, uint32_t columns) {
#pragma unroll
    for (uint32_t turn = 0; turn < COUNT * ROW_CHUNKS / LARGE_M_THREADS; ++turn) {
        const uint32_t at = turn * LARGE_M_THREADS + threadIdx.x, row = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
        const uint32_t column = group * GROUP + chunk * CHUNK;
        const bool valid = first + row < rows && column < columns;
        const uint8_t* source = valid ? from + static_cast<uint64_t>(first + row) * pitch + column : from;
        copy_16_bytes(to + place_of(row, chunk), source, valid);
    }
}

__device__ __forceinline__ void large_m(const Product& product) {
    extern __shared__ __align__(128) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, of_eight = lane / 4, pair = lane % 4;
    const uint32_t quarter = lane / 8, of_quarter = lane % 8;
    const uint32_t first_row = blockIdx.x * LARGE_M_ROWS, first_feature = blockIdx.y * LARGE_M_FEATURES;
    const uint32_t warp_feature = warp % WARPS_ACROSS * WARP_FEATURES, warp_row = warp / WARPS_ACROSS * WARP_ROWS;
    const uint32_t groups = product.groups();
    const auto copy = [&](uint32_t group) {
        const uint32_t stage = shared + group % 2 * STAGE_BYTES;
        copy_rows<LARGE_M_FEATURES>(stage, product.weight, product.columns, first_feature, product.features, group, product.columns);
        copy_rows<LARGE_M_ROWS>(stage + LARGE_M_FEATURES * GROUP, product.x, product.x_pitch, first_row, product.rows, group,
                             product.columns);
    };
    float sums[FEATURE_TILES][ROW_TILES][4] = {};
    copy(0);
    wait_for_copies();
    __syncthreads();
#pragma unroll 1
    for (uint32_t group = 0; group < groups; ++group) {
        if (group + 1 < groups) {
            // All warps are done with the other stage.
            copy(group + 1);
        }
        const uint32_t weights = shared + group % 2 * STAGE_BYTES, x = weights + LARGE_M_FEATURES * GROUP;
        float partial[FEATURE_TILES][ROW_TILES][4] = {};
#pragma unroll CHUNK_PAIRS_AT_ONCE
        for (uint32_t chunk = 0; chunk < ROW_CHUNKS; chunk += 2) {
            uint32_t words[4];
            // Quarters in the order of mma.sync. Features: both groups of eight features, then the
            // next sixteen columns. Rows: both groups of sixteen columns, then the next eight rows.
            const auto features_at = [&](uint32_t tile) {
                const uint32_t row = warp_feature + tile * FRAGMENT_FEATURES + quarter % 2 * 8 + of_quarter;
                load_quarters(words, weights + place_of(row, chunk + quarter / 2));
                return Features(words[0], words[1], words[2], words[3]);
            };
            const Features features[FEATURE_TILES] = {features_at(0), features_at(1)};
#pragma unroll
            for (uint32_t tile = 0; tile < ROW_TILES; tile += 2) {
                const uint32_t row = warp_row + tile * FRAGMENT_ROWS + quarter / 2 * 8 + of_quarter;
                load_quarters(words, x + place_of(row, chunk + quarter % 2));
                const Rows rows[2] = {Rows(words[0], words[1]), Rows(words[2], words[3])};
#pragma unroll
                for (uint32_t i = 0; i < FEATURE_TILES * 2; ++i) {
                    multiply_add(partial[i / 2][tile + i % 2], features[i / 2], rows[i % 2]);
                }
            }
        }
        float of_features[FEATURE_TILES][2];
#pragma unroll
        for (uint32_t i = 0; i < FEATURE_TILES * 2; ++i) {
            const uint32_t feature = first_feature + warp_feature + i / 2 * FRAGMENT_FEATURES + i % 2 * 8 + of_eight;
            of_features[i / 2][i % 2] = feature_scale(product, feature, group);
        }
#pragma unroll
        for (uint32_t tile = 0; tile < ROW_TILES; ++tile) {
            const uint32_t row = first_row + warp_row + tile * FRAGMENT_ROWS + 2 * pair;
            const float of_rows[2] = {row_scale(product, row, group), row_scale(product, row + 1, group)};
#pragma unroll
            for (uint32_t i = 0; i < FEATURE_TILES * 4; ++i) {
                sums[i / 4][tile][i % 4] += partial[i / 4][tile][i % 4] * (of_features[i / 4][i % 4 / 2] * of_rows[i % 2]);
            }
        }
        wait_for_copies();
        __syncthreads();
    }
    float* tile_of_sums = reinterpret_cast<float*>(memory);
#pragma unroll
    for (uint32_t i = 0; i < FEATURE_TILES * ROW_TILES * 4; ++i) {
        const uint32_t feature_tile = i / (ROW_TILES * 4), tile = i / 4 % ROW_TILES, of_lane = i % 4;
        const uint32_t row = warp_row + tile * FRAGMENT_ROWS + 2 * pair + of_lane % 2;
        const uint32_t feature = warp_feature + feature_tile * FRAGMENT_FEATURES + of_eight + 8 * (of_lane / 2);
        tile_of_sums[row * SUMS_PITCH + feature] = sums[feature_tile][tile][of_lane];
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t at = threadIdx.x; at < LARGE_M_ROWS * LARGE_M_FEATURES; at += LARGE_M_THREADS) {
        const uint32_t row = at / LARGE_M_FEATURES, feature = at % LARGE_M_FEATURES;
        store_sum(product, first_row + row, first_feature + feature, tile_of_sums[row * SUMS_PITCH + feature]);
    }
}

}  // namespace

#define LINEAR_E4M3(NAME, THREADS, BLOCKS, COMPUTE)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                      \
        NAME(const uint8_t* weight, const uint8_t* x, const float* weight_scales, const float* x_scales, float fixed,  \
             const void* bias, void* out, uint32_t rows, uint32_t features, uint32_t columns, uint32_t x_pitch,        \
             uint32_t out_pitch, uint32_t height, uint32_t flags) {                                                    \
        COMPUTE({weight, x, weight_scales, x_scales, fixed, bias, out, rows, features, columns, x_pitch, out_pitch,    \
                 height, flags});                                                                                      \
    }
LINEAR_E4M3(gemm_tiled_e4m3_small_m_r8, SMALL_M_THREADS, 1, small_m<1>)
LINEAR_E4M3(gemm_tiled_e4m3_small_m_r16, SMALL_M_THREADS, 1, small_m<2>)
LINEAR_E4M3(gemm_tiled_e4m3_small_m_r32, SMALL_M_THREADS, 1, small_m<4>)
LINEAR_E4M3(gemm_tiled_e4m3_large_m, LARGE_M_THREADS, 2, large_m)

// Launch: rows, features and columns > 0.
//   small_m: grid (div_ceil(features, SMALL_M_FEATURES), div_ceil(rows, ROWS)), block
//            (SMALL_M_THREADS), no dynamic shared memory
//   large_m: grid (div_ceil(rows, LARGE_M_ROWS), div_ceil(features, LARGE_M_FEATURES)), block
//            (LARGE_M_THREADS), dynamic shared memory LARGE_M_SHARED_BYTES
