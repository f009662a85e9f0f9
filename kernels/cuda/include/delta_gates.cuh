// Shared by the kernels of the gated delta rule: the operands of a launch and the two gates of a
// token and value head.
#pragma once

#include "contract.cuh"
#include "element.cuh"
#include "state_sequences.cuh"

// Added to the squared length of queries and keys before the square root (transformers 5.17,
// `l2norm` of `modeling_qwen3_5.py`).
constexpr float L2_EPSILON = 1e-6f;

// `Stored` is the element type of the matrices in the slots: f32 or bf16.
template <typename Element, typename Stored>
struct Delta {
    const Element* qkv;
    uint32_t qkv_pitch;
    const Element* update;
    uint32_t update_pitch;
    const Element* decay;
    uint32_t decay_pitch;
    const float *log_decay, *bias;
    uint32_t key_heads, value_heads, key_dim, value_dim;
    StateSequences sequences;
    StateSlots slots;
    uint32_t first_sequence;
    Element* out;

    // The key head that a value head uses.
    __device__ __forceinline__ uint32_t key_head(uint32_t head) const { return head / (value_heads / key_heads); }
    // Index of the first column of a head's query, key or value in a row of qkv.
    __device__ __forceinline__ uint32_t query_column(uint32_t head) const { return key_head(head) * key_dim; }
    __device__ __forceinline__ uint32_t key_column(uint32_t head) const { return (key_heads + key_head(head)) * key_dim; }
    __device__ __forceinline__ uint32_t value_column(uint32_t head) const {
        return 2 * key_heads * key_dim + head * value_dim;
    }
    __device__ __forceinline__ const Element* row(uint32_t row) const {
        return qkv + static_cast<uint64_t>(row) * qkv_pitch;
    }
    // Elements from the start of a slot's matrices to a row of a head's matrix.
    __device__ __forceinline__ uint64_t of_matrix(uint32_t head, uint32_t value) const {
        return (static_cast<uint64_t>(head) * value_dim + value) * key_dim;
    }
    __device__ __forceinline__ const Stored* matrices(const char* slot) const {
        return reinterpret_cast<const Stored*>(slot + slots.matrices_at);
    }
    __device__ __forceinline__ Stored* matrices(char* slot) const {
        return reinterpret_cast<Stored*>(slot + slots.matrices_at);
    }
};

// The gates of one value head: `rate` is exp(log_decay).
struct HeadGates {
    float rate, bias;

    // The logarithm of the factor by which a token's decay `a` shrinks the state, at most 0.
    __device__ __forceinline__ float log_kept(float a) const {
        // Above 20, softplus(x) equals x in f32.
        const float x = a + bias, softplus = x > 20.0f ? x : log1pf(expf(x));
        return -rate * softplus;
    }

    // The write strength: the factor by which a token's update of the state is multiplied.
    static __device__ __forceinline__ float strength(float b) { return 1.0f / (1.0f + expf(-b)); }
};

template <typename Element, typename Stored>
__device__ __forceinline__ HeadGates head_gates(const Delta<Element, Stored>& call, uint32_t head) {
    return {expf(call.log_decay[head]), call.bias[head]};
}
