// Keys: the bits of a float, mapped to an integer that sorts as the float does.
#pragma once

#include <stdint.h>

// KEY_OF_NOTHING is the key of minus infinity, KEY_OF_LEAST the key of the smallest finite number.
// Only logits with a key above KEY_OF_NOTHING can be drawn.
constexpr uint32_t KEY_OF_NOTHING = 0x007fffffu;
constexpr uint32_t KEY_OF_LEAST = 0x00800000u;
constexpr uint32_t KEY_OF_ZERO = 0x80000000u;
// -0 sorts directly before 0, as in Rust's `total_cmp`.
constexpr uint32_t KEY_OF_MINUS_ZERO = 0x7fffffffu;

__device__ __forceinline__ uint32_t order_key(float value) {
    const uint32_t bits = __float_as_uint(value);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Key for which -0 equals 0.
__device__ __forceinline__ uint32_t signless_key(float value) {
    return order_key(value + 0.0f);
}

__device__ __forceinline__ float value_of(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// A candidate. Smaller candidates come first: they have larger logits, or equal logits and smaller
// ids. No two candidates of a row are equal.
__device__ __forceinline__ uint64_t candidate(uint32_t key, uint32_t id) {
    return static_cast<uint64_t>(~key) << 32 | id;
}
__device__ __forceinline__ uint32_t key_of(uint64_t candidate) {
    return ~static_cast<uint32_t>(candidate >> 32);
}
__device__ __forceinline__ uint32_t id_of(uint64_t candidate) {
    return static_cast<uint32_t>(candidate);
}
