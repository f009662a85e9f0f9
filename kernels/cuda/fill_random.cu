// Normally distributed numbers from a counter: weights for benchmarks that need no file.
//
// out[i] = scale * normal(seed, i), rounded to the element
//
// out [count] bf16, f16 or f32, aligned to 8 bytes (f32: 16)
//
// Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives four words for the counter
// i / 4 and the key `seed`; Box and Muller make two normals of two words. So an element depends on seed and place alone,
// never on the launch. The longest a normal can be is 5.9.

#include "element.cuh"

// The four words of one counter.
__device__ __forceinline__ uint4 philox(uint64_t counter, uint64_t seed) {
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    uint4 words = make_uint4(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0);
#pragma unroll
    for (uint32_t round = 0; round < 10; ++round) {
        const uint64_t first = static_cast<uint64_t>(0xD2511F53u) * words.x;
        const uint64_t second = static_cast<uint64_t>(0xCD9E8D57u) * words.z;
        words = make_uint4(static_cast<uint32_t>(second >> 32) ^ words.y ^ low, static_cast<uint32_t>(second),
                           static_cast<uint32_t>(first >> 32) ^ words.w ^ high, static_cast<uint32_t>(first));
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return words;
}

// Two words give two independent normals.
__device__ __forceinline__ float2 box_muller(uint32_t first, uint32_t second) {
    // In the open interval from 0 to 1: the logarithm is finite. 24 bits, so that the sum is exact.
    const float uniform = static_cast<float>(first >> 8) * 0x1p-24f + 0x1p-25f;
    const float length = sqrtf(-2.0f * logf(uniform));
    float sine, cosine;
    sincospif(static_cast<float>(second >> 8) * 0x1p-23f, &sine, &cosine);
    return make_float2(length * cosine, length * sine);
}

template <typename Element>
__device__ __forceinline__ void fill_random(Element* out, uint64_t count, uint64_t seed, float scale) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    for (uint64_t group = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; 4 * group < count;
         group += stride) {
        const uint4 words = philox(group, seed);
        const float2 front = box_muller(words.x, words.y), back = box_muller(words.z, words.w);
        const float values[4] = {scale * front.x, scale * front.y, scale * back.x, scale * back.y};
        if (4 * group + 4 <= count) {
            store<4>(out + 4 * group, values);
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                if (4 * group + i < count) {
                    out[4 * group + i] = from_float<Element>(values[i]);
                }
            }
        }
    }
}

#define KERNEL(name, Element)                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                               \
        fill_random_##name(Element* out, uint64_t count, uint64_t seed, float scale) {              \
        fill_random(out, count, seed, scale);                                                       \
    }
FOR_EACH_ACTIVATION(KERNEL)
KERNEL(f32, float)

// Launch: grid (clamp(div_ceil(count, 1024), 1, 4096)), block (256), no dynamic shared memory.
