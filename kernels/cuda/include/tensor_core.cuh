// Products of small matrices on the tensor cores of sm_75 and later (mma.sync), and the copies
// that load their operands.
//
// A warp multiplies A [16, 16] by B [16, 8] and adds the product to C [16, 8]. With
// `group = lane / 4` and `pair = lane % 4`, a lane has the columns 2 * pair and 2 * pair + 1 of C,
// in the rows `group` (c[0], c[1]) and `group + 8` (c[2], c[3]). A's registers are four 8 x 8
// quarters in the order top left, bottom left, top right, bottom right. So two adjacent C tiles,
// rounded to 16 bits, are operand A of the next product (FlashAttention-2, Dao 2023, arXiv
// 2307.08691).
#pragma once

#include <cuda_fp16.h>
#include <cstdint>
#if !defined(BURSAR_NO_BF16)
#include <cuda_bf16.h>
#endif

// The operations that differ between the two activation types.
template <typename T>
struct TensorCoreElement;

template <>
struct TensorCoreElement<__half> {
    // Two floats, rounded to the nearest, ties to even, the first in the low half.
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    }

    static __device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
        // Turing multiplies 8 columns at a time: the left quarters first, then the right quarters.
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b0));
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
    }
};

#if !defined(BURSAR_NO_BF16)
template <>
struct TensorCoreElement<__nv_bfloat16> {
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    }

    static __device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
#endif

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 quarters from shared memory. Lane i provides the address of row i % 8 of
// quarter i / 8.
__device__ __forceinline__ void load_quarters(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Loads four quarters as load_quarters does, each one transposed.
__device__ __forceinline__ void load_quarters_transposed(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ uint4 load_16_bytes(uint32_t address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store_16_bytes(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Starts the copy of 16 bytes to shared memory, or writes 16 zero bytes if `valid` is false. In
// that case, `source` is not read, but must still be an address in global memory. On Turing, the
// copy is complete on return.
__device__ __forceinline__ void copy_16_bytes(uint32_t destination, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    const uint32_t bytes = valid ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes)
                 : "memory");
#else
    uint4 value = make_uint4(0u, 0u, 0u, 0u);
    if (valid) {
        value = __ldg(static_cast<const uint4*>(source));
    }
    store_16_bytes(destination, value);
#endif
}

// Waits until this thread's copies have completed. Other threads see them after a barrier.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
