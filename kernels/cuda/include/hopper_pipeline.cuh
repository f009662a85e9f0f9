// Warp-specialized pipeline of the Hopper GEMMs (sm_90a), modeled on the persistent GEMMs of
// CUTLASS 3. A ring of stages in shared memory holds the operands of K steps. One warpgroup, or one
// thread of it, is the producer: it waits for a free stage and starts the copies of a step to that
// stage. The other warpgroups are consumers: they wait until a stage is full, multiply, and release
// the stage. After the last step of a tile, a consumer hands its sums over to the epilogue, which
// writes them out while the producer already copies the steps of the next tile.
//
// The kernel contains the code that selects the next tile, copies a step, processes the sums of a
// step, and stores the results in the epilogue. It describes its pipeline by a struct with these
// members:
//
//   Ring       position in the ring, or a reference to one: FixedRing, or a type with its members
//   Barriers   the barriers of all stages in shared memory: RingBarriers
//   X_BYTES    bytes of each consumer's rows of x, which come first in a stage
//   BLOCKS     number of blocks in the cluster, which copy to each other's stages
//   CONSUMERS  consumer warpgroups per block
//   RELEASE    how a consumer releases a stage
//   LEAD       steps by which the first consumer is ahead of the second, so that one consumer
//              multiplies while the other writes out
//   BEGIN      ID of the named barrier at which the second consumer starts
//
// If one of the following details changes, the compiler orders the registers of the loops
// differently, and the machine code is no longer the code that was measured:
// - each kernel chooses whether Ring is a reference;
// - kernels initialize their barriers and divide their warpgroups themselves;
// - no part of the pipeline is a lambda;
// - add_steps calls `lead` before the ring advances, and end_step calls `lead` after the ring
//   advances.
#pragma once

#include <cstdint>

#include "hopper_cluster.cuh"
#include "tensor_core.cuh"
#include "wgmma.cuh"

constexpr uint32_t WARPGROUP = 128;         // threads
constexpr uint32_t STEP_ROW_BYTES = 128;    // bytes of a row in a step, which is the span of one swizzle
constexpr uint32_t PRODUCT_ROW_BYTES = 32;  // bytes of a row in one wgmma

// A position in a ring whose stages have BYTES bytes and contain the weight from byte WEIGHT_AT on.
template <uint32_t STAGES, uint32_t BYTES, uint32_t WEIGHT_AT>
struct FixedRing : Ring<STAGES> {
    static constexpr uint32_t bytes = BYTES, weight_at = WEIGHT_AT;
};

// How a consumer warpgroup releases a stage in each block of the cluster.
enum class Release {
    ONCE,       // one warp arrives for the warpgroup
    EACH_WARP,  // each warp arrives, for the reason given at release_to_all
};

// Number of arrivals at the barrier of an empty stage.
template <typename Pipeline>
constexpr uint32_t RELEASES =
    Pipeline::CONSUMERS * Pipeline::BLOCKS * (Pipeline::RELEASE == Release::EACH_WARP ? WARPGROUP / 32 : 1);

// The indices of this thread's warpgroup and warp. The shuffle shows the compiler that the value is
// the same in all threads of a warp.
__device__ __forceinline__ uint32_t warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0); }
__device__ __forceinline__ uint32_t warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// Ends a block together with the other blocks of its cluster, which may access its shared memory
// until then.
__device__ __forceinline__ void end_roles() {
    __syncwarp();
    cluster_sync();
}

template <typename Pipeline>
struct Producer {
    typename Pipeline::Ring ring;
    typename Pipeline::Barriers& barriers;

    // The barrier that counts the bytes copied to the stage.
    __device__ __forceinline__ uint32_t full() const { return shared_address(&barriers.full[ring.stage]); }

    // Waits until all consumers of the cluster have released the stage.
    __device__ __forceinline__ void await_empty() const {
        barrier_wait(shared_address(&barriers.empty[ring.stage]), ring.parity ^ 1);
    }

    // Waits for the stage and announces `bytes` bytes. Returns the barrier that counts them.
    __device__ __forceinline__ uint32_t begin(uint32_t bytes) const {
        const uint32_t barrier = full();
        await_empty();
        barrier_arrive_expecting(barrier, bytes);
        return barrier;
    }
};

// A consumer warpgroup. The stages start at `shared`.
template <typename Pipeline>
struct Consumer {
    typename Pipeline::Barriers& barriers;
    typename Pipeline::Ring ring;
    const uint32_t shared, warpgroup, thread;
    bool staggers = true;  // in this tile, the second consumer starts LEAD steps after the first

    // The address of the stage.
    __device__ __forceinline__ uint32_t address() const { return shared + ring.stage * ring.bytes; }

    __device__ __forceinline__ void await_full() const {
        barrier_wait(shared_address(&barriers.full[ring.stage]), ring.parity);
    }

    // Releases a stage in all blocks of the cluster, because all of them copy to it.
    __device__ __forceinline__ void release(uint32_t stage) const {
        const uint32_t empty = shared_address(&barriers.empty[stage]);
        if constexpr (Pipeline::RELEASE == Release::EACH_WARP) {
            release_to_all<Pipeline::BLOCKS>(empty);
        } else if (thread % 32 == 0 && thread / 32 < Pipeline::BLOCKS) {
            // One warp signals each block.
            barrier_arrive_at(empty, thread / 32);
        }
    }

    // Begins a tile. The second consumer waits for the first.
    __device__ __forceinline__ void begin_steps() const {
        if (staggers && warpgroup == 1) {
            part_sync(Pipeline::BEGIN, Pipeline::CONSUMERS * WARPGROUP);
        }
    }

    // After LEAD steps of a tile, the first consumer lets the second start.
    __device__ __forceinline__ void lead(uint32_t step, uint32_t steps) const {
        if (staggers && warpgroup == 0 && step + 1 == min(Pipeline::LEAD, steps)) {
            part_arrive(Pipeline::BEGIN, Pipeline::CONSUMERS * WARPGROUP);
        }
    }

    // Ends step `step` of `steps`.
    __device__ __forceinline__ void end_step(uint32_t step, uint32_t steps) {
        ring.advance();
        lead(step, steps);
    }

    // Starts the products of the stage at address `stage`: this consumer's 64 rows of x with
    // 8 * TILES rows of the weight, which begin at byte `from` of the stage's weight. With `adds`,
    // the products are added to `sums`.
    template <typename Operand, uint32_t TILES>
    __device__ __forceinline__ void start(float (&sums)[TILES][4], uint32_t stage, uint32_t from, bool adds) const {
        constexpr uint64_t LAYOUT = matrix_layout<64>(16, 8 * STEP_ROW_BYTES);
        hold(sums);
        products_begin();
#pragma unroll
        for (uint32_t k = 0; k < STEP_ROW_BYTES / PRODUCT_ROW_BYTES; ++k) {
            Warpgroup<Operand>::multiply(
                sums, matrix_at(LAYOUT, stage + warpgroup * Pipeline::X_BYTES + k * PRODUCT_ROW_BYTES),
                matrix_at(LAYOUT, stage + ring.weight_at + from + k * PRODUCT_ROW_BYTES), k > 0 || adds);
        }
        products_end();
    }

    // Computes the products of one part of the stage at address `stage` (see start) separately. The
    // stage is released after its last part.
    template <typename Operand, uint32_t TILES>
    __device__ __forceinline__ void multiply_part(float (&products)[TILES][4], uint32_t stage, uint32_t from,
                                                  bool is_last) const {
        start<Operand>(products, stage, from, false);
        products_wait<0>();
        hold(products);
        if (is_last) {
            release(ring.stage);
        }
    }

    // Adds the products of all steps of a tile to `sums`. Each step is started while the previous
    // one is in progress. Without ADDS, `sums` has no initial values.
    template <typename Operand, bool ADDS, uint32_t TILES>
    __device__ __forceinline__ void add_steps(float (&sums)[TILES][4], uint32_t steps) {
        uint32_t before = 0;  // the stage of the previous step
        for (uint32_t step = 0; step < steps; ++step) {
            await_full();
            start<Operand>(sums, address(), 0, ADDS || step > 0);
            if (step > 0) {
                products_wait<1>();
                release(before);
            }
            before = ring.stage;
            lead(step, steps);
            ring.advance();
        }
        products_wait<0>();
        hold(sums);
        release(before);
    }
};
