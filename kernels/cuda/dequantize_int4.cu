// Dequantization of a weight of 4-bit integers, for GEMMs of many rows. int4.cuh describes the
// weight.
// Targets: sm_80, sm_90a
//
// dequantize_int4_<type>     out = rows of the weight, as elements
//
// <type> is bf16 or f16.
//
// weight, scales, zeros      int4.cuh
// out       [rows, columns]  the activation type
// group     log2 of the columns of a group, 5 to 7
//
// Row `i` of out is row `first + i` of the weight if `i < half`, and row `second + i - half`
// otherwise. `first`, `second` and `half` are multiples of BLOCK_ROWS, and columns is a multiple of
// the group.

#include "contract.cuh"
#include "element.cuh"
#include "int4.cuh"
#include "kernel_order.cuh"

namespace {

using contract::gemm_int4::THREADS;

// A thread block writes a block of rows. Four adjacent lanes read the four words that hold 32
// columns of a row. They then exchange pairs of columns, and each lane writes 8 adjacent columns.
template <typename Element>
__device__ __forceinline__ void dequantize(const uint32_t* weight, const Element* scales, const uint8_t* zeros,
                                           Element* out, uint32_t columns, uint32_t group, uint32_t half,
                                           uint32_t first, uint32_t second) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t spans = columns / SPAN_COLUMNS, groups = columns >> group, first_row = blockIdx.x * BLOCK_ROWS;
    const uint32_t from = first_row < half ? first + first_row : second + first_row - half;
    const uint32_t unit = threadIdx.x % UNITS;
    const uint32_t* const block = weight + static_cast<uint64_t>(from) * (columns / 8);
    static_assert(THREADS % 32 == 0, "whole warps take part in each exchange");
    for (uint32_t begin = 0; begin < BLOCK_ROWS * spans; begin += THREADS / UNITS) {
        const uint32_t at = begin + threadIdx.x / UNITS, row = at / spans, span = at % spans;
        const bool is_inside = at < BLOCK_ROWS * spans;
        const uint32_t strip = span / WORDS;
        uint32_t pairs[4] = {};
        if (is_inside) {
            const uint32_t unit_words = words_of_strip(columns, strip);
            const uint32_t word = __ldg(block + strip * (BLOCK_ROWS * UNITS * WORDS) + (row * UNITS + unit) * unit_words + span % WORDS);
            const uint64_t of_group = scale_index(from + row, span * SPAN_COLUMNS >> group, groups);
            const GroupOperands<Element> operands(scales[of_group], zeros ? __ldg(zeros + of_group) : 8u);
#pragma unroll
            for (uint32_t pair = 0; pair < 4; ++pair) {
                pairs[pair] = dequantized<Element>(word >> 4 * pair, operands);
            }
        }
        // The transpose of a matrix of 4 lanes and 4 pairs, in two steps.
#pragma unroll
        for (uint32_t step = 1; step <= 2; step *= 2) {
            const bool is_high = unit & step;
#pragma unroll
            for (uint32_t low = 0; low < 4; ++low) {
                if ((low & step) == 0) {
                    const uint32_t got = __shfl_xor_sync(0xffffffffu, is_high ? pairs[low] : pairs[low | step], step);
                    (is_high ? pairs[low] : pairs[low | step]) = got;
                }
            }
        }
        if (is_inside) {
            Element* const to = out + static_cast<uint64_t>(first_row + row) * columns + span * SPAN_COLUMNS + unit * 8;
            *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

}  // namespace

#define KERNEL(name, Element)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        dequantize_int4_##name(const uint32_t* weight, const Element* scales, const uint8_t* zeros, Element* out,      \
                               uint32_t columns, uint32_t group, uint32_t half, uint32_t first, uint32_t second) {     \
        dequantize<Element>(weight, scales, zeros, out, columns, group, half, first, second);                          \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (rows of out / 8), block (THREADS), no dynamic shared memory. The kernel may be
// launched with programmatic stream serialization.
