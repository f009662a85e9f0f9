// Argmax of each row: greedy sampling on the device.
//
// x   [rows, columns]   f32 or the activations' type, rows pitch elements apart
// ids [columns] u32     results to write in place of the columns, or null
// out [rows] u32        column of the row's largest element
//
// The first of equal elements wins; -0 equals 0. A NaN is never chosen over a number, not even over
// minus infinity; the result of a row that contains only NaNs is 0xffffffff. Any number of columns
// and any alignment are allowed; loads are 16 bytes wide when rows are aligned to 16 bytes and a
// row is a whole number of 16-byte vectors.
//
// A row of 152,064 elements is too long for one block. On sm_90 a cluster of eight blocks shares a
// row, and each block writes its best element into the first block's shared memory, so neither
// scratch memory nor a second launch is needed. Older targets have one block per row.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

using contract::argmax::THREADS;
using contract::common::NO_CHOICE;
// Number of vectors that a thread loads at once.
constexpr uint32_t HELD = 5;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS
#define SHARE_OF_A_ROW __cluster_dims__(CLUSTER, 1, 1)
constexpr uint32_t CLUSTER = contract::argmax::CLUSTER;
#else
#define SHARE_OF_A_ROW
constexpr uint32_t CLUSTER = 1;
#endif

struct Best {
    float value;
    uint32_t place;
};

// Returns true if `next` wins over `best`, in whichever order the two were read.
__device__ __forceinline__ bool beats(const Best& next, const Best& best) {
    if (next.place == NO_CHOICE || best.place == NO_CHOICE) {
        return best.place == NO_CHOICE;
    }
    return next.value > best.value || (next.value == best.value && next.place < best.place);
}

__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (uint32_t distance = WARP / 2; distance > 0; distance /= 2) {
        const Best next = {__shfl_xor_sync(ALL_LANES, best.value, distance),
                           __shfl_xor_sync(ALL_LANES, best.place, distance)};
        if (beats(next, best)) {
            best = next;
        }
    }
    return best;
}

// The largest element of this thread's share of a row. The loop keeps only the index of the vector
// that contains it; the element's position in that vector is found at the end.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ Best best_of(const Element* x, uint32_t columns, uint32_t part) {
    Best best = {-INFINITY, NO_CHOICE};
    const uint32_t vectors = columns / WIDTH;
    constexpr uint32_t STRIDE = CLUSTER * THREADS;
    for (uint32_t first = part * THREADS + threadIdx.x; first < vectors; first += HELD * STRIDE) {
        Words<WIDTH, Element> held[HELD];
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            if (first + slot * STRIDE < vectors) {
                held[slot] = load_words<WIDTH>(x + (first + slot * STRIDE) * WIDTH);
            }
        }
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            if (first + slot * STRIDE < vectors) {
                float values[WIDTH];
                widen<WIDTH, Element>(held[slot], values);
                // fmaxf ignores a NaN, and comparisons with NaN are false. Vectors are visited in
                // ascending order, so a later equal element never wins.
                float largest = values[0];
#pragma unroll
                for (uint32_t i = 1; i < WIDTH; ++i) {
                    largest = fmaxf(largest, values[i]);
                }
                if (largest > best.value || (best.place == NO_CHOICE && largest == best.value)) {
                    best = {largest, first + slot * STRIDE};
                }
            }
        }
    }
    if (best.place != NO_CHOICE) {
        const uint32_t start = best.place * WIDTH;
        float values[WIDTH];
        load<WIDTH>(x + start, values);
#pragma unroll
        for (uint32_t i = WIDTH; i > 0; --i) {
            if (values[i - 1] == best.value) {
                best.place = start + i - 1;
            }
        }
    }
    return best;
}

template <typename Element>
__device__ __forceinline__ void argmax(const Element* x, uint32_t columns, uint64_t pitch, const uint32_t* ids,
                                       uint32_t* out) {
    __shared__ Best of_warps[THREADS / WARP];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t row = blockIdx.x / CLUSTER, part = blockIdx.x % CLUSTER;
#ifdef HAS_CLUSTERS
    __shared__ Best of_blocks[CLUSTER];
    // No block may write to the first block's shared memory before the first block runs. The work
    // between this arrival and the wait hides the delay.
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    x += row * pitch;
    const bool aligned = aligned_to(x, 16) && columns % VECTOR<Element> == 0;
    Best best = aligned ? best_of<VECTOR<Element>>(x, columns, part) : best_of<1>(x, columns, part);
    best = warp_best(best);
    if (threadIdx.x % WARP == 0) {
        of_warps[threadIdx.x / WARP] = best;
    }
    __syncthreads();
    if (threadIdx.x < WARP) {
        best = warp_best(threadIdx.x < THREADS / WARP ? of_warps[threadIdx.x] : Best{-INFINITY, NO_CHOICE});
    }
#ifdef HAS_CLUSTERS
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0) {
        const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(&of_blocks[part]));
        uint32_t there;
        asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(here));
        asm volatile("st.shared::cluster.v2.b32 [%0], {%1, %2};" ::"r"(there), "r"(__float_as_uint(best.value)),
                     "r"(best.place)
                     : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (part == 0 && threadIdx.x < WARP) {
        best = warp_best(threadIdx.x < CLUSTER ? of_blocks[threadIdx.x] : Best{-INFINITY, NO_CHOICE});
    }
#endif
    if (part == 0 && threadIdx.x == 0) {
        out[row] = ids == nullptr || best.place == NO_CHOICE ? best.place : ids[best.place];
    }
}

#define KERNEL(name, Element)                                                                       \
    extern "C" __global__ void SHARE_OF_A_ROW __launch_bounds__(THREADS, 3)                            \
        argmax_##name(const Element* x, uint32_t columns, uint32_t pitch, const uint32_t* ids,      \
                      uint32_t* out) {                                                              \
        argmax(x, columns, pitch, ids, out);                                                        \
    }
FOR_EACH_ACTIVATION(KERNEL)
KERNEL(f32, float)

// Launch: grid (rows * blocks), block (THREADS), no dynamic shared memory; blocks is CLUSTER for
// the sm_90a image and 1 for other images. (The loaded image determines this, not the device.) The
// cluster size is compiled in and needs no launch attribute. rows and columns > 0.
