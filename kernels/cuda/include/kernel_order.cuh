// Letting one kernel of a stream begin before the one in front of it has ended (programmatic dependent launch, sm_90),
// so that a launch's delay and what needs nothing of the other are hidden behind it.
//
// Nothing happens unless the later of the two is launched with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
// which only kernels that wait below may be. All blocks of a kernel that lets the next one start must wait themselves, so
// that whoever comes behind may rely on everything in front.
#pragma once

// The next kernel may be started once all blocks of this one have said so or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel in front has ended and its writes are seen. Before this, nothing that it writes may be read and
// nothing that it reads may be written.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
