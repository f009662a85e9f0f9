// The sequences of a step over layers with a recurrent state, and the slots of one layer. The
// structs are kernel parameters; kernels/src/cuda/states.rs has the same layout.
//
// A sequence's rows are row query_starts[s] and the following rows. Its state before the step is in
// the slot reads[s], and is zero if all of its tokens are rows of this step. Its state after the
// step is written to the slot writes[s], and its state after snapshot_rows[s][i] rows to the slot
// snapshot_slots[s][i]. A slot number at or past `slots`, such as NO_STATE, is neither read nor
// written. A sequence with a context of 0 is padding: no slot is accessed, and its output is zeros.
#pragma once

#include <stdint.h>

#include "contract.cuh"

using contract::states::SNAPSHOTS;

struct StateSequences {
    const uint32_t* query_starts;     // [sequences + 1]
    const uint32_t* context_lengths;  // [sequences], tokens including this step's rows
    const uint32_t* reads;            // [sequences]
    const uint32_t* writes;           // [sequences]
    const uint32_t* snapshot_rows;    // [sequences, SNAPSHOTS]
    const uint32_t* snapshot_slots;   // [sequences, SNAPSHOTS]
    uint32_t sequences;
    uint32_t rows;  // of the batch
};

// Slots of one layer: [slots], each with the convolution's inputs, followed by the matrices
// [value_heads, value_dim, key_dim] in f32 or bf16.
struct StateSlots {
    char* start;
    uint64_t slot_bytes;
    uint64_t matrices_at;  // bytes from the start of a slot to its matrices
    uint32_t slots;

    // The start of a slot, or null for no slot.
    __device__ __forceinline__ char* at(uint32_t slot) const {
        return slot < slots ? start + slot * slot_bytes : nullptr;
    }
};

// One sequence of a step. Rows are clamped to the batch, even if `query_starts` is invalid.
struct StatePart {
    uint32_t first_row, rows;
    bool is_padding;
    const char* read;  // null: the state is zero
    char* write;       // null: the state is not written
    uint32_t snapshot_rows[SNAPSHOTS];
    char* snapshots[SNAPSHOTS];  // null: no snapshot

    // Calls `of_slot(rows, slot)` for each slot to which the state after `rows` rows is written.
    template <typename Write>
    __device__ __forceinline__ void each_written(const Write& of_slot) const {
#pragma unroll
        for (uint32_t i = 0; i < SNAPSHOTS; ++i) {
            if (snapshots[i] != nullptr && snapshot_rows[i] - 1 < rows) {
                of_slot(snapshot_rows[i], snapshots[i]);
            }
        }
        if (write != nullptr) {
            of_slot(rows, write);
        }
    }
};

__device__ __forceinline__ StatePart state_part(const StateSequences& all, const StateSlots& slots, uint32_t sequence) {
    StatePart part;
    part.first_row = min(all.query_starts[sequence], all.rows);
    const uint32_t end = min(all.query_starts[sequence + 1], all.rows);
    part.rows = end > part.first_row ? end - part.first_row : 0;
    const uint32_t context = all.context_lengths[sequence];
    part.is_padding = context == 0;
    part.read = context > part.rows ? slots.at(all.reads[sequence]) : nullptr;
    part.write = context > 0 && part.rows > 0 ? slots.at(all.writes[sequence]) : nullptr;
#pragma unroll
    for (uint32_t i = 0; i < SNAPSHOTS; ++i) {
        part.snapshot_rows[i] = all.snapshot_rows[sequence * SNAPSHOTS + i];
        part.snapshots[i] = context > 0 ? slots.at(all.snapshot_slots[sequence * SNAPSHOTS + i]) : nullptr;
    }
    return part;
}
