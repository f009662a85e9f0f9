// Matrix products of a Hopper warpgroup (wgmma, sm_90a): C [64, N] += A [64, 16] * B [16, N] (in
// E4M3, A [64, 32] * B [32, N]), with sums in f32. Products are asynchronous: they are started, and
// `products_wait` waits for them. B is in shared memory, A in shared memory or in registers. C has
// the layout of tensor_core.cuh, 16 rows per warp: c[j] has the columns from 8 * j on. Source: the
// PTX ISA manual, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#include "e4m3.cuh"

// Layout of a matrix in shared memory: chunks of 64 columns (128 bytes per row) or 16 columns (32
// bytes per row). In E4M3, a chunk has twice as many columns. The rows of a chunk are consecutive,
// and the 16-byte pieces of every 8 rows are permuted as TMA permutes them ("swizzle").
template <int CHUNK>
struct Swizzle;

template <>
struct Swizzle<64> {
    static constexpr uint64_t KIND = 1;
    // Byte offset of piece `piece` (of 8) of row `row` in a chunk.
    static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
        return row * 128 + ((piece ^ (row & 7)) << 4);
    }
};

template <>
struct Swizzle<16> {
    static constexpr uint64_t KIND = 3;
    static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
        return row * 32 + ((piece ^ ((row >> 2) & 1)) << 4);
    }
};

// The constant part of a matrix descriptor: `across` is the number of bytes from one chunk of
// columns to the next (used only if the product sums down a column, as for B in `gather`), and
// `down` is the number of bytes from 8 rows to the next 8.
template <int CHUNK>
__host__ __device__ constexpr uint64_t matrix_layout(uint32_t across, uint32_t down) {
    return (Swizzle<CHUNK>::KIND << 62) | (static_cast<uint64_t>(down >> 4) << 32) |
           (static_cast<uint64_t>(across >> 4) << 16);
}

__device__ __forceinline__ uint64_t matrix_at(uint64_t layout, uint32_t address) {
    return layout | ((address & 0x3ffff) >> 4);
}

// Orders earlier accesses to the registers of the products before the products.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Combines the products that were started since the last call into one group.
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `GROUPS` groups are unfinished.
template <int GROUPS>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the compiler from moving uses of these registers across this point.
template <int TILES>
__device__ __forceinline__ void hold(float (&c)[TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            asm volatile("" : "+f"(c[tile][i])::"memory");
        }
    }
}

// The registers of C, four for each tile of eight columns: as operands, and as their names in the
// text of the instruction.
#define BURSAR_TILE(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define BURSAR_TILES_2(c, at) BURSAR_TILE(c[at]), BURSAR_TILE(c[at + 1])
#define BURSAR_TILES_4(c, at) BURSAR_TILES_2(c, at), BURSAR_TILES_2(c, at + 2)
#define BURSAR_TILES_8(c, at) BURSAR_TILES_4(c, at), BURSAR_TILES_4(c, at + 4)
#define BURSAR_TILES_16(c, at) BURSAR_TILES_8(c, at), BURSAR_TILES_8(c, at + 8)
#define BURSAR_NAMES_4 \
    "%0, %1, %2, %3"
#define BURSAR_NAMES_8 \
    BURSAR_NAMES_4     \
    ", %4, %5, %6, %7"
#define BURSAR_NAMES_12 \
    BURSAR_NAMES_8      \
    ", %8, %9, %10, %11"
#define BURSAR_NAMES_16 \
    BURSAR_NAMES_12     \
    ", %12, %13, %14, %15"
#define BURSAR_NAMES_32 \
    BURSAR_NAMES_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BURSAR_NAMES_40 \
    BURSAR_NAMES_32     \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BURSAR_NAMES_56 \
    BURSAR_NAMES_40     \
    ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
#define BURSAR_NAMES_64 \
    BURSAR_NAMES_56     \
    ", %56, %57, %58, %59, %60, %61, %62, %63"
#define BURSAR_NAMES_80 \
    BURSAR_NAMES_64     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define BURSAR_NAMES_96 \
    BURSAR_NAMES_80     \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BURSAR_NAMES_112 \
    BURSAR_NAMES_96      \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define BURSAR_NAMES_128 \
    BURSAR_NAMES_112     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// C [64, N] = A * B^T, or += if `add`. A [64, DEPTH] and B [N, DEPTH] are in shared memory, and the
// product sums along their rows. The macro parameters A, B and ADD are the numbers of the operands
// after those of C. END is the text after the last operand: two flags that say whether A and B are
// transposed. The E4M3 instructions do not take these flags.
#define BURSAR_MULTIPLY_DEEP(TYPE, DEPTH, END, N, NAMES, A, B, ADD, ...)                                               \
    static __device__ __forceinline__ void multiply(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {           \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD                                                     \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #N DEPTH ".f32." TYPE "." TYPE " {" NAMES "}, %" #A ", %" #B  \
                     ", add, 1, 1" END ";\n}\n"                                                                        \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }
#define BURSAR_MULTIPLY(TYPE, ...) BURSAR_MULTIPLY_DEEP(TYPE, "k16", ", 0, 0", __VA_ARGS__)
#define BURSAR_MULTIPLY_E4M3(...) BURSAR_MULTIPLY_DEEP("e4m3", "k32", "", __VA_ARGS__)

// C [64, N] += A * B. A [64, 16] is in registers, which are the operands A0 to A3; B is in shared
// memory. With TRANSPOSED 1, B is [16, N], and the product sums along A's rows and down B's
// columns; with 0, B is [N, 16], and the product sums along the rows of both.
#define BURSAR_MULTIPLY_REGISTERS(NAME, TRANSPOSED, TYPE, N, NAMES, A0, A1, A2, A3, B, ...)                            \
    static __device__ __forceinline__ void NAME(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {            \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES "}, {%" #A0 ", %" #A1  \
                     ", %" #A2 ", %" #A3 "}, %" #B ", 1, 1, 1, " #TRANSPOSED ";\n"                                     \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }
#define BURSAR_GATHER(...) BURSAR_MULTIPLY_REGISTERS(gather, 1, __VA_ARGS__)
#define BURSAR_MULTIPLY_HELD(...) BURSAR_MULTIPLY_REGISTERS(multiply_held, 0, __VA_ARGS__)

// The products for elements of type T, which the instruction calls TYPE: one function for each
// supported number of columns of C.
template <typename T>
struct Warpgroup;

#define BURSAR_WARPGROUP(T, TYPE)                                                                                      \
    template <>                                                                                                        \
    struct Warpgroup<T> {                                                                                              \
        BURSAR_MULTIPLY(TYPE, 8, BURSAR_NAMES_4, 4, 5, 6, BURSAR_TILE(c[0]))                                           \
        BURSAR_MULTIPLY(TYPE, 16, BURSAR_NAMES_8, 8, 9, 10, BURSAR_TILES_2(c, 0))                                      \
        BURSAR_MULTIPLY(TYPE, 24, BURSAR_NAMES_12, 12, 13, 14, BURSAR_TILES_2(c, 0), BURSAR_TILE(c[2]))                \
        BURSAR_MULTIPLY(TYPE, 32, BURSAR_NAMES_16, 16, 17, 18, BURSAR_TILES_4(c, 0))                                   \
        BURSAR_MULTIPLY(TYPE, 64, BURSAR_NAMES_32, 32, 33, 34, BURSAR_TILES_8(c, 0))                                   \
        BURSAR_MULTIPLY(TYPE, 80, BURSAR_NAMES_40, 40, 41, 42, BURSAR_TILES_8(c, 0), BURSAR_TILES_2(c, 8))             \
        BURSAR_MULTIPLY(TYPE, 112, BURSAR_NAMES_56, 56, 57, 58, BURSAR_TILES_8(c, 0), BURSAR_TILES_4(c, 8),            \
                        BURSAR_TILES_2(c, 12))                                                                         \
        BURSAR_MULTIPLY(TYPE, 128, BURSAR_NAMES_64, 64, 65, 66, BURSAR_TILES_16(c, 0))                                 \
        BURSAR_MULTIPLY(TYPE, 160, BURSAR_NAMES_80, 80, 81, 82, BURSAR_TILES_16(c, 0), BURSAR_TILES_4(c, 16))          \
        BURSAR_MULTIPLY(TYPE, 192, BURSAR_NAMES_96, 96, 97, 98, BURSAR_TILES_16(c, 0), BURSAR_TILES_8(c, 16))          \
        BURSAR_MULTIPLY(TYPE, 224, BURSAR_NAMES_112, 112, 113, 114, BURSAR_TILES_16(c, 0), BURSAR_TILES_8(c, 16),      \
                        BURSAR_TILES_4(c, 24))                                                                         \
        BURSAR_MULTIPLY(TYPE, 256, BURSAR_NAMES_128, 128, 129, 130, BURSAR_TILES_16(c, 0), BURSAR_TILES_16(c, 16))     \
        BURSAR_GATHER(TYPE, 32, BURSAR_NAMES_16, 16, 17, 18, 19, 20, BURSAR_TILES_4(c, 0))                             \
        BURSAR_GATHER(TYPE, 64, BURSAR_NAMES_32, 32, 33, 34, 35, 36, BURSAR_TILES_8(c, 0))                             \
        BURSAR_GATHER(TYPE, 80, BURSAR_NAMES_40, 40, 41, 42, 43, 44, BURSAR_TILES_8(c, 0), BURSAR_TILES_2(c, 8))       \
        BURSAR_GATHER(TYPE, 128, BURSAR_NAMES_64, 64, 65, 66, 67, 68, BURSAR_TILES_16(c, 0))                           \
        BURSAR_GATHER(TYPE, 256, BURSAR_NAMES_128, 128, 129, 130, 131, 132, BURSAR_TILES_16(c, 0),                     \
                      BURSAR_TILES_16(c, 16))                                                                          \
        BURSAR_MULTIPLY_HELD(TYPE, 8, BURSAR_NAMES_4, 4, 5, 6, 7, 8, BURSAR_TILE(c[0]))                                \
        BURSAR_MULTIPLY_HELD(TYPE, 16, BURSAR_NAMES_8, 8, 9, 10, 11, 12, BURSAR_TILES_2(c, 0))                         \
        BURSAR_MULTIPLY_HELD(TYPE, 32, BURSAR_NAMES_16, 16, 17, 18, 19, 20, BURSAR_TILES_4(c, 0))                      \
        BURSAR_MULTIPLY_HELD(TYPE, 64, BURSAR_NAMES_32, 32, 33, 34, 35, 36, BURSAR_TILES_8(c, 0))                      \
        BURSAR_MULTIPLY_HELD(TYPE, 128, BURSAR_NAMES_64, 64, 65, 66, 67, 68, BURSAR_TILES_16(c, 0))                    \
    };

BURSAR_WARPGROUP(__nv_bfloat16, "bf16")
BURSAR_WARPGROUP(__half, "f16")

template <>
struct Warpgroup<E4m3> {
    BURSAR_MULTIPLY_E4M3(8, BURSAR_NAMES_4, 4, 5, 6, BURSAR_TILE(c[0]))
    BURSAR_MULTIPLY_E4M3(16, BURSAR_NAMES_8, 8, 9, 10, BURSAR_TILES_2(c, 0))
    BURSAR_MULTIPLY_E4M3(24, BURSAR_NAMES_12, 12, 13, 14, BURSAR_TILES_2(c, 0), BURSAR_TILE(c[2]))
    BURSAR_MULTIPLY_E4M3(32, BURSAR_NAMES_16, 16, 17, 18, BURSAR_TILES_4(c, 0))
    BURSAR_MULTIPLY_E4M3(64, BURSAR_NAMES_32, 32, 33, 34, BURSAR_TILES_8(c, 0))
    BURSAR_MULTIPLY_E4M3(128, BURSAR_NAMES_64, 64, 65, 66, BURSAR_TILES_16(c, 0))
};

#undef BURSAR_WARPGROUP
#undef BURSAR_MULTIPLY_HELD
#undef BURSAR_GATHER
#undef BURSAR_MULTIPLY_REGISTERS
#undef BURSAR_MULTIPLY_E4M3
#undef BURSAR_MULTIPLY
#undef BURSAR_MULTIPLY_DEEP
#undef BURSAR_NAMES_128
#undef BURSAR_NAMES_112
#undef BURSAR_NAMES_96
#undef BURSAR_NAMES_80
#undef BURSAR_NAMES_64
#undef BURSAR_NAMES_56
#undef BURSAR_NAMES_40
#undef BURSAR_NAMES_32
#undef BURSAR_NAMES_16
#undef BURSAR_NAMES_12
#undef BURSAR_NAMES_8
#undef BURSAR_NAMES_4
#undef BURSAR_TILES_16
#undef BURSAR_TILES_8
#undef BURSAR_TILES_4
#undef BURSAR_TILES_2
#undef BURSAR_TILE
