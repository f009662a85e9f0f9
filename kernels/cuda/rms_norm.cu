// Root-mean-square normalization (Zhang and Sennrich 2019, arXiv 1910.07467) of a tensor's rows, or
// of a residual to which the kernel first adds the outputs of each row's experts (MoE).
//
// rms_norm:             out = x / sqrt(mean(x^2) + epsilon) * (weight + weight_offset), row by row
// rms_norm_add:         sum = (sum + rms_norm(x)) * factor, rounded once
// add_experts_rms_norm: adds to residual as add_experts of experts.cu does, if all experts are on
//                       this rank; out = rms_norm(residual)
//
// x        [rows, hidden]         rows x_pitch elements apart
// residual [rows, hidden]         rows residual_pitch elements apart, changed in place
// sum      [rows, hidden]         rows sum_pitch elements apart, changed in place
// weight   [hidden]               activations' type
// factor   [1] f32                or null: 1
// out      [rows, hidden]         contiguous; may be x itself if x is contiguous
// products [rows * top, hidden]   contiguous, in the order of places; already multiplied by their
//                                 choices' weights
// places   [rows * top] u32       the place of each choice's product
//
// Arithmetic and mean are f32, rounded once at the end. A NaN in a row makes only that row NaN. Any
// hidden size and alignment; accesses are 16 bytes wide when addresses, pitches and hidden are
// multiples of 16 bytes. Up to 2 vectors of a row per thread (at most 8192 elements per row) stay
// in registers between the sum and the scaling; the rest of a longer row is read again.
// add_experts_rms_norm gives the same bits as add_experts followed by rms_norm.

#include "expert_sum.cuh"
#include "norm_rows.cuh"

// Adds the squares of `WIDTH` elements to `squares`.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void add_squares(const Words<WIDTH, Element>& kept, float& squares) {
    float values[WIDTH];
    widen<WIDTH, Element>(kept, values);
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        squares += values[i] * values[i];
    }
}

// Normalizes every gridDim.x-th row, `WIDTH` elements at a time. Each thread has the same columns
// in all of its rows, so the weights are read once. The next row is loaded while the current row is
// summed. Registers hold elements unconverted, as they are in memory.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_rows(const Rows<Element>& call) {
    __shared__ float partial[2][WARPS_MAX];
    using Kept = Words<WIDTH, Element>;
    const uint32_t vectors = call.hidden / WIDTH;
    Kept weights[HELD], ahead[HELD];
    const auto each = [&](auto step) { each_held<WIDTH>(vectors, step); };
    const auto fetch = [&](uint64_t row) { fetch_row<WIDTH>(call, vectors, row, ahead); };
    // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
    each([&](uint32_t slot, uint32_t column) { weights[slot] = load_words<WIDTH>(call.weight + column); });
    wait_for_previous_kernel();
    if (blockIdx.x < call.rows) {
        fetch(blockIdx.x);
    }
    uint32_t turn = 0;
    for (uint64_t row = blockIdx.x; row < call.rows; row += gridDim.x, turn ^= 1) {
        const Element* x = call.x + row * call.x_pitch;
        Element* out = call.out + row * call.hidden;
        const uint32_t rest = threadIdx.x + HELD * blockDim.x;
        Kept kept[HELD];
        float squares = 0.0f;
        each([&](uint32_t slot, uint32_t) {
            kept[slot] = ahead[slot];
            add_squares<WIDTH, Element>(kept[slot], squares);
        });
        if (row + gridDim.x < call.rows) {
            fetch(row + gridDim.x);
        }
#pragma unroll 1
        for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
            add_squares<WIDTH, Element>(load_words<WIDTH>(x + vector * WIDTH), squares);
        }
        const float factor = 1.0f / sqrtf(block_sum(squares, partial[turn]) / call.hidden + call.epsilon);
        each([&](uint32_t slot, uint32_t column) { write_scaled<WIDTH>(kept[slot], weights[slot], call.weight_offset, factor, out + column); });
#pragma unroll 1
        for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
            // `out` may be `x`: each thread reads only elements that no other thread writes.
            const Kept again = load_words<WIDTH>(x + vector * WIDTH);
            write_scaled<WIDTH>(again, load_words<WIDTH>(call.weight + vector * WIDTH), call.weight_offset, factor,
                                out + vector * WIDTH);
        }
    }
}

// Adds the norm of every gridDim.x-th row to the row of `call.out`, `WIDTH` elements at a time. Each
// thread has the same columns in all of its rows, so the weights are read once. The vectors of both
// rows are loaded before the squares are summed.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_add_rows(const Rows<Element>& call, const float* factor, uint32_t sum_pitch) {
    __shared__ float partial[2][WARPS_MAX];
    using Kept = Words<WIDTH, Element>;
    const uint32_t vectors = call.hidden / WIDTH, rest = threadIdx.x + HELD * blockDim.x;
    Kept weights[HELD];
    const auto each = [&](auto step) { each_held<WIDTH>(vectors, step); };
    // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
    each([&](uint32_t slot, uint32_t column) { weights[slot] = load_words<WIDTH>(call.weight + column); });
    wait_for_previous_kernel();
    const float times = factor != nullptr ? *factor : 1.0f;
    uint32_t turn = 0;
    for (uint64_t row = blockIdx.x; row < call.rows; row += gridDim.x, turn ^= 1) {
        const Element* x = call.x + row * call.x_pitch;
        Element* sum = call.out + row * sum_pitch;
        Kept kept[HELD], held[HELD];
        float squares = 0.0f;
        each([&](uint32_t slot, uint32_t column) {
            kept[slot] = load_words<WIDTH>(x + column);
            held[slot] = load_words<WIDTH>(sum + column);
        });
        each([&](uint32_t slot, uint32_t) { add_squares<WIDTH, Element>(kept[slot], squares); });
#pragma unroll 1
        for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
            add_squares<WIDTH, Element>(load_words<WIDTH>(x + vector * WIDTH), squares);
        }
        const float scale = 1.0f / sqrtf(block_sum(squares, partial[turn]) / call.hidden + call.epsilon);
        const auto add = [&](const Kept& kept, const Kept& weight, const Kept& held, Element* to) {
            float values[WIDTH], by[WIDTH], sums[WIDTH];
            widen<WIDTH, Element>(kept, values);
            widen<WIDTH, Element>(weight, by);
            widen<WIDTH, Element>(held, sums);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                sums[i] = (sums[i] + values[i] * scale * (by[i] + call.weight_offset)) * times;
            }
            store<WIDTH>(to, sums);
        };
        each([&](uint32_t slot, uint32_t column) { add(kept[slot], weights[slot], held[slot], sum + column); });
#pragma unroll 1
        for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
            const uint32_t column = vector * WIDTH;
            add(load_words<WIDTH>(x + column), load_words<WIDTH>(call.weight + column), load_words<WIDTH>(sum + column),
                sum + column);
        }
    }
}

template <typename Element>
__device__ __forceinline__ void norm_add(const Rows<Element>& call, const float* factor, uint32_t sum_pitch) {
    let_next_kernel_start();
    const uint64_t starts = reinterpret_cast<uint64_t>(call.x) | reinterpret_cast<uint64_t>(call.out)
        | reinterpret_cast<uint64_t>(call.weight);
    const uint64_t steps = call.x_pitch | call.hidden | sum_pitch;
    if (aligned_to(starts, 16) && steps % VECTOR<Element> == 0) {
        norm_add_rows<VECTOR<Element>>(call, factor, sum_pitch);
    } else {
        norm_add_rows<1>(call, factor, sum_pitch);
    }
}

// Processes one row per block. Eight products of each vector are in flight at once, so no next row
// has to be prefetched.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void norm_sum(const ExpertSum<Element>& sum, const Element* weight, NormTerms terms,
                                         Element* out) {
    __shared__ float partial[WARPS_MAX];
    using Kept = Words<WIDTH, Element>;
    const uint64_t row = blockIdx.x;
    const uint32_t vectors = sum.columns / WIDTH, rest = threadIdx.x + HELD * blockDim.x;
    Element *residual = sum.row_of_residual(row), *to = out + row * sum.columns;
    Kept weights[HELD], kept[HELD];
    const auto each = [&](auto step) { each_held<WIDTH>(vectors, step); };
    float squares = 0.0f;
    // Rounds and writes a sum, adds the squares of its rounded elements to `squares`, and returns
    // the rounded elements.
    const auto write = [&](const float(&values)[WIDTH], uint32_t column) {
        const Kept words = to_words<WIDTH, Element>(values);
        *reinterpret_cast<Kept*>(residual + column) = words;
        float again[WIDTH];
        widen<WIDTH, Element>(words, again);
#pragma unroll
        for (uint32_t i = 0; i < WIDTH; ++i) {
            squares += again[i] * again[i];
        }
        return words;
    };
    // No kernel writes weights, so they are read before `wait_for_previous_kernel`.
    each([&](uint32_t slot, uint32_t column) { weights[slot] = load_words<WIDTH>(weight + column); });
    wait_for_previous_kernel();
    float sums[HELD][WIDTH];
    sum.template add<WIDTH>(row, each, sums);
    each([&](uint32_t slot, uint32_t column) { kept[slot] = write(sums[slot], column); });
#pragma unroll 1
    for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
        float more[1][WIDTH];
        sum.template add<WIDTH>(row, [&](auto step) { step(0, vector * WIDTH); }, more);
        write(more[0], vector * WIDTH);
    }
    const float factor = 1.0f / sqrtf(block_sum(squares, partial) / sum.columns + terms.epsilon);
    each([&](uint32_t slot, uint32_t column) {
        write_scaled<WIDTH>(kept[slot], weights[slot], terms.weight_offset, factor, to + column);
    });
#pragma unroll 1
    for (uint32_t vector = rest; vector < vectors; vector += blockDim.x) {
        // Each thread reads only elements that it has written itself.
        const uint32_t column = vector * WIDTH;
        write_scaled<WIDTH>(load_words<WIDTH>(residual + column), load_words<WIDTH>(weight + column), terms.weight_offset,
                            factor, to + column);
    }
}

template <typename Element>
__device__ __forceinline__ void add_experts_norm(const ExpertSum<Element>& sum, const Element* weight, NormTerms terms,
                                                 Element* out) {
    let_next_kernel_start();
    const uint64_t starts = reinterpret_cast<uint64_t>(sum.products) | reinterpret_cast<uint64_t>(sum.residual)
        | reinterpret_cast<uint64_t>(weight) | reinterpret_cast<uint64_t>(out);
    const uint64_t steps = sum.columns | sum.residual_pitch;
    if (aligned_to(starts, 16) && steps % VECTOR<Element> == 0) {
        norm_sum<VECTOR<Element>>(sum, weight, terms, out);
    } else {
        norm_sum<1>(sum, weight, terms, out);
    }
}

#define KERNEL(name, Element)                                                                                      \
    extern "C" __global__ void __launch_bounds__(contract::norm::THREADS_MAX, 2)                                   \
        rms_norm_##name(const Element* x, uint32_t x_pitch, const Element* weight, uint32_t rows, uint32_t hidden, \
                        float epsilon, float weight_offset, Element* out) {                                        \
        norm(Rows<Element>{x, x_pitch, weight, nullptr, rows, hidden, epsilon, out, weight_offset});               \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(contract::norm::THREADS_MAX, 2)                                   \
        rms_norm_add_##name(const Element* x, uint32_t x_pitch, const Element* weight, uint32_t rows,              \
                            uint32_t hidden, float epsilon, float weight_offset, const float* factor,              \
                            Element* sum, uint32_t sum_pitch) {                                                    \
        norm_add(Rows<Element>{x, x_pitch, weight, nullptr, rows, hidden, epsilon, sum, weight_offset}, factor,    \
                 sum_pitch);                                                                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(contract::norm::THREADS_MAX)                                      \
        add_experts_rms_norm_##name(const Element* products, const uint32_t* places, uint32_t top,                 \
                                    Element* residual, uint32_t residual_pitch, const Element* weight,             \
                                    uint32_t hidden, float epsilon, float weight_offset, Element* out) {           \
        add_experts_norm(ExpertSum<Element>{products, places, top, residual, residual_pitch, hidden}, weight,      \
                         NormTerms{epsilon, weight_offset}, out);                                                  \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (min(rows, 8 * SMs)) for rms_norm and rms_norm_add, which are correct with any grid,
// and (rows) for add_experts_rms_norm; block (min(THREADS_MAX, round_up(div_ceil(hidden, 16), 32))),
// no dynamic shared memory. rows, hidden and top > 0. The block must consist of at most 16 whole
// warps.
