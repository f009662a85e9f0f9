// Decode attention, one new token per sequence, over a KV cache in the
// activations' type: see decode_attention.cuh.

#include "decode_attention.cuh"

// Counters for the launches in one stream of a loaded module; zero between launches.
extern "C" __device__ uint32_t attention_decode_counters[contract::attention_decode::COUNTERS] = {};

#define KERNEL(name, Element) FOR_EACH_HEAD_DIM(KERNEL_OF, name, Element, Element)
FOR_EACH_ACTIVATION(KERNEL)
