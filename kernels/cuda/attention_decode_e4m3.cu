// Decode attention, one new token per sequence, over a KV cache in E4M3: see decode_attention.cuh.
//
// Targets: sm_90a

#include "decode_attention.cuh"

#define KERNEL(name, Element) FOR_EACH_HEAD_DIM(KERNEL_OF, e4m3_##name, Element, E4m3)
FOR_EACH_ACTIVATION(KERNEL)
