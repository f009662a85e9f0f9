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
// steps     div_ceil(in, 128)
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
// The work is a line of units: one tile after the other, each in steps of 128 columns. Blocks take equal stretches of
// the line ("Stream-K", Osama et al. 2023, arXiv 2301.03598): who has only part of a tile leaves it in `parts`, and the
// last to come adds them up. That costs the way to the L2 cache and back three times over, at the very end. So blocks
// are clusters of two, and a tile that two of a cluster have to themselves is added up in their shared memory instead,
// each warpgroup finishing some of the rows of x.
//
// One warp copies, two warpgroups multiply, and one warp writes the tiles behind which a block has more to do. The
// weight is the tall operand of wgmma, x the narrow one, so that few rows waste little. A block has a multiprocessor
// without another of its kind: shares are equal only while each has the bandwidth of a whole one. Started early, a
// block comes where the one in front has just ended, and fills its stages while others end still.

#include "element.cuh"
#include "few_rows.cuh"
#include "hopper_cluster.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"

constexpr uint32_t CHUNKS = 2;          // of a step, one beside the other
constexpr uint32_t CHUNK_COLUMNS = 64;  // what one swizzle spans
constexpr uint32_t COLUMNS = CHUNKS * CHUNK_COLUMNS;
constexpr uint32_t ROW_BYTES = CHUNK_COLUMNS * 2;  // of a row of a chunk
constexpr uint32_t TILE_ROWS_MAX = 128;
constexpr uint32_t HALF_ROWS = 64;  // of the tallest tile: what one wgmma takes
constexpr uint32_t WARPGROUP = 128;
constexpr uint32_t MULTIPLIERS = 2 * WARPGROUP;  // threads
constexpr uint32_t COPIER = MULTIPLIERS;         // the first thread of the warp that copies; one more writes
constexpr uint32_t TEAM = 2;  // blocks of a cluster
constexpr uint32_t STAGES_MAX = 40;
constexpr uint32_t STREAMS = 8;  // that may launch at the same time
constexpr uint32_t STREAM_COUNTERS = 4096;

// Counters of so many streams: each must have its own, here or elsewhere.
extern "C" __device__ uint32_t linear_few_counters[STREAMS * STREAM_COUNTERS] = {};

// Names of barriers of a part of the block; 0 is everyone's.
constexpr uint32_t MULTIPLIERS_MEET = 1;
constexpr uint32_t TILE_TO_WRITE = 2;
constexpr uint32_t WRITER_IS_FREE = 3;

// Bits of `flags`.
constexpr uint32_t ADD_TO_OUT = 1;
constexpr uint32_t OUT_IS_F32 = 2;

// Shared memory: stages, then what warps tell each other, barriers, and a word for all. More than half of a
// multiprocessor's 228 KiB, so that no two blocks share one, and not all of it: small kernels that stand between two of
// these in the stream find room beside them.
template <uint32_t ROWS>
struct Shared {
    // The sums of a tall tile, and for each warpgroup what three others send it.
    static constexpr uint32_t TOLD_BYTES = ROWS < 32 ? 12 * 1024 : TILE_ROWS_MAX * ROWS * 4;
    static constexpr uint32_t TOLD_AT = (ROWS < 32 ? 156 : ROWS < 64 ? 144 : 180) * 1024;
    static constexpr uint32_t FULL_AT = TOLD_AT + TOLD_BYTES;
    static constexpr uint32_t EMPTY_AT = FULL_AT + 8 * STAGES_MAX;
    static constexpr uint32_t WORD_AT = EMPTY_AT + 8 * STAGES_MAX;
    static constexpr uint32_t TOLD_ALL_AT = WORD_AT + 16;  // barriers, one a warpgroup
    static constexpr uint32_t BYTES = WORD_AT + 64;

    // Where this warpgroup is told.
    static __device__ __forceinline__ uint32_t told_at(uint32_t warpgroup) {
        return TOLD_AT + warpgroup * (TOLD_BYTES / 2);
    }
};

// A stage: the chunks of a step of a tile's rows of the weight, then those of x.
struct Stages {
    uint32_t chunk_bytes;  // of the weight: whole swizzles
    uint32_t weight_bytes;
    uint32_t bytes;
    uint32_t count;
    uint32_t copied;  // bytes

    template <uint32_t ROWS>
    static __device__ __forceinline__ Stages of(uint32_t tile_rows) {
        Stages stages;
        stages.chunk_bytes = (tile_rows + 7) / 8 * 8 * ROW_BYTES;
        stages.weight_bytes = CHUNKS * stages.chunk_bytes;
        stages.bytes = stages.weight_bytes + CHUNKS * ROWS * ROW_BYTES;
        stages.copied = CHUNKS * (tile_rows + ROWS) * ROW_BYTES;
        // wgmma reads 64 rows, or twice as many, whatever stands there: for the last stage that is what warps tell.
        static_assert(Shared<ROWS>::TOLD_BYTES >= HALF_ROWS * ROW_BYTES, "and never what is behind it");
        stages.count = min(STAGES_MAX, Shared<ROWS>::TOLD_AT / stages.bytes);
        return stages;
    }
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

// The features of a tile. Rows behind them are those of another, or nothing.
struct Features {
    uint32_t first;
    uint32_t end;
};

template <typename Element, bool GATED>
__device__ __forceinline__ Features features_of(const Arguments<Element>& arguments, uint32_t tile) {
    return {first_feature<Element, GATED>(arguments, tile), first_feature<Element, GATED>(arguments, tile + 1)};
}

// Gated, the map puts eight rows of up behind the same eight of the gate, so that one thread has both of a feature.
template <typename Element, bool GATED>
struct Place {
    const TensorMap& weight;
    const Arguments<Element>& arguments;
    uint32_t tile;
    uint32_t column;
    uint32_t row;  // gated: group of eight

    __device__ __forceinline__ Place(const TensorMap& weight, const Arguments<Element>& arguments, uint32_t unit)
        : weight(weight), arguments(arguments) {
        tile = unit / arguments.steps;
        column = unit % arguments.steps * COLUMNS;
        find_row();
    }
    __device__ __forceinline__ void find_row() {
        row = first_feature<Element, GATED>(arguments, tile) / (GATED ? 8 : 1);
    }
    __device__ __forceinline__ void copy(const Stages& stages, uint32_t stage, uint32_t barrier) const {
#pragma unroll
        for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
            const uint32_t at = stage + chunk * stages.chunk_bytes, from = column + chunk * CHUNK_COLUMNS;
            if (GATED) {
                copy_box_once(at, weight, barrier, from, 0, 0, row);
            } else {
                copy_box_once(at, weight, barrier, from, row);
            }
        }
    }
    __device__ __forceinline__ void advance() {
        column += COLUMNS;
        if (column == arguments.steps * COLUMNS) {
            column = 0;
            tile += 1;
            find_row();
        }
    }
};

// A step of x from this column on.
template <uint32_t ROWS>
__device__ __forceinline__ void copy_x(const TensorMap& x, uint32_t at, uint32_t barrier, uint32_t column) {
#pragma unroll
    for (uint32_t chunk = 0; chunk < CHUNKS; ++chunk) {
        copy_box(at + chunk * ROWS * ROW_BYTES, x, barrier, column + chunk * CHUNK_COLUMNS, 0);
    }
}

// One thread keeps the stages full.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void copy(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments,
                                     const Stages& stages, uint32_t shared, uint32_t first, uint32_t last) {
    Place<Element, GATED> place(weight, arguments, first);
    const uint32_t held = min(stages.count, last - first);
    uint32_t column = place.column;
    for (uint32_t stage = 0; stage < held; ++stage) {
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage;
        barrier_arrive_expecting(full, stages.copied);
        place.copy(stages, shared + stage * stages.bytes, full);
        place.advance();
    }
    wait_for_previous_kernel();
    for (uint32_t stage = 0; stage < held; ++stage) {
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage;
        copy_x<ROWS>(x, shared + stage * stages.bytes + stages.weight_bytes, full, column);
        column = column + COLUMNS == arguments.steps * COLUMNS ? 0 : column + COLUMNS;
    }
    uint32_t stage = 0, parity = 0;
#pragma unroll 1
    for (uint32_t unit = first + held; unit < last; ++unit) {
        const uint32_t full = shared + Shared<ROWS>::FULL_AT + 8 * stage, at = shared + stage * stages.bytes;
        barrier_wait(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, parity);
        barrier_arrive_expecting(full, stages.copied);
        place.copy(stages, at, full);
        copy_x<ROWS>(x, at + stages.weight_bytes, full, place.column);
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

// What a warp has of a tile that is summed up: 16 of the tile's rows, and GROUPS times eight rows of x.
template <typename Element, uint32_t GROUPS, bool GATED>
struct Piece {
    static constexpr uint32_t FEATURES = GATED ? 1 : 2;  // of a thread
    static constexpr uint32_t VALUES = GROUPS * 2 * FEATURES;

    const Arguments<Element>& arguments;
    uint32_t features[FEATURES];
    uint32_t first_row;
    uint32_t before[VALUES];  // bits of what is added to
    float bias[FEATURES];

    // `warp` is the one whose rows of the tile these are.
    __device__ __forceinline__ Piece(const Arguments<Element>& arguments, Features tile, uint32_t warp,
                                     uint32_t first_group)
        : arguments(arguments), first_row(first_group * 8 + threadIdx.x % 4 * 2) {
#pragma unroll
        for (uint32_t own = 0; own < FEATURES; ++own) {
            const uint32_t feature = tile.first + (warp * FEATURES + own) * 8 + threadIdx.x % 32 / 4;
            features[own] = feature < tile.end ? feature : 0xffffffffu;
        }
    }

    // Runs for each value: its number, its group, which of the group's four it is, and its place in out.
    template <typename Do>
    __device__ __forceinline__ void each(Do&& run) const {
#pragma unroll
        for (uint32_t i = 0; i < VALUES; ++i) {
            const uint32_t own = i % FEATURES, column = i / FEATURES, row = first_row + column / 2 * 8 + column % 2;
            if (row < arguments.rows && features[own] < arguments.features) {
                run(i, column / 2, own * 2 + column % 2,
                    static_cast<uint64_t>(row) * arguments.out_pitch + features[own]);
            }
        }
    }

    // Starts to read what is added. Where sums of others are waited for, it is on its way before.
    __device__ __forceinline__ void fetch() {
        if (GATED) {
            return;
        }
#pragma unroll
        for (uint32_t own = 0; own < FEATURES; ++own) {
            const bool biased = arguments.bias != nullptr && features[own] < arguments.features;
            bias[own] = biased ? to_float(arguments.bias[features[own]]) : 0.0f;
        }
        if (!(arguments.flags & ADD_TO_OUT)) {
            return;
        }
        if (arguments.flags & OUT_IS_F32) {
            const uint32_t* out = static_cast<const uint32_t*>(arguments.out);
            each([&](uint32_t i, uint32_t, uint32_t, uint64_t at) { before[i] = out[at]; });
        } else {
            const uint16_t* out = static_cast<const uint16_t*>(arguments.out);
            each([&](uint32_t i, uint32_t, uint32_t, uint64_t at) { before[i] = out[at]; });
        }
    }

    // Writes the sums, with what was fetched.
    __device__ __forceinline__ void write(const float (&c)[GROUPS][4]) const {
        if constexpr (GATED) {
            each([&](uint32_t, uint32_t group, uint32_t of_four, uint64_t at) {
                const float value = silu(c[group][of_four]) * c[group][2 + of_four];
                static_cast<Element*>(arguments.out)[at] = from_float<Element>(value);
            });
        } else {
            const bool adds = arguments.flags & ADD_TO_OUT;
            if (arguments.flags & OUT_IS_F32) {
                each([&](uint32_t i, uint32_t group, uint32_t of_four, uint64_t at) {
                    const float value = c[group][of_four] + bias[i % FEATURES];
                    static_cast<float*>(arguments.out)[at] = adds ? __uint_as_float(before[i]) + value : value;
                });
            } else {
                each([&](uint32_t i, uint32_t group, uint32_t of_four, uint64_t at) {
                    const float value = c[group][of_four] + bias[i % FEATURES];
                    static_cast<Element*>(arguments.out)[at] =
                        from_float<Element>(adds ? pair_to_floats<Element>(before[i]).x + value : value);
                });
            }
        }
    }
};

// 16 bytes of shared memory.
__device__ __forceinline__ void load_shared(float (&values)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
                 "f"(values[3])
                 : "memory");
}

// Leaves this block's part of a tile for the last of those that share it; true for that one, which then has the sum.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ bool gather(float (&c)[ROWS / 8][4], const Arguments<Element>& arguments, const Line& line,
                                       uint32_t shared, uint32_t tile) {
    constexpr uint32_t VALUES = ROWS / 2;  // of a thread
    // Parts that are read at once: as many as registers hold.
    constexpr uint32_t AT_ONCE = ROWS == 64 ? 2 : 4;
    const uint32_t begin = tile * arguments.steps;
    const uint32_t first = line.block_of(begin), others = line.block_of(begin + arguments.steps - 1) - first;
    float* flat = &c[0][0];
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
    part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
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
    part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(word) : "memory");
    if (before != others) {
        return false;
    }
    // The others' parts in their order, and this block's own in its place among them.
    const uint32_t place = blockIdx.x - first;
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
            if (other + i < others) {
                if (other + i == place) {
                    add_own();
                }
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

// Two warpgroups multiply what comes: this is where one is in the stages.
template <typename Element, uint32_t ROWS>
struct Steps {
    const Stages& stages;
    uint32_t shared;
    uint32_t stage = 0;
    uint32_t parity = 0;

    // Adds what comes from `unit` until `end`: half of the columns of a low tile, or half of the rows of a tall one.
    template <bool LOW>
    __device__ __forceinline__ void add(float (&c)[ROWS / 8][4], uint32_t unit, uint32_t end) {
        constexpr uint64_t LAYOUT = matrix_layout<CHUNK_COLUMNS>(0, 8 * ROW_BYTES);
        const uint32_t warpgroup = threadIdx.x / WARPGROUP;
        constexpr uint32_t OWN = LOW ? CHUNKS / 2 : CHUNKS;
        const uint32_t skipped = LOW ? warpgroup * OWN : 0u;  // chunks
        const uint32_t weight_from = skipped * stages.chunk_bytes + (LOW ? 0u : warpgroup * HALF_ROWS * ROW_BYTES);
        const uint32_t x_from = stages.weight_bytes + skipped * ROWS * ROW_BYTES;
        for (; unit < end; ++unit) {
            barrier_wait(shared + Shared<ROWS>::FULL_AT + 8 * stage, parity);
            const uint32_t at = shared + stage * stages.bytes;
            hold(c);
            products_begin();
#pragma unroll
            for (uint32_t chunk = 0; chunk < OWN; ++chunk) {
                const uint32_t weight_at = at + weight_from + chunk * stages.chunk_bytes;
                const uint32_t x_at = at + x_from + chunk * ROWS * ROW_BYTES;
#pragma unroll
                for (uint32_t k = 0; k < CHUNK_COLUMNS / 16; ++k) {
                    FewColumns<Element, ROWS>::multiply(c, matrix_at(LAYOUT, weight_at + 32 * k),
                                                        matrix_at(LAYOUT, x_at + 32 * k), 1);
                }
            }
            products_end();
            products_wait<0>();
            hold(c);
            if (threadIdx.x % 32 == 0) {
                barrier_arrive(shared + Shared<ROWS>::EMPTY_AT + 8 * stage);
            }
            if (++stage == stages.count) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
};

// The tile that a cluster of blocks has to itself, each block a stretch of its columns. SHARERS warpgroups have sums of
// the same rows of the tile, and share the rows of x among them: each sends the others what is theirs, and finishes its
// own. A block gets here once at most, so that what it is told is never overwritten.
template <typename Element, uint32_t ROWS, bool GATED, uint32_t SHARERS>
__device__ __forceinline__ void multiply_together(const Arguments<Element>& arguments, Steps<Element, ROWS>& steps,
                                                  uint32_t tile, uint32_t first, uint32_t last) {
    constexpr uint32_t GROUPS = ROWS / 8 < SHARERS ? 1 : ROWS / 8 / SHARERS, OWNERS = ROWS / 8 / GROUPS;
    constexpr uint32_t IN_BLOCK = SHARERS / TEAM, SENT_BYTES = GROUPS * WARPGROUP * 16;
    static_assert((SHARERS - 1) * SENT_BYTES <= Shared<ROWS>::TOLD_BYTES / 2, "both warpgroups are told at once");
    const uint32_t warpgroup = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const uint32_t own = cluster_rank() * IN_BLOCK + warpgroup % IN_BLOCK;
    const auto barrier = [&](uint32_t warpgroup) { return steps.shared + Shared<ROWS>::TOLD_ALL_AT + 8 * warpgroup; };
    // Where a warpgroup is told by another one what it finishes of a group of rows.
    const auto place = [&](uint32_t warpgroup, uint32_t from, uint32_t to, uint32_t group) {
        const uint32_t at = (from < to ? from : from - 1) * SENT_BYTES + (group * WARPGROUP + thread) * 16;
        return steps.shared + Shared<ROWS>::told_at(warpgroup) + at;
    };
    const bool is_owner = own < OWNERS;  // eight rows are one warpgroup's
    Piece<Element, GROUPS, GATED> piece(arguments, features_of<Element, GATED>(arguments, tile),
                                        threadIdx.x / 32 % (8 / IN_BLOCK), own * GROUPS);
    if (is_owner) {
        if (thread == 0) {
            barrier_arrive_expecting(barrier(warpgroup), (SHARERS - 1) * SENT_BYTES);
        }
        piece.fetch();
    }
    cluster_wait();
    float c[ROWS / 8][4] = {};
    steps.template add<SHARERS == 2 * TEAM>(c, first, last);
    // Who is told is still there: it waits for this.
#pragma unroll
    for (uint32_t to = 0; to < OWNERS; ++to) {
        if (to != own) {
            const uint32_t there = IN_BLOCK == 2 ? to % 2 : warpgroup;
#pragma unroll
            for (uint32_t group = 0; group < GROUPS; ++group) {
                send_to(to / IN_BLOCK, place(there, own, to, group), barrier(there), c[to * GROUPS + group]);
            }
        }
    }
    if (!is_owner) {
        return;
    }
    barrier_wait_cluster(barrier(warpgroup), 0);
    // In the order of the columns, whoever finishes.
    float sum[GROUPS][4] = {};
#pragma unroll
    for (uint32_t from = 0; from < SHARERS; ++from) {
#pragma unroll
        for (uint32_t group = 0; group < GROUPS; ++group) {
            float part[4];
            if (from != own) {
                load_shared(part, place(warpgroup, from, own, group));
            } else {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    part[i] = c[from < OWNERS ? from * GROUPS + group : 0][i];
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sum[group][i] += part[i];
            }
        }
    }
    piece.write(sum);
}

// Tiles that a block has whole, but for its last: a warp writes them while the others multiply, which makes a step of
// 64 rows faster by one in a hundred.
__device__ __forceinline__ bool is_for_writer(uint32_t begin, uint32_t steps, uint32_t first, uint32_t last) {
    return begin >= first && begin + steps < last;
}

template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void write_tiles(const Arguments<Element>& arguments, uint32_t shared, uint32_t first,
                                            uint32_t last) {
    constexpr uint32_t GROUPS = ROWS < 32 ? ROWS / 8 : 4;  // at once
    const uint32_t threads = arguments.tile_rows <= HALF_ROWS ? WARPGROUP : MULTIPLIERS;
    wait_for_previous_kernel();
    uint32_t tile = (first + arguments.steps - 1) / arguments.steps;
    for (; is_for_writer(tile * arguments.steps, arguments.steps, first, last); ++tile) {
        part_arrive(WRITER_IS_FREE, threads + 32);
        const Features features = features_of<Element, GATED>(arguments, tile);
        part_sync(TILE_TO_WRITE, threads + 32);
#pragma unroll 1
        for (uint32_t warp = 0; warp < threads / 32; ++warp) {
#pragma unroll 1
            for (uint32_t group = 0; group < ROWS / 8; group += GROUPS) {
                float c[GROUPS][4];
                Piece<Element, GROUPS, GATED> piece(arguments, features, warp, group);
                piece.fetch();
#pragma unroll
                for (uint32_t i = 0; i < GROUPS; ++i) {
                    const uint32_t slot = (group + i) * threads + warp * 32 + threadIdx.x % 32;
                    load_shared(c[i], shared + Shared<ROWS>::TOLD_AT + slot * 16);
                }
                piece.write(c);
            }
        }
    }
}

// What a multiplier does from the first to the last unit of its block.
template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void multiply(const Arguments<Element>& arguments, const Line& line, const Stages& stages,
                                         uint32_t shared, uint32_t first, uint32_t last) {
    const uint32_t warpgroup = threadIdx.x / WARPGROUP;
    const bool low = arguments.tile_rows <= HALF_ROWS;
    const uint32_t told = shared + Shared<ROWS>::told_at(1) + threadIdx.x % WARPGROUP * 4;
    Steps<Element, ROWS> steps = {stages, shared};
    wait_for_previous_kernel();
    const uint32_t lead = blockIdx.x / TEAM * TEAM, own = first / arguments.steps, own_begin = own * arguments.steps;
    if (line.start(lead) == own_begin && line.start(lead + TEAM) == own_begin + arguments.steps) {
        if (low) {
            multiply_together<Element, ROWS, GATED, 2 * TEAM>(arguments, steps, own, first, last);
        } else {
            multiply_together<Element, ROWS, GATED, TEAM>(arguments, steps, own, first, last);
        }
        return;
    }
    for (uint32_t unit = first; unit < last;) {
        const uint32_t tile = unit / arguments.steps;
        const uint32_t begin = tile * arguments.steps;
        const uint32_t end = min(begin + arguments.steps, last);
        const bool whole = unit == begin && end == begin + arguments.steps;
        const Features features = features_of<Element, GATED>(arguments, tile);
        float c[ROWS / 8][4] = {};
        if (low) {
            steps.template add<true>(c, unit, end);
        } else {
            steps.template add<false>(c, unit, end);
        }
        unit = end;
        if (!whole && !gather<Element, ROWS>(c, arguments, line, shared, tile)) {
            continue;
        }
        float* flat = &c[0][0];
        if (low && warpgroup == 1) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(told + i * WARPGROUP * 4), "f"(flat[i]) : "memory");
            }
        }
        if (low) {
            part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
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
            if (is_for_writer(begin, arguments.steps, first, last)) {
                const uint32_t threads = low ? WARPGROUP : MULTIPLIERS;
                part_sync(WRITER_IS_FREE, threads + 32);
#pragma unroll
                for (uint32_t group = 0; group < ROWS / 8; ++group) {
                    store_shared(shared + Shared<ROWS>::TOLD_AT + (group * threads + threadIdx.x) * 16, c[group]);
                }
                part_arrive(TILE_TO_WRITE, threads + 32);
            } else {
                constexpr uint32_t GROUPS = ROWS < 32 ? ROWS / 8 : 4;  // at once
#pragma unroll
                for (uint32_t group = 0; group < ROWS / 8; group += GROUPS) {
                    Piece<Element, GROUPS, GATED> piece(arguments, features, threadIdx.x / 32, group);
                    piece.fetch();
                    piece.write(reinterpret_cast<const float(&)[GROUPS][4]>(c[group]));
                }
            }
        }
        if (low && unit < last) {
            part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
        }
    }
}

template <typename Element, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void few(const TensorMap& weight, const TensorMap& x, const Arguments<Element>& arguments) {
    extern __shared__ __align__(1024) uint8_t stages_bytes[];
    let_next_kernel_start();
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(stages_bytes));
    const Stages stages = Stages::of<ROWS>(arguments.tile_rows);
    if (threadIdx.x == COPIER) {
        fetch_map(weight);
        fetch_map(x);
        for (uint32_t stage = 0; stage < stages.count; ++stage) {
            barrier_init(shared + Shared<ROWS>::FULL_AT + 8 * stage, 1);
            barrier_init(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, MULTIPLIERS / 32);
        }
        for (uint32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
            barrier_init(shared + Shared<ROWS>::TOLD_ALL_AT + 8 * warpgroup, 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    cluster_arrive();
    Line line;
    line.units = arguments.tiles * arguments.steps;
    line.blocks = min(gridDim.x, line.units);
    if (blockIdx.x >= line.blocks) {
        wait_for_previous_kernel();
        return;
    }
    const uint32_t first = line.start(blockIdx.x), last = line.start(blockIdx.x + 1);
    // The same in all threads of a warp, as the compiler sees it.
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < MULTIPLIERS / 32) {
        multiply<Element, ROWS, GATED>(arguments, line, stages, shared, first, last);
    } else if (warp == COPIER / 32) {
        if (is_elected()) {
            copy<Element, ROWS, GATED>(weight, x, arguments, stages, shared, first, last);
        }
    } else {
        write_tiles<Element, ROWS, GATED>(arguments, shared, first, last);
    }
}

// The bound lets a thread have 168 registers, which is what adding up parts of 64 rows takes; 128 were slower.
#define IN_TEAMS __cluster_dims__(TEAM, 1, 1) __launch_bounds__(384, 1)
#define LINEAR_FEW(name, Element, ROWS)                                                                                \
    extern "C" __global__ void IN_TEAMS                                                                                \
        linear_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,     \
                                    void* out, const Element* bias, float* parts, uint32_t* counters,                  \
                                    uint32_t out_pitch, uint32_t rows, uint32_t features, uint32_t steps,              \
                                    uint32_t tiles, uint32_t tile_rows, uint32_t flags) {                              \
        few<Element, ROWS, false>(                                                                                     \
            weight, x, {out, bias, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, flags});       \
    }                                                                                                                  \
    extern "C" __global__ void IN_TEAMS                                                                                \
        gate_up_few_##name##_r##ROWS(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,    \
                                     Element* out, float* parts, uint32_t* counters, uint32_t out_pitch,               \
                                     uint32_t rows, uint32_t features, uint32_t steps, uint32_t tiles,                 \
                                     uint32_t tile_rows) {                                                             \
        few<Element, ROWS, true>(                                                                                      \
            weight, x, {out, nullptr, parts, counters, out_pitch, rows, features, steps, tiles, tile_rows, 0});        \
    }
#define KERNEL(name, Element)                                                                                          \
    LINEAR_FEW(name, Element, 8) LINEAR_FEW(name, Element, 16) LINEAR_FEW(name, Element, 32)                           \
    LINEAR_FEW(name, Element, 64)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (multiprocessors), or tiles * steps if that is less, and even; block (320); dynamic shared memory
//   168 * 1024 + 704 for ROWS of 8 and 16,   160 * 1024 + 704 for 32,   212 * 1024 + 704 for 64
// bytes, for which the function's limit has to be raised first. ROWS is the least of 8, 16, 32, 64 that rows fit in.
// Clusters of two are compiled in. May be launched with programmatic stream serialization, and should be. parts and
// counters: see above.
//
// Any tiles in the range of tile_rows is right. Where half as many tiles as multiprocessors are not too tall they are
// the fastest cut: each cluster has one, and nothing goes through parts. Of more features each block takes tiles of its
// own (a multiple of the multiprocessors), and nothing is added up at all. Two blocks of this on a multiprocessor,
// started early, took half as long again as one after the other: hence their size. Fetching ahead into the L2 cache
// while the kernel in front ends was slower. At 64 rows it changed nothing to copy x no more than once, or to share it
// through multicast, and writing whole lines by way of shared memory was slower. x does not come sooner than the
// weights that were asked for before it, though it stands in the L2 cache: with fewer steps of it under way than of
// the weight, in stages of its own, o and qkv took 3 to 15 % longer. Nor was it of use that the multipliers bring
// its first steps (cp.async). Steps of 64 columns, twice as many, made a step of 64 rows slower by two in a hundred.
// Clusters of four have room for 120 blocks only on a card of 132 multiprocessors that was asked.
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, element strides 1, interleave NONE,
// swizzle 128B, L2 promotion 128 bytes (256 were slower), out of bounds NONE (zeros), and
//   weight of linear_few    rank 2, dimensions {in, features}, strides {2 * in} bytes, box {64, tile_rows}
//   weight of gate_up_few   rank 4, dimensions {in, 8, 2, features / 8}, strides {2 * in, 2 * in * features, 16 * in}
//                           bytes, box {64, 8, 2, tile_rows / 16}
//   x                       rank 2, dimensions {in, rows}, strides {2 * pitch} bytes, box {64, ROWS}
// Those of the weights last as long as the weights; that of x belongs to one address and number of rows.
