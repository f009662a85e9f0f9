// Products of few rows: a step of decoding, which is bound by reading the weights once.
// Targets: sm_90a
//
// linear_few_<type>_r<ROWS>     out = x * weight^T (+ bias) (+ out)
// gate_up_few_<type>_r<ROWS>    out = silu(x * gate^T) * (x * up^T)   (SwiGLU, Shazeer 2020, arXiv 2002.05202)
//
// <type> is bf16 or f16, ROWS is 8, 16, 32 or 64: the most rows that the kernel takes.
//
// weight    [features, in]          as a tensor map; gate_up_few: [2 * features, in], gate rows, then up rows
// x         [rows, in]              as a tensor map, 1 <= rows <= ROWS
// out       [rows, features]        the same type, or f32 if flags say so; rows out_pitch elements apart, any alignment
// bias      [features]              the same type, or null
// parts     [2 * grid, ROWS * 128]  f32, scratch: what is in it before does not matter
// counters  [tiles]                 u32, zeros before the first launch, and zeros again after each
// steps     div_ceil(in, 64)
// tiles     how many tiles the features are cut into, all as tall as can be alike
// tile_rows rows of the tallest, div_ceil(features, tiles) <= 128; gate_up_few: 16 * div_ceil(features / 8, tiles)
// flags     1: add to what is in out; 2: out is f32
//
// Sums are f32 on the tensor cores, with one rounding at the end; gate and up are not rounded before they are
// multiplied. The same bits every time for the same shape, kernel, grid and tile_rows: the order of additions does
// not depend on who comes last. A NaN stays in its row of x, or in the features whose weights have it. `in` is a
// multiple of 8, rows of x and weight start at multiples of 16 bytes, and gate_up_few wants features to be a multiple
// of 8: that is what the tensor maps need. Any other size is right: places past an edge count as zeros, and nothing is
// written there. out must not overlap x. Launches that follow each other in one stream may share parts and counters;
// others must not.
//
// The first copies of weights do not wait for the kernel in front. Whoever writes weights synchronises before it
// launches this with programmatic stream serialization.
//
// The work is a line of units: one tile after the other, each in steps of 64 columns. Blocks take
// equal stretches of the line ("Stream-K", Osama et al. 2023, arXiv
// 2301.03598): who has only part of a tile leaves it in `parts`, and the last to come adds them up. One warp copies,
// two warpgroups multiply: the weight is the tall operand of wgmma, x the narrow one, so that few rows waste little. A
// block has a multiprocessor without another of its kind: shares are equal only while each has the bandwidth of a whole
// one. Started early, a block comes where the one in front has just ended, and fills its stages while others end still.

#include "element.cuh"
#include "few_rows.cuh"
#include "hopper_cluster.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"

constexpr uint32_t COLUMNS = 64;  // of a step
constexpr uint32_t ROW_BYTES = COLUMNS * 2;
constexpr uint32_t TILE_ROWS_MAX = 128;
constexpr uint32_t HALF_ROWS = 64;  // of the tallest tile: what one wgmma takes
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t MULTIPLIERS = 2 * WARPGROUP;  // threads
constexpr uint32_t THREADS = MULTIPLIERS + 32;
constexpr uint32_t STAGES_MAX = 40;
constexpr uint32_t PAIR_FROM = PAIRS;
constexpr uint32_t STREAMS = 8;  // that may launch at the same time
constexpr uint32_t STREAM_COUNTERS = 4096;

// Counters of so many streams: each must have its own, here or elsewhere.
extern "C" __device__ uint32_t linear_few_counters[STREAMS * STREAM_COUNTERS] = {};

// Bits of `flags`.
constexpr uint32_t ADD_TO_OUT = 1;
constexpr uint32_t OUT_IS_F32 = 2;

// Blocks that share what they copy of x, and each have a tile of their own.
template <uint32_t ROWS>
constexpr uint32_t TEAM = ROWS >= PAIR_FROM ? 2 : 1;

// Shared memory: stages, then what one warpgroup tells the other, barriers, and a word for all.
template <uint32_t ROWS>
struct Shared {
    static constexpr uint32_t TOLD_BYTES = HALF_ROWS * ROWS * 4;
    static constexpr uint32_t BARRIER_BYTES = 2 * 8 * STAGES_MAX + 64;
    // More than half of a multiprocessor's 228 KiB, so that no two blocks share one, and not all of it: small kernels
    // that stand between two of these in the stream find room beside them.
    static constexpr uint32_t TOLD_AT = ((ROWS == 64 ? LIMIT_KIB : 160) * 1024 - BARRIER_BYTES - TOLD_BYTES) / 1024 * 1024;
    static constexpr uint32_t FULL_AT = TOLD_AT + TOLD_BYTES;
    static constexpr uint32_t EMPTY_AT = FULL_AT + 8 * STAGES_MAX;
    static constexpr uint32_t WORD_AT = EMPTY_AT + 8 * STAGES_MAX;
    static constexpr uint32_t BYTES = WORD_AT + 64;
};

// A stage: a step of a tile's rows of the weight, then the same step of x.
struct Stages {
    uint32_t weight_bytes;  // whole swizzles
    uint32_t bytes;
    uint32_t count;
    uint32_t copied;  // bytes

    template <uint32_t ROWS>
    static __device__ __forceinline__ Stages of(uint32_t tile_rows) {
        Stages stages;
        stages.weight_bytes = (tile_rows + 7) / 8 * 8 * ROW_BYTES;
        stages.bytes = stages.weight_bytes + ROWS * ROW_BYTES;
        stages.copied = (tile_rows + ROWS) * ROW_BYTES;
        // wgmma reads 64 rows, or twice as many, whatever stands there; behind the last stage is room for them too.
        const uint32_t read = (tile_rows <= HALF_ROWS ? HALF_ROWS : TILE_ROWS_MAX) * ROW_BYTES;
        const uint32_t behind = read > stages.bytes ? read - stages.bytes : 0u;
        stages.count = min(STAGES_MAX, (Shared<ROWS>::TOLD_AT - behind) / stages.bytes);
        if (tile_rows <= HALF_ROWS) {
            // A warpgroup takes every other step: a stage is always the same one's, which then misses no turn of it.
            stages.count = stages.count / 2 * 2;
        }
        return stages;
    }
};

// The stretches of the line that blocks take, or teams of them.
struct Line {
    uint32_t units;
    uint32_t teams;

    __device__ __forceinline__ uint32_t start(uint32_t team) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(units) * team / teams);
    }
    __device__ __forceinline__ uint32_t team_of(uint32_t unit) const {
        return static_cast<uint32_t>(((static_cast<uint64_t>(unit) + 1) * teams - 1) / units);
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
    uint32_t tiles;
    uint32_t tile_rows;
    uint32_t flags;
};

// The first feature of a tile. All tiles are as tall as can be alike; a gated one has whole groups of eight.
template <typename Element, bool GATED>
__device__ __forceinline__ uint32_t first_feature(const Arguments<Element>& arguments, uint32_t tile) {
    constexpr uint32_t GROUP = GATED ? 8 : 1;
    const uint64_t groups = arguments.features / GROUP;
    return static_cast<uint32_t>(groups * tile / arguments.tiles) * GROUP;
}

// Gated, the map puts eight rows of up behind the same eight of the gate, so that one thread has both of a feature.
template <typename Element, uint32_t ROWS, bool GATED>
struct Place {
    const TensorMap& weight;
    const Arguments<Element>& arguments;
    uint32_t tile;
    uint32_t column;
    uint32_t row;  // gated: group of eight

    __device__ __forceinline__ Place(const TensorMap& weight, const Arguments<Element>& arguments, uint32_t unit,
                                     uint32_t rank)
        : weight(weight), arguments(arguments) {
        tile = unit / arguments.steps * TEAM<ROWS> + rank;
        column = unit % arguments.steps * COLUMNS;
        find_row();
    }
    __device__ __forceinline__ void find_row() {
        row = first_feature<Element, GATED>(arguments, tile) / (GATED ? 8 : 1);
    }
    __device__ __forceinline__ void copy(uint32_t stage, uint32_t barrier) const {
        if (GATED) {
            copy_box_once(stage, weight, barrier, column, 0, 0, row);
        } else {
            copy_box_once(stage, weight, barrier, column, row);
        }
    }
    __device__ __forceinline__ void advance() {
        column += COLUMNS;
        if (column == arguments.steps * COLUMNS) {
            column = 0;
            tile += TEAM<ROWS>;
            find_row();
        }
    }
};

// One thread keeps the stages full.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void copy(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments,
                                     const Stages& stages, uint32_t shared, uint32_t rank, uint32_t first,
                                     uint32_t last) {
    Place<Element, ROWS, GATED> place(weight, arguments, first, rank);
    const auto copy_x = [&](uint32_t stage, uint32_t column) {
        const uint32_t at = shared + stage * stages.bytes + stages.weight_bytes;
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage;
        if constexpr (TEAM<ROWS> == 1) {
            copy_box(at, x, full, column, 0);
        } else {
            constexpr uint32_t OWN = ROWS / TEAM<ROWS>;
            copy_box_to((1 << TEAM<ROWS>) - 1, at + rank * OWN * ROW_BYTES, x, full, column, rank * OWN);
        }
    };
    const uint32_t begin = place.column;
    const uint32_t held = min(stages.count, last - first);
    for (uint32_t stage = 0; stage < held; ++stage) {
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage;
        barrier_arrive_expecting(full, stages.copied);
        place.copy(shared + stage * stages.bytes, full);
        place.advance();
    }
    wait_for_previous_kernel();
    if (TEAM<ROWS> > 1) {
        cluster_wait();
    }
    uint32_t column = begin;
    for (uint32_t stage = 0; stage < held; ++stage) {
        copy_x(stage, column);
        column = column + COLUMNS == arguments.steps * COLUMNS ? 0 : column + COLUMNS;
    }
    uint32_t stage = 0, parity = 0;
    for (uint32_t unit = first + held; unit < last; ++unit) {
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage, at = shared + stage * stages.bytes;
        barrier_wait(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, parity);
#ifdef NO_X
        barrier_arrive_expecting(full, stages.copied - ROWS * ROW_BYTES);
        place.copy(at, full);
#else
        barrier_arrive_expecting(full, stages.copied);
        place.copy(at, full);
        copy_x(stage, place.column);
#endif
        place.advance();
        if (++stage == stages.count) {
            stage = 0;
            parity ^= 1;
        }
    }
}

__device__ __forceinline__ float silu(float gate) {
    // exp overflows to infinity for a very negative gate, and the quotient is then a zero.
    return __fdividef(gate, 1.0f + __expf(-gate));
}

// Writes COUNT features that a thread has of a tile: values[feature][column of C].
template <typename Out, typename Element, uint32_t ROWS, uint32_t COUNT>
__device__ __forceinline__ void write(const float (&values)[COUNT][ROWS / 4], const Arguments<Element>& arguments,
                                      const uint32_t (&features)[COUNT]) {
    const uint32_t first_row = threadIdx.x % 4 * 2;
    Out* out = static_cast<Out*>(arguments.out);
    const auto at = [&](uint32_t row, uint32_t feature) {
        return out + static_cast<uint64_t>(row) * arguments.out_pitch + feature;
    };
    const auto inside = [&](uint32_t row, uint32_t feature) {
        return row < arguments.rows && feature < arguments.features;
    };
    // All reads before the first write: the compiler cannot know that they do not overlap.
    Out before[COUNT][ROWS / 4] = {};
#ifdef NO_WRITE
    if (arguments.rows < 1000) {
        float all = 0;
        for (uint32_t i = 0; i < COUNT * (ROWS / 4); ++i) all += values[i % COUNT][i / COUNT];
        if (all != 12345.0f) return;
    }
#endif
#ifdef NO_ADD
    if (false) {
#else
    if (arguments.flags & ADD_TO_OUT) {
#endif
#pragma unroll
        for (uint32_t i = 0; i < COUNT * (ROWS / 4); ++i) {
            const uint32_t own = i % COUNT, column = i / COUNT, row = column / 2 * 8 + first_row + column % 2;
            before[own][column] = inside(row, features[own]) ? *at(row, features[own]) : from_float<Out>(0.0f);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < COUNT * (ROWS / 4); ++i) {
        const uint32_t own = i % COUNT, column = i / COUNT, row = column / 2 * 8 + first_row + column % 2;
        if (inside(row, features[own])) {
            const float value = values[own][column];
            *at(row, features[own]) =
                from_float<Out>(arguments.flags & ADD_TO_OUT ? to_float(before[own][column]) + value : value);
        }
    }
}

// Writes a tile that is summed up; `warp` is the one whose rows of the tile this warp has.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void finish(const float (&c)[ROWS / 8][4], const Arguments<Element>& arguments,
                                       uint32_t tile, uint32_t warp) {
    constexpr uint32_t COUNT = GATED ? 1 : 2;
    const uint32_t group = threadIdx.x % 32 / 4;
    float values[COUNT][ROWS / 4];
    uint32_t features[COUNT];
    // Rows behind the tile's are those of another, or nothing.
    const uint32_t first = first_feature<Element, GATED>(arguments, tile);
    const uint32_t end = first_feature<Element, GATED>(arguments, tile + 1);
    const auto feature_of = [&](uint32_t within) { return first + within < end ? first + within : 0xffffffffu; };
    if constexpr (GATED) {
        features[0] = feature_of(warp * 8 + group);
#pragma unroll
        for (uint32_t column = 0; column < ROWS / 4; ++column) {
            values[0][column] = silu(c[column / 2][column % 2]) * c[column / 2][2 + column % 2];
        }
    } else {
#pragma unroll
        for (uint32_t low = 0; low < 2; ++low) {
            features[low] = feature_of(warp * 16 + low * 8 + group);
            const bool biased = arguments.bias != nullptr && features[low] < arguments.features;
            const float bias = biased ? to_float(arguments.bias[features[low]]) : 0.0f;
#pragma unroll
            for (uint32_t column = 0; column < ROWS / 4; ++column) {
                values[low][column] = c[column / 2][low * 2 + column % 2] + bias;
            }
        }
    }
    if (!GATED && arguments.flags & OUT_IS_F32) {
        write<float, Element, ROWS>(values, arguments, features);
    } else {
        write<Element, Element, ROWS>(values, arguments, features);
    }
}

// Leaves this block's part of a tile for the last of those that share it; true for that one, which then has the sum.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ bool gather(float (&c)[ROWS / 8][4], const Arguments<Element>& arguments, const Line& line,
                                       uint32_t shared, uint32_t rank, uint32_t tile) {
    constexpr uint32_t VALUES = ROWS / 2;  // of a thread
    // Parts that are read at once: as many as registers hold.
    constexpr uint32_t AT_ONCE = ROWS == 64 ? 2 : 4;
    const uint32_t begin = tile / TEAM<ROWS> * arguments.steps, team = blockIdx.x / TEAM<ROWS>;
    const uint32_t first = line.team_of(begin), others = line.team_of(begin + arguments.steps - 1) - first;
    float* flat = &c[0][0];
    // A block has at most one part that begins inside a tile, its first, and one that does not, its last.
    const auto part = [&](uint32_t team) {
        const uint32_t slot = 2 * (team * TEAM<ROWS> + rank) + (line.start(team) <= begin ? 1u : 0u);
        return arguments.parts + static_cast<uint64_t>(slot) * (VALUES * MULTIPLIERS) + threadIdx.x * 4;
    };
    float* own = part(team);
#pragma unroll
    for (uint32_t four = 0; four < VALUES / 4; ++four) {
        __stcg(reinterpret_cast<float4*>(own + four * 4 * MULTIPLIERS),
               make_float4(flat[four * 4], flat[four * 4 + 1], flat[four * 4 + 2], flat[four * 4 + 3]));
    }
    part_sync(1, MULTIPLIERS);
    const uint32_t word = shared + Shared<ROWS>::WORD_AT;
    if (threadIdx.x == 0) {
        // What all threads wrote is seen by whoever sees this: the barrier orders it before.
        __threadfence();
        const uint32_t before = atomicAdd(arguments.counters + tile, 1u);
        __threadfence();
        if (before == others) {
            arguments.counters[tile] = 0;
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(before) : "memory");
    }
    part_sync(1, MULTIPLIERS);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(word) : "memory");
    if (before != others) {
        return false;
    }
    // The others' parts in their order, and this block's own in its place among them.
    const uint32_t place = team - first;
    float sum[VALUES] = {};
    const auto add_own = [&] {
#pragma unroll
        for (uint32_t i = 0; i < VALUES; ++i) {
            sum[i] += flat[i];
        }
    };
#pragma unroll 1
    for (uint32_t other = 0; other < others; other += AT_ONCE) {
        float4 held[AT_ONCE][VALUES / 4];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            const uint32_t at = min(other + i, others - 1);
            const float* from = part(first + at + (at >= place ? 1u : 0u));
#pragma unroll
            for (uint32_t four = 0; four < VALUES / 4; ++four) {
                held[i][four] = __ldcg(reinterpret_cast<const float4*>(from + four * 4 * MULTIPLIERS));
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; ++i) {
            if (other + i == place) {
                add_own();
            }
            if (other + i < others) {
#pragma unroll
                for (uint32_t four = 0; four < VALUES / 4; ++four) {
                    sum[four * 4] += held[i][four].x;
                    sum[four * 4 + 1] += held[i][four].y;
                    sum[four * 4 + 2] += held[i][four].z;
                    sum[four * 4 + 3] += held[i][four].w;
                }
            }
        }
    }
    if (place == others) {
        add_own();
    }
#pragma unroll
    for (uint32_t i = 0; i < VALUES; ++i) {
        flat[i] = sum[i];
    }
    return true;
}

// Two warpgroups multiply what comes: each half of the rows of a tall tile, or every other step of a low one.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void multiply(const Arguments<Element>& arguments, const Line& line, const Stages& stages,
                                         uint32_t shared, uint32_t rank, uint32_t first, uint32_t last) {
    constexpr uint64_t LAYOUT = matrix_layout<COLUMNS>(0, 8 * ROW_BYTES);
    const uint32_t warpgroup = threadIdx.x / WARPGROUP;
    const bool low = arguments.tile_rows <= HALF_ROWS;
    const uint32_t half = low ? 0u : warpgroup * HALF_ROWS * ROW_BYTES;
    const uint32_t told = shared + Shared<ROWS>::TOLD_AT + threadIdx.x % WARPGROUP * 4;
    wait_for_previous_kernel();
    if (TEAM<ROWS> > 1) {
        cluster_wait();
    }
    uint32_t stage = 0, parity = 0;
    for (uint32_t unit = first; unit < last;) {
        const uint32_t tile = unit / arguments.steps * TEAM<ROWS> + rank;
        const uint32_t begin = unit / arguments.steps * arguments.steps;
        const uint32_t end = min(begin + arguments.steps, last);
        const bool whole = unit == begin && end == begin + arguments.steps;
        float c[ROWS / 8][4] = {};
        for (; unit < end; ++unit) {
            if (!low || unit % 2 == warpgroup) {
                barrier_wait(shared + Shared<ROWS>::FULL_AT + 8 * stage, parity);
                const uint32_t at = shared + stage * stages.bytes;
                hold(c);
                products_begin();
#pragma unroll
                for (uint32_t k = 0; k < COLUMNS / 16; ++k) {
                    FewColumns<Element, ROWS>::multiply(c, matrix_at(LAYOUT, at + half + 32 * k),
                                                        matrix_at(LAYOUT, at + stages.weight_bytes + 32 * k), 1);
                }
                products_end();
                products_wait<0>();
                hold(c);
                if (threadIdx.x % 32 == 0) {
                    barrier_arrive(shared + Shared<ROWS>::EMPTY_AT + 8 * stage);
                    // The other block is still there as long as it will fill this stage again.
                    if (TEAM<ROWS> > 1 && unit + stages.count < last) {
                        barrier_arrive_at(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, rank ^ 1);
                    }
                }
            }
            if (++stage == stages.count) {
                stage = 0;
                parity ^= 1;
            }
        }
#ifdef NO_GATHER
        if (!whole && unit < last) continue;
#else
        if (!whole && !gather<Element, ROWS>(c, arguments, line, shared, rank, tile)) {
            continue;
        }
#endif
        float* flat = &c[0][0];
        if (low && warpgroup == 1) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(told + i * WARPGROUP * 4), "f"(flat[i]) : "memory");
            }
        }
        if (low) {
            part_sync(1, MULTIPLIERS);
        }
        if (low && warpgroup == 0) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                float other;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(told + i * WARPGROUP * 4) : "memory");
                flat[i] += other;
            }
        }
        if (!low || warpgroup == 0) {
            finish<Element, ROWS, GATED>(c, arguments, tile, threadIdx.x / 32);
        }
        if (low && unit < last) {
            part_sync(1, MULTIPLIERS);
        }
    }
}

template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void few(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments) {
    extern __shared__ __align__(1024) uint8_t stages_bytes[];
    let_next_kernel_start();
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(stages_bytes));
    const Stages stages = Stages::of<ROWS>(arguments.tile_rows);
    if (threadIdx.x == MULTIPLIERS) {
        fetch_map(weight);
        fetch_map(x);
        const uint32_t readers = (arguments.tile_rows <= HALF_ROWS ? WARPGROUP : MULTIPLIERS) / 32 * TEAM<ROWS>;
        for (uint32_t stage = 0; stage < stages.count; ++stage) {
            barrier_init(shared + Shared<ROWS>::FULL_AT + 8 * stage, 1);
            barrier_init(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, readers);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (TEAM<ROWS> > 1) {
        cluster_arrive();
    }
    const uint32_t team = blockIdx.x / TEAM<ROWS>, rank = TEAM<ROWS> > 1 ? cluster_rank() : 0u;
    Line line;
    line.units = arguments.tiles / TEAM<ROWS> * arguments.steps;
    line.teams = min(gridDim.x / TEAM<ROWS>, line.units);
    if (team >= line.teams) {
        wait_for_previous_kernel();
        return;
    }
    const uint32_t first = line.start(team), last = line.start(team + 1);
    if (threadIdx.x < MULTIPLIERS) {
        multiply<Element, ROWS, GATED>(arguments, line, stages, shared, rank, first, last);
    } else if (threadIdx.x == MULTIPLIERS) {
        copy<Element, ROWS, GATED>(weight, x, arguments, stages, shared, rank, first, last);
    }
}

// Bounds of two blocks, though a multiprocessor has one: registers are left for the small kernels too.
#define ALONE __launch_bounds__(THREADS, 2)
#if PAIRS == 64
#define IN_PAIRS __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
#else
#define IN_PAIRS __launch_bounds__(384, 1)
#endif
#define LINEAR_FEW(name, Element, ROWS, BOUNDS)                                                                        \
    extern "C" __global__ void BOUNDS                                                                                  \
        linear_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,     \
                                    void* out, const Element* bias, float* parts, uint32_t* counters,                  \
                                    uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps,              \
                                    uint32_t tiles, uint32_t tile_rows, uint32_t flags) {                              \
        few<Element, ROWS, false>(                                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags});       \
    }                                                                                                                  \
    extern "C" __global__ void BOUNDS                                                                                  \
        gate_up_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,    \
                                     Element* out, float* parts, uint32_t* counters, uint32_t out_pitch,               \
                                     uint32_t rows, uint32_t features, uint32_t steps, uint32_t tiles,                 \
                                     uint32_t tile_rows) {                                                             \
        few<Element, ROWS, true>(                                                                                      \
            weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, 0});        \
    }
#define KERNEL(name, Element)                                                                                          \
    LINEAR_FEW(name, Element, 8, ALONE) LINEAR_FEW(name, Element, 16, ALONE)                                           \
    LINEAR_FEW(name, Element, 32, ALONE) LINEAR_FEW(name, Element, 64, IN_PAIRS)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (multiprocessors), or tiles * steps if that is less; block (288); dynamic shared memory
//   (160 * 1024 - 704 - 256 * ROWS) / 1024 * 1024 + 256 * ROWS + 704
// bytes, for which the function's limit has to be raised first. ROWS is the least of 8, 16, 32, 64 that rows fit in.
// May be launched with programmatic stream serialization, and should be. parts and counters: see above.
//
// Any tiles in the range of tile_rows is right. Four blocks a tile (a quarter of a multiple of the multiprocessors) were
// the fastest cut for a whole step; tiles of a block's own are too low there for the copy engine. Two blocks of this on a
// multiprocessor, started early, took half as long again as one after the other: hence their size. Fetching ahead into
// the L2 cache while the kernel in front ends was slower, and so were 200 KiB.
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE,
// swizzle 128B, L2 promotion 128 bytes (256 were slower), out of bounds NONE (zeros), and
//   weight of linear_few    rank 2, dimensions {in, features}, strides {2 * in} bytes, box {64, tile_rows}
//   weight of gate_up_few   rank 4, dimensions {in, 8, 2, features / 8}, strides {2 * in, 2 * in * features, 16 * in}
//                           bytes, box {64, 8, 2, tile_rows / 16}
//   x                       rank 2, dimensions {in, rows}, strides {2 * pitch} bytes, box {64, ROWS}
// Those of the weights last as long as the weights; that of x belongs to one address and number of rows.
