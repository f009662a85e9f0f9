// Row-wise scatter-add: `out[to[i]] += x[from[i]]`.
//
// x    [x_rows, columns]     rows x_pitch elements apart
// from [chosen] u32          rows of x
// to   [chosen] u32          rows of out, each at most once
// out  [out_rows, columns]   rows out_pitch elements apart; all other rows keep their contents
//
// Sums are f32, rounded once. If to[i] >= out_rows, the row is skipped. If from[i] >= x_rows,
// nothing outside x is read; all bits of row to[i] are set to 1, which is a NaN in every float
// type, so that the error is visible. If `to` names a row twice, that row holds either sum or a
// mixture of both. Any alignment is allowed; accesses are 16 bytes wide when addresses, pitches and
// columns are multiples of 16 bytes.

#include "contract.cuh"
#include "copy_row.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

// Number of vectors that a thread loads from each of the two rows before it adds them.
constexpr uint32_t HELD = 4;

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void add_row(const Element* x, Element* out, uint32_t columns) {
    const uint32_t vectors = columns / WIDTH;
    for (uint32_t first = threadIdx.x; first < vectors; first += HELD * blockDim.x) {
        Words<WIDTH, Element> added[HELD], held[HELD];
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * blockDim.x;
            if (vector < vectors) {
                added[slot] = load_words<WIDTH>(x + vector * WIDTH);
                held[slot] = load_words<WIDTH>(out + vector * WIDTH);
            }
        }
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = first + slot * blockDim.x;
            if (vector < vectors) {
                float more[WIDTH], values[WIDTH];
                widen<WIDTH, Element>(added[slot], more);
                widen<WIDTH, Element>(held[slot], values);
#pragma unroll
                for (uint32_t i = 0; i < WIDTH; ++i) {
                    values[i] += more[i];
                }
                store<WIDTH>(out + vector * WIDTH, values);
            }
        }
    }
}

template <typename Element>
__device__ __forceinline__ void add_rows(const Element* x, uint32_t x_rows, uint32_t x_pitch, const uint32_t* from,
                                         const uint32_t* to, uint32_t columns, Element* out, uint32_t out_rows,
                                         uint32_t out_pitch) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t source = from[blockIdx.x], place = to[blockIdx.x];
    if (place >= out_rows) {
        return;
    }
    out += static_cast<uint64_t>(place) * out_pitch;
    if (source >= x_rows) {
        fill_row(out, columns * sizeof(Element), ALL_ONES);
        return;
    }
    x += static_cast<uint64_t>(source) * x_pitch;
    const uint64_t together = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out);
    constexpr uint32_t HALF = VECTOR<Element> / 2;
    if (aligned_to(together, 16) && columns % VECTOR<Element> == 0) {
        add_row<VECTOR<Element>>(x, out, columns);
    } else if (aligned_to(together, 8) && columns % HALF == 0) {
        add_row<HALF>(x, out, columns);
    } else {
        add_row<1>(x, out, columns);
    }
}

#define KERNEL(name, Element)                                                                                    \
    extern "C" __global__ void __launch_bounds__(contract::copy_rows::THREADS)                                   \
        add_rows_##name(const Element* x, uint32_t x_rows, uint32_t x_pitch, const uint32_t* from,               \
                        const uint32_t* to, uint32_t columns, Element* out, uint32_t out_rows,                   \
                        uint32_t out_pitch) {                                                                    \
        add_rows(x, x_rows, x_pitch, from, to, columns, out, out_rows, out_pitch);                               \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch (chosen > 0): grid (chosen), block (THREADS of contract::copy_rows),
// no dynamic shared memory.
