// Layer normalization (Ba et al. 2016, arXiv 1607.06450).
//
// layer_norm: out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, row by row
//
// x      [rows, hidden]   rows x_pitch elements apart
// weight [hidden]         activations' type
// bias   [hidden]         activations' type
// out    [rows, hidden]   contiguous; may be x itself if x is contiguous
//
// Arithmetic is f32, rounded once at the end. The variance is computed from squared distances from
// a mean, never as a difference of two large sums, so that a large mean costs no precision. A NaN
// in a row makes only that row NaN. Any hidden size and alignment; accesses are 16 bytes wide when
// addresses, pitches and hidden are multiples of 16 bytes. Up to 2 vectors of a row per thread (at
// most 8192 elements per row) stay in registers; the rest of a longer row is read again.

#include "norm_rows.cuh"

// Count, mean, and sum of squared distances from that mean, of a set of numbers.
struct Moments {
    float count, mean, squares;
};

// Computes the moments of the whole block from the moments of its warps (Chan, Golub and LeVeque
// 1979): the distances of the warps' means from the common mean are added to the distances within
// the warps. Consecutive calls must use different `partial` arrays (see `block_sum`).
__device__ __forceinline__ Moments block_moments(const Moments& of_warp, Moments (&partial)[WARPS_MAX]) {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    if (warps == 1) {
        return of_warp;
    }
    if (lane == 0) {
        partial[warp] = of_warp;
    }
    __syncthreads();
    const Moments one = lane < warps ? partial[lane] : Moments{0.0f, 0.0f, 0.0f};
    const float count = warp_sum(one.count);
    const float mean = warp_sum(one.count * one.mean) / count;
    return {count, mean, warp_sum(one.squares + one.count * (one.mean - mean) * (one.mean - mean))};
}

// Normalizes every gridDim.x-th row, `WIDTH` elements at a time. Each thread has the same columns
// in all of its rows, so weights and biases are read once. The next row is loaded while the current
// row is summed. Registers hold elements unconverted, as they are in memory.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_rows(const Rows<Element>& call) {
    __shared__ Moments partial[2][WARPS_MAX];
    using Kept = Words<WIDTH, Element>;
    const uint32_t vectors = call.hidden / WIDTH, rest = threadIdx.x + HELD * blockDim.x;
    Kept weights[HELD], biases[HELD], ahead[HELD];
    const auto each = [&](auto step) { each_held<WIDTH>(vectors, step); };
    const auto fetch = [&](uint64_t row) { fetch_row<WIDTH>(call, vectors, row, ahead); };
    const auto finish = [&](const Kept& kept, const Kept& weight, const Kept& bias, float mean, float factor,
                            Element* to) {
        float values[WIDTH], by[WIDTH], shift[WIDTH];
        widen<WIDTH, Element>(kept, values);
        widen<WIDTH, Element>(weight, by);
        widen<WIDTH, Element>(bias, shift);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = (values[i] - mean) * factor * by[i] + shift[i];
        }
        store<WIDTH>(to, values);
    };
    // No kernel writes weights and biases, so they are read before wait_for_previous_kernel.
    each([&](uint32_t slot, uint32_t column) {
        weights[slot] = load_words<WIDTH>(call.weight + column);
        biases[slot] = load_words<WIDTH>(call.bias + column);
    });
    wait_for_previous_kernel();
    if (blockIdx.x < call.rows) {
        fetch(blockIdx.x);
    }
    uint32_t turn = 0;
    for (uint64_t row = blockIdx.x; row < call.rows; row += gridDim.x, turn ^= 1) {
        const Element* x = call.x + row * call.x_pitch;
        Element* out = call.out + row * call.hidden;
        Kept kept[HELD];
        each([&](uint32_t slot, uint32_t) { kept[slot] = ahead[slot]; });
        if (row + gridDim.x < call.rows) {
            fetch(row + gridDim.x);
        }
        // Calls `step(values)` for each vector of this thread.
        const auto over = [&](auto step) {
            float values[WIDTH];
            each([&](uint32_t slot, uint32_t) {
                widen<WIDTH, Element>(kept[slot], values);
                step(values);
            });
#pragma unroll 1
            for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
                load<WIDTH>(x + vector * WIDTH, values);
                step(values);
            }
        };
        Moments moments = {0.0f, 0.0f, 0.0f};
        over([&](const float(&values)[WIDTH]) {
            moments.count += WIDTH;
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                moments.mean += values[i];
            }
        });
        // A warp may have no elements. Its mean is then 0 instead of 0 / 0, which is NaN.
        moments.count = warp_sum(moments.count);
        moments.mean = warp_sum(moments.mean) / fmaxf(moments.count, 1.0f);
        over([&](const float(&values)[WIDTH]) {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                moments.squares += (values[i] - moments.mean) * (values[i] - moments.mean);
            }
        });
        moments.squares = warp_sum(moments.squares);
        moments = block_moments(moments, partial[turn]);
        const float factor = 1.0f / sqrtf(moments.squares / moments.count + call.epsilon);
        each([&](uint32_t slot, uint32_t column) {
            finish(kept[slot], weights[slot], biases[slot], moments.mean, factor, out + column);
        });
#pragma unroll 1
        for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
            const uint32_t column = vector * WIDTH;
            finish(load_words<WIDTH>(x + column), load_words<WIDTH>(call.weight + column),
                   load_words<WIDTH>(call.bias + column), moments.mean, factor, out + column);
        }
    }
}

#define KERNEL(name, Element)                                                                                      \
    extern "C" __global__ void __launch_bounds__(contract::norm::THREADS_MAX)                                      \
        layer_norm_##name(const Element* x, uint32_t x_pitch, const Element* weight, const Element* bias,          \
                          uint32_t rows, uint32_t hidden, float epsilon, Element* out) {                           \
        norm(Rows<Element>{x, x_pitch, weight, bias, rows, hidden, epsilon, out});                                 \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (min(rows, 8 * SMs)), block (min(THREADS_MAX, round_up(div_ceil(hidden, 16), 32))),
// no dynamic shared memory. rows and hidden > 0. Any grid is correct. The block must consist of at
// most 16 whole warps.
