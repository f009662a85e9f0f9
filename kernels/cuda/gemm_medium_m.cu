// Gate and up GEMM of a gated MLP, fused with the gate (SwiGLU, Shazeer 2020, arXiv 2002.05202),
// for a few hundred rows: a decode step with enough sequences to be bound by the tensor cores, and
// thus by the GPU's power limit.
// Targets: sm_90a
//
// gemm_medium_m_<type>_f<width>
//   gate = x * weight[0 .. features]^T + bias[0 .. features]
//   up   = x * weight[features .. 2 * features]^T + bias[features .. 2 * features]
//   out  = activation(gate) * up
//
// <type> is bf16 or f16, <width> the features of a tile: 80, 96 or 112.
//
// x         [rows, in]            as a tensor map
// weight    [2 * features, in]    as a tensor map
// bias      [2 * features]        the same type, or null
// activation                      SILU or GELU_TANH of contract::gate
// out       [rows, features]      the same type; rows out_pitch elements apart
//
// Sums are f32 on the tensor cores, rounded once at the end. The same shape gives the same bits
// every time. A NaN in x affects only its row, a NaN in the weight only the features that use it.
// Any number of rows and any `in`; `features` must be even. Rows of x and of the weight start at
// multiples of 16 bytes, rows of out at multiples of 8 bytes, bias at a multiple of 4 bytes. out
// must not overlap x.
//
// The first copies of weights do not wait for the previous kernel. Code that writes weights must
// therefore synchronize before it launches this kernel with programmatic stream serialization.
//
// As in gemm_large_m.cu, a cluster of two blocks has 256 rows and shares the weights of its tile;
// one warp copies, two warpgroups multiply. The difference is the tile's width, which is chosen so
// that a few hundred rows fill the GPU. With 96 features per tile (192 rows of the weight), 18,944
// features are 198 tiles, three for each of 66 clusters; with 128 features they are 148 tiles, two
// and a quarter per cluster. The host chooses the width at which the busiest cluster has the fewest
// features.
//
// Groups of 64 rows that do not exist are neither copied nor multiplied. If fewer than 64 rows are
// left for the last group, it begins earlier and overlaps the previous group. It is not padded with
// zeros, because TMA writes zeros at 16 bytes a cycle, half as fast as it copies. Up to 128 rows
// are divided into 64 per block.

#include "contract.cuh"
#include "element.cuh"
#include "gate.cuh"
#include "hopper_pipeline.cuh"
#include "hopper_store.cuh"
#include "kernel_order.cuh"
#include "weight_copy.cuh"

namespace {

using contract::gemm_medium_m::BLOCK_ROWS;
using contract::gemm_medium_m::MULTIPLIERS;  // warpgroups that multiply
using contract::gemm_medium_m::PART_ROWS;    // rows of x per warpgroup
constexpr uint32_t BLOCKS = contract::gemm_medium_m::CLUSTER;      // per cluster, along the rows
constexpr uint32_t DEPTH = contract::gemm_medium_m::STEP_COLUMNS;  // columns of a step: 128 bytes
constexpr uint32_t PART_BYTES = PART_ROWS * DEPTH * 2;              // 8 KiB per step
constexpr uint32_t STAGES_MAX = contract::gemm_medium_m::STAGES_MAX;
static_assert(contract::gemm_medium_m::THREADS == (1 + MULTIPLIERS) * WARPGROUP, "MULTIPLIERS and one copying warpgroup");
static_assert(DEPTH * 2 == STEP_ROW_BYTES, "two bytes per column");
constexpr uint32_t LEAD = 3;  // see hopper_pipeline.cuh
constexpr uint16_t ALL_BLOCKS = (1 << BLOCKS) - 1;  // of the cluster, one bit each

// The number of stages of `bytes` bytes that fit into shared memory, up to STAGES_MAX.
__host__ __device__ constexpr uint32_t stages_of(uint32_t bytes) {
    return contract::gemm_medium_m::SHARED_BYTES / bytes < STAGES_MAX ? contract::gemm_medium_m::SHARED_BYTES / bytes
                                                                      : STAGES_MAX;
}

// Layout of a stage: a step of x, then of gate, then of up, `WIDTH` features each. If every block
// has only 64 rows, stages are smaller and more of them fit.
template <uint32_t WIDTH>
struct Stages {
    static constexpr uint32_t HALF_BYTES = WIDTH * DEPTH * 2;  // gate or up
    static constexpr uint32_t OF_ONE = stages_of(PART_BYTES + 2 * HALF_BYTES);
    static constexpr uint32_t OF_ALL = stages_of(MULTIPLIERS * PART_BYTES + 2 * HALF_BYTES);
    static_assert(OF_ALL > LEAD, "the first warpgroup can be LEAD steps ahead");

    const uint32_t parts;  // 64-row parts of x in a stage
    const uint32_t weights_at, bytes, count;

    __device__ __forceinline__ explicit Stages(uint32_t rows)
        : parts(rows <= BLOCK_ROWS ? 1 : MULTIPLIERS),
          weights_at(parts * PART_BYTES),
          bytes(weights_at + 2 * HALF_BYTES),
          count(parts == 1 ? OF_ONE : OF_ALL) {}
};

// A position in the ring of stages, like Ring of hopper_copy.cuh, but with a number of stages that
// is not known at compile time.
struct StageRing {
    const uint32_t count, bytes, weight_at;
    uint32_t stage = 0;
    uint32_t parity = 0;

    template <uint32_t WIDTH>
    __device__ __forceinline__ explicit StageRing(const Stages<WIDTH>& stages)
        : count(stages.count), bytes(stages.bytes), weight_at(stages.weights_at) {}

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == count) {
            stage = 0;
            parity ^= 1;
        }
    }
};

struct Pipeline {
    using Ring = StageRing&;
    using Barriers = RingBarriers<STAGES_MAX>;
    static constexpr uint32_t X_BYTES = PART_BYTES;
    static constexpr uint32_t BLOCKS = ::BLOCKS, CONSUMERS = MULTIPLIERS;
    static constexpr Release RELEASE = Release::ONCE;
    static constexpr uint32_t LEAD = ::LEAD, BEGIN = 1;
};

template <typename T>
struct Arguments {
    T* out;
    const T* bias;
    uint32_t out_pitch;
    uint32_t rows;
    uint32_t features;
    uint32_t in_features;
    uint32_t activation;
};

// The tiles of a cluster. All tiles of the same features follow one another, so that their weights
// are read once.
struct Tiles {
    const uint32_t rows, rank, parts, width;
    const uint32_t down, count, steps;
    uint32_t next;
    uint32_t row = 0, feature = 0;  // first row and feature of this block's tile

    template <typename T, uint32_t WIDTH>
    __device__ __forceinline__ Tiles(const Arguments<T>& arguments, const Stages<WIDTH>& stages, uint32_t rank)
        : rows(arguments.rows),
          rank(rank),
          parts(stages.parts),
          width(WIDTH),
          down((rows + BLOCKS * BLOCK_ROWS - 1) / (BLOCKS * BLOCK_ROWS)),
          count(down * ((arguments.features + WIDTH - 1) / WIDTH)),
          steps((arguments.in_features + DEPTH - 1) / DEPTH),
          next(blockIdx.x / BLOCKS) {}

    __device__ __forceinline__ bool advance() {
        if (next >= count) {
            return false;
        }
        row = (next % down * BLOCKS + rank) * parts * PART_ROWS;
        feature = next / down * width;
        next += gridDim.x / BLOCKS;
        return true;
    }

    // `first` is the first row of a warpgroup's part of this tile; `has` is true if that row
    // exists.
    __device__ __forceinline__ uint32_t first(uint32_t warpgroup) const { return row + warpgroup * PART_ROWS; }
    __device__ __forceinline__ bool has(uint32_t warpgroup) const { return warpgroup < parts && first(warpgroup) < rows; }

    // The first row that the warpgroup multiplies. The last group of 64 rows may overlap the rows
    // of another warpgroup, so that all 64 rows exist.
    __device__ __forceinline__ uint32_t from(uint32_t warpgroup) const {
        return min(first(warpgroup), rows - min(rows, PART_ROWS));
    }
};

// Copies all tiles' operands, step by step, into the ring. Called by one thread.
template <typename T, uint32_t WIDTH>
__device__ __forceinline__ void copy(const TensorMap& x, const TensorMap& weight, const Arguments<T>& arguments,
                                     uint32_t shared, Pipeline::Barriers& barriers, uint32_t rank) {
    const Stages<WIDTH> stages(arguments.rows);
    StageRing ring(stages);
    Tiles tiles(arguments, stages, rank);
    const Producer<Pipeline> producer{ring, barriers};
    // Each block copies one half of the weight's rows, gate or up, to both blocks.
    const auto copy_weight = [&](uint32_t step) {
        const uint32_t bytes = (tiles.has(0) ? PART_BYTES : 0) + (tiles.has(1) ? PART_BYTES : 0) + 2 * stages.HALF_BYTES;
        barrier_arrive_expecting(producer.full(), bytes);
        const uint32_t stage = shared + ring.stage * stages.bytes;
        copy_box_once_to(ALL_BLOCKS, stage + stages.weights_at + rank * stages.HALF_BYTES, weight, producer.full(),
                         step * DEPTH, tiles.feature + rank * arguments.features);
    };
    const auto copy_x = [&](uint32_t step) {
        for (uint32_t part = 0; part < MULTIPLIERS && tiles.has(part); ++part) {
            copy_box(shared + ring.stage * stages.bytes + part * PART_BYTES, x, producer.full(),
                     static_cast<int32_t>(step * DEPTH), static_cast<int32_t>(tiles.from(part)));
        }
    };
    for (bool is_first = true; tiles.advance(); is_first = false) {
        uint32_t step = 0;
        if (is_first) {
            const uint32_t held = min(stages.count, tiles.steps);
            for (; step < held; ++step, ring.advance()) {
                copy_weight(step);
            }
            wait_for_previous_kernel();
            ring.stage = ring.parity = 0;
            for (step = 0; step < held; ++step, ring.advance()) {
                copy_x(step);
            }
        }
        for (; step < tiles.steps; ++step, ring.advance()) {
            producer.await_empty();
            copy_weight(step);
            copy_x(step);
        }
    }
}

// Writes a warp's 16 rows of a tile, which start at `from`, except rows before `first_row`.
template <typename T, uint32_t GROUPS>
__device__ __forceinline__ void write_out(const float (&sums)[2 * GROUPS][4], const Arguments<T>& arguments,
                                          uint32_t from, uint32_t first_row, uint32_t first) {
    const uint32_t lane = threadIdx.x % 32, pair = lane % 4;
    // The bias of this lane's two columns of a group.
    const auto bias_at = [&](uint32_t column, uint32_t skipped) {
        const bool is_there = arguments.bias != nullptr && column < arguments.features;
        const T* at = arguments.bias + skipped + column;
        return pair_to_floats<T>(is_there ? __ldg(reinterpret_cast<const uint32_t*>(at)) : 0u);
    };
    const GatedProduct gated(arguments.activation);
    uint32_t words[GROUPS][2];
#pragma unroll
    for (uint32_t group = 0; group < GROUPS; ++group) {
        const uint32_t column = first + group * 8 + pair * 2;
        const float2 bias = bias_at(column, 0), up_bias = bias_at(column, arguments.features);
#pragma unroll
        for (uint32_t low = 0; low < 2; ++low) {
            const float(&gate)[4] = sums[group];
            const float(&up)[4] = sums[GROUPS + group];
            words[group][low] = TensorCoreElement<T>::pack(gated(gate[2 * low] + bias.x, up[2 * low] + up_bias.x),
                                                           gated(gate[2 * low + 1] + bias.y, up[2 * low + 1] + up_bias.y));
        }
    }
    // Two neighboring lanes of a row exchange values, so that one lane has four columns of a group
    // and the other lane has four columns of the next group. The two groups of a row are then
    // written as whole sectors.
    const bool is_odd = lane % 2 != 0;
    const uint32_t own = first + pair % 2 * 8 + pair / 2 * 4;
#pragma unroll
    for (uint32_t low = 0; low < 2; ++low) {
        const uint32_t row = from + lane / 4 + low * 8;
        const bool is_mine = row >= first_row && row < arguments.rows;
        T* const to = arguments.out + static_cast<uint64_t>(row) * arguments.out_pitch;
#pragma unroll
        for (uint32_t group = 0; group < GROUPS; group += 2) {
            const uint32_t mine = words[group][low], next = words[group + 1][low];
            const uint32_t got = __shfl_xor_sync(0xffffffffu, is_odd ? mine : next, 1);
            const uint2 four = is_odd ? make_uint2(got, next) : make_uint2(mine, got);
            const uint32_t column = own + group * 8;
            if (is_mine && column + 2 < arguments.features) {
                *reinterpret_cast<uint2*>(to + column) = four;
            } else if (is_mine && column < arguments.features) {
                *reinterpret_cast<uint32_t*>(to + column) = four.x;
            }
        }
    }
}

// Processes all tiles of one multiplying warpgroup.
template <typename T, uint32_t WIDTH>
__device__ __forceinline__ void multiply(const Arguments<T>& arguments, uint32_t shared, Pipeline::Barriers& barriers,
                                         uint32_t rank, uint32_t warpgroup) {
    constexpr uint32_t GROUPS = WIDTH / 8;  // groups of eight columns
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const Stages<WIDTH> stages(arguments.rows);
    StageRing ring(stages);
    float sums[2 * GROUPS][4];
    Consumer<Pipeline> consumer{barriers, ring, shared, warpgroup, thread};

    wait_for_previous_kernel();
    Tiles tiles(arguments, stages, rank);
    for (bool is_first = true; tiles.advance(); is_first = false) {
        if (!tiles.has(warpgroup)) {
            for (uint32_t step = 0; step < tiles.steps; ++step, ring.advance()) {
                consumer.await_full();
                consumer.release(ring.stage);
            }
            continue;
        }
        consumer.staggers = is_first && tiles.has(MULTIPLIERS - 1);
        consumer.begin_steps();
        consumer.template add_steps<T, false>(sums, tiles.steps);
        write_out<T, GROUPS>(sums, arguments, tiles.from(warpgroup) + thread / 32 * 16, tiles.first(warpgroup), tiles.feature);
    }
}

template <typename T, uint32_t WIDTH>
__device__ __forceinline__ void gate_up(const TensorMap& x, const TensorMap& weight, const Arguments<T>& arguments) {
    extern __shared__ __align__(1024) uint8_t stages[];
    __shared__ Pipeline::Barriers barriers;
    const uint32_t shared = shared_address(stages);
    const uint32_t rank = cluster_rank();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        fetch_map(x);
        fetch_map(weight);
        for (uint32_t stage = 0; stage < STAGES_MAX; ++stage) {
            barrier_init(shared_address(&barriers.full[stage]), 1);
            barrier_init(shared_address(&barriers.empty[stage]), RELEASES<Pipeline>);
        }
        barrier_init_done();
    }
    // From here until end_roles, the other block may copy into this block's memory.
    cluster_sync();
    const uint32_t warpgroup = warpgroup_index();
    if (warpgroup == 0) {
        give_registers<40>();
        if (warp_index() == 0 && is_elected()) {
            copy<T, WIDTH>(x, weight, arguments, shared, barriers, rank);
        }
    } else {
        take_registers<232>();
        multiply<T, WIDTH>(arguments, shared, barriers, rank, warpgroup - 1);
    }
    end_roles();
}

}  // namespace

#define GATE_UP(name, Element, WIDTH)                                                                                  \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__((1 + MULTIPLIERS) * WARPGROUP, 1)      \
        gemm_medium_m_##name##_f##WIDTH(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,\
                                         Element* out, const Element* bias, uint32_t out_pitch, uint32_t rows,         \
                                         uint32_t features, uint32_t in_features, uint32_t activation) {               \
        gate_up<Element, WIDTH>(x, weight, {out, bias, out_pitch, rows, features, in_features, activation});           \
    }
#define KERNEL(name, Element) FOR_EACH_GATED_WIDTH(GATE_UP, name, Element)
FOR_EACH_ACTIVATION(KERNEL)

// Launch. Block THREADS, dynamic shared memory SHARED_BYTES (contract::gemm_medium_m), grid
// x = 2 * min(SMs / 2, tiles), where tiles = div_ceil(rows, 256) * div_ceil(features,
// width). Any even grid is correct; this grid is the fastest. `rows`, `features` and `in_features`
// are > 0. The kernel itself sets its cluster size of two. The limit of dynamic shared memory must
// be raised once per function. The kernel may, and should, be launched with programmatic stream
// serialization.
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, rank 2, element
// strides 1, interleave NONE, swizzle 128B, L2 promotion 128 bytes, out of bounds NONE (zeros), and
//   x       dimensions {in, rows}, stride {2 * pitch} bytes, box {64, 64}
//   weight  dimensions {in, 2 * features}, stride {2 * in} bytes, box {64, width}
//
// At 256 rows the GPU is at its power limit, and a GEMM with the same number of features takes as
// long as with cuBLASLt, however well it fills the GPU. The gain of this kernel is the time of a
// separate gate kernel. A GEMM without a gate gained nothing in a step, neither with tiles of 192
// features nor with narrower tiles that two or four clusters shared (through shared or device
// memory), so this file has no kernel without a gate. Letting each cluster begin at a different
// step of x was no faster.
