// 4-bit integer weights in GEMMs with few rows on Hopper: the scales of a step in shared memory,
// and the operands that a warp dequantizes.
#pragma once

#include "contract.cuh"
#include "int4.cuh"
#include "small_m_formats.cuh"
#include "small_m_scales.cuh"

constexpr uint32_t PIECE_BYTES = BLOCK_ROWS * UNITS * UNIT_BYTES;  // bytes of a block in a step
constexpr uint32_t SWIZZLE_BYTES = 1024;  // alignment of x, which TMA permutes
static_assert(STRIP_COLUMNS == contract::gemm_small_m::STEP_COLUMNS, "a step is a strip");
static_assert(BLOCK_ROWS == contract::gemm_small_m::GATE_ROWS, "a gated tile alternates between blocks");

// The layout of a step's scales in shared memory. For each block of the tile and each group of the
// step, there are eight scales, one for each row of the block. The zero points follow all scales,
// in the same order.
template <typename T>
struct Int4Scales {
    static constexpr uint32_t SCALE_BYTES = BLOCK_ROWS * sizeof(T), ZERO_BYTES = BLOCK_ROWS;

    const typename Int4Format<T>::Scales& scales;
    uint32_t blocks, shift;  // the step has 1 << shift groups

    __device__ __forceinline__ Int4Scales(const typename Int4Format<T>::Scales& scales, uint32_t tile_rows)
        : scales(scales), blocks(tile_rows / BLOCK_ROWS), shift(7 - scales.group) {}

    __device__ __forceinline__ uint32_t count() const { return blocks << shift; }
    // A multiple of 16.
    __device__ __forceinline__ uint32_t bytes() const {
        return (count() * (SCALE_BYTES + (scales.zeros ? ZERO_BYTES : 0)) + 15) / 16 * 16;
    }
    // Offsets of the first scale and zero point of a block and a group of the step.
    __device__ __forceinline__ uint32_t scale_at(uint32_t block, uint32_t group) const {
        return ((block << shift) + group) * SCALE_BYTES;
    }
    __device__ __forceinline__ uint32_t zero_at(uint32_t block, uint32_t group) const {
        return count() * SCALE_BYTES + ((block << shift) + group) * ZERO_BYTES;
    }

    // Copies the scales of the step that starts at `column`. `first` is the index of the tile's
    // first block. The weight (if gated, each half) has `existing` blocks, and scales of later
    // blocks become zeros. A whole warp calls this function.
    template <bool GATED>
    __device__ __forceinline__ void copy(uint32_t to, uint32_t first, uint32_t existing, uint32_t column) const {
        const uint32_t groups = scales.columns >> scales.group, first_group = column >> scales.group;
        const uint32_t half = GATED ? blocks / 2 : blocks;
        for (uint32_t at = threadIdx.x % 32; at < count(); at += 32) {
            const uint32_t block = at >> shift, group = at - (block << shift);
            const bool is_up = block >= half;
            const uint32_t row = first + (is_up ? block - half : block);
            const bool is_there = row < existing && first_group + group < groups;
            const uint64_t from = (static_cast<uint64_t>(is_up ? existing + row : row) * groups + first_group + group) * BLOCK_ROWS;
            copy_bytes<SCALE_BYTES>(to + scale_at(block, group), is_there ? scales.weight + from : scales.weight, is_there);
            if (scales.zeros) {
                copy_bytes<ZERO_BYTES>(to + zero_at(block, group), is_there ? scales.zeros + from : scales.zeros, is_there);
            }
        }
    }
};

// Reads a lane's operands from a stage: its words of the two blocks of its warp's 16 rows of the
// weight, and the scales of its two rows.
template <typename Format>
struct Int4Operands {
    using T = typename Format::Element;

    const Int4Scales<T> scales;
    const uint32_t scale_bytes;  // of a step
    uint32_t words_at[2], scales_at[2], zeros_at[2];

    // `warp` is the index of the warp among the warps that multiply the same step, and selects two
    // blocks of eight rows. If gated, the first half of the tile's blocks are gate rows, and the
    // second half are the corresponding up rows.
    __device__ __forceinline__ Int4Operands(const typename Int4Format<T>::Scales& of_weight, uint32_t tile_rows,
                                            bool is_gated, uint32_t warp)
        : scales(of_weight, tile_rows), scale_bytes(scales.bytes()) {
        const uint32_t row = threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t block = is_gated ? i * (scales.blocks / 2) + warp : 2 * warp + i;
            words_at[i] = block * PIECE_BYTES;
            scales_at[i] = scales.scale_at(block, 0) + row * static_cast<uint32_t>(sizeof(T));
            zeros_at[i] = scales.zero_at(block, 0) + row;
        }
    }

    // Reads the words of both blocks.
    __device__ __forceinline__ void read(uint32_t (&words)[2][WORDS], uint32_t stage, uint32_t unit_words) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            read_words(words[i], stage + words_at[i], unit_words);
        }
    }

    // Reads the scales and zero points of this lane's two rows for group `group` of the step. The
    // step's scales start at address `from`.
    __device__ __forceinline__ void read_group(GroupOperands<T> (&operands)[2], uint32_t from, uint32_t group) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            uint16_t scale;
            uint32_t zero = 8;
            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(scale)
                         : "r"(from + scales_at[i] + group * Int4Scales<T>::SCALE_BYTES)
                         : "memory");
            if (scales.scales.zeros) {
                asm volatile("ld.shared.u8 %0, [%1];"
                             : "=r"(zero)
                             : "r"(from + zeros_at[i] + group * Int4Scales<T>::ZERO_BYTES)
                             : "memory");
            }
            operands[i] = GroupOperands<T>(reinterpret_cast<const T&>(scale), zero);
        }
    }
};
