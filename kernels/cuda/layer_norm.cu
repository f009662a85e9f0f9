// Layer normalisation (Ba et al. 2016, arXiv 1607.06450).
//
// out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, row by row
//
// x      [rows, hidden]   rows x_pitch elements apart
// weight [hidden]         activations' type
// bias   [hidden]         activations' type
// out    [rows, hidden]   contiguous; may be x itself where x is contiguous
//
// Arithmetic is f32 with one rounding at the end; the variance is the mean square of the distances from the mean, taken
// after it, so that a large mean costs no digits. A NaN in a row makes that row NaN and no other. Any hidden size and
// alignment; 16-byte accesses when addresses, pitch and hidden are aligned to it. A row of up to 4 vectors a thread
// (8192 elements) stays in registers; what is longer is read again.

#include "element.cuh"
#include "reduce.cuh"

// Vectors that a thread keeps.
constexpr uint32_t HELD = 4;

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_row(const Element* x, const Element* weight, const Element* bias, uint32_t hidden,
                                         float epsilon, Element* out) {
    __shared__ float partial_sum[WARPS_MAX], partial_square[WARPS_MAX];
    const uint32_t vectors = hidden / WIDTH;
    float held[HELD][WIDTH];
    // Calls `step(vector, values)` for each vector of this thread.
    const auto each = [&](auto step) {
#pragma unroll
        for (uint32_t slot = 0; slot < HELD; ++slot) {
            const uint32_t vector = threadIdx.x + slot * blockDim.x;
            if (vector < vectors) {
                step(vector, held[slot]);
            }
        }
        for (uint32_t vector = threadIdx.x + HELD * blockDim.x; vector < vectors; vector += blockDim.x) {
            float values[WIDTH];
            load<WIDTH>(x + vector * WIDTH, values);
            step(vector, values);
        }
    };
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        if (vector < vectors) {
            load<WIDTH>(x + vector * WIDTH, held[slot]);
        }
    }
    float sum = 0.0f, squares = 0.0f;
    each([&](uint32_t, float(&values)[WIDTH]) {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            sum += values[i];
        }
    });
    const float mean = block_sum(sum, partial_sum) / hidden;
    each([&](uint32_t, float(&values)[WIDTH]) {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            squares += (values[i] - mean) * (values[i] - mean);
        }
    });
    const float factor = 1.0f / sqrtf(block_sum(squares, partial_square) / hidden + epsilon);
    each([&](uint32_t vector, float(&values)[WIDTH]) {
        float weights[WIDTH], biases[WIDTH];
        load<WIDTH>(weight + vector * WIDTH, weights);
        load<WIDTH>(bias + vector * WIDTH, biases);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = (values[i] - mean) * factor * weights[i] + biases[i];
        }
        store<WIDTH>(out + vector * WIDTH, values);
    });
}

template <typename Element>
__device__ __forceinline__ void norm_rows(const Element* x, uint32_t x_pitch, const Element* weight,
                                          const Element* bias, uint32_t hidden, float epsilon, Element* out) {
    const uint64_t row = blockIdx.x;
    x += row * x_pitch;
    out += row * hidden;
    const bool aligned = aligned_to(x, 16) && aligned_to(out, 16) && aligned_to(weight, 16) && aligned_to(bias, 16)
        && hidden % VECTOR<Element> == 0;
    if (aligned) {
        norm_row<VECTOR<Element>>(x, weight, bias, hidden, epsilon, out);
    } else {
        norm_row<1>(x, weight, bias, hidden, epsilon, out);
    }
}

#define KERNEL(name, Element)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        layer_norm_##name(const Element* x, uint32_t x_pitch, const Element* weight, const Element* bias,            \
                          uint32_t hidden, float epsilon, Element* out) {                                            \
        norm_rows(x, x_pitch, weight, bias, hidden, epsilon, out);                                                   \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows), block (min(256, round_up(div_ceil(hidden, 16), 32))), no dynamic shared memory. rows and
// hidden > 0. The block must be whole warps, at most 8 of them.
