// Products of a warpgroup of Hopper with few columns (wgmma, sm_90a): C [64, N] += A [64, 16] * B [N, 16]^T, both in
// shared memory with the product along their rows, N from 8 to 64; without `add`, C is overwritten. C has the layout of
// tensor_core.cuh, 16 rows a warp: c[j] are the columns 8 * j and on. Waiting and descriptors are those of wgmma.cuh.
#pragma once

#include "wgmma.cuh"

// N columns of elements T.
template <typename T, int N>
struct FewColumns;

#define BURSAR_FEW_COLUMNS(T, TYPE, N, REGISTERS, A, B, ADD, ...)                                                      \
    template <>                                                                                                        \
    struct FewColumns<T, N> {                                                                                          \
        static __device__ __forceinline__ void multiply(float (&c)[N / 8][4], uint64_t a, uint64_t b, int add) {       \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD                                                  \
                         ", 0;\n"                                                                                      \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, %" A       \
                         ", %" B ", add, 1, 1, 0, 0;\n}\n"                                                             \
                         : __VA_ARGS__                                                                                 \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };

#define BURSAR_FOUR(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define BURSAR_EIGHT(c, at) BURSAR_FOUR(c[at]), BURSAR_FOUR(c[at + 1])
#define BURSAR_SIXTEEN(c, at) BURSAR_EIGHT(c, at), BURSAR_EIGHT(c, at + 2)
#define BURSAR_UP_TO_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define BURSAR_UP_TO_16 BURSAR_UP_TO_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define BURSAR_UP_TO_32                                                                                                \
    BURSAR_UP_TO_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

#define BURSAR_FEW_COLUMNS_OF(T, TYPE)                                                                                 \
    BURSAR_FEW_COLUMNS(T, TYPE, 8, "%0, %1, %2, %3", "4", "5", "6", BURSAR_FOUR(c[0]))                                 \
    BURSAR_FEW_COLUMNS(T, TYPE, 16, BURSAR_UP_TO_8, "8", "9", "10", BURSAR_EIGHT(c, 0))                                \
    BURSAR_FEW_COLUMNS(T, TYPE, 32, BURSAR_UP_TO_16, "16", "17", "18", BURSAR_SIXTEEN(c, 0))                           \
    BURSAR_FEW_COLUMNS(T, TYPE, 64, BURSAR_UP_TO_32, "32", "33", "34", BURSAR_SIXTEEN(c, 0), BURSAR_SIXTEEN(c, 4))

BURSAR_FEW_COLUMNS_OF(__nv_bfloat16, "bf16")
BURSAR_FEW_COLUMNS_OF(__half, "f16")

#undef BURSAR_FEW_COLUMNS_OF
#undef BURSAR_UP_TO_32
#undef BURSAR_UP_TO_16
#undef BURSAR_UP_TO_8
#undef BURSAR_SIXTEEN
#undef BURSAR_EIGHT
#undef BURSAR_FOUR
#undef BURSAR_FEW_COLUMNS
