// GEMMs of many rows with the weights of their experts on Hopper (sm_90a only), for prompt steps.
// Tiles, the ring and the order of warpgroups are as in gemm_large_m.cu.
//
// gated_experts_large_m_<type>   out[place] = activation(x[row] * gate^T) * (x[row] * up^T)
//                             (SwiGLU and GeGLU, arXiv 2002.05202)
// experts_large_m_<type>         out[place] = router weight of the choice * (x[place] * w^T)
//
// experts_large_m_e4m3.cu has variants of both kernels with weights and x in E4M3, which are named
// `_e4m3_blocks` and `_e4m3_rows` as in gemm_large_m_e4m3.cu.
//
// Operands are as in experts.cu, with three differences. The weight is passed as a tensor map. The
// rows of x and out start at multiples of 16 bytes. `in` and `features` are multiples of 8. Sums
// are f32 in the order of columns, rounded once at the end, so the bits of a row do not depend on
// other rows. A NaN in x affects only its row, and a NaN in the weight only its feature.
//
// A cluster of two blocks has a tile of 2 * 128 places of one expert, 128 per block, and 256 rows
// of its weight. Each block loads half of these rows for both blocks. If an expert's last tile has
// at most 128 places, both blocks take all of these places, and each takes half of the weight's
// rows, so that the remainder costs half a tile. A warpgroup whose 64 places are past the end
// multiplies nothing. In the gated kernel, the rows of x are not contiguous, so TMA cannot load
// them as boxes. In both kernels, 128 threads therefore copy x in pieces of 16 bytes (cp.async),
// and announce that a stage is full two stages later, after their copies have completed.

#pragma once

#include "contract.cuh"
#include "element.cuh"
#include "expert_list.cuh"
#include "gate.cuh"
#include "hopper_store.cuh"
#include "kernel_order.cuh"
#include "large_m_stages.cuh"
#include "small_m_formats.cuh"

namespace {

constexpr uint32_t COPY_ROWS = TILE_WEIGHTS / 4;  // rows of the weight in one copy
constexpr uint32_t COPY_BYTES = HALF_BYTES / 2;
constexpr uint32_t TILE_PLACES = BLOCKS * TILE_ROWS;  // places of a cluster's tile
constexpr uint32_t COPY_STAGES_MAX = 2;  // largest number of stages with unfinished copies of x
constexpr uint32_t BEGIN = 2;    // IDs of named barriers; 1 is for counting tiles
constexpr uint32_t ALONE = 3;

struct Pipeline : LargeMPipeline {
    using Ring = LargeMRing;
    static constexpr Release RELEASE = Release::EACH_WARP;
    static constexpr uint32_t LEAD = 2, BEGIN = ::BEGIN;
};
static_assert(Pipeline::LEAD + COPY_STAGES_MAX <= STAGES,
              "the producer must announce LEAD full stages before it waits for a free stage");

template <typename Format>
constexpr uint32_t DEPTH = STEP_ROW_BYTES / sizeof(typename Format::Operand);  // columns of a step

template <typename Format>
struct Arguments {
    const typename Format::Operand* x;
    const uint32_t* choices;
    const uint32_t* starts;
    const float* weights;
    typename Format::Element* out;
    uint32_t x_pitch;
    uint32_t in;
    uint32_t features;
    uint32_t top;
    uint32_t experts;
    uint32_t activation;  // contract::gate
    typename Format::Scales scales;

    // The row of x at a place.
    template <bool GATED>
    __device__ __forceinline__ uint32_t row_of(uint32_t place) const {
        return GATED ? choices[place] / top : place;
    }
};

// The items of a cluster. All clusters share one list of items: all tiles of the weight for one
// tile of places, then all tiles of the weight for the next tile of places. With n clusters, a
// cluster takes every n-th item.
template <bool GATED>
struct Items {
    static constexpr uint32_t COLUMNS = GATED ? TILE_WEIGHTS / 2 : TILE_WEIGHTS;
    const Tiles& tiles;
    const uint32_t* starts;
    const uint32_t experts, across, count;
    uint32_t next;
    // This block's part: half of the tile's places and all of the columns, or, if `is_split`, all
    // places and half of the columns.
    Tile tile = {0, 0, 0};
    uint32_t column = 0;
    bool is_split = false;

    template <typename Format>
    __device__ __forceinline__ Items(const Tiles& tiles, const Arguments<Format>& arguments)
        : tiles(tiles), starts(arguments.starts), experts(arguments.experts),
          across((arguments.features + COLUMNS - 1) / COLUMNS), count(tiles.before[arguments.experts] * across),
          next(blockIdx.x / BLOCKS) {}

    __device__ __forceinline__ bool advance(uint32_t rank) {
        if (next >= count) {
            return false;
        }
        const uint32_t number = next / across;
        tile = tiles.tile<TILE_PLACES>(number, tiles.expert_of(number, experts), starts);
        column = next % across * COLUMNS;
        is_split = tile.end - tile.first <= TILE_ROWS;
        if (is_split) {
            column += rank * (COLUMNS / 2);
        } else {
            tile.first += rank * TILE_ROWS;
            tile.end = min(tile.end, tile.first + TILE_ROWS);
        }
        next += gridDim.x / BLOCKS;
        return true;
    }
};

// Waits until all of this thread's groups of copies except the last `LATER` groups have completed.
template <uint32_t LATER>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Copies the operands of all items to the ring, step by step. Called by a warpgroup: each thread
// copies the same piece of eight rows of x, and one thread also copies the weights.
template <bool GATED, typename Format>
__device__ __forceinline__ void copy(const TensorMap& weight, const Arguments<Format>& arguments, const Tiles& tiles,
                                     uint32_t shared, Pipeline::Barriers& barriers, uint32_t rank) {
    constexpr uint32_t ROWS = TILE_ROWS / (WARPGROUP / 8);  // per thread
    const bool is_first = warp_index() == 0 && is_elected();
    const uint32_t piece = threadIdx.x % 8, row = threadIdx.x / 8;
    const uint32_t steps = (arguments.in + DEPTH<Format> - 1) / DEPTH<Format>;
    Producer<Pipeline> producer{{}, barriers};
    LargeMRing& ring = producer.ring;
    // Number of stages with unfinished copies, and the first of these stages.
    uint32_t under_way = 0, landed = 0;
    const auto say = [&] {
        publish_writes();
        barrier_arrive(shared_address(&barriers.full[landed]));
        landed = landed + 1 == STAGES ? 0 : landed + 1;
        under_way -= 1;
    };
    Items<GATED> items(tiles, arguments);
    while (items.advance(rank)) {
        uint32_t rows[ROWS];
#pragma unroll
        for (uint32_t i = 0; i < ROWS; ++i) {
            const uint32_t place = items.tile.first + row + i * (WARPGROUP / 8);
            rows[i] = 0xffffffffu;
            if (place < items.tile.end) {
                rows[i] = arguments.template row_of<GATED>(place);
            }
        }
        // First rows of the weight for two copies. If this block has rows of both gate and up, the
        // second copy is for the rows of up. Otherwise, its rows follow the rows of the first copy.
        const uint32_t half = items.is_split ? 0 : rank * (GATED ? arguments.features : TILE_WEIGHTS / 2);
        const uint32_t weight_row = items.tile.expert * (GATED ? 2 : 1) * arguments.features + half + items.column;
        const uint32_t second_row = weight_row + (GATED && items.is_split ? arguments.features : COPY_ROWS);
        for (uint32_t step = 0; step < steps; ++step) {
            producer.await_empty();
            const uint32_t stage = shared + ring.stage * STAGE_BYTES;
            if (is_first) {
                const uint32_t full = producer.full();
                const int32_t weight_column = static_cast<int32_t>(step * DEPTH<Format>);
                barrier_arrive_expecting(full, (items.is_split ? 1 : 2) * HALF_BYTES);
#pragma unroll
                for (uint32_t i = 0; i < 2; ++i) {
                    const int32_t from = static_cast<int32_t>(i == 0 ? weight_row : second_row);
                    const uint32_t to = stage + X_BYTES + i * COPY_BYTES;
                    if (items.is_split) {
                        copy_box(to, weight, full, weight_column, from);
                    } else {
                        copy_box_to((1 << BLOCKS) - 1, to + rank * HALF_BYTES, weight, full, weight_column, from);
                    }
                }
            }
            __syncwarp();
            const uint32_t column = step * DEPTH<Format> + piece * (DEPTH<Format> / 8);
#pragma unroll
            for (uint32_t i = 0; i < ROWS; ++i) {
                const bool is_there = rows[i] != 0xffffffffu && column < arguments.in;
                const auto* from = arguments.x + (is_there ? static_cast<uint64_t>(rows[i]) * arguments.x_pitch + column : 0);
                copy_16_bytes(stage + Swizzle<64>::place(row + i * (WARPGROUP / 8), piece), from, is_there);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
            ring.advance();
            under_way += 1;
            if (under_way > COPY_STAGES_MAX) {
                copies_wait<COPY_STAGES_MAX>();
                say();
            }
        }
    }
    copies_wait<0>();
    while (under_way > 0) {
        say();
    }
}

// Writes one warpgroup's 64 places of an item of WIDTH columns through shared memory, up to 128
// columns at a time.
template <bool GATED, uint32_t WIDTH, uint32_t TILES, typename Format>
__device__ __forceinline__ void write_out(const float (&sums)[TILES][4], const Arguments<Format>& arguments, uint32_t staging,
                                          uint32_t first_place, uint32_t end, uint32_t column, const float (&by)[2],
                                          uint32_t warpgroup) {
    using Element = typename Format::Element;
    constexpr uint32_t AT_ONCE = WIDTH < 128 ? WIDTH : 128, PIECES = AT_ONCE / 8;
    const uint32_t thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % 32;
    const uint32_t to_row = thread / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t to_piece = lane / 16;
    const GatedProduct gated(arguments.activation);
#pragma unroll
    for (uint32_t first = 0; first < WIDTH; first += AT_ONCE) {
        part_sync(ALONE + warpgroup, WARPGROUP);
#pragma unroll
        for (uint32_t piece = 0; piece < PIECES; piece += 2) {
            uint32_t words[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const float(&one)[4] = sums[first / 8 + piece + i / 2];
                if constexpr (GATED) {
                    const float(&other)[4] = sums[WIDTH / 8 + piece + i / 2];
                    words[i] = TensorCoreElement<Element>::pack(gated(one[i % 2 * 2], other[i % 2 * 2]),
                                                                gated(one[i % 2 * 2 + 1], other[i % 2 * 2 + 1]));
                } else {
                    words[i] = TensorCoreElement<Element>::pack(by[i % 2] * one[i % 2 * 2], by[i % 2] * one[i % 2 * 2 + 1]);
                }
            }
            store_quarters(staging + piece / 8 * BOX_BYTES + Swizzle<64>::place(to_row, piece % 8 + to_piece), words);
        }
        part_sync(ALONE + warpgroup, WARPGROUP);
#pragma unroll
        for (uint32_t i = 0; i < 64 * PIECES / WARPGROUP; ++i) {
            const uint32_t row = (i * WARPGROUP + thread) / PIECES, piece = thread % PIECES;
            const uint32_t place = first_place + row, feature = column + first + piece * 8;
            if (place < end && feature < arguments.features) {
                Element* to = arguments.out + static_cast<uint64_t>(place) * arguments.features + feature;
                *reinterpret_cast<uint4*>(to) =
                    load_16_bytes(staging + piece / 8 * BOX_BYTES + Swizzle<64>::place(row, piece % 8));
            }
        }
    }
}

// The E4M3 scales for one thread's sums: the scales of its two rows of x and, with scales by
// blocks, of each 64 rows of the weight. There are WIDTH rows of the weight or, if gated, WIDTH
// rows each of gate and up. LOW means that scale blocks or experts do not have a multiple of 64
// rows, so a scale block may begin or end within 64 rows.
template <bool GATED, uint32_t WIDTH, bool LOW, typename Format>
struct ExpertScales {
    static constexpr uint32_t QUARTERS = WIDTH * (GATED ? 2 : 1) / 64;
    const typename Format::Scales& scales;
    const uint32_t features, column, end;  // rows of the weight
    uint32_t first[2];                     // first weight rows: of the features, or of gate and up
    uint32_t of_x[2];                      // rows of x, or the start of their scales
    uint32_t of_weight[QUARTERS];          // start of the weight's scales
    float x[2], weight[QUARTERS];

    __device__ __forceinline__ ExpertScales(const Arguments<Format>& arguments, const Items<GATED>& items, uint32_t own)
        : scales(arguments.scales), features(arguments.features), column(items.column),
          end(arguments.experts * (GATED ? 2 : 1) * arguments.features) {
        const uint32_t last = items.tile.end - 1;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = arguments.template row_of<GATED>(min(own + i * 8, last));
            of_x[i] = Format::BY_BLOCKS ? row * scales.groups : row;
            first[i] = (items.tile.expert * (GATED ? 2 : 1) + i) * features + column;
        }
        if constexpr (Format::BY_BLOCKS && !LOW) {
#pragma unroll
            for (uint32_t quarter = 0; quarter < QUARTERS; ++quarter) {
                of_weight[quarter] = min(row(quarter * 8), end - 1) / scales.height * scales.groups;
            }
        }
    }

    // The first of the eight rows of the weight that `tile` contains.
    __device__ __forceinline__ uint32_t row(uint32_t tile) const {
        const uint32_t of_part = WIDTH / 8;
        return GATED ? first[tile / of_part] + tile % of_part * 8 : first[0] + tile * 8;
    }

    __device__ __forceinline__ float of_block(uint32_t row, uint32_t group) const {
        return __ldg(scales.weight + static_cast<uint64_t>(min(row, end - 1) / scales.height) * scales.groups + group);
    }

    __device__ __forceinline__ void fetch(uint32_t group) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            x[i] = scales.x[of_x[i] + group];
        }
        if constexpr (!LOW) {
#pragma unroll
            for (uint32_t quarter = 0; quarter < QUARTERS; ++quarter) {
                weight[quarter] = __ldg(scales.weight + of_weight[quarter] + group);
            }
        }
    }

    // Adds the sums of a group of columns for the tiles from `start` on.
    template <uint32_t TILES, uint32_t PART>
    __device__ __forceinline__ void add(float (&sums)[TILES][4], uint32_t start, const float (&part)[PART][4],
                                        uint32_t group) const {
        if constexpr (!Format::BY_BLOCKS) {
#pragma unroll
            for (uint32_t tile = 0; tile < PART; ++tile) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    sums[start + tile][i] += part[tile][i];
                }
            }
        } else {
#pragma unroll
            for (uint32_t tile = 0; tile < PART; ++tile) {
                const float of_weight = LOW ? of_block(row(start + tile), group) : weight[(start + tile) / 8];
                const float both[2] = {x[0] * of_weight, x[1] * of_weight};
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    sums[start + tile][i] += part[tile][i] * both[i / 2];
                }
            }
        }
    }

    // Applies the scales of the rows of the weight and of x, or the fixed scale of x, after all
    // sums are complete.
    template <uint32_t TILES>
    __device__ __forceinline__ void scale_rows(float (&sums)[TILES][4]) const {
        float own[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            own[i] = scales.x == nullptr ? scales.fixed : scales.x[of_x[i]];
        }
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; ++tile) {
            const uint32_t at = row(tile) + threadIdx.x % 4 * 2;
            // Features are a multiple of eight, so both scales exist or neither does.
            const float2 two = at < end ? __ldg(reinterpret_cast<const float2*>(scales.weight + at)) : float2{};
            sums[tile][0] *= own[0] * two.x;
            sums[tile][1] *= own[0] * two.y;
            sums[tile][2] *= own[1] * two.x;
            sums[tile][3] *= own[1] * two.y;
        }
    }
};

// A multiplying warpgroup.
template <bool GATED, typename Format>
struct Multiplier : Consumer<Pipeline> {
    const Arguments<Format>& arguments;

    // Skips an item in which this warpgroup has no places.
    __device__ __forceinline__ void pass(uint32_t steps) {
        this->begin_steps();
        for (uint32_t step = 0; step < steps; ++step) {
            this->await_full();
            this->release(this->ring.stage);
            this->end_step(step, steps);
        }
    }

    // Processes an item of WIDTH columns.
    template <uint32_t WIDTH>
    __device__ __forceinline__ void multiply(const Items<GATED>& items, uint32_t steps) {
        const uint32_t thread = threadIdx.x % WARPGROUP, first_place = items.tile.first + this->warpgroup * 64;
        float sums[WIDTH * (GATED ? 2 : 1) / 8][4];
        float by[2] = {1.0f, 1.0f};
        if (!GATED) {
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t place = first_place + thread / 32 * 16 + thread % 32 / 4 + i * 8;
                by[i] = place < items.tile.end ? arguments.weights[arguments.choices[place]] : 0.0f;
            }
        }
        this->begin_steps();
        if constexpr (Format::IS_PLAIN) {
            this->template add_steps<typename Format::Operand, false>(sums, steps);
        } else {
            const uint32_t own = first_place + thread / 32 * 16 + thread % 32 / 4;
            if (Format::BY_BLOCKS && (arguments.scales.height % 64 != 0 || arguments.features % 64 != 0)) {
                add_groups<WIDTH, true>(sums, items, own, steps);
            } else {
                add_groups<WIDTH, false>(sums, items, own, steps);
            }
        }
        const uint32_t staging = this->shared + STAGING_AT + this->warpgroup * 2 * BOX_BYTES;
        write_out<GATED, WIDTH>(sums, arguments, staging, first_place, items.tile.end, items.column, by, this->warpgroup);
    }

    // Adds the products of all steps in E4M3. Each step is a group of columns, whose sums are
    // computed separately and then added to `sums`. `own` is this thread's first place.
    template <uint32_t WIDTH, bool LOW, uint32_t TILES>
    __device__ __forceinline__ void add_groups(float (&sums)[TILES][4], const Items<GATED>& items, uint32_t own,
                                               uint32_t steps) {
        static_assert(DEPTH<Format> == GROUP && TILES % (HALF / 8) == 0,
                      "a step must be one group of columns, and its tiles must be whole halves");
        using Scales = ExpertScales<GATED, WIDTH, LOW, Format>;
        Scales scales(arguments, items, own);
#pragma unroll
        for (uint32_t tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sums[tile][i] = 0.0f;
            }
        }
        for (uint32_t step = 0; step < steps; ++step) {
            if constexpr (Format::BY_BLOCKS) {
                // The scales are loaded while products are computed.
                scales.fetch(step);
            }
            this->await_full();
#pragma unroll
            for (uint32_t half = 0; half < TILES / (HALF / 8); ++half) {
                float part[HALF / 8][4];
                this->template multiply_part<typename Format::Operand>(part, this->address(), half * HALF_BYTES,
                                                                       half + 1 == TILES / (HALF / 8));
                scales.add(sums, half * (HALF / 8), part, step);
            }
            this->end_step(step, steps);
        }
        if constexpr (!Format::BY_BLOCKS) {
            scales.scale_rows(sums);
        }
    }

    __device__ __forceinline__ void multiply_all(const Tiles& tiles, uint32_t rank) {
        const uint32_t steps = (arguments.in + DEPTH<Format> - 1) / DEPTH<Format>;
        Items<GATED> items(tiles, arguments);
        while (items.advance(rank)) {
            if (items.tile.first + this->warpgroup * 64 >= items.tile.end) {
                pass(steps);
            } else if (items.is_split) {
                multiply<Items<GATED>::COLUMNS / 2>(items, steps);
            } else {
                multiply<Items<GATED>::COLUMNS>(items, steps);
            }
            this->staggers = false;
        }
    }
};

template <bool GATED, typename Format>
__device__ __forceinline__ void large_m(const TensorMap& weight, const Arguments<Format>& arguments) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Pipeline::Barriers barriers;
    __shared__ Tiles tiles;
    const uint32_t shared = shared_address(tiles_of_shared);
    const uint32_t rank = cluster_rank();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        fetch_map(weight);
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
            // One arrival of each thread that copies x, and one of the thread that announces the
            // bytes of the weights.
            barrier_init(shared_address(&barriers.full[stage]), WARPGROUP + 1);
            barrier_init(shared_address(&barriers.empty[stage]), RELEASES<Pipeline>);
        }
        barrier_init_done();
    }
    wait_for_previous_kernel();
    const uint32_t warpgroup = warpgroup_index();
    if (warpgroup == 0) {
        tiles.count<TILE_PLACES>(arguments.starts, arguments.experts);
    }
    // From here on, the other block may copy into this block's shared memory, until both blocks
    // have reached the end.
    cluster_sync();
    if (warpgroup == 0) {
        give_registers<56>();
        copy<GATED>(weight, arguments, tiles, shared, barriers, rank);
    } else {
        take_registers<224>();
        Multiplier<GATED, Format>{{barriers, {}, shared, warpgroup - 1, threadIdx.x % WARPGROUP}, arguments}
            .multiply_all(tiles, rank);
    }
    end_roles();
}

}  // namespace

#define IN_CLUSTERS __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)

// Launch: persistent; block THREADS and dynamic shared memory SHARED_BYTES of
// contract::gemm_large_m, grid x = 2 * min(multiprocessors / 2, largest possible number of items).
// Any other even grid is correct, but slower. Clusters of two are compiled in. May be launched
// with programmatic stream serialization.
//
// The tensor map of the weight: type BFLOAT16 or FLOAT16, rank 2, element strides 1, interleave
// NONE, swizzle 128B, out of bounds NONE (zeros), and
//
//   dimensions {in, all experts' rows}, stride {2 * in} bytes, box {64, 64}
//   in E4M3: type UINT8, stride {in} bytes, box {128, 64}
