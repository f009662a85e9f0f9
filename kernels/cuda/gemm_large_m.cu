// GEMM with many rows on Hopper (sm_90a only), also fused with the gate of a gated MLP (SwiGLU,
// Shazeer 2020, arXiv 2002.05202), so that the gate's input is never written to memory. Modeled on
// the warp-specialized persistent GEMMs of CUTLASS 3: TMA loads tiles, two warpgroups multiply with
// wgmma, and two blocks share the weights that both need.
//
// gemm_large_m_gated_<type>
//   gate = x * weight[0 .. columns]^T + bias[0 .. columns]
//   up   = x * weight[columns .. 2 * columns]^T + bias[columns .. 2 * columns]
//   out  = activation(gate) * up, where the activation is SiLU or the tanh approximation of GELU
//   x [rows, in], weight [2 * columns, in], bias [2 * columns] or null, out [rows, columns]
//
// gemm_large_m_<type>
//   out = x * weight^T + bias
//   x [rows, in], weight [columns, in], bias [columns] or null, out [rows, columns]
//
// gemm_large_m_add_<type>
//   out += x * weight^T + bias, operands as for gemm_large_m
//
// Sums are f32, rounded once at the end; neither a bias nor the previous contents of `out` cause a
// rounding in between. `x`, `weight` and `out` are passed as tensor maps (see Launch): they start
// at multiples of 16 bytes, and their rows are a multiple of 16 bytes apart. `bias` is aligned to
// 4 bytes; `columns` is even. Any number of rows, any even `columns` and any `in`. A NaN affects
// only its row or column.

// Targets: sm_90a

#include "include/contract.cuh"
#include "include/element.cuh"
#include "include/gate.cuh"
#include "include/large_m_tiles.cuh"

namespace {

constexpr uint32_t DEPTH = contract::gemm_large_m::STEP_COLUMNS;  // columns of a step: 128 bytes
static_assert(DEPTH * 2 == STEP_ROW_BYTES, "two bytes per column");

struct Pipeline : LargeMPipeline {
    static constexpr Release RELEASE = Release::ONCE;
    static constexpr uint32_t LEAD = 3, BEGIN = ::BEGIN;
};

// Computes all tiles of one consumer warpgroup.
template <Kind KIND, typename T>
__device__ __forceinline__ void multiply(const TensorMap& out, const T* bias, const Arguments& arguments,
                                         uint32_t shared, Pipeline::Barriers& barriers, uint32_t rank,
                                         uint32_t warpgroup) {
    const uint32_t thread = threadIdx.x % WARPGROUP;
    const uint32_t staging = shared + STAGING_AT + warpgroup * 2 * BOX_BYTES;
    LargeMRing ring;
    float sums[32][4];
    Consumer<Pipeline> consumer{barriers, ring, shared, warpgroup, thread};

    Tiles<KIND, DEPTH> tiles(arguments);
    Biases<KIND, T> biases;
    while (tiles.advance(rank)) {
        if (bias != nullptr) {
            biases.load(bias, tiles.column, arguments.columns);
        }
        if (KIND == Kind::ADDED) {
            take_held<T>(consumer, sums, [](float& sum, float held) { sum = held; });
            hold(sums);
        }
        consumer.begin_steps();
        consumer.template add_steps<T, KIND == Kind::ADDED>(sums, tiles.steps);
        consumer.staggers = false;
        if (bias != nullptr) {
            biases.add(sums);
        }
        write_out<KIND, T>(sums, out, staging, tiles.row + warpgroup * 64, tiles.column, warpgroup,
                           GatedProduct(arguments.activation));
    }
    if (thread == 0) {
        stores_read<0>();
    }
}

template <Kind KIND, typename T>
__device__ __forceinline__ void linear(const TensorMap& x, const TensorMap& weight, const TensorMap& out, const T* bias,
                                       const Arguments& arguments) {
    extern __shared__ __align__(1024) uint8_t tiles_of_shared[];
    __shared__ Pipeline::Barriers barriers;
    const uint32_t shared = shared_address(tiles_of_shared);
    const uint32_t rank = cluster_rank();
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        for (uint32_t stage = 0; stage < STAGES; ++stage) {
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
            copy<Pipeline, KIND, DEPTH, true>(x, weight, out, arguments, shared, barriers, rank);
        }
    } else {
        take_registers<232>();
        multiply<KIND, T>(out, bias, arguments, shared, barriers, rank, warpgroup - 1);
    }
    end_roles();
}

}  // namespace

#define GEMM_LARGE_M(NAME, KIND, TYPE)                                                                            \
    extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)                      \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,                        \
             const __grid_constant__ TensorMap out, const TYPE* bias, uint32_t rows, uint32_t columns,             \
             uint32_t in_features, uint32_t group, uint32_t activation) {                                          \
        linear<KIND, TYPE>(x, weight, out, bias, {rows, columns, in_features, group, activation});                 \
    }
#define GEMM_LARGE_M_OF(SUFFIX, TYPE)                                         \
    GEMM_LARGE_M(gemm_large_m_gated_##SUFFIX, Kind::GATED, TYPE)       \
    GEMM_LARGE_M(gemm_large_m_##SUFFIX, Kind::PLAIN, TYPE)                    \
    GEMM_LARGE_M(gemm_large_m_add_##SUFFIX, Kind::ADDED, TYPE)

FOR_EACH_ACTIVATION(GEMM_LARGE_M_OF)

// Launch. Persistent: block THREADS, dynamic shared memory SHARED_BYTES (contract::gemm_large_m),
// grid x = 2 * min(SMs / 2, pairs * across), where
//   pairs = div_ceil(rows, 256), and
//   across = div_ceil(columns, 128) for the gated kernel and div_ceil(columns, 256) for the other
//   kernels.
// Any even grid is correct; this grid is the fastest. `rows`, `columns`, `in_features` and `group`
// are > 0. `group` is the number of pairs of row tiles that clusters process before they continue
// with the next columns (large_m_tiles.cuh); 16 is a good value. `activation` is SILU or GELU_TANH
// of contract::gate; kernels without gates ignore it. The kernel itself sets its cluster size of
// two. The limit of dynamic shared memory must be raised once per function
// (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES).
//
// The tensor maps come from cuTensorMapEncodeTiled: type BFLOAT16 or FLOAT16, rank 2, element
// strides 1, interleave NONE, swizzle 128B, L2 promotion 128 bytes, out of bounds NONE (zeros), and
//   x       dimensions {in, rows}, stride {2 * pitch} bytes, box {64, 128}
//   weight  dimensions {in, rows of the weight}, stride {2 * in} bytes, box {64, 128}
//   out     dimensions {columns, rows}, stride {2 * pitch} bytes, box {64, 64}
