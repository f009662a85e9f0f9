// The norm of each head's output in a gated delta net, multiplied by the SiLU of a gate (Yang et
// al. 2024, arXiv 2412.06464).
//
// out = x / sqrt(mean(x^2) + epsilon) * weight * gate / (1 + exp(-gate)), for each head of each row
//
// x       [rows, heads * head_dim]     rows x_pitch elements apart
// gate    [rows, heads * head_dim]     rows gate_pitch elements apart
// weight  [head_dim] f32
// out     [rows, heads * head_dim]     contiguous; may be x itself if x is contiguous
//
// Arithmetic and mean are f32, rounded once at the end. A NaN makes its own head NaN and no other
// head. Any head_dim and alignment; accesses are 16 bytes wide when addresses, pitches and head_dim
// are multiples of 16 bytes.
//
// Method: up to 32 lanes (a power of two) share a head. If the head has at most that many vectors,
// each lane has at most one vector. The first vector of a lane stays in registers between the sum
// and the scaling.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"
#include "logistic.cuh"
#include "reduce.cuh"

template <typename Element>
struct GatedNorm {
    const Element* x;
    uint32_t x_pitch;
    const Element* gate;
    uint32_t gate_pitch;
    const float* weight;
    uint32_t rows, heads, head_dim;
    float epsilon;
    Element* out;
};

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void write_gated(const float (&x)[WIDTH], const float (&gate)[WIDTH], const float* weight,
                                            float factor, Element* to) {
    float values[WIDTH];
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        values[i] = x[i] * factor * weight[i] * silu(gate[i]);
    }
    store<WIDTH>(to, values);
}

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_heads(const GatedNorm<Element>& call, uint32_t lanes) {
    const uint32_t vectors = call.head_dim / WIDTH, lane = threadIdx.x % lanes;
    const uint64_t items = static_cast<uint64_t>(call.rows) * call.heads;
    const uint64_t item = static_cast<uint64_t>(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes;
    const bool is_in = item < items;
    const uint64_t row = is_in ? item / call.heads : 0;
    const uint32_t column = is_in ? static_cast<uint32_t>(item % call.heads) * call.head_dim : 0;
    const Element* x = call.x + row * call.x_pitch + column;
    const Element* gate = call.gate + row * call.gate_pitch + column;
    Element* out = call.out + row * call.heads * call.head_dim + column;
    // A lane has at most one vector in registers. A lane without a vector takes part in the sum.
    const bool has_first = is_in && lane < vectors;
    float first[WIDTH] = {}, first_gate[WIDTH] = {};
    if (has_first) {
        load<WIDTH>(x + lane * WIDTH, first);
        load<WIDTH>(gate + lane * WIDTH, first_gate);
    }
    float squares = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        squares += first[i] * first[i];
    }
    for (uint32_t vector = lane + lanes; is_in && vector < vectors; vector += lanes) {
        float values[WIDTH];
        load<WIDTH>(x + vector * WIDTH, values);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            squares += values[i] * values[i];
        }
    }
    for (uint32_t distance = lanes / 2; distance > 0; distance /= 2) {
        squares += __shfl_xor_sync(ALL_LANES, squares, distance);
    }
    const float factor = 1.0f / sqrtf(squares / call.head_dim + call.epsilon);
    if (has_first) {
        write_gated<WIDTH>(first, first_gate, call.weight + lane * WIDTH, factor, out + lane * WIDTH);
    }
    for (uint32_t vector = lane + lanes; is_in && vector < vectors; vector += lanes) {
        // `out` may be `x`: each lane reads only elements that no other lane writes.
        float values[WIDTH], gates[WIDTH];
        load<WIDTH>(x + vector * WIDTH, values);
        load<WIDTH>(gate + vector * WIDTH, gates);
        write_gated<WIDTH>(values, gates, call.weight + vector * WIDTH, factor, out + vector * WIDTH);
    }
}

template <typename Element>
__device__ __forceinline__ void gated_rms_norm(const GatedNorm<Element>& call, uint32_t lanes) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint64_t starts = reinterpret_cast<uint64_t>(call.x) | reinterpret_cast<uint64_t>(call.gate)
        | reinterpret_cast<uint64_t>(call.out) | reinterpret_cast<uint64_t>(call.weight);
    const uint64_t steps = call.x_pitch | call.gate_pitch | call.head_dim;
    if (aligned_to(starts, 16) && steps % VECTOR<Element> == 0) {
        norm_heads<VECTOR<Element>>(call, lanes);
    } else {
        norm_heads<1>(call, lanes);
    }
}

#define KERNEL(name, Element)                                                                                      \
    extern "C" __global__ void __launch_bounds__(contract::gated_rms_norm::THREADS)                                \
        gated_rms_norm_##name(const Element* x, uint32_t x_pitch, const Element* gate, uint32_t gate_pitch,        \
                              const float* weight, uint32_t rows, uint32_t heads, uint32_t head_dim, float epsilon,\
                              uint32_t lanes, Element* out) {                                                      \
        gated_rms_norm(GatedNorm<Element>{x, x_pitch, gate, gate_pitch, weight, rows, heads, head_dim, epsilon,    \
                                          out},                                                                    \
                       lanes);                                                                                     \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (div_ceil(rows * heads * lanes, THREADS)), block THREADS, no dynamic shared memory.
// lanes is a power of two from 1 to 32; the fastest is the smallest one that is at least head_dim /
// 8. rows, heads and head_dim > 0.
