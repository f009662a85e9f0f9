// Output of GEMMs with many rows: SwiGLU, and stores of tile quarters to shared memory (sm_90a).
#pragma once

#include <stdint.h>

#include "logistic.cuh"

// Stores the four 8 x 8 quarters of a 16 x 16 matrix to shared memory. Lane i provides the address
// of row i % 8 of quarter i / 8.
__device__ __forceinline__ void store_quarters(uint32_t address, const uint32_t (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// SwiGLU (Shazeer 2020, arXiv 2002.05202).
__device__ __forceinline__ float gated(float gate, float up) { return silu(gate) * up; }
