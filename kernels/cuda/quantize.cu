// Quantization of activations to E4M3, alone or fused with a norm or with a gate. The fused kernels
// quantize their own results, so that no separate pass has to read the results again. On Hopper,
// quantize_large_m.cu handles many rows.
//
// quantize_<type>
//   out = x
// rms_norm_rounded_<type>
//   out = x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset)
//   (Zhang and Sennrich 2019, arXiv 1910.07467)
// add_experts_rms_norm_rounded_<type> (Hopper only)
//   adds to residual as add_experts of experts.cu does, if all experts are on this rank; then,
//   out = rms_norm_rounded of residual
// silu_mul_rounded_<type>, on Hopper also silu_mul_rounded_small_m_<type>
//   out = gate / (1 + exp(-gate)) * up             (SwiGLU, Shazeer 2020, arXiv 2002.05202)
// gelu_mul_rounded_<type>
//   out = gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 * gate^3))) * up
//
// x        [rows, columns]       rows x_pitch elements apart
// gate_up  [rows, 2 * columns]   gate, then up; rows x_pitch elements apart
// weight   [columns]             activations' type
// products, places, residual     as in rms_norm.cu
// plain    [rows, columns]       out in the activations' type, contiguous, or null
// data     [rows, columns]       out / scale in E4M3, contiguous
// scales   [rows, div_ceil(columns, 128)] f32 if kind is BY_GROUPS, [rows] if it is BY_ROWS
// fixed    the scale if kind is FIXED
//
// A scale is the largest magnitude among its numbers, divided by 448, in f32 and never below the
// smallest normal number. out is divided by the scale, rounded to nearest, ties to even, and
// limited to 448 in magnitude. A NaN stays NaN and is ignored by the scale, but a NaN in a row
// makes the row's norm NaN. Arithmetic is f32. columns is a multiple of 8. The rows that are read
// have any alignment, with 16-byte accesses where the alignment allows them. plain is aligned to 16
// bytes, and data to 8 bytes.

#include "contract.cuh"
#include "element.cuh"
#include "expert_sum.cuh"
#include "gate.cuh"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#include "hopper_cluster.cuh"
#endif
#include "kernel_order.cuh"
#include "rounding.cuh"

// Number of vectors that a thread keeps in registers. The thread computes its other vectors again
// each time it needs them. PTX targets keep no vectors and do not unroll the loop (`ONCE`), because
// otherwise the PTX would be three times as long.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr uint32_t HELD = 0;
#define ONCE _Pragma("unroll 1")
#else
constexpr uint32_t HELD = 2;
#define ONCE
#endif
// Number of blocks of a cluster, which share a gated row if there are few rows: a gated row is five
// times as long as other rows. At 256 rows, clusters are slower than one block per row.
constexpr uint32_t GATE_BLOCKS = contract::fp8::GATE_BLOCKS;

// Loads eight adjacent elements, with one access if they are `aligned`.
template <typename Element>
__device__ __forceinline__ void load_eight(const Element* from, bool aligned, float (&values)[WIDTH]) {
    if (aligned) {
        load<WIDTH>(from, values);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = to_float(from[i]);
        }
    }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The largest value among the cluster's blocks. Afterward, other blocks may still read this
// block's value: see `leave_cluster`.
__device__ __forceinline__ float largest_of_cluster(float value) {
    __shared__ float own;
    if (threadIdx.x == 0) {
        own = value;
    }
    cluster_sync();
    const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(&own));
#pragma unroll
    for (uint32_t rank = 0; rank < GATE_BLOCKS; ++rank) {
        float other;
        asm volatile(
            "{\n"
            ".reg .b32 place;\n"
            "mapa.shared::cluster.u32 place, %1, %2;\n"
            "ld.shared::cluster.f32 %0, [place];\n"
            "}\n"
            : "=f"(other)
            : "r"(at), "r"(rank)
            : "memory");
        value = fmaxf(value, other);
    }
    cluster_arrive();
    return value;
}
// A block ends only when all blocks of the cluster have read its value.
__device__ __forceinline__ void leave_cluster() { cluster_wait(); }
#else
// Without clusters, one block processes a whole row.
__device__ __forceinline__ uint32_t cluster_rank() { return 0; }
__device__ __forceinline__ float largest_of_cluster(float value) { return value; }
__device__ __forceinline__ void leave_cluster() {}
#endif

// Writes a row, or this block's part of a row that its cluster shares. `make(column, values)`
// computes eight numbers from a column on. `make_held(turn, column, values)` does the same for the
// vectors that stay in registers. All threads take part in each turn, in which each thread has one
// vector, because the lanes of a group exchange values.
template <uint32_t BLOCKS, typename Element, typename MakeHeld, typename Make>
__device__ __forceinline__ void write_row(const Target<Element>& target, uint64_t row, MakeHeld&& make_held, Make&& make) {
    __shared__ float partial[WARPS_MAX];
    // Each block has whole groups of 128 columns.
    const uint32_t all = target.columns / WIDTH;
    const uint32_t share = (all + BLOCKS * GROUP_LANES - 1) / (BLOCKS * GROUP_LANES) * GROUP_LANES;
    const uint32_t first = BLOCKS == 1 ? 0 : min(cluster_rank() * share, all), vectors = BLOCKS == 1 ? all : min(first + share, all);
    const uint32_t turns = (vectors - first + blockDim.x - 1) / blockDim.x;
    float held[HELD + 1][WIDTH];  // one more, because HELD may be 0
    const auto vector_of = [&](uint32_t turn) { return first + turn * blockDim.x + threadIdx.x; };
    const auto each = [&](auto&& run) {
#pragma unroll
        for (uint32_t turn = 0; turn < HELD; ++turn) {
            if (turn < turns) {
                run(vector_of(turn), held[turn]);
            }
        }
        ONCE
        for (uint32_t turn = HELD; turn < turns; ++turn) {
            float values[WIDTH] = {};
            if (vector_of(turn) < vectors) {
                make(vector_of(turn) * WIDTH, values);
            }
            run(vector_of(turn), values);
        }
    };
#pragma unroll
    for (uint32_t turn = 0; turn < HELD; ++turn) {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            held[turn][i] = 0.0f;
        }
        if (vector_of(turn) < vectors) {
            make_held(turn, vector_of(turn) * WIDTH, held[turn]);
        }
    }
    float of_row = target.fixed;
    if (target.kind == BY_ROWS) {
        float largest = 0.0f;
        each([&](uint32_t, const float(&values)[WIDTH]) { largest = fmaxf(largest, largest_of(values)); });
        largest = largest_of_block(largest, partial);
        if constexpr (BLOCKS > 1) {
            largest = largest_of_cluster(largest);
        }
        of_row = e4m3_scale(largest);
        if (threadIdx.x == 0 && first == 0) {
            target.scales[row] = of_row;
        }
    }
    const uint32_t groups = (target.columns + GROUP - 1) / GROUP;
    each([&](uint32_t vector, const float(&values)[WIDTH]) {
        float scale = of_row;
        if (target.kind == BY_GROUPS) {
            scale = e4m3_scale(largest_of_lanes<GROUP_LANES>(largest_of(values)));
            if (vector % GROUP_LANES == 0 && vector < vectors) {
                target.scales[row * groups + vector / GROUP_LANES] = scale;
            }
        }
        if (vector < vectors) {
            write(target, row, vector * WIDTH, scale, values);
        }
    });
    if (BLOCKS > 1 && target.kind == BY_ROWS) {
        leave_cluster();
    }
}

template <uint32_t BLOCKS, typename Element, typename Make>
__device__ __forceinline__ void write_row(const Target<Element>& target, uint64_t row, Make&& make) {
    write_row<BLOCKS>(target, row, [&](uint32_t, uint32_t column, float(&values)[WIDTH]) { make(column, values); }, make);
}

template <typename Element>
__device__ __forceinline__ void quantize(const Element* x, uint32_t x_pitch, const Target<Element>& target) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint64_t row = blockIdx.x;
    const Element* from = x + row * x_pitch;
    const bool aligned = aligned_to(from, 16);
    write_row<1>(target, row, [&](uint32_t column, float(&values)[WIDTH]) { load_eight(from + column, aligned, values); });
}

// Normalizes a row. The first read of each vector calls `read(column, values)`; later reads load
// the vector from `from`. Weights, which no kernel writes, are read before the previous kernel has
// ended: if they were read later, they would queue after the weights that the next GEMM already
// streams. With KEEPS, a thread keeps the first HELD vectors that it reads in registers.
template <bool KEEPS, typename Element, typename Read>
__device__ __forceinline__ void norm_row(const Element* from, bool aligned, const Read& read, const Element* weight,
                                         NormTerms terms, const Target<Element>& target) {
    __shared__ float partial[WARPS_MAX];
    const bool weight_aligned = aligned_to(weight, 16);
    const uint32_t vectors = target.columns / WIDTH;
    float held[KEEPS ? HELD + 1 : 1][WIDTH];  // one more, because HELD may be 0
    Words<WIDTH, Element> weights[HELD + 1];
    const auto each = [&](auto step) {
        each_held<HELD>(vectors, [&](uint32_t turn, uint32_t vector, bool is_in) {
            if (is_in) {
                step(turn, vector * WIDTH);
            }
        });
    };
    float squares = 0.0f;
    const auto square = [&](const float(&values)[WIDTH]) {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            squares += values[i] * values[i];
        }
    };
    each([&](uint32_t turn, uint32_t column) {
        float by[WIDTH];
        load_eight(weight + column, weight_aligned, by);
        weights[turn] = to_words<WIDTH, Element>(by);
    });
    wait_for_previous_kernel();
    if constexpr (KEEPS) {
        each([&](uint32_t turn, uint32_t column) { read(column, held[turn]); });
        each([&](uint32_t turn, uint32_t) { square(held[turn]); });
    }
    for (uint32_t vector = (KEEPS ? HELD : 0) * blockDim.x + threadIdx.x; vector < vectors; vector += blockDim.x) {
        float values[WIDTH];
        read(vector * WIDTH, values);
        square(values);
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, partial) / target.columns + terms.epsilon);
    const auto scale = [&](const float(&by)[WIDTH], float(&values)[WIDTH]) {
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = values[i] * factor * (by[i] + terms.weight_offset);
        }
    };
    const auto make_held = [&](uint32_t turn, uint32_t column, float(&values)[WIDTH]) {
        float by[WIDTH];
        widen<WIDTH, Element>(weights[turn], by);
        if constexpr (KEEPS) {
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                values[i] = held[turn][i];
            }
        } else {
            load_eight(from + column, aligned, values);
        }
        scale(by, values);
    };
    write_row<1>(target, blockIdx.x, make_held, [&](uint32_t column, float(&values)[WIDTH]) {
        float by[WIDTH];
        load_eight(from + column, aligned, values);
        load_eight(weight + column, weight_aligned, by);
        scale(by, values);
    });
}

template <typename Element>
__device__ __forceinline__ void rms_norm(const Element* x, uint32_t x_pitch, const Element* weight, NormTerms terms,
                                         const Target<Element>& target) {
    let_next_kernel_start();
    const Element* from = x + static_cast<uint64_t>(blockIdx.x) * x_pitch;
    const bool aligned = aligned_to(from, 16);
    const auto read = [&](uint32_t column, float(&values)[WIDTH]) { load_eight(from + column, aligned, values); };
    norm_row<true>(from, aligned, read, weight, terms, target);
}

template <typename Element>
__device__ __forceinline__ void add_experts_norm(const ExpertSum<Element>& sum, const Element* weight, NormTerms terms,
                                                 const Target<Element>& target) {
    let_next_kernel_start();
    const uint64_t row = blockIdx.x;
    Element* residual = sum.row_of_residual(row);
    const bool aligned = aligned_to(residual, 16), all_aligned = aligned && aligned_to(sum.products, 16);
    // A thread later reads only elements that it has written itself: `write_row` assigns the same
    // vectors to each thread as the norm does.
    const auto add = [&](uint32_t column, float(&values)[WIDTH]) {
        float sums[1][WIDTH];
        if (all_aligned) {
            sum.template add<WIDTH>(row, [&](auto step) { step(0, column); }, sums);
            const auto words = to_words<WIDTH, Element>(sums[0]);
            *reinterpret_cast<Words<WIDTH, Element>*>(residual + column) = words;
            widen<WIDTH, Element>(words, values);
            return;
        }
        for (uint32_t i = 0; i < WIDTH; ++i) {
            float one[1][1];
            sum.template add<1>(row, [&](auto step) { step(0, column + i); }, one);
            residual[column + i] = from_float<Element>(one[0][0]);
            values[i] = rounded<Element>(one[0][0]);
        }
    };
    norm_row<false>(residual, aligned, add, weight, terms, target);
}

template <Gate GATE, uint32_t BLOCKS, typename Element>
__device__ __forceinline__ void gate_mul(const Element* gate_up, uint32_t pitch, const Target<Element>& target) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint64_t row = blockIdx.x / BLOCKS;
    const Element *gate = gate_up + row * pitch, *up = gate + target.columns;
    const bool aligned = aligned_to(gate, 16) && aligned_to(up, 16);
    write_row<BLOCKS>(target, row, [&](uint32_t column, float(&values)[WIDTH]) {
        float ups[WIDTH];
        load_eight(gate + column, aligned, values);
        load_eight(up + column, aligned, ups);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            values[i] = activation<GATE>(values[i]) * ups[i];
        }
    });
}

#define KERNEL(name, Element)                                                                                      \
    extern "C" __global__ void __launch_bounds__(contract::fp8::THREADS_MAX, 2)                                    \
        quantize_##name(const Element* x, uint32_t x_pitch, uint32_t columns, Element* plain, uint32_t kind,       \
                        float fixed, uint8_t* data, float* scales) {                                               \
        quantize(x, x_pitch, Target<Element>{columns, plain, kind, fixed, data, scales});                          \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(contract::fp8::THREADS_MAX, 2)                                    \
        rms_norm_rounded_##name(const Element* x, uint32_t x_pitch, const Element* weight, float epsilon,          \
                                float weight_offset, uint32_t columns, Element* plain, uint32_t kind, float fixed, \
                                uint8_t* data, float* scales) {                                                    \
        rms_norm(x, x_pitch, weight, NormTerms{epsilon, weight_offset},                                            \
                 Target<Element>{columns, plain, kind, fixed, data, scales});                                      \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(contract::fp8::THREADS_MAX, 2)                                    \
        silu_mul_rounded_##name(const Element* gate_up, uint32_t x_pitch, uint32_t columns, Element* plain,        \
                                uint32_t kind, float fixed, uint8_t* data, float* scales) {                        \
        gate_mul<Gate::SILU, 1>(gate_up, x_pitch, Target<Element>{columns, plain, kind, fixed, data, scales});     \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(contract::fp8::THREADS_MAX, 2)                                    \
        gelu_mul_rounded_##name(const Element* gate_up, uint32_t x_pitch, uint32_t columns, Element* plain,        \
                                uint32_t kind, float fixed, uint8_t* data, float* scales) {                        \
        gate_mul<Gate::GELU_TANH, 1>(gate_up, x_pitch,                                                             \
                                     Target<Element>{columns, plain, kind, fixed, data, scales});                  \
    }
FOR_EACH_ACTIVATION(KERNEL)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KERNEL_OF_HOPPER(name, Element)                                                                            \
    extern "C" __global__ void __launch_bounds__(contract::fp8::THREADS_MAX)                                       \
        add_experts_rms_norm_rounded_##name(const Element* products, const uint32_t* places, uint32_t top,         \
                                            Element* residual, uint32_t residual_pitch, const Element* weight,     \
                                            float epsilon, float weight_offset, uint32_t columns, Element* plain,  \
                                            uint32_t kind, float fixed, uint8_t* data, float* scales) {            \
        add_experts_norm(ExpertSum<Element>{products, places, top, residual, residual_pitch, columns}, weight,     \
                         NormTerms{epsilon, weight_offset},                                                        \
                         Target<Element>{columns, plain, kind, fixed, data, scales});                              \
    }                                                                                                              \
    extern "C" __global__ void __cluster_dims__(GATE_BLOCKS, 1, 1)                                                 \
        __launch_bounds__(contract::fp8::THREADS_MAX, 2)                                                           \
        silu_mul_rounded_small_m_##name(const Element* gate_up, uint32_t x_pitch, uint32_t columns, Element* plain,    \
                                    uint32_t kind, float fixed, uint8_t* data, float* scales) {                    \
        gate_mul<Gate::SILU, GATE_BLOCKS>(gate_up, x_pitch,                                                        \
                                          Target<Element>{columns, plain, kind, fixed, data, scales});             \
    }
FOR_EACH_ACTIVATION(KERNEL_OF_HOPPER)
#endif

// Launch: grid (rows), block (clamp(round_up(columns / 8, 32), 32, THREADS_MAX) of contract::fp8),
// no dynamic shared memory. silu_mul_rounded_small_m has a cluster of GATE_BLOCKS per row: grid
// (rows * GATE_BLOCKS), and the block is computed from columns / GATE_BLOCKS. rows, columns and top
// > 0. Any block of whole warps, at most THREADS_MAX threads, is correct.
