// Elements of activations and weights: bf16 and f16 in memory, f32 in registers.
//
// GPUs before sm_80 have no bf16 arithmetic, so only the f16 kernels are compiled for them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// Expands `KERNEL(name, Element)` for each element type of activations that the target supports.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define FOR_EACH_ACTIVATION(KERNEL) KERNEL(f16, __half)
#else
#define FOR_EACH_ACTIVATION(KERNEL) KERNEL(bf16, __nv_bfloat16) KERNEL(f16, __half)
#endif

// Number of elements in 16 bytes, which one thread moves with one instruction.
template <typename Element>
constexpr uint32_t VECTOR = 16 / sizeof(Element);

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// The value of the element after it has been stored and loaded again.
template <typename Element>
__device__ __forceinline__ float rounded(float value) {
    return to_float(from_float<Element>(value));
}

// Two adjacent elements in one 32-bit word, the first in the low half.
template <typename Element>
__device__ __forceinline__ float2 pair_to_floats(uint32_t pair);
template <>
__device__ __forceinline__ float2 pair_to_floats<__half>(uint32_t pair) {
    return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 pair_to_floats<__nv_bfloat16>(uint32_t pair) {
    // A bf16 is the upper half of an f32.
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <typename Element>
__device__ __forceinline__ uint32_t pair_from_floats(float low, float high);
template <>
__device__ __forceinline__ uint32_t pair_from_floats<__half>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pair_from_floats<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&pair);
}

// `true` if accesses of `bytes` bytes may be used on a row that starts at `address`, which is a
// pointer or a byte offset.
__device__ __forceinline__ bool aligned_to(uint64_t address, uint32_t bytes) { return address % bytes == 0; }
__device__ __forceinline__ bool aligned_to(const void* address, uint32_t bytes) {
    return aligned_to(reinterpret_cast<uint64_t>(address), bytes);
}

// The machine word of `BYTES` bytes.
template <uint32_t BYTES>
struct Word;
template <>
struct Word<16> {
    using Type = uint4;
};
template <>
struct Word<8> {
    using Type = uint2;
};
template <>
struct Word<4> {
    using Type = uint32_t;
};
template <>
struct Word<2> {
    using Type = uint16_t;
};

// `COUNT` adjacent elements in their memory format, for example in registers until the thread needs
// them as f32.
template <uint32_t COUNT, typename Element>
using Words = typename Word<COUNT * sizeof(Element)>::Type;

// Reads `COUNT` adjacent elements with one instruction. `from` must be aligned to their total size.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ Words<COUNT, Element> load_words(const Element* from) {
    return *reinterpret_cast<const Words<COUNT, Element>*>(from);
}

// Converts elements in memory format to f32.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ void widen(const Words<COUNT, Element>& words, float (&values)[COUNT]) {
    if constexpr (sizeof(Element) == 4 || COUNT == 1) {
        const Element* elements = reinterpret_cast<const Element*>(&words);
#pragma unroll
        for (uint32_t i = 0; i < COUNT; ++i) {
            values[i] = to_float(elements[i]);
        }
    } else {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&words);
#pragma unroll
        for (uint32_t pair = 0; pair < COUNT / 2; ++pair) {
            const float2 both = pair_to_floats<Element>(pairs[pair]);
            values[2 * pair] = both.x;
            values[2 * pair + 1] = both.y;
        }
    }
}

// Reads `COUNT` adjacent elements and converts them to f32.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ void load(const Element* from, float (&values)[COUNT]) {
    widen<COUNT, Element>(load_words<COUNT>(from), values);
}

// Rounds each value to the nearest element. Returns the elements in memory format.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ Words<COUNT, Element> to_words(const float (&values)[COUNT]) {
    Words<COUNT, Element> words;
    if constexpr (sizeof(Element) == 4 || COUNT == 1) {
        Element* elements = reinterpret_cast<Element*>(&words);
#pragma unroll
        for (uint32_t i = 0; i < COUNT; ++i) {
            elements[i] = from_float<Element>(values[i]);
        }
    } else {
        uint32_t* pairs = reinterpret_cast<uint32_t*>(&words);
#pragma unroll
        for (uint32_t pair = 0; pair < COUNT / 2; ++pair) {
            pairs[pair] = pair_from_floats<Element>(values[2 * pair], values[2 * pair + 1]);
        }
    }
    return words;
}

// Writes `COUNT` adjacent elements with one instruction, each rounded to the nearest. `to` must be
// aligned to their total size.
template <uint32_t COUNT, typename Element>
__device__ __forceinline__ void store(Element* to, const float (&values)[COUNT]) {
    *reinterpret_cast<Words<COUNT, Element>*>(to) = to_words<COUNT, Element>(values);
}

// The numbers of a root-mean-square norm: `epsilon` is added to the mean square, and
// `weight_offset` to each weight.
struct NormTerms {
    float epsilon, weight_offset;
};

// Writes a vector of a row, multiplied by the row's factor and by the weights of its columns, to
// each of which `offset` is added.
template <uint32_t WIDTH, typename Element>
__device__ __forceinline__ void write_scaled(const Words<WIDTH, Element>& words, const Words<WIDTH, Element>& weight,
                                             float offset, float factor, Element* to) {
    float values[WIDTH], by[WIDTH];
    widen<WIDTH, Element>(words, values);
    widen<WIDTH, Element>(weight, by);
#pragma unroll
    for (uint32_t i = 0; i < WIDTH; ++i) {
        values[i] = values[i] * factor * (by[i] + offset);
    }
    store<WIDTH>(to, values);
}
