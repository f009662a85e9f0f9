// Philox4x32-10: random numbers as a function of a key and a counter (Salmon,
// Moraes, Dror, Shaw, SC'11).
//
// Bit-identical to kernels/src/sampling/philox.rs: the counter is (position low, position high, 0,
// 0), the key (seed low, seed high).
#pragma once

#include <stdint.h>

// A double in [0, 1) with 53 random bits, for the token at `position` of a
// sequence with this `seed`.
__device__ __forceinline__ double philox_uniform(uint64_t seed, uint64_t position) {
    uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t low0 = 0xd2511f53u * counter[0], high0 = __umulhi(0xd2511f53u, counter[0]);
        const uint32_t low1 = 0xcd9e8d57u * counter[2], high1 = __umulhi(0xcd9e8d57u, counter[2]);
        const uint32_t next0 = high1 ^ counter[1] ^ key[0], next2 = high0 ^ counter[3] ^ key[1];
        counter[0] = next0, counter[1] = low1, counter[2] = next2, counter[3] = low0;
        key[0] += 0x9e3779b9u, key[1] += 0xbb67ae85u;
    }
    const uint64_t bits = (static_cast<uint64_t>(counter[0]) << 32 | counter[1]) >> 11;
    return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}
