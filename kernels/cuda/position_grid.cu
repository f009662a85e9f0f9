// Learned position embeddings on a square grid, interpolated between its points (bilinear, corners
// aligned; Qwen3-VL's vision encoder).
//
// table  [side * side, hidden]   activations' type, contiguous, row by row of the grid
// places [3, patches] u32        picture, row and column of each patch
// layout [pictures, 4] u32       the second number is the picture's patches down, the third its
//                                patches across
// out    [patches, hidden]       rows out_pitch elements apart
//
// On each axis, place = index * (side - 1) / max(count - 1, 1), where index is the patch's row or
// column, and count is the number of patches down or across the picture. The grid point before that
// place has the weight w = 1 - (place - floor(place)), the grid point after it the weight 1 - w.
// The four points are summed in f32, in row-major order, without fused operations, so that the sums
// have the same bits as on the CPU. They are rounded only once, at the end. A patch that is not in
// its picture, or whose picture does not exist, becomes a row of NaN, so that the error is visible,
// and nothing outside the operands is read. Any alignment; accesses are 16 bytes wide when
// addresses, pitch and hidden are multiples of 16 bytes, and 8 bytes wide when they are only
// multiples of 8 bytes. side is 1 to 65,535.
//
// The table stays in the L2 cache (48 x 48 points of 1152 elements are 5.3 MB), and adjacent
// patches, which are in the same block, read the same points. Only the output causes memory
// traffic.

#include "contract.cuh"
#include "element.cuh"
#include "kernel_order.cuh"

constexpr uint32_t POINTS = 4;
constexpr uint32_t LAYOUT_NUMBERS = contract::patchify::LAYOUT_NUMBERS;

// A position between two points of a side of the grid, or on the last point.
struct Between {
    uint32_t point[2];
    float weight[2];

    // Computes the position of `index`, which is less than `count`.
    __device__ __forceinline__ Between(uint32_t index, uint32_t count, uint32_t side) {
        const float steps = static_cast<float>(count > 1 ? count - 1 : 1);
        const float place = __fdiv_rn(__fmul_rn(static_cast<float>(index), static_cast<float>(side - 1)), steps);
        const float before = floorf(place);
        weight[0] = __fsub_rn(1.0f, __fsub_rn(place, before));
        weight[1] = __fsub_rn(1.0f, weight[0]);
        point[0] = min(static_cast<uint32_t>(before), side - 1);
        point[1] = min(point[0] + 1, side - 1);
    }
};

// The four points around a patch, and their weights.
template <typename Element>
struct Around {
    const Element* points[POINTS];
    float weights[POINTS];

    // Initializes the points for a patch that does not exist: the weights make its output NaN.
    __device__ __forceinline__ explicit Around(const Element* table) {
#pragma unroll
        for (uint32_t point = 0; point < POINTS; ++point) {
            points[point] = table;
            weights[point] = __uint_as_float(0x7fffffffu);
        }
    }

    __device__ __forceinline__ void find(const Between& row, const Between& column, uint32_t side, uint32_t hidden) {
        const Element* table = points[0];
#pragma unroll
        for (uint32_t point = 0; point < POINTS; ++point) {
            const uint32_t at = row.point[point / 2] * side + column.point[point % 2];
            points[point] = table + static_cast<uint64_t>(at) * hidden;
            weights[point] = __fmul_rn(row.weight[point / 2], column.weight[point % 2]);
        }
    }
};

template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void add_points(const Around<Element>& around, uint32_t hidden, Element* out) {
    for (uint32_t vector = threadIdx.x; vector < hidden / WIDTH; vector += blockDim.x) {
        Words<WIDTH, Element> held[POINTS];
#pragma unroll
        for (uint32_t point = 0; point < POINTS; ++point) {
            held[point] = load_words<WIDTH>(around.points[point] + vector * WIDTH);
        }
        float sums[WIDTH] = {};
#pragma unroll
        for (uint32_t point = 0; point < POINTS; ++point) {
            float values[WIDTH];
            widen<WIDTH, Element>(held[point], values);
#pragma unroll
            for (uint32_t i = 0; i < WIDTH; ++i) {
                sums[i] = __fadd_rn(sums[i], __fmul_rn(values[i], around.weights[point]));
            }
        }
        store<WIDTH>(out + vector * WIDTH, sums);
    }
}

template <typename Element>
__device__ __forceinline__ void position_grid(const Element* table, uint32_t side, uint32_t hidden,
                                              const uint32_t* places, uint32_t patches, const uint32_t* layout,
                                              uint32_t pictures, Element* out, uint32_t out_pitch) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint32_t patch = blockIdx.x * blockDim.y + threadIdx.y;
    if (patch >= patches) {
        return;
    }
    const uint32_t picture = places[patch];
    const uint32_t row = places[static_cast<uint64_t>(patches) + patch];
    const uint32_t column = places[2 * static_cast<uint64_t>(patches) + patch];
    Around<Element> around(table);
    if (picture < pictures) {
        const uint32_t* numbers = layout + static_cast<uint64_t>(picture) * LAYOUT_NUMBERS;
        const uint32_t down = numbers[1], across = numbers[2];
        if (row < down && column < across) {
            around.find(Between(row, down, side), Between(column, across, side), side, hidden);
        }
    }
    out += static_cast<uint64_t>(patch) * out_pitch;
    const uint64_t together = reinterpret_cast<uint64_t>(table) | reinterpret_cast<uint64_t>(out);
    constexpr uint32_t HALF = VECTOR<Element> / 2;
    if (aligned_to(together, 16) && hidden % VECTOR<Element> == 0) {
        add_points<VECTOR<Element>>(around, hidden, out);
    } else if (aligned_to(together, 8) && hidden % HALF == 0) {
        add_points<HALF>(around, hidden, out);
    } else {
        add_points<1>(around, hidden, out);
    }
}

#define KERNEL(name, Element)                                                                               \
    extern "C" __global__ void __launch_bounds__(contract::position_grid::THREADS) position_grid_##name(    \
        const Element* table, uint32_t side, uint32_t hidden, const uint32_t* places, uint32_t patches,     \
        const uint32_t* layout, uint32_t pictures, Element* out, uint32_t out_pitch) {                      \
        position_grid(table, side, hidden, places, patches, layout, pictures, out, out_pitch);              \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: wide = min(div_ceil(hidden, 8), THREADS), tall = THREADS / wide (of
// contract::position_grid); grid (div_ceil(patches, tall)), block (wide, tall), no dynamic shared
// memory. patches > 0. Any block of at most THREADS threads is correct.
