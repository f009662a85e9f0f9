// The output of one warp's part of a tile of small_m_product.cuh: the bias or the gate is applied,
// and the previous contents are optionally added. Also loads and stores of sums in shared memory.
#pragma once

#include "gate.cuh"
#include "small_m_stages.cuh"

// A warp's part of a tile whose sums are complete: 16 of the tile's rows, and GROUPS times
// eight rows of x.
template <typename Format, uint32_t GROUPS, bool GATED>
struct Piece {
    static constexpr uint32_t FEATURES = GATED ? 1 : 2;  // per thread
    static constexpr uint32_t VALUES = GROUPS * 2 * FEATURES;
    static constexpr bool IS_SCALED = Format::BY_ROWS;  // scales apply to complete sums
    using Element = typename Format::Element;

    const Arguments<Format>& arguments;
    uint32_t features[FEATURES];
    uint32_t first_row;
    uint32_t before[VALUES];  // bits of the previous contents of out
    float bias[FEATURES];
    float scale[IS_SCALED ? FEATURES : 1], row_scale[IS_SCALED ? GROUPS * 2 : 1];

    // `warp` is the index of the warp that has these rows of the tile.
    __device__ __forceinline__ Piece(const Arguments<Format>& arguments, Features tile, uint32_t warp,
                                     uint32_t first_group)
        : arguments(arguments), first_row(first_group * 8 + threadIdx.x % 4 * 2) {
#pragma unroll
        for (uint32_t own = 0; own < FEATURES; ++own) {
            const uint32_t feature = tile.first + (warp * FEATURES + own) * 8 + threadIdx.x % 32 / 4;
            features[own] = feature < tile.end ? feature : 0xffffffffu;
        }
    }

    // Calls `run(index of the value, group, index among the group's four sums, index in out)` for
    // each value.
    template <typename Do>
    __device__ __forceinline__ void each(Do&& run) const {
#pragma unroll
        for (uint32_t i = 0; i < VALUES; ++i) {
            const uint32_t own = i % FEATURES, column = i / FEATURES, row = first_row + column / 2 * 8 + column % 2;
            if (row < arguments.rows && features[own] < arguments.features) {
                run(i, column / 2, own * 2 + column % 2,
                    static_cast<uint64_t>(row) * arguments.out_pitch + features[own]);
            }
        }
    }

    // Starts to read the values that `write` combines with the sums. If the caller then waits for
    // sums of other warpgroups, these reads are already in progress.
    __device__ __forceinline__ void fetch() {
        if (GATED) {
            return;
        }
#pragma unroll
        for (uint32_t own = 0; own < FEATURES; ++own) {
            const bool biased = arguments.bias != nullptr && features[own] < arguments.features;
            bias[own] = biased ? to_float(arguments.bias[features[own]]) : 0.0f;
        }
        if constexpr (IS_SCALED) {
            fetch_scales();
        }
        if (!(arguments.flags & ADD_TO_OUT)) {
            return;
        }
        if (arguments.flags & OUT_IS_F32) {
            const uint32_t* out = static_cast<const uint32_t*>(arguments.out);
            each([&](uint32_t i, uint32_t, uint32_t, uint64_t at) { before[i] = out[at]; });
        } else {
            const uint16_t* out = static_cast<const uint16_t*>(arguments.out);
            each([&](uint32_t i, uint32_t, uint32_t, uint64_t at) { before[i] = out[at]; });
        }
    }

    __device__ __forceinline__ void fetch_scales() {
        const typename Format::Scales& scales = arguments.scales;
#pragma unroll
        for (uint32_t own = 0; own < FEATURES; ++own) {
            scale[own] = features[own] < arguments.features ? __ldg(scales.weight + features[own]) : 0.0f;
        }
#pragma unroll
        for (uint32_t i = 0; i < GROUPS * 2; ++i) {
            const uint32_t row = first_row + i / 2 * 8 + i % 2;
            row_scale[i] = scales.x == nullptr ? scales.fixed : row < arguments.rows ? scales.x[row] : 0.0f;
        }
    }

    // A sum, with its scales and the bias applied.
    __device__ __forceinline__ float finished(float sum, uint32_t i) const {
        if constexpr (IS_SCALED) {
            sum *= row_scale[i / FEATURES] * scale[i % FEATURES];
        }
        return sum + bias[i % FEATURES];
    }

    // Writes the sums, combined with the values that `fetch` has read.
    __device__ __forceinline__ void write(const float (&c)[GROUPS][4]) const {
        if constexpr (GATED) {
            const GatedProduct gated(arguments.flags & IS_GELU ? contract::gate::GELU_TANH : contract::gate::SILU);
            each([&](uint32_t, uint32_t group, uint32_t of_four, uint64_t at) {
                const float value = gated(c[group][of_four], c[group][2 + of_four]);
                static_cast<Element*>(arguments.out)[at] = from_float<Element>(value);
            });
        } else {
            const bool adds = arguments.flags & ADD_TO_OUT;
            if (arguments.flags & OUT_IS_F32) {
                each([&](uint32_t i, uint32_t group, uint32_t of_four, uint64_t at) {
                    const float value = finished(c[group][of_four], i);
                    static_cast<float*>(arguments.out)[at] = adds ? __uint_as_float(before[i]) + value : value;
                });
            } else {
                each([&](uint32_t i, uint32_t group, uint32_t of_four, uint64_t at) {
                    const float value = finished(c[group][of_four], i);
                    static_cast<Element*>(arguments.out)[at] =
                        from_float<Element>(adds ? pair_to_floats<Element>(before[i]).x + value : value);
                });
            }
        }
    }
};

// Loads and stores of 16 bytes of shared memory.
__device__ __forceinline__ void load_shared(float (&values)[4], uint32_t from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, const float (&values)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(values[0]), "f"(values[1]), "f"(values[2]),
                 "f"(values[3])
                 : "memory");
}
