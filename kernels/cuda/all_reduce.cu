// All-reduce and all-gather through peer memory that every rank's GPU has mapped.
// Targets: sm_90a
//
// all_reduce:          out = the sum of all ranks' partial rows (plus out, if `accumulate`). Each
//                      rank reads from all other ranks.
// all_reduce_two_shot: as all_reduce, but each rank sums only its share of the units and then reads
//                      the other ranks' shares. With `accumulate`, `out` must be the same on all
//                      ranks (as a residual stream is), because each rank adds only its own share
//                      of `out`.
// all_reduce_pieces:   as all_reduce, for two ranks. Each rank writes its rows piece by piece into
//                      the other rank's memory, and adds up in its own memory. Unlike a remote
//                      read, a remote write does not wait for a reply, and nothing is first copied
//                      to local exchange memory.
// all_reduce_rms_norm: residual += the sum; out = the rows of residual divided by their root mean
//                      square, times weight, as in rms_norm.cu. A block processes whole rows. This
//                      kernel and the norm kernels below, except all_reduce_rms_norm_shares for
//                      more than four ranks, have variants named `_rounded`. These variants round
//                      out to E4M3 as quantize.cu does, and also write the unquantized rows unless
//                      `plain` is null.
// all_reduce_rms_norm_pieces: as all_reduce_rms_norm, for two ranks, with the method of
//                             all_reduce_pieces.
// all_reduce_rms_norm_shares: as all_reduce_rms_norm, for more than two ranks. Each rank owns a
//                             share of the rows. The other ranks write their partial rows of that
//                             share into the owner's memory. The owner adds them up and writes the
//                             sums into the memory of the other ranks.
// all_reduce_rms_norm_pushed: as all_reduce_rms_norm, for few rows, with one transfer over the link
//                             instead of three in sequence (NCCL's LL protocol). A rank writes its
//                             units into the memory of each other rank, with the epoch next to
//                             every 4 bytes, and polls its own memory for the other ranks' units.
// all_gather:          out[:, r * columns..] = the rows of rank r.
// best_of_ranks:       argmax of each row over the columns of all ranks. On entry, out [rows] u32
//                      holds the column of the largest element of each row of this rank's x [rows,
//                      columns] f32, as argmax.cu returns it. On return, out holds the column of
//                      the largest element over all ranks; the first of equal elements wins.
// part_from_ranks:     announces that this rank takes part in no further collectives, so that no
//                      rank waits for it.
//
// Block b of a rank copies its input to the rank's exchange memory, waits at a barrier for
// block b of every other rank, and reads what those blocks have written. Sums are f32 in the
// order of the ranks, rounded once, so every rank gets the same bits if the contents of `out` that
// are added are also the same. In the variants with pieces and shares, block b does not wait at a
// barrier: block b of each other rank announces how many pieces have arrived. The pushed variant
// has no barrier either: it waits for the epoch next to the data.
//
// Exchange memory has two halves that alternate. A rank that arrives at collective e + 1 has
// finished its kernel of collective e, so no rank still reads the half that collective e + 2
// writes. The epoch is in device memory, so that a captured graph can be replayed. Because
// blocks wait for each other, all blocks of a launch must be resident at once: at most
// BLOCKS_MAX, one per SM.
//
// If no two ranks share a GPU, a norm kernel lets the next kernel start before the other ranks have
// arrived, so that the next GEMM's weights are already being loaded. On a shared GPU, that next
// kernel could occupy the SMs that the other rank's blocks need in order to arrive.
//
// A wait fails after `patience` nanoseconds. The waiting rank then records the missing rank in
// `failed`. This collective and all later collectives end without waiting, and their outputs are
// undefined.

#include "exchange.cuh"
#include "exchange_norm.cuh"
#include "exchange_pieces.cuh"
#include "exchange_pushed.cuh"
#include "kernel_order.cuh"
#include "reduce.cuh"

using contract::all_reduce::NORM_THREADS_MAX;
using contract::all_reduce::THREADS;
using contract::common::NO_CHOICE;

template <typename Element, typename Unit>
__device__ __forceinline__ void one_shot(const Exchange& all, const RowView& partial, const RowView& out,
                                         uint64_t units, bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    bring<Unit>(all, half, partial, units, first, step);
    if (meet(all, 0, epoch)) {
        for (uint64_t unit = first; unit < units; unit += step) {
            Unit* to = unit_of<Unit>(out, unit);
            *to = sum_of<Element, Unit>(all, half + unit * sizeof(Unit), accumulate ? to : nullptr);
        }
    }
    leave(all, epoch);
}

template <typename Element, typename Unit>
__device__ __forceinline__ void two_shot(const Exchange& all, const RowView& partial, const RowView& out,
                                         uint64_t units, bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    // Block b processes the same offsets of every share, so block b depends only on the blocks b of
    // the other ranks.
    const uint64_t share = (units + all.ranks - 1) / all.ranks;
    const auto each = [&](uint32_t rank, auto work) {
        const uint64_t start = rank * share, end = min(start + share, units);
        for (uint64_t unit = start + first; unit < end; unit += step) {
            work(unit, half + unit * sizeof(Unit));
        }
    };
    for (uint32_t rank = 0; rank < all.ranks; ++rank) {
        each(rank, [&](uint64_t unit, uint64_t offset) {
            *reinterpret_cast<Unit*>(all.data[all.rank] + offset) = *unit_of<Unit>(partial, unit);
        });
    }
    bool came = meet(all, 0, epoch);
    if (came) {
        // No other rank reads this rank's share of this rank's input, so the sum can overwrite it.
        each(all.rank, [&](uint64_t unit, uint64_t offset) {
            const Unit* before = accumulate ? unit_of<Unit>(out, unit) : nullptr;
            *reinterpret_cast<Unit*>(all.data[all.rank] + offset) = sum_of<Element, Unit>(all, offset, before);
        });
        came = meet(all, 1, epoch);
    }
    if (came) {
        for (uint32_t next = 0; next < all.ranks; ++next) {
            // Each rank starts with a different rank, so that the ranks use different links at the
            // same time.
            const uint32_t rank = (all.rank + next) % all.ranks;
            each(rank, [&](uint64_t unit, uint64_t offset) {
                *unit_of<Unit>(out, unit) = load_exchanged<Unit>(all.data[rank] + offset);
            });
        }
    }
    leave(all, epoch);
}

template <typename Element>
__device__ __forceinline__ void sum_in_pieces(const Exchange& all, const RowView& partial, const RowView& out,
                                              uint64_t units, bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, start, step] = begin(all);
    const uint8_t* here = all.data[all.rank] + half;
    uint8_t* there = all.data[1 - all.rank] + half;
    const auto each = [&, first = start, step = step](uint32_t piece, auto work) {
#pragma unroll
        for (uint32_t i = 0; i < PIECE; ++i) {
            const uint64_t unit = first + (uint64_t(piece) * PIECE + i) * step;
            if (unit < units) {
                work(i, unit);
            }
        }
    };
    const auto push = [&](uint32_t piece) {
        uint4 own[PIECE];
        each(piece, [&](uint32_t i, uint64_t unit) { own[i] = *unit_of<uint4>(partial, unit); });
        each(piece, [&](uint32_t i, uint64_t unit) { reinterpret_cast<uint4*>(there)[unit] = own[i]; });
    };
    const auto add = [&](uint32_t piece) {
        // All reads are in flight before the first sum.
        uint4 own[PIECE], other[PIECE], before[PIECE];
        each(piece, [&](uint32_t i, uint64_t unit) {
            own[i] = *unit_of<uint4>(partial, unit);
            other[i] = load_exchanged<uint4>(here + unit * sizeof(uint4));
            if (accumulate) {
                before[i] = *unit_of<uint4>(out, unit);
            }
        });
        each(piece, [&](uint32_t i, uint64_t unit) {
            *unit_of<uint4>(out, unit) = add_pair<Element>(all, own[i], other[i], accumulate ? &before[i] : nullptr);
        });
    };
    const uint64_t of_a_piece = step * PIECE;
    in_pieces(all, epoch, static_cast<uint32_t>((units + of_a_piece - 1) / of_a_piece), push, add);
    leave(all, epoch);
}

// The sum of the squares of a unit's elements.
template <typename Element>
__device__ __forceinline__ float squares_of_unit(const uint4& unit) {
    float values[VECTOR<Element>], squares = 0.0f;
    widen<VECTOR<Element>, Element>(unit, values);
#pragma unroll
    for (uint32_t i = 0; i < VECTOR<Element>; ++i) {
        squares += values[i] * values[i];
    }
    return squares;
}

// Begins the collective of a norm. The weights of this thread's unit, which no kernel writes, are
// read before the previous kernel ends.
template <typename Element>
__device__ __forceinline__ Collective begin_norm(const Exchange& all, const Element* weight, uint32_t vector,
                                                 bool is_in, uint4& by_words) {
    by_words = is_in ? load_words<VECTOR<Element>>(weight + vector * VECTOR<Element>) : uint4{};
    if (all.apart != 0) {
        let_next_kernel_start();
    }
    wait_for_previous_kernel();
    return begin(all);
}

__device__ __forceinline__ uint4* unit_in(const RowView& rows, uint64_t row, uint32_t column) {
    return reinterpret_cast<uint4*>(rows.start) + row * rows.pitch + column;
}

// Each thread processes the same unit of every row of its block. A piece is `DEPTH` rows, which are
// added up and normalized together.
template <uint32_t DEPTH, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm_in_pieces(const Exchange& all, const RowView& partial,
                                                       const RowView& residual, const Element* weight, NormTerms terms,
                                                       const Out& out, uint32_t rows) {
    // One buffer suffices: between the sums of two pieces, all threads wait for the next piece.
    __shared__ float squares_of[DEPTH][WARPS_MAX], largest_of_rows[DEPTH][WARPS_MAX];
    const uint32_t vectors = partial.columns, vector = threadIdx.x;
    const bool is_in = vector < vectors;
    uint4 by_words;
    const Collective collective = begin_norm(all, weight, vector, is_in, by_words);
    const uint8_t* here = all.data[all.rank] + collective.half;
    uint8_t* there = all.data[1 - all.rank] + collective.half;
    // Calls `work(index in the piece, row, this thread's unit in rows without gaps)` for each
    // row of a piece.
    const auto each = [&](uint32_t piece, auto work) {
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; ++i) {
            const uint32_t row = blockIdx.x + (piece * DEPTH + i) * gridDim.x;
            if (row < rows && is_in) {
                work(i, row, row * uint64_t(vectors) + vector);
            }
        }
    };
    const auto push = [&](uint32_t piece) {
        uint4 own[DEPTH];
        each(piece, [&](uint32_t i, uint32_t row, uint64_t) { own[i] = *unit_in(partial, row, vector); });
        each(piece, [&](uint32_t i, uint32_t, uint64_t unit) { reinterpret_cast<uint4*>(there)[unit] = own[i]; });
    };
    const auto add = [&](uint32_t piece) {
        // All reads are in flight before the first sum.
        uint4 own[DEPTH], other[DEPTH], before[DEPTH], sum[DEPTH] = {};
        each(piece, [&](uint32_t i, uint32_t row, uint64_t unit) {
            own[i] = *unit_in(partial, row, vector);
            other[i] = load_exchanged<uint4>(here + unit * sizeof(uint4));
            before[i] = *unit_in(residual, row, vector);
        });
        each(piece, [&](uint32_t i, uint32_t row, uint64_t) {
            sum[i] = add_pair<Element>(all, own[i], other[i], &before[i]);
            *unit_in(residual, row, vector) = sum[i];
        });
        float squares[DEPTH];
#pragma unroll
        for (uint32_t i = 0; i < DEPTH; ++i) {
            squares[i] = squares_of_unit<Element>(sum[i]);
        }
        block_sums(squares, squares_of);
        write_normed(out, sum, by_words, squares, terms, vector, largest_of_rows,
                     [&](auto work) { each(piece, [&](uint32_t i, uint32_t row, uint64_t) { work(i, row); }); });
    };
    const uint32_t rows_of_a_block = (rows + gridDim.x - 1) / gridDim.x;
    in_pieces(all, collective.epoch, (rows_of_a_block + DEPTH - 1) / DEPTH, push, add);
    leave(all, collective.epoch);
}

// Each thread processes the same unit of every row of its block. A piece has one row per rank;
// there are at most `RANKS` ranks. The ranks' inputs of one piece and the sums of the previous
// piece are in flight together and announced together.
template <uint32_t RANKS, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm_in_shares(const Exchange& all, const RowView& partial,
                                                       const RowView& residual, const Element* weight, NormTerms terms,
                                                       const Out& out, uint32_t rows) {
    // One buffer suffices: between the norms of two pieces, all threads pass the barrier of
    // `have_come`.
    __shared__ float squares_of[RANKS][WARPS_MAX], largest_of_rows[RANKS][WARPS_MAX];
    const uint32_t vectors = partial.columns, vector = threadIdx.x;
    const bool is_in = vector < vectors;
    uint4 by_words;
    const Collective collective = begin_norm(all, weight, vector, is_in, by_words);
    const uint32_t rows_of_a_block = (rows + gridDim.x - 1) / gridDim.x;
    const uint32_t pieces = (rows_of_a_block + all.ranks - 1) / all.ranks;
    // Blocks begin with different ranks, so that even a few rows are distributed over the ranks.
    const auto row_of = [&](uint32_t piece, uint32_t owner) {
        const uint32_t after = (owner + all.ranks - blockIdx.x % all.ranks) % all.ranks;
        return blockIdx.x + (piece * all.ranks + after) * gridDim.x;
    };
    const auto has_row = [&](uint32_t piece, uint32_t owner) { return row_of(piece, owner) < rows; };
    // The half of a rank's exchange memory holds the sums of all rows, followed by each other
    // rank's input for the rows that this rank owns.
    const auto unit_at = [&](uint32_t rank, uint64_t row) {
        return all.data[rank] + collective.half + (row * vectors + vector) * sizeof(uint4);
    };
    const auto brought = [&](uint32_t to, uint32_t from, uint32_t piece) {
        const uint64_t before = from < to ? from : from - 1;
        return unit_at(to, rows + (before * pieces + piece) * gridDim.x + blockIdx.x);
    };
    // Calls `work(owner, row)` for each row of a piece; rank `owner` sums the row.
    const auto each = [&](uint32_t piece, auto work) {
#pragma unroll
        for (uint32_t owner = 0; owner < RANKS; ++owner) {
            if (owner < all.ranks && is_in && has_row(piece, owner)) {
                work(owner, row_of(piece, owner));
            }
        }
    };
    const auto push = [&](uint32_t piece) {
        uint4 own[RANKS];
        each(piece, [&](uint32_t owner, uint32_t row) { own[owner] = *unit_in(partial, row, vector); });
        each(piece, [&](uint32_t owner, uint32_t) {
            if (owner != all.rank) {
                *reinterpret_cast<uint4*>(brought(owner, all.rank, piece)) = own[owner];
            }
        });
    };
    const auto add = [&](uint32_t piece) {
        const uint32_t row = row_of(piece, all.rank);
        if (!is_in) {
            return;
        }
        uint4 read[RANKS];
#pragma unroll
        for (uint32_t rank = 0; rank < RANKS; ++rank) {
            if (rank < all.ranks) {
                read[rank] = rank == all.rank ? *unit_in(partial, row, vector)
                                              : load_exchanged<uint4>(brought(all.rank, rank, piece));
            }
        }
        uint4* to = unit_in(residual, row, vector);
        const uint4 sum = add_up<Element>(all, read, to);
        *to = sum;
#pragma unroll
        for (uint32_t rank = 0; rank < RANKS; ++rank) {
            if (rank < all.ranks && rank != all.rank) {
                *reinterpret_cast<uint4*>(unit_at(rank, row)) = sum;
            }
        }
    };
    const auto norm = [&](uint32_t piece) {
        uint4 sum[RANKS] = {};
        each(piece, [&](uint32_t owner, uint32_t row) {
            sum[owner] = owner == all.rank ? *unit_in(residual, row, vector)
                                           : load_exchanged<uint4>(unit_at(all.rank, row));
        });
        float squares[RANKS];
#pragma unroll
        for (uint32_t owner = 0; owner < RANKS; ++owner) {
            squares[owner] = squares_of_unit<Element>(sum[owner]);
        }
        block_sums(squares, squares_of);
        each(piece, [&](uint32_t owner, uint32_t row) {
            if (owner != all.rank) {
                *unit_in(residual, row, vector) = sum[owner];
            }
        });
        write_normed(out, sum, by_words, squares, terms, vector, largest_of_rows, [&](auto work) { each(piece, work); });
    };
    push(0);
    announce(all, collective.epoch, 1);
    for (uint32_t round = 0; round <= pieces; ++round) {
        if (round + 1 < pieces) {
            push(round + 1);
        }
        // Waits for the other ranks' inputs of this round's piece and their sums of the
        // previous piece. A rank that owns no row of the piece also waits, so that it
        // notices a missing rank.
        if (!have_come(all, collective.epoch, round + 1)) {
            break;
        }
        if (round < pieces) {
            if (has_row(round, all.rank)) {
                add(round);
            }
            announce(all, collective.epoch, round + 2);
        }
        if (round > 0) {
            norm(round - 1);
        }
    }
    leave(all, collective.epoch);
}

// Each thread processes the same unit of every row of its block, and reads the next row while the
// current row is normalized. There are at most `RANKS` ranks.
template <bool PUSHES, uint32_t RANKS, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm(const Exchange& all, const RowView& partial, const RowView& residual,
                                             const Element* weight, NormTerms terms, const Out& out, uint32_t rows) {
    __shared__ float squares_of[2][WARPS_MAX], largest_of_rows[1][WARPS_MAX];
    const uint32_t vectors = partial.columns, vector = threadIdx.x;
    const bool is_in = vector < vectors;
    uint4 by_words;
    const auto [epoch, half, first, step] = begin_norm(all, weight, vector, is_in, by_words);
    const auto place = [&](uint64_t row) { return row * vectors + vector; };
    const auto brought = [&](uint64_t row) { return half + place(row) * sizeof(uint4); };
    for (uint64_t row = blockIdx.x; row < rows && is_in; row += gridDim.x) {
        const uint4 own = *unit_of<uint4>(partial, place(row));
        if constexpr (PUSHES) {
            for (uint32_t rank = 0; rank < all.ranks; ++rank) {
                if (rank != all.rank) {
                    push(pushed(all, rank, all.rank, epoch, place(row)), own, epoch);
                }
            }
        } else {
            *reinterpret_cast<uint4*>(all.data[all.rank] + brought(row)) = own;
        }
    }
    bool came = PUSHES || meet(all, 0, epoch);
    uint4 read[RANKS] = {};
    const auto fetch = [&](uint64_t row) {
        if (row >= rows || !is_in) {
            return;
        }
        if constexpr (PUSHES) {
#pragma unroll
            for (uint32_t rank = 0; rank < RANKS; ++rank) {
                if (rank == all.rank) {
                    read[rank] = *unit_of<uint4>(partial, place(row));
                } else if (rank < all.ranks) {
                    came = came && receive(all, rank, epoch, place(row), read[rank]);
                }
            }
        } else {
            read_all(all, brought(row), read);
        }
    };
    if (came) {
        fetch(blockIdx.x);
    }
    uint32_t buffer = 0;
    for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x, buffer ^= 1) {
        if (!__syncthreads_and(came)) {
            break;
        }
        uint4 sum = {};
        if (is_in) {
            uint4* to = unit_of<uint4>(residual, place(row));
            sum = add_up<Element>(all, read, to);
            *to = sum;
        }
        const float squares = squares_of_unit<Element>(sum);
        fetch(row + gridDim.x);
        const uint4 sums[1] = {sum};
        const float squares_of_row[1] = {block_sum(squares, squares_of[buffer])};
        write_normed(out, sums, by_words, squares_of_row, terms, vector, largest_of_rows, [&](auto work) {
            if (is_in) {
                work(0, row);
            }
        });
    }
    leave(all, epoch);
}

template <typename Unit>
__device__ __forceinline__ void gather(const Exchange& all, const RowView& part, const RowView& out, uint64_t units) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    bring<Unit>(all, half, part, units, first, step);
    if (meet(all, 0, epoch)) {
        for (uint32_t next = 0; next < all.ranks; ++next) {
            const uint32_t rank = (all.rank + next) % all.ranks;
            for (uint64_t unit = first; unit < units; unit += step) {
                const uint64_t row = unit / part.columns, column = unit - row * part.columns;
                Unit* to = reinterpret_cast<Unit*>(out.start) + row * out.pitch + rank * uint64_t(part.columns) + column;
                *to = load_exchanged<Unit>(all.data[rank] + half + unit * sizeof(Unit));
            }
        }
    }
    leave(all, epoch);
}

// Each thread processes the same rows before and after the barrier.
__device__ __forceinline__ void pick_best(const Exchange& all, const float* x, uint32_t pitch, uint32_t first_column,
                                          uint32_t* out, uint32_t rows) {
    wait_for_previous_kernel();
    const Collective collective = begin(all);
    const auto found = [&](uint32_t rank, uint64_t row) {
        return all.data[rank] + collective.half + row * sizeof(uint2);
    };
    for (uint64_t row = collective.first; row < rows; row += collective.step) {
        const uint32_t place = out[row];
        *reinterpret_cast<uint2*>(found(all.rank, row)) =
            place == NO_CHOICE ? make_uint2(0, NO_CHOICE)
                               : make_uint2(__float_as_uint(x[row * pitch + place]), first_column + place);
    }
    if (meet(all, 0, collective.epoch)) {
        for (uint64_t row = collective.first; row < rows; row += collective.step) {
            uint2 best = make_uint2(0, NO_CHOICE);
            for (uint32_t rank = 0; rank < all.ranks; ++rank) {
                const uint2 next = load_exchanged<uint2>(found(rank, row));
                // Ranks are visited in the order of their columns, so a later equal element never
                // wins.
                const bool is_larger = __uint_as_float(next.x) > __uint_as_float(best.x);
                if (next.y != NO_CHOICE && (best.y == NO_CHOICE || is_larger)) {
                    best = next;
                }
            }
            out[row] = best.y;
        }
    }
    leave(all, collective.epoch);
}

#define KERNELS(name, Element)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_##name(                                    \
        const __grid_constant__ Exchange all, RowView partial, RowView out, uint64_t units, uint32_t accumulate) { \
        one_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_odd_##name(                                \
        const __grid_constant__ Exchange all, RowView partial, RowView out, uint64_t units, uint32_t accumulate) { \
        one_shot<Element, uint16_t>(all, partial, out, units, accumulate != 0);                                    \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_shot_##name(                               \
        const __grid_constant__ Exchange all, RowView partial, RowView out, uint64_t units, uint32_t accumulate) { \
        two_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_pieces_##name(                                 \
        const __grid_constant__ Exchange all, RowView partial, RowView out, uint64_t units, uint32_t accumulate) { \
        sum_in_pieces<Element>(all, partial, out, units, accumulate != 0);                                         \
    }
FOR_EACH_ACTIVATION(KERNELS)

#define NORM(kernel, name, THREADS_MAX, Element, ...)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1) kernel##_##name(                                  \
        const __grid_constant__ Exchange all, RowView partial, RowView residual, const Element* weight,            \
        float epsilon, float weight_offset, Element* out, uint32_t rows) {                                         \
        const Plain<Element> to{partial.columns * VECTOR<Element>, out};                                           \
        __VA_ARGS__(all, partial, residual, weight, NormTerms{epsilon, weight_offset}, to, rows);                  \
    }
#define ROUNDED(kernel, name, THREADS_MAX, Element, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1) kernel##_rounded_##name(                          \
        const __grid_constant__ Exchange all, RowView partial, RowView residual, const Element* weight,            \
        float epsilon, float weight_offset, Element* plain, uint32_t kind, float fixed, uint8_t* data,             \
        float* scales, uint32_t rows) {                                                                            \
        const Target<Element> to{partial.columns * VECTOR<Element>, plain, kind, fixed, data, scales};             \
        __VA_ARGS__(all, partial, residual, weight, NormTerms{epsilon, weight_offset}, to, rows);                  \
    }
#define BOTH(...) NORM(__VA_ARGS__) ROUNDED(__VA_ARGS__)
// There is no rounded variant of all_reduce_rms_norm_shares_8: rounding its rows would take 464
// bytes of local memory per thread.
#define NORMS(name, Element)                                                                                       \
    BOTH(all_reduce_rms_norm, name, NORM_THREADS_MAX, Element, sum_and_norm<false, 8>)                             \
    BOTH(all_reduce_rms_norm_pieces_2, name, NORM_THREADS_MAX, Element, sum_and_norm_in_pieces<2>)                 \
    BOTH(all_reduce_rms_norm_pieces_4, name, NORM_THREADS_MAX / 2, Element, sum_and_norm_in_pieces<4>)             \
    BOTH(all_reduce_rms_norm_shares_4, name, NORM_THREADS_MAX, Element, sum_and_norm_in_shares<4>)                 \
    NORM(all_reduce_rms_norm_shares_8, name, NORM_THREADS_MAX, Element, sum_and_norm_in_shares<8>)                 \
    BOTH(all_reduce_rms_norm_pushed_2, name, NORM_THREADS_MAX, Element, sum_and_norm<true, 2>)                     \
    BOTH(all_reduce_rms_norm_pushed_8, name, NORM_THREADS_MAX, Element, sum_and_norm<true, 8>)
FOR_EACH_ACTIVATION(NORMS)
static_assert(RANKS_MAX == 8, "the kernels above support up to 8 ranks");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const __grid_constant__ Exchange all, RowView part, RowView out, uint64_t units) {
    gather<uint4>(all, part, out, units);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather_odd(const __grid_constant__ Exchange all, RowView part, RowView out, uint64_t units) {
    gather<uint16_t>(all, part, out, units);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    best_of_ranks(const __grid_constant__ Exchange all, const float* x, uint32_t pitch, uint32_t first_column, uint32_t* out,
                  uint32_t rows) {
    pick_best(all, x, pitch, first_column, out, rows);
}

extern "C" __global__ void __launch_bounds__(32, 1) part_from_ranks(const __grid_constant__ Exchange all) {
    // All collectives of this rank are complete here. Another rank may still wait, in the last
    // collective, for data in flight to it. This kernel gives that data a millisecond to arrive; if
    // the data takes longer, that collective and all later collectives fail.
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        __threadfence_system();
        for (const uint64_t start = nanoseconds(); nanoseconds() - start < 1'000'000;) {
        }
        record_timeout(all, all.rank);
    }
}

// Launch: grid (at most BLOCKS_MAX), block (THREADS of contract::all_reduce), the same on all
// ranks; part_from_ranks: grid (1), block (32).
// - A unit is 16 bytes if starts, columns and pitches are multiples of 16 bytes, otherwise 2 bytes.
//   `units` is the number of units in all rows. All of them must fit into one half of the exchange
//   memory.
// - Norms: a block has one thread per unit of a row, in whole warps, at most NORM_THREADS_MAX;
//   units are 16 bytes. At most PUSHED_UNITS units are pushed.
// - Pieces: two ranks, 16-byte units. With pieces of 4 rows, at most NORM_THREADS_MAX / 2 threads.
// - Shares of R ranks: a half holds rows + (R - 1) * grid * div_ceil(div_ceil(rows, grid), R) rows.
