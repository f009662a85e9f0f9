// Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467), alone and behind a residual's addition.
//
// rms_norm:     out = x / sqrt(mean(x^2) + epsilon) * weight, row by row
// add_rms_norm: residual = residual + x, rounded to the element; out = rms_norm(residual)
//
// x        [rows, hidden]   rows x_pitch elements apart
// residual [rows, hidden]   rows residual_pitch elements apart, changed in place
// weight   [hidden]         activations' type
// out      [rows, hidden]   contiguous; may be x itself where x is contiguous
//
// Arithmetic and mean are f32 with one rounding at the end. A NaN in a row makes that row NaN and no other. Any hidden
// size and alignment; 16-byte accesses when addresses, pitches and hidden are aligned to it. A row of up to 4 vectors
// a thread (8192 elements) stays in registers between the sum and the scaling; what is longer is read again.

#include "element.cuh"
#include "reduce.cuh"

// Vectors that a thread keeps.
constexpr uint32_t HELD = 4;

// `WIDTH` elements at a time. `ADDING` is whether there is a residual; without, `residual` is not looked at.
template <uint32_t WIDTH, bool ADDING, typename Element>
__device__ __forceinline__ void norm_row(const Element* x, Element* residual, const Element* weight, uint32_t hidden,
                                         float epsilon, Element* out) {
    __shared__ float partial[WARPS_MAX];
    const uint32_t vectors = hidden / WIDTH;
    float held[HELD][WIDTH];
    float squares = 0.0f;
    const auto take = [&](uint32_t vector, float(&values)[WIDTH]) {
        load<WIDTH>(x + vector * WIDTH, values);
        if constexpr (ADDING) {
            float before[WIDTH];
            load<WIDTH>(residual + vector * WIDTH, before);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                values[i] = rounded<Element>(before[i] + values[i]);
            }
        }
    };
    const auto keep = [&](uint32_t vector, const float(&values)[WIDTH]) {
        if constexpr (ADDING) {
            store<WIDTH>(residual + vector * WIDTH, values);
        }
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            squares += values[i] * values[i];
        }
    };
    // All loads first: their delays overlap.
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        if (vector < vectors) {
            take(vector, held[slot]);
        }
    }
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        if (vector < vectors) {
            keep(vector, held[slot]);
        }
    }
    for (uint32_t vector = threadIdx.x + HELD * blockDim.x; vector < vectors; vector += blockDim.x) {
        float values[WIDTH];
        take(vector, values);
        keep(vector, values);
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, partial) / hidden + epsilon);
    const auto scale = [&](uint32_t vector, float(&values)[WIDTH]) {
        float weights[WIDTH];
        load<WIDTH>(weight + vector * WIDTH, weights);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = values[i] * factor * weights[i];
        }
        store<WIDTH>(out + vector * WIDTH, values);
    };
#pragma unroll
    for (uint32_t slot = 0; slot < HELD; ++slot) {
        const uint32_t vector = threadIdx.x + slot * blockDim.x;
        if (vector < vectors) {
            scale(vector, held[slot]);
        }
    }
    for (uint32_t vector = threadIdx.x + HELD * blockDim.x; vector < vectors; vector += blockDim.x) {
        // Each thread reads again what it alone has read, and with a residual also written.
        float values[WIDTH];
        load<WIDTH>((ADDING ? residual : x) + vector * WIDTH, values);
        scale(vector, values);
    }
}

template <bool ADDING, typename Element>
__device__ __forceinline__ void norm_rows(const Element* x, uint32_t x_pitch, Element* residual,
                                          uint32_t residual_pitch, const Element* weight, uint32_t hidden,
                                          float epsilon, Element* out) {
    const uint64_t row = blockIdx.x;
    x += row * x_pitch;
    out += row * hidden;
    if (ADDING) {
        residual += row * residual_pitch;
    }
    const bool aligned = aligned_to(x, 16) && aligned_to(out, 16) && aligned_to(weight, 16)
        && (!ADDING || aligned_to(residual, 16)) && hidden % VECTOR<Element> == 0;
    if (aligned) {
        norm_row<VECTOR<Element>, ADDING>(x, residual, weight, hidden, epsilon, out);
    } else {
        norm_row<1, ADDING>(x, residual, weight, hidden, epsilon, out);
    }
}

#define KERNEL(name, Element)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        rms_norm_##name(const Element* x, uint32_t x_pitch, const Element* weight, uint32_t hidden, float epsilon,    \
                        Element* out) {                                                                               \
        norm_rows<false>(x, x_pitch, static_cast<Element*>(nullptr), 0, weight, hidden, epsilon, out);                \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(256)                                                                 \
        add_rms_norm_##name(const Element* x, uint32_t x_pitch, Element* residual, uint32_t residual_pitch,           \
                            const Element* weight, uint32_t hidden, float epsilon, Element* out) {                    \
        norm_rows<true>(x, x_pitch, residual, residual_pitch, weight, hidden, epsilon, out);                          \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows), block (min(256, round_up(div_ceil(hidden, 16), 32))), no dynamic shared memory. rows and
// hidden > 0. The block must be whole warps, at most 8 of them.
