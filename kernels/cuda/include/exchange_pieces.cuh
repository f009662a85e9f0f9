// Collectives in pieces: each rank writes into the other ranks' memory and adds up in its own
// memory.
#pragma once

#include "exchange.cuh"

// Units per thread in a piece. A block's piece is at most 32 KiB. A link of 400 GB/s that
// 128 blocks share takes 10 us to transfer one such piece for each block, which is longer
// than a block takes to read, add up and write a piece. While one block does that, other
// blocks keep the link busy.
constexpr uint32_t PIECE = 4;

// Announces to the same block of the other ranks that `pieces` pieces of this collective have been
// written. A release is cumulative: everything that any thread wrote before the barrier is ordered
// before the release. Only the threads that release (one for each other rank) wait until those
// writes have arrived.
__device__ __forceinline__ void announce(const Exchange& all, uint32_t epoch, uint32_t pieces) {
    __syncthreads();
    if (threadIdx.x < all.ranks && threadIdx.x != all.rank) {
        Control* other = all.control[threadIdx.x];
        store_release(&other->pieces[blockIdx.x][all.rank], uint64_t(epoch) << 32 | pieces);
    }
}

// Waits until the same block of each other rank has announced `pieces` pieces. Returns false if a
// rank does not announce them in time. Once `failed` names a rank, the wait fails at once if any
// announcement is missing.
__device__ __forceinline__ bool have_come(const Exchange& all, uint32_t epoch, uint32_t pieces) {
    bool came = true;
    if (threadIdx.x < all.ranks && threadIdx.x != all.rank) {
        Control* own = all.control[all.rank];
        const uint64_t* theirs = &own->pieces[blockIdx.x][threadIdx.x];
        const auto are_there = [&] {
            const uint64_t progress = load_acquire(theirs);
            const uint32_t of = static_cast<uint32_t>(progress >> 32);
            return of == epoch ? static_cast<uint32_t>(progress) >= pieces : of == epoch + 1;
        };
        const uint64_t start = nanoseconds();
        while (!are_there()) {
            if (load_acquire(&own->failed) != 0 || nanoseconds() - start > all.patience) {
                record_timeout(all, threadIdx.x);
                came = false;
                break;
            }
        }
    }
    return __syncthreads_and(came);
}

// For two ranks: `push(piece)` writes a piece into the other rank's memory, and `add(piece)` adds
// up a piece that the other rank wrote into this rank's memory. While one piece is added up, the
// next one is in flight.
template <typename Push, typename Add>
__device__ __forceinline__ void in_pieces(const Exchange& all, uint32_t epoch, uint32_t pieces, Push push, Add add) {
    push(0);
    announce(all, epoch, 1);
    for (uint32_t piece = 0; piece < pieces; ++piece) {
        const bool is_last = piece + 1 == pieces;
        if (!is_last) {
            push(piece + 1);
        }
        if (!have_come(all, epoch, piece + 1)) {
            break;
        }
        add(piece);
        if (!is_last) {
            announce(all, epoch, piece + 2);
        }
    }
}

// The sum of this rank's unit and the other rank's unit, in the order of ranks, plus the unit at
// `before` unless it is null.
template <typename Element>
__device__ __forceinline__ uint4 add_pair(const Exchange& all, const uint4& own, const uint4& other, const uint4* before) {
    const uint4 read[2] = {all.rank == 0 ? own : other, all.rank == 0 ? other : own};
    return add_up<Element>(all, read, before);
}
