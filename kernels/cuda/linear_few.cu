// Products of few rows: a step of decoding, which is bound by reading the weights once.
// Targets: sm_90a
//
// linear_few    out = x * weight^T (+ bias) (+ out)
// gate_up_few   out = silu(x * gate^T) * (x * up^T)   (SwiGLU, Shazeer 2020, arXiv 2002.05202)
//
// x       [rows, in]            bf16 or f16, as a tensor map; rows from 1 to ROWS of the kernel (8, 16, 32, 64)
// weight  [features, in]        the same type, as a tensor map; gate_up_few: [2 * features, in], gate rows, then up rows
// bias    [features]            the same type, or null
// out     [rows, features]      the same type or f32; rows out_pitch elements apart, any alignment
// parts   [2 * grid, ROWS * 128] f32, scratch: what is in it before does not matter
// counters [tiles]              u32, zeros before the first launch and after every launch
//
// Sums in f32 on the tensor cores, one rounding at the end (gate and up are not rounded before they are multiplied). The
// same bits every time for the same shape, kernel and grid: parts of a sum are added in the order of `in`, whoever comes
// last. NaN and infinity go their usual way, and stay in their row of x. `in` is a multiple of 8 and rows of x and weight
// start at multiples of 16 bytes, which tensor maps ask for; places past an edge are zeros and nothing is written there.
// out and x must not overlap. Two launches may share parts and counters if one follows the other in a stream.
//
// The weights must not be written while kernels of this kind may start early: their first copies do not wait for the
// kernel in front.
//
// The work is a line of units, one tile (128 rows of the weight) after the other, each in steps of 64 columns. Thread
// blocks take equal stretches of that line ("Stream-K", Osama et al. 2023, arXiv 2301.03598), so that all multiprocessors
// read to the end whatever the shape. Who has only part of a tile leaves it in `parts`; the last to come adds them up. One
// warp copies, four multiply: the weight is the tall operand of wgmma, x the narrow one. A block takes half of the shared
// memory, so that the next kernel's block can stand beside it and fill its own stages while this one ends.

#include "element.cuh"
#include "few_rows.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"

constexpr uint32_t COLUMNS = 64;                // of a step, 128 bytes a row
constexpr uint32_t HALF_TILE = 64;              // rows of the weight that one wgmma takes
constexpr uint32_t HALF_BYTES = HALF_TILE * COLUMNS * 2;
constexpr uint32_t MULTIPLIERS = 128;           // threads
constexpr uint32_t THREADS = MULTIPLIERS + 32;
constexpr uint32_t STAGES_MAX = 6;

// Bits of `flags`.
constexpr uint32_t ADD_TO_OUT = 1;
constexpr uint32_t OUT_IS_F32 = 2;

template <uint32_t ROWS>
struct Stage {
    static constexpr uint32_t ROW_BYTES = ROWS * COLUMNS * 2;
    static constexpr uint32_t BYTES = 2 * HALF_BYTES + ROW_BYTES;
    static constexpr uint32_t COUNT = ROWS <= 16 ? 6 : ROWS <= 32 ? 5 : 4;
    // Behind the stages: barriers of full and of empty stages, and a word for all multipliers.
    static constexpr uint32_t FULL_AT = COUNT * BYTES;
    static constexpr uint32_t EMPTY_AT = FULL_AT + 8 * STAGES_MAX;
    static constexpr uint32_t WORD_AT = EMPTY_AT + 8 * STAGES_MAX;
    static constexpr uint32_t SHARED_BYTES = WORD_AT + 32;
    static_assert(SHARED_BYTES <= 113 * 1024 - 512, "two blocks share a multiprocessor");
};

// The stretches of the line that blocks take.
struct Line {
    uint32_t units;
    uint32_t blocks;

    __device__ __forceinline__ uint32_t start(uint32_t block) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(units) * block / blocks);
    }
    __device__ __forceinline__ uint32_t block_of(uint32_t unit) const {
        return static_cast<uint32_t>(((static_cast<uint64_t>(unit) + 1) * blocks - 1) / units);
    }
};

template <typename Element>
struct Arguments {
    void* out;
    const Element* bias;
    float* parts;
    uint32_t* counters;
    uint32_t out_pitch;
    uint32_t rows;
    uint32_t features;
    uint32_t steps;
    uint32_t flags;
    uint32_t ahead;
    uint32_t lead;
};

// Where the two halves of a tile begin in the weight.
template <bool GATED>
__device__ __forceinline__ uint32_t first_row(uint32_t tile, uint32_t half, uint32_t features) {
    return GATED ? tile * HALF_TILE + half * features : (2 * tile + half) * HALF_TILE;
}

template <bool GATED>
__device__ __forceinline__ void copy_weights(const TensorMap& weight, uint32_t stage, uint32_t barrier, uint32_t unit,
                                             uint32_t steps, uint32_t features) {
    const uint32_t tile = unit / steps, column = unit % steps * COLUMNS;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        copy_box_once(stage + half * HALF_BYTES, weight, barrier, column, first_row<GATED>(tile, half, features));
    }
}

// One thread keeps the stages full.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void copy(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments,
                                     uint32_t shared, uint32_t first, uint32_t last) {
    using S = Stage<ROWS>;
    const uint32_t steps = arguments.steps, features = arguments.features;
    const uint32_t held = min(S::COUNT, last - first);
    for (uint32_t stage = 0; stage < held; ++stage) {
        const uint32_t full = shared + S::FULL_AT + 8 * stage;
        barrier_arrive_expecting(full, S::BYTES);
        copy_weights<GATED>(weight, shared + stage * S::BYTES, full, first + stage, steps, features);
    }
    // While the kernel in front ends, memory has more to do than the stages can hold.
    const uint32_t fetched = min(arguments.ahead, last - first - held);
    for (uint32_t unit = first + held; unit < first + held + fetched; ++unit) {
        const uint32_t tile = unit / steps, column = unit % steps * COLUMNS;
        fetch_box(weight, column, first_row<GATED>(tile, 0, features));
        fetch_box(weight, column, first_row<GATED>(tile, 1, features));
    }
    wait_for_previous_kernel();
    for (uint32_t stage = 0; stage < held; ++stage) {
        copy_box(shared + stage * S::BYTES + 2 * HALF_BYTES, x, shared + S::FULL_AT + 8 * stage,
                 (first + stage) % steps * COLUMNS, 0);
    }
    // The next kernel's first copies queue up behind this one's last.
    const uint32_t asked = last - min(arguments.lead, last - first - held);
    uint32_t stage = 0, parity = 0;
    for (uint32_t unit = first + held; unit < last; ++unit) {
        if (unit == asked) {
            let_next_kernel_start();
        }
        const uint32_t full = shared + S::FULL_AT + 8 * stage;
        barrier_wait(shared + S::EMPTY_AT + 8 * stage, parity);
        barrier_arrive_expecting(full, S::BYTES);
        copy_weights<GATED>(weight, shared + stage * S::BYTES, full, unit, steps, features);
        copy_box(shared + stage * S::BYTES + 2 * HALF_BYTES, x, full, unit % steps * COLUMNS, 0);
        if (++stage == S::COUNT) {
            stage = 0;
            parity ^= 1;
        }
    }
    if (asked == last) {
        let_next_kernel_start();
    }
}

// Writes a tile that is summed up.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void finish(const float (&c)[2][ROWS / 8][4], const Arguments<Element>& arguments,
                                       uint32_t tile) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t half = 0; half < (GATED ? 1 : 2); ++half) {
#pragma unroll
        for (uint32_t low = 0; low < 2; ++low) {
            const uint32_t feature = first_row<GATED>(tile, half, 0) + warp * 16 + low * 8 + lane / 4;
            if (feature >= arguments.features) {
                continue;
            }
            const float bias = arguments.bias == nullptr ? 0.0f : to_float(arguments.bias[feature]);
#pragma unroll
            for (uint32_t piece = 0; piece < ROWS / 8 * 2; ++piece) {
                const uint32_t row = piece / 2 * 8 + lane % 4 * 2 + piece % 2;
                if (row < arguments.rows) {
                    const uint64_t at = static_cast<uint64_t>(row) * arguments.out_pitch + feature;
                    float value = c[half][piece / 2][low * 2 + piece % 2];
                    if (GATED) {
                        // exp overflows to infinity for a very negative gate, and the quotient is then a zero.
                        value = __fdividef(value, 1.0f + __expf(-value)) * c[1][piece / 2][low * 2 + piece % 2];
                    } else {
                        value += bias;
                    }
                    if (arguments.flags & OUT_IS_F32) {
                        float* out = static_cast<float*>(arguments.out) + at;
                        *out = arguments.flags & ADD_TO_OUT ? *out + value : value;
                    } else {
                        Element* out = static_cast<Element*>(arguments.out) + at;
                        *out = from_float<Element>(arguments.flags & ADD_TO_OUT ? to_float(*out) + value : value);
                    }
                }
            }
        }
    }
}

// Leaves this block's part of a tile for the last of those that share it; true for that one, which then has the sum.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ bool gather(float (&c)[2][ROWS / 8][4], const Arguments<Element>& arguments, const Line& line,
                                       uint32_t shared, uint32_t tile) {
    constexpr uint32_t VALUES = ROWS;  // of a thread: ROWS * 128 in all
    const uint32_t begin = tile * arguments.steps;
    const uint32_t first = line.block_of(begin), last = line.block_of(begin + arguments.steps - 1);
    float* flat = &c[0][0][0];
    // A block has at most one part that begins inside a tile, its first, and one that does not, its last.
    const auto part = [&](uint32_t block) {
        const uint32_t slot = 2 * block + (line.start(block) <= begin ? 1u : 0u);
        return arguments.parts + static_cast<uint64_t>(slot) * (VALUES * MULTIPLIERS) + threadIdx.x * 4;
    };
    float* own = part(blockIdx.x);
#pragma unroll
    for (uint32_t four = 0; four < VALUES / 4; ++four) {
        __stcg(reinterpret_cast<float4*>(own + four * 4 * MULTIPLIERS),
               make_float4(flat[four * 4], flat[four * 4 + 1], flat[four * 4 + 2], flat[four * 4 + 3]));
    }
    __threadfence();
    part_sync(1, MULTIPLIERS);
    const uint32_t word = shared + Stage<ROWS>::WORD_AT;
    if (threadIdx.x == 0) {
        const uint32_t before = atomicAdd(arguments.counters + tile, 1u);
        if (before == last - first) {
            arguments.counters[tile] = 0;
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(before) : "memory");
    }
    part_sync(1, MULTIPLIERS);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(word) : "memory");
    if (before != last - first) {
        return false;
    }
    __threadfence();
#pragma unroll
    for (uint32_t i = 0; i < VALUES; ++i) {
        flat[i] = 0.0f;
    }
#pragma unroll(ROWS <= 16 ? 4 : 1)
    for (uint32_t block = first; block <= last; ++block) {
        const float* from = part(block);
#pragma unroll
        for (uint32_t four = 0; four < VALUES / 4; ++four) {
            const float4 held = __ldcg(reinterpret_cast<const float4*>(from + four * 4 * MULTIPLIERS));
            flat[four * 4] += held.x;
            flat[four * 4 + 1] += held.y;
            flat[four * 4 + 2] += held.z;
            flat[four * 4 + 3] += held.w;
        }
    }
    return true;
}

// A warpgroup multiplies what comes.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void multiply(const Arguments<Element>& arguments, const Line& line, uint32_t shared,
                                         uint32_t first, uint32_t last) {
    using S = Stage<ROWS>;
    constexpr uint64_t LAYOUT = matrix_layout<64>(0, 8 * COLUMNS * 2);
    wait_for_previous_kernel();
    uint32_t stage = 0, parity = 0;
    for (uint32_t unit = first; unit < last;) {
        const uint32_t tile = unit / arguments.steps;
        const uint32_t begin = tile * arguments.steps;
        const uint32_t end = min(begin + arguments.steps, last);
        const bool whole = unit == begin && end == begin + arguments.steps;
        float c[2][ROWS / 8][4];
        int add = 0;
        for (; unit < end; ++unit) {
            barrier_wait(shared + S::FULL_AT + 8 * stage, parity);
            const uint32_t at = shared + stage * S::BYTES;
            hold(c[0]);
            hold(c[1]);
            products_begin();
#pragma unroll
            for (uint32_t k = 0; k < COLUMNS / 16; ++k) {
                const uint64_t x = matrix_at(LAYOUT, at + 2 * HALF_BYTES + 32 * k);
                FewColumns<Element, ROWS>::multiply(c[0], matrix_at(LAYOUT, at + 32 * k), x, add);
                FewColumns<Element, ROWS>::multiply(c[1], matrix_at(LAYOUT, at + HALF_BYTES + 32 * k), x, add);
                add = 1;
            }
            products_end();
            products_wait<0>();
            hold(c[0]);
            hold(c[1]);
            if (threadIdx.x % 32 == 0) {
                barrier_arrive(shared + S::EMPTY_AT + 8 * stage);
            }
            if (++stage == S::COUNT) {
                stage = 0;
                parity ^= 1;
            }
        }
        if (whole || gather<Element, ROWS>(c, arguments, line, shared, tile)) {
            finish<Element, ROWS, GATED>(c, arguments, tile);
        }
    }
}

template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void few(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments) {
    extern __shared__ __align__(1024) uint8_t stages[];
    using S = Stage<ROWS>;
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(stages));
    if (threadIdx.x == MULTIPLIERS) {
        fetch_map(weight);
        fetch_map(x);
        for (uint32_t stage = 0; stage < S::COUNT; ++stage) {
            barrier_init(shared + S::FULL_AT + 8 * stage, 1);
            barrier_init(shared + S::EMPTY_AT + 8 * stage, MULTIPLIERS / 32);
        }
        barrier_init_done();
    }
    __syncthreads();
    const uint32_t tile_features = GATED ? HALF_TILE : 2 * HALF_TILE;
    Line line;
    line.units = (arguments.features + tile_features - 1) / tile_features * arguments.steps;
    line.blocks = min(gridDim.x, line.units);
    if (blockIdx.x >= line.blocks) {
        wait_for_previous_kernel();
        return;
    }
    const uint32_t first = line.start(blockIdx.x), last = line.start(blockIdx.x + 1);
    if (threadIdx.x < MULTIPLIERS) {
        multiply<Element, ROWS, GATED>(arguments, line, shared, first, last);
    } else if (threadIdx.x == MULTIPLIERS) {
        copy<Element, ROWS, GATED>(weight, x, arguments, shared, first, last);
    }
}

#define LINEAR_FEW(name, Element, ROWS)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        linear_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,     \
                                    void* out, const Element* bias, float* parts, uint32_t* counters,                  \
                                    uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps,              \
                                    uint32_t flags, uint32_t ahead, uint32_t lead) {                                   \
        few<Element, ROWS, false>(                                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, flags, ahead, lead});            \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        gate_up_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,    \
                                     Element* out, float* parts, uint32_t* counters, uint32_t out_pitch,               \
                                     uint32_t rows, uint32_t features, uint32_t steps, uint32_t ahead,                 \
                                     uint32_t lead) {                                                                  \
        few<Element, ROWS, true>(weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, 0, ahead, lead});     \
    }
#define KERNEL(name, Element)                                                                                          \
    LINEAR_FEW(name, Element, 8) LINEAR_FEW(name, Element, 16) LINEAR_FEW(name, Element, 32)                           \
    LINEAR_FEW(name, Element, 64)
FOR_EACH_ACTIVATION(KERNEL)
