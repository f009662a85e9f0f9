// Programmatic dependent launch (sm_90): a kernel may begin before the previous kernel of
// the stream has ended. This hides the launch latency and any work that does not depend
// on the previous kernel.
//
// The functions have no effect unless the later kernel is launched with
// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION. Only kernels that call
// wait_for_previous_kernel may be launched with that attribute. If a kernel calls
// let_next_kernel_start, all of its blocks must also call wait_for_previous_kernel, so that the
// next kernel can rely on everything before it in the stream.
#pragma once

// The next kernel may start once all blocks of this kernel have called this function or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its writes are visible. Before this call, nothing
// that the previous kernel writes may be read, and nothing that the previous kernel reads may be
// written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
