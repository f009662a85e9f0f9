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
// parts     [2 * grid, PART_NUMBERS] f32, scratch: what is in it before does not matter
// counters  [tiles]                 u32, zeros before the first launch, and zeros again after each
// steps     div_ceil(in, 128)
// tiles     how many tiles the features are cut into, all as tall as can be alike
// tile_rows rows of the tallest, div_ceil(features, tiles) <= 128; gate_up_few: 16 * div_ceil(features / 8, tiles)
// flags     ADD_TO_OUT: add to what is in out; OUT_IS_F32
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

#include "contract.cuh"
#include "few_pieces.cuh"
#include "few_stages.cuh"
#include "wgmma.cuh"

// Counters of as many streams as may launch at the same time: each must have its own, here or elsewhere.
using contract::linear_few::STREAM_COUNTERS;
using contract::linear_few::STREAMS;
extern "C" __device__ uint32_t linear_few_counters[STREAMS * STREAM_COUNTERS] = {};

// Leaves this block's part of a tile for the last of those that share it; true for that one, which then has the sum.
template <typename Element, uint32_t ROWS>
__device__ __forceinline__ bool gather(float (&c)[ROWS / 8][4], const Arguments<Element>& arguments, const Line& line,
                                       uint32_t shared, uint32_t tile) {
    constexpr uint32_t VALUES = ROWS / 2;  // of a thread
    static_assert(VALUES * MULTIPLIERS == contract::linear_few::PART_NUMBERS<ROWS>, "scratch is made of such parts");
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
                    Warpgroup<Element>::multiply(c, matrix_at(LAYOUT, weight_at + 32 * k),
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
#define KERNEL(name, Element) FOR_EACH_FEW_ROWS(LINEAR_FEW, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (multiprocessors), or tiles * steps if that is less, and even; block (THREADS); dynamic shared memory
// SHARED_BYTES<ROWS> (contract::linear_few), for which the function's limit has to be raised first. ROWS is the least of 8,
// 16, 32, 64 that rows fit in. Clusters of two are compiled in. May be launched with programmatic stream serialization, and
// should be. parts and counters: see above.
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
