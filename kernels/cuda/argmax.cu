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

#include "best.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

// Number of vectors that a thread loads at once.
constexpr uint32_t HELD = 5;

// The largest element of this thread's share of a row. The loop keeps only the index of the vector
// that contains it; the element's position in that vector is found at the end.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ Best best_of(const Element* x, uint32_t columns, uint32_t part) {
    Best best = {-INFINITY, NO_CHOICE};
    const uint32_t vectors = columns / WIDTH;
    constexpr uint32_t STRIDE = BLOCKS_PER_ROW * THREADS;
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
                if (largest > best.value || (best.index == NO_CHOICE && largest == best.value)) {
                    best = {largest, first + slot * STRIDE};
                }
            }
        }
    }
    if (best.index != NO_CHOICE) {
        const uint32_t start = best.index * WIDTH;
        float values[WIDTH];
        load<WIDTH>(x + start, values);
#pragma unroll
        for (uint32_t i = WIDTH; i > 0; --i) {
            if (values[i - 1] == best.value) {
                best.index = start + i - 1;
            }
        }
    }
    return best;
}

template <typename Element>
__device__ __forceinline__ void argmax(const Element* x, uint32_t columns, uint64_t pitch, const uint32_t* ids,
                                       uint32_t* out) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t row = blockIdx.x / BLOCKS_PER_ROW, part = blockIdx.x % BLOCKS_PER_ROW;
    arrive_at_cluster_barrier();
    x += row * pitch;
    const bool aligned = aligned_to(x, 16) && columns % VECTOR<Element> == 0;
    Best best = aligned ? best_of<VECTOR<Element>>(x, columns, part) : best_of<1>(x, columns, part);
    best = best_of_row(best, part);
    if (part == 0 && threadIdx.x == 0) {
        out[row] = ids == nullptr || best.index == NO_CHOICE ? best.index : ids[best.index];
    }
}

#define KERNEL(name, Element)                                                                       \
    extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 3)                            \
        argmax_##name(const Element* x, uint32_t columns, uint32_t pitch, const uint32_t* ids,      \
                      uint32_t* out) {                                                              \
        argmax(x, columns, pitch, ids, out);                                                        \
    }
FOR_EACH_ACTIVATION(KERNEL)
KERNEL(f32, float)

// Launch: grid (rows * blocks), block (THREADS), no dynamic shared memory; blocks is BLOCKS_PER_ROW for
// the sm_90a image and 1 for other images. (The loaded image determines this, not the device.) The
// cluster size is compiled in and needs no launch attribute. rows and columns > 0.
