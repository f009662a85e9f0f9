// Products with the logistic function, in f32.
#pragma once

// x / (1 + exp(-y)). For a very negative y, exp overflows to infinity and the quotient is zero.
__device__ __forceinline__ float times_logistic(float x, float y) { return __fdividef(x, 1.0f + __expf(-y)); }

// The sigmoid linear unit (Elfwing et al. 2017, arXiv 1702.03118).
__device__ __forceinline__ float silu(float x) { return times_logistic(x, x); }
