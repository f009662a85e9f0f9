// Products of a warpgroup of Hopper (wgmma, sm_90a): C [64, N] += A [64, 16] * B [16, N], sums in f32, started now and
// finished by `products_wait`. B stands in shared memory, A there or in registers. C has the layout of tensor_core.cuh,
// 16 rows a warp: c[j] are the columns 8 * j and on. After the PTX ISA manual, "Asynchronous warpgroup level matrix
// instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

// How a matrix stands in shared memory: in chunks of 64 columns (128 bytes a row) or 16 columns (32 bytes), 8 rows of a
// chunk one after the other with their 16-byte pieces exchanged as the copy engine does it ("swizzle").
template <int CHUNK>
struct Swizzle;

template <>
struct Swizzle<64> {
    static constexpr uint64_t KIND = 1;
    // Byte of piece `piece` (of 8) of row `row` in a chunk.
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

// The constant part of a matrix's descriptor: `across` bytes from chunk to chunk of columns (read only when the product
// runs over rows), `down` bytes from 8 rows to the next 8.
template <int CHUNK>
__host__ __device__ constexpr uint64_t matrix_layout(uint32_t across, uint32_t down) {
    return (Swizzle<CHUNK>::KIND << 62) | (static_cast<uint64_t>(down >> 4) << 32) |
           (static_cast<uint64_t>(across >> 4) << 16);
}

__device__ __forceinline__ uint64_t matrix_at(uint64_t layout, uint32_t address) {
    return layout | ((address & 0x3ffff) >> 4);
}

// Registers that the products read or write are settled.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products started since the last call are one group.
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `GROUPS` groups are unfinished.
template <int GROUPS>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the compiler from moving uses of these registers over this place.
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

template <typename T>
struct Warpgroup;

#define BURSAR_TILE(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])

template <>
struct Warpgroup<__nv_bfloat16> {
    // C [64, 112] = A * B^T, or += if `add`: A [64, 16] and B [112, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[14][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55"
            "}, %56, %57, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 128] = A * B^T, or += if `add`: A [64, 16] and B [128, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[16][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 256] = A * B^T, or += if `add`: A [64, 16] and B [256, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[32][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
            "}, %128, %129, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15]), BURSAR_TILE(c[16]), BURSAR_TILE(c[17]), BURSAR_TILE(c[18]), BURSAR_TILE(c[19]),
              BURSAR_TILE(c[20]), BURSAR_TILE(c[21]), BURSAR_TILE(c[22]), BURSAR_TILE(c[23]), BURSAR_TILE(c[24]),
              BURSAR_TILE(c[25]), BURSAR_TILE(c[26]), BURSAR_TILE(c[27]), BURSAR_TILE(c[28]), BURSAR_TILE(c[29]),
              BURSAR_TILE(c[30]), BURSAR_TILE(c[31])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 80] += A * B: A [64, 16] in registers, B [16, 80] in shared memory, the product along A's rows and down B.
    static __device__ __forceinline__ void gather(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39"
            "}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }

    // C [64, 128] += A * B: A [64, 16] in registers, B [16, 128] in shared memory, the product along A's rows and down B.
    static __device__ __forceinline__ void gather(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Warpgroup<__half> {
    // C [64, 112] = A * B^T, or += if `add`: A [64, 16] and B [112, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[14][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %58, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55"
            "}, %56, %57, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 128] = A * B^T, or += if `add`: A [64, 16] and B [128, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[16][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 256] = A * B^T, or += if `add`: A [64, 16] and B [256, 16] in shared memory, the product along their rows.
    static __device__ __forceinline__ void scores(float (&c)[32][4], uint64_t a, uint64_t b, int add) {
        asm volatile(
            "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
            "}, %128, %129, add, 1, 1, 0, 0;\n}\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15]), BURSAR_TILE(c[16]), BURSAR_TILE(c[17]), BURSAR_TILE(c[18]), BURSAR_TILE(c[19]),
              BURSAR_TILE(c[20]), BURSAR_TILE(c[21]), BURSAR_TILE(c[22]), BURSAR_TILE(c[23]), BURSAR_TILE(c[24]),
              BURSAR_TILE(c[25]), BURSAR_TILE(c[26]), BURSAR_TILE(c[27]), BURSAR_TILE(c[28]), BURSAR_TILE(c[29]),
              BURSAR_TILE(c[30]), BURSAR_TILE(c[31])
            : "l"(a), "l"(b), "r"(add));
    }

    // C [64, 80] += A * B: A [64, 16] in registers, B [16, 80] in shared memory, the product along A's rows and down B.
    static __device__ __forceinline__ void gather(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39"
            "}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }

    // C [64, 128] += A * B: A [64, 16] in registers, B [16, 128] in shared memory, the product along A's rows and down B.
    static __device__ __forceinline__ void gather(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
        asm volatile(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
            : BURSAR_TILE(c[0]), BURSAR_TILE(c[1]), BURSAR_TILE(c[2]), BURSAR_TILE(c[3]), BURSAR_TILE(c[4]),
              BURSAR_TILE(c[5]), BURSAR_TILE(c[6]), BURSAR_TILE(c[7]), BURSAR_TILE(c[8]), BURSAR_TILE(c[9]),
              BURSAR_TILE(c[10]), BURSAR_TILE(c[11]), BURSAR_TILE(c[12]), BURSAR_TILE(c[13]), BURSAR_TILE(c[14]),
              BURSAR_TILE(c[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

#undef BURSAR_TILE
