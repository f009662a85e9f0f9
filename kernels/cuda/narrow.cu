// Rounding f32 to the activations' type, to the nearest, for weights that a checkpoint keeps wider.
//
// x   [count] f32
// out [count] activations' type
//
// What an f16 cannot hold becomes infinite; a NaN stays one. Any count and any alignment; 16-byte accesses when both
// addresses are aligned to it.

#include "element.cuh"

template <typename Element>
__device__ __forceinline__ void narrow(const float* x, Element* out, uint64_t count) {
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t vectors = aligned_to(x, 16) && aligned_to(out, 8) ? count / 4 : 0;
    for (uint64_t vector = first; vector < vectors; vector += stride) {
        float values[4];
        load<4>(x + 4 * vector, values);
        store<4>(out + 4 * vector, values);
    }
    for (uint64_t i = 4 * vectors + first; i < count; i += stride) {
        out[i] = from_float<Element>(x[i]);
    }
}

#define KERNEL(name, Element)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) narrow_##name(const float* x, Element* out, uint64_t count) { \
        narrow(x, out, count);                                                                                    \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: grid (clamp(div_ceil(count, 1024), 1, 4096)), block (256), no dynamic shared memory.
