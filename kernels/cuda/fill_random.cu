// Random initialization in place, for weights of a model whose values do not matter. The algorithm
// is defined in `kernels/src/ops/fill_random.rs`; the CPU backend generates the same bits.
//
// out[row, column] = round(float(sum - 131070) * factor), where `sum` adds up the four 16-bit
//                    quarters of splitmix64(seed, row * pitch + column)
//
// out [count / columns, columns] bf16, f16, f32 or E4M3, contiguous, any alignment
//
// An element depends only on the seed and its position, never on the launch.

#include "contract.cuh"
#include "e4m3.cuh"
#include "element.cuh"

// Step `i` of SplitMix64 (Steele, Lea and Flood 2014).
__device__ __forceinline__ uint64_t split_mix(uint64_t seed, uint64_t i) {
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

#define KERNEL(name, Element)                                                                                             \
    extern "C" __global__ void __launch_bounds__(contract::random::THREADS)                                               \
        fill_random_##name(Element* out, uint64_t count, uint32_t columns, uint32_t pitch, uint64_t seed, float factor) { \
        const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;                                            \
        for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {         \
            const uint64_t place = columns == pitch ? i : i / columns * pitch + i % columns;                              \
            const uint64_t z = split_mix(seed, place);                                                                    \
            const int32_t sum = static_cast<int32_t>((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48)); \
            out[i] = from_float<Element>(__fmul_rn(static_cast<float>(sum - 131070), factor));                            \
        }                                                                                                                 \
    }
FOR_EACH_ACTIVATION(KERNEL)
KERNEL(f32, float)
template <>
__device__ __forceinline__ E4m3 from_float<E4m3>(float value) {
    return {static_cast<uint8_t>(e4m3_pair(value, 0.0f))};
}
KERNEL(e4m3, E4m3)

// Launch: grid (clamp(div_ceil(count, THREADS), 1, 8192)), block (THREADS of contract::random),
// no dynamic shared memory.
