// GEMM of a weight of 4-bit integers with up to 64 rows of activations. int4.cuh describes the
// weight.
// Targets: sm_80, sm_90a
//
// gemm_int4_<type>_r<ROWS>   out = x * weight^T (+ bias) (+ out), or with GATED
//                            out = silu(x * gate^T + bias) * (x * up^T + bias)   (SwiGLU, Shazeer
//                            2020, arXiv 2002.05202)
//
// <type> is bf16 or f16. ROWS is 8, 16, 32 or 64, the largest number of rows that the kernel
// supports.
//
// weight, scales, zeros       int4.cuh; GATED: [2 * features, columns], gate rows, then up rows
// x         [rows, columns]   rows x_pitch elements apart, 1 <= rows <= ROWS
// bias      [features]        the activation type, or null; GATED: [2 * features]
// out       [rows, features]  the activation type, or f32 with OUT_IS_F32; rows out_pitch elements
//           apart, any alignment
// parts     [2 * grid, TILE_ROWS * ROWS] f32, scratch; needs no initialization
// counters  [tiles]           u32, zero before the first launch, and zero again after each launch
// group     log2 of the columns of a group, 5 to 7
// units     units of work per block, see below
// flags     ADD_TO_OUT: add to the contents of out; OUT_IS_F32; GATED
//
// columns is a multiple of the group, and features a multiple of 8. x_pitch is a multiple of 8.
// weight and x start at multiples of 16 bytes. out must not overlap x. Sums are f32 on the tensor
// cores, rounded once at the end; gate and up are not rounded before they are multiplied. The same
// shape, kernel and `units` give the same bits every time: the order of additions does not depend
// on which block finishes last. A NaN in x affects only its row, a NaN in the scales only the
// features that use it. Consecutive launches in one stream may share parts and counters; other
// launches must not.
//
// The first copies of weights, scales and zeros do not wait for the previous kernel. Code that
// writes weights must therefore synchronize before it launches this kernel with programmatic stream
// serialization.
//
// The work is a sequence of units: one tile of TILE_ROWS weight rows after another, each in steps
// of STEP_COLUMNS columns. Each block takes a contiguous range of units (Stream-K, Osama et al.
// 2023, arXiv 2301.03598). A block that has only part of a tile leaves its sums in `parts`, and the
// last block to finish the tile adds them up. Weights and x are copied to shared memory several
// steps ahead. The weight is the M operand of mma.sync. Each warp multiplies 32 weight rows by all
// rows of x.
//
// A fragment of a gated GEMM has eight gate rows and the corresponding eight up rows, so that a
// lane has both sums of a feature.

#include "contract.cuh"
#include "element.cuh"
#include "int4.cuh"
#include "kernel_order.cuh"
#include "logistic.cuh"
#include "tensor_core.cuh"

using namespace contract::gemm_int4;

// One set of counters for each stream that may launch at the same time.
extern "C" __device__ uint32_t gemm_int4_counters[STREAMS * STREAM_COUNTERS] = {};

namespace {

constexpr uint32_t WARP = 32;
constexpr uint32_t CHUNK = 16;                 // bytes that a thread copies at once
constexpr uint32_t FRAGMENTS = 2;              // fragments per warp, of 16 weight rows each
constexpr uint32_t WARP_ROWS = 16 * FRAGMENTS;
constexpr uint32_t HALF_ROWS = 8;              // gate rows of a fragment; it has as many up rows
constexpr uint32_t TILE_BLOCKS = TILE_ROWS / BLOCK_ROWS;
constexpr uint32_t PIECE_BYTES = BLOCK_ROWS * STEP_COLUMNS / 2;  // bytes of a block in a step
constexpr uint32_t WEIGHT_BYTES = TILE_BLOCKS * PIECE_BYTES;
constexpr uint32_t X_ROW_BYTES = STEP_COLUMNS * 2;
static_assert(THREADS / WARP * WARP_ROWS == TILE_ROWS, "the warps cover the rows of a tile");
static_assert(STRIP_COLUMNS == STEP_COLUMNS, "a step is a strip");
static_assert(HALF_ROWS == BLOCK_ROWS, "each half of a fragment is a block");

template <typename Element>
struct Call {
    const uint8_t* weight;
    const Element* scales;
    const uint8_t* zeros;
    const Element* x;
    const Element* bias;
    void* out;
    float* parts;
    uint32_t* counters;
    uint32_t rows, features, columns, x_pitch, out_pitch, group, units, flags;

    __device__ __forceinline__ bool is(uint32_t flag) const { return (flags & flag) != 0; }
    __device__ __forceinline__ uint32_t steps() const { return (columns + STEP_COLUMNS - 1) / STEP_COLUMNS; }
    __device__ __forceinline__ uint32_t tile_features() const { return is(GATED) ? TILE_ROWS / 2 : TILE_ROWS; }
    __device__ __forceinline__ uint32_t tiles() const { return (features + tile_features() - 1) / tile_features(); }
};

// A unit of work.
struct Unit {
    uint32_t tile, step;

    __device__ __forceinline__ void advance(uint32_t steps) {
        if (++step == steps) {
            step = 0;
            ++tile;
        }
    }

    // Moves on by `count` steps, or to the next tile if the tile has fewer steps left.
    __device__ __forceinline__ void advance_by(uint32_t count, uint32_t steps) {
        step += count;
        if (step >= steps) {
            step = 0;
            ++tile;
        }
    }
};

template <uint32_t LEFT>
__device__ __forceinline__ void wait_for_all_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// A thread's part of the copies of weights. In a gated GEMM, the first half of a tile's blocks are
// gate rows, and the second half are the corresponding up rows.
struct WeightCopies {
    static constexpr uint32_t AT_ONCE = THREADS * CHUNK / PIECE_BYTES, TURNS = TILE_BLOCKS / AT_ONCE;

    const uint8_t* from;  // the thread's first source in the step
    uint32_t at;          // byte offset of that source in its block
    uint32_t blocks;      // blocks from the thread's first block to the last block of the features

    template <typename Element>
    __device__ __forceinline__ WeightCopies(const Call<Element>& call, Unit unit) {
        const uint32_t block_bytes = call.columns / 2 * BLOCK_ROWS;
        const uint32_t first = unit.tile * (call.tile_features() / BLOCK_ROWS) + threadIdx.x * CHUNK / PIECE_BYTES;
        at = unit.step * PIECE_BYTES + threadIdx.x * CHUNK % PIECE_BYTES;
        blocks = max(call.features / BLOCK_ROWS, first) - first;
        from = call.weight + static_cast<uint64_t>(first) * block_bytes + at;
    }

    // Starts the copies of a unit.
    template <typename Element>
    __device__ __forceinline__ void start(const Call<Element>& call, uint32_t to) const {
        const bool gated = call.is(GATED);
        const uint32_t block_bytes = call.columns / 2 * BLOCK_ROWS;
        // The up rows are the same number of bytes after the gate rows in every tile.
        const uint64_t up = static_cast<uint64_t>(call.features / BLOCK_ROWS) * block_bytes;
#pragma unroll
        for (uint32_t turn = 0; turn < TURNS; ++turn) {
            const bool is_up = gated && turn >= TURNS / 2;
            const uint32_t block = (is_up ? turn - TURNS / 2 : turn) * AT_ONCE;
            const bool valid = block < blocks && at < block_bytes;
            copy_16_bytes(to + (turn * THREADS + threadIdx.x) * CHUNK, from + block * block_bytes + (is_up ? up : 0), valid);
        }
    }

    // Moves on to `unit`, which follows the current unit.
    template <typename Element>
    __device__ __forceinline__ void advance(const Call<Element>& call, Unit unit) {
        if (unit.step == 0) {
            *this = WeightCopies(call, unit);
        } else {
            at += PIECE_BYTES;
            from += PIECE_BYTES;
        }
    }
};

// Byte offset of a chunk of a row of x in shared memory. The same chunk of eight adjacent rows,
// which an instruction reads at once, is in different banks.
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t chunk) {
    return row * X_ROW_BYTES + (chunk ^ row % 8) * CHUNK;
}

// Starts the copies of a unit's columns of x.
template <uint32_t ROWS, typename Element>
__device__ __forceinline__ void copy_x(const Call<Element>& call, Unit unit, uint32_t to) {
    constexpr uint32_t CHUNKS = X_ROW_BYTES / CHUNK, ROWS_AT_ONCE = THREADS / CHUNKS;
    const uint32_t chunk = threadIdx.x % CHUNKS, column = unit.step * STEP_COLUMNS + chunk * VECTOR<Element>;
#pragma unroll
    for (uint32_t turn = 0; turn < ROWS / ROWS_AT_ONCE; ++turn) {
        const uint32_t row = turn * ROWS_AT_ONCE + threadIdx.x / CHUNKS;
        const bool valid = row < call.rows && column < call.columns;
        const Element* source = valid ? call.x + static_cast<uint64_t>(row) * call.x_pitch + column : call.x;
        copy_16_bytes(to + place_of(row, chunk), source, valid);
    }
}

// Scales and zero points of a lane's rows, two for each fragment: the scale in the low half of a
// word, and the zero point in the high half. The four lanes of a row have four adjacent groups, so
// that with groups of 128 columns the next scales are loaded four steps ahead.
struct Scales {
    uint32_t both[FRAGMENTS][2];

    // Loads the scales of the groups `4 * quad` to `4 * quad + 3`.
    template <typename Element>
    __device__ __forceinline__ void load(const Call<Element>& call, uint32_t tile, uint32_t quad) {
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        const bool gated = call.is(GATED);
        const uint32_t groups = call.columns >> call.group, group = min(4 * quad + lane % 4, groups - 1);
        const uint32_t first = tile * call.tile_features() + warp * (gated ? WARP_ROWS / 2 : WARP_ROWS) + lane / 4;
#pragma unroll
        for (uint32_t i = 0; i < FRAGMENTS * 2; ++i) {
            const uint32_t below = gated ? i / 2 * HALF_ROWS : i * 8;
            // Features past the last are not written, so their scale does not matter.
            const uint32_t feature = min(first + below, call.features - 1) + (gated && i % 2 ? call.features : 0);
            const uint64_t at = scale_index(feature, group, groups);
            const uint32_t zero = call.zeros ? __ldg(call.zeros + at) : 8u;
            both[i / 2][i % 2] = __ldg(reinterpret_cast<const uint16_t*>(call.scales) + at) | zero << 16;
        }
    }
};

// The scale and the zero point that the lane `source` of the same row has.
template <typename Element>
__device__ __forceinline__ GroupOperands<Element> operands_of(uint32_t both, uint32_t source) {
    const uint32_t found = __shfl_sync(0xffffffffu, both, source, 4);
    const uint16_t scale = static_cast<uint16_t>(found);
    return {reinterpret_cast<const Element&>(scale), found >> 16};
}

template <typename Element, uint32_t ROWS>
using Sums = float[FRAGMENTS][ROWS / 8][4];

// Byte offsets of a lane's operands in a stage.
struct Offsets {
    uint32_t blocks[FRAGMENTS][2], x[4];

    __device__ __forceinline__ explicit Offsets(bool gated) {
        const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
        for (uint32_t i = 0; i < FRAGMENTS * 2; ++i) {
            // GATED: the two halves of a fragment are a block of gate rows and the corresponding
            // block of up rows.
            const uint32_t block = gated ? i % 2 * (TILE_BLOCKS / 2) + FRAGMENTS * warp + i / 2 : 2 * FRAGMENTS * warp + i;
            blocks[i / 2][i % 2] = block * PIECE_BYTES;
        }
        // The lane provides the address of a row of x for load_quarters.
#pragma unroll
        for (uint32_t word = 0; word < 4; ++word) {
            x[word] = WEIGHT_BYTES + place_of(lane % 8, 4 * word + lane / 8);
        }
    }
};

// Reads a lane's words of a block from shared memory. In the last strip of a row, units may have
// fewer than WORDS words; the missing words are set to zero.
__device__ __forceinline__ void read_unit(uint32_t (&words)[4], uint32_t block, uint32_t unit_words) {
    const uint32_t lane = threadIdx.x % WARP;
    if (unit_words == WORDS) {
        const uint4 read = load_16_bytes(block + lane * UNIT_BYTES);
        words[0] = read.x, words[1] = read.y, words[2] = read.z, words[3] = read.w;
    } else {
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            words[word] = 0;
            if (word < unit_words) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[word]) : "r"(block + (lane * unit_words + word) * 4) : "memory");
            }
        }
    }
}

// Multiplies a unit from shared memory. `scales` has the scales of four groups.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ void multiply(const Call<Element>& call, uint32_t step, uint32_t stage, const Offsets& offsets,
                                         const Scales& scales, Sums<Element, ROWS>& sums) {
    const uint32_t unit_words = words_of_strip(call.columns, step);
    uint32_t words[FRAGMENTS][2][4];
#pragma unroll
    for (uint32_t i = 0; i < FRAGMENTS * 2; ++i) {
        read_unit(words[i / 2][i % 2], stage + offsets.blocks[i / 2][i % 2], unit_words);
    }
    GroupOperands<Element> groups[FRAGMENTS][2];
#pragma unroll
    for (uint32_t word = 0; word < 4; ++word) {
        // The group of these 32 columns.
        if ((word * SPAN_COLUMNS & (1u << call.group) - 1) == 0) {
            const uint32_t source = (step * STEP_COLUMNS + word * SPAN_COLUMNS >> call.group) % 4;
#pragma unroll
            for (uint32_t i = 0; i < FRAGMENTS * 2; ++i) {
                groups[i / 2][i % 2] = operands_of<Element>(scales.both[i / 2][i % 2], source);
            }
        }
        uint32_t elements[FRAGMENTS][2][4];
#pragma unroll
        for (uint32_t fragment = 0; fragment < FRAGMENTS; ++fragment) {
            dequantize_span<Element>(elements[fragment], words[fragment][0][word], words[fragment][1][word],
                                     groups[fragment][0], groups[fragment][1]);
        }
#pragma unroll
        for (uint32_t tile = 0; tile < ROWS / 8; ++tile) {
            uint32_t of_x[4];
            load_quarters(of_x, stage + offsets.x[word] + tile * (8 * X_ROW_BYTES));
#pragma unroll
            for (uint32_t fragment = 0; fragment < FRAGMENTS; ++fragment) {
                TensorCoreElement<Element>::multiply_add(sums[fragment][tile], elements[fragment][0], of_x[0], of_x[1]);
                TensorCoreElement<Element>::multiply_add(sums[fragment][tile], elements[fragment][1], of_x[2], of_x[3]);
            }
        }
    }
}

template <typename Out, typename Element>
__device__ __forceinline__ void store_as(const Call<Element>& call, uint64_t at, float value) {
    Out* out = static_cast<Out*>(call.out) + at;
    *out = from_float<Out>(call.is(ADD_TO_OUT) ? value + to_float(*out) : value);
}

template <typename Element>
__device__ __forceinline__ void store_sum(const Call<Element>& call, uint32_t row, uint32_t feature, float value) {
    const uint64_t at = static_cast<uint64_t>(row) * call.out_pitch + feature;
    if (call.is(OUT_IS_F32)) {
        store_as<float>(call, at, value);
    } else {
        store_as<Element>(call, at, value);
    }
}

// Writes the output of a tile.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ void finish(const Call<Element>& call, uint32_t tile, const Sums<Element, ROWS>& sums) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, of_eight = lane / 4, quarter = lane % 4;
    const bool gated = call.is(GATED);
    const uint32_t first = tile * call.tile_features() + warp * (gated ? WARP_ROWS / 2 : WARP_ROWS) + of_eight;
    const auto bias = [&](uint32_t feature) { return call.bias ? to_float(call.bias[feature]) : 0.0f; };
#pragma unroll
    for (uint32_t fragment = 0; fragment < FRAGMENTS; ++fragment) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t feature = first + (gated ? fragment * HALF_ROWS : fragment * 16 + half * 8);
            if (feature >= call.features || gated && half == 1) {
                continue;
            }
            const float of_feature = bias(feature), of_up = gated ? bias(call.features + feature) : 0.0f;
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 8 * 2; ++i) {
                const uint32_t row = i / 2 * 8 + 2 * quarter + i % 2;
                if (row < call.rows) {
                    float value = sums[fragment][i / 2][half * 2 + i % 2] + of_feature;
                    if (gated) {
                        value = silu(value) * (sums[fragment][i / 2][2 + i % 2] + of_up);
                    }
                    store_sum(call, row, feature, value);
                }
            }
        }
    }
}

// Adds up the sums of a tile that several blocks share, in the order of the blocks. Returns `false`
// in every block but the last to finish.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ bool add_parts(const Call<Element>& call, uint32_t tile, Sums<Element, ROWS>& sums) {
    // Shared memory after the stages.
    extern __shared__ __align__(128) uint8_t memory[];
    uint32_t& finished = *reinterpret_cast<uint32_t*>(memory + SHARED_BYTES<ROWS> - EXCHANGED_BYTES);
    const uint32_t first_unit = tile * call.steps();
    const uint32_t first = first_unit / call.units, last = (first_unit + call.steps() - 1) / call.units;
    if (first == last) {
        return true;
    }
    const uint32_t quarter = threadIdx.x % 4;
    // A thread block has two slots: one for a tile that an earlier block began, and one for a tile
    // that a later block ends.
    const auto slot = [&](uint32_t block) {
        return call.parts + static_cast<uint64_t>(2 * block + (block == first)) * (TILE_ROWS * ROWS) + threadIdx.x;
    };
    float* own = slot(blockIdx.x);
#pragma unroll
    for (uint32_t i = 0; i < FRAGMENTS * ROWS / 8 * 4; ++i) {
        if (i / 4 % (ROWS / 8) * 8 + 2 * quarter + i % 2 < call.rows) {
            __stcg(own + i * THREADS, sums[i / (ROWS / 2)][i / 4 % (ROWS / 8)][i % 4]);
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        finished = atomicAdd(call.counters + tile, 1u);
        if (finished == last - first) {
            call.counters[tile] = 0;
        }
    }
    __syncthreads();
    const bool is_last = finished == last - first;
    if (is_last) {
        __threadfence();
#pragma unroll
        for (uint32_t i = 0; i < FRAGMENTS * ROWS / 8 * 4; ++i) {
            sums[i / (ROWS / 2)][i / 4 % (ROWS / 8)][i % 4] = 0.0f;
        }
        // The loads of several blocks are in flight at once, if registers suffice.
#pragma unroll(ROWS <= 16 ? 4 : 1)
        for (uint32_t block = first; block <= last; ++block) {
            const float* part = slot(block);
#pragma unroll
            for (uint32_t i = 0; i < FRAGMENTS * ROWS / 8 * 4; ++i) {
                if (i / 4 % (ROWS / 8) * 8 + 2 * quarter + i % 2 < call.rows) {
                    sums[i / (ROWS / 2)][i / 4 % (ROWS / 8)][i % 4] += __ldcg(part + i * THREADS);
                }
            }
        }
    }
    // No thread may write `finished` again before all threads have read it.
    __syncthreads();
    return is_last;
}

template <typename Element, uint32_t ROWS>
__device__ __forceinline__ void gemm(const Call<Element>& call) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr uint32_t COUNT = STAGES<ROWS>, STAGE_BYTES = WEIGHT_BYTES + ROWS * X_ROW_BYTES;
    static_assert(COUNT * STAGE_BYTES + EXCHANGED_BYTES == SHARED_BYTES<ROWS>, "the host reserves all stages");
    const uint32_t shared = shared_address(memory), steps = call.steps();
    const uint32_t first = blockIdx.x * call.units, end = min(first + call.units, call.tiles() * steps);
    Unit now{first / steps, first % steps}, copied = now;
    WeightCopies weights(call, now);
#pragma unroll
    for (uint32_t stage = 0; stage < COUNT - 1; ++stage) {
        if (first + stage < end) {
            weights.start(call, shared + stage * STAGE_BYTES);
            copied.advance(steps);
            weights.advance(call, copied);
        }
    }
    const Offsets offsets(call.is(GATED));
    // Number of steps that one load of the scales of four groups covers.
    const uint32_t steps_of_quad = 4 << call.group < STEP_COLUMNS ? 1 : (4 << call.group) / STEP_COLUMNS;
    Scales scales, next;
    scales.load(call, now.tile, now.step / steps_of_quad);
    // The first unit that needs the scales in `next`.
    Unit scaled{now.tile, now.step / steps_of_quad * steps_of_quad};
    scaled.advance_by(steps_of_quad, steps);
    next.load(call, min(scaled.tile, call.tiles() - 1), scaled.step / steps_of_quad);
    let_next_kernel_start();
    wait_for_previous_kernel();
    copied = now;
#pragma unroll
    for (uint32_t stage = 0; stage < COUNT - 1; ++stage) {
        if (first + stage < end) {
            copy_x<ROWS>(call, copied, shared + stage * STAGE_BYTES + WEIGHT_BYTES);
            copied.advance(steps);
        }
        end_of_copies();
    }
    Sums<Element, ROWS> sums = {};
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t unit = first; unit < end; ++unit) {
        wait_for_all_copies_but<COUNT - 2>();
        // All warps have finished reading the stage that is overwritten next.
        __syncthreads();
        if (unit + COUNT - 1 < end) {
            const uint32_t to = shared + (stage == 0 ? COUNT - 1 : stage - 1) * STAGE_BYTES;
            weights.start(call, to);
            copy_x<ROWS>(call, copied, to + WEIGHT_BYTES);
            copied.advance(steps);
            weights.advance(call, copied);
        }
        end_of_copies();
        if (now.tile == scaled.tile && now.step == scaled.step) {
            scales = next;
            scaled.advance_by(steps_of_quad, steps);
            next.load(call, min(scaled.tile, call.tiles() - 1), scaled.step / steps_of_quad);
        }
        multiply<Element, ROWS>(call, now.step, shared + stage * STAGE_BYTES, offsets, scales, sums);
        stage = stage + 1 == COUNT ? 0 : stage + 1;
        if (now.step + 1 == steps || unit + 1 == end) {
            if (add_parts<Element, ROWS>(call, now.tile, sums)) {
                finish<Element, ROWS>(call, now.tile, sums);
            }
#pragma unroll
            for (uint32_t i = 0; i < FRAGMENTS * ROWS / 8 * 4; ++i) {
                sums[i / (ROWS / 2)][i / 4 % (ROWS / 8)][i % 4] = 0.0f;
            }
        }
        now.advance(steps);
    }
}

}  // namespace

#define GEMM_INT4(name, Element, ROWS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS<ROWS>)                                                \
        gemm_int4_##name##_r##ROWS(const uint8_t* weight, const Element* scales, const uint8_t* zeros, const Element* x, \
                                   const Element* bias, void* out, float* parts, uint32_t* counters, uint32_t rows,    \
                                   uint32_t features, uint32_t columns, uint32_t x_pitch, uint32_t out_pitch,          \
                                   uint32_t group, uint32_t units, uint32_t flags) {                                   \
        gemm<Element, ROWS>({weight, scales, zeros, x, bias, out, parts, counters, rows, features, columns, x_pitch,   \
                             out_pitch, group, units, flags});                                                         \
    }
#define KERNEL(name, Element) FOR_EACH_SMALL_M_ROWS(GEMM_INT4, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid div_ceil(tiles * div_ceil(columns, STEP_COLUMNS), units), block (THREADS), dynamic
// shared memory SHARED_BYTES<ROWS>. ROWS is the smallest of 8, 16, 32 and 64 that is >= rows. tiles
// is div_ceil(features, TILE_ROWS), or if GATED div_ceil(features, TILE_ROWS / 2). Blocks never
// wait for one another, so any number of units is correct. rows, features and columns are > 0. The
// kernel may be launched with programmatic stream serialization.
