// Sums over ranks and columns side by side, through memory that every rank's device has mapped.
// Targets: sm_90a
//
// all_reduce: out = (out +) the sum of all ranks' partial rows, each rank reading all others
// all_reduce_two_shot: the same; each rank sums its share of the units and then reads the others' shares. What the sum
//                      is added to must be the same on all ranks, as a residual stream is: each adds its share's
// all_reduce_pieces:   the same of two ranks. Each writes what it brings into the other's memory, piece by piece, and adds up
//                      in its own: a write does not wait for an answer as a read does, and nothing is copied first
// all_reduce_rms_norm: residual += the sum, and out = its rows divided by their root mean square, times weight, as rms_norm.cu
//                      has it; a block has whole rows. `_rounded` (of this and those below, but of shares of more than four
//                      ranks): out rounded to E4M3 as quantize.cu has it, and plain too unless `plain` is null
// all_reduce_rms_norm_pieces: the same of two ranks, as all_reduce_pieces
// all_reduce_rms_norm_shares: the same of more. Each rank sums its share of the rows, of what the others have written into its
//                      memory, and writes the sums into theirs
// all_reduce_rms_norm_pushed: the same of few rows, with one way instead of three (NCCL's LL): a rank writes its units into
//                      memory of each other rank, every 4 bytes beside the epoch, and reads what the others have written
// all_gather:          out[:, rank * columns..] = that rank's rows
// best_of_ranks:       out [rows] u32 has the place of each row's largest of x [rows, columns] f32, as argmax.cu finds it, and
//                      gets that of the largest of all ranks' side by side, the first of equals
// part_from_ranks:     tells the others that this rank comes to no more exchanges, so that none waits for it
//
// A rank copies what it brings to its exchange memory, its block b meets block b of all other ranks, and reads what
// the same blocks have written there. Sums are f32 in the order of the ranks, rounded once: every rank gets the same bits.
// In pieces and in shares, block b waits for no meeting: block b of the other ranks tells it how many pieces have come.
// Exchange memory has two halves that take turns. A rank that arrives at exchange e + 1 has ended its kernel of exchange
// e, so no rank still reads the half that exchange e + 2 writes. The epoch is in memory, so a captured graph can be
// replayed. The waits need all blocks of a launch on the device at once: at most BLOCKS_MAX, one a multiprocessor.
//
// Where no two ranks share a GPU, a norm lets the next kernel start before the ranks have met, so a product's weights are on
// their way meanwhile. On a shared one that kernel could take the room that the other rank needs to come.
//
// A wait ends after `patience` nanoseconds: the rank notes who is missing in `failed`, and this and all later exchanges
// end without waiting; what they would have written is undefined.

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
__device__ __forceinline__ void one_shot(const Exchange& all, const Place& partial, const Place& out, uint64_t units,
                                         bool accumulate) {
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
__device__ __forceinline__ void two_shot(const Exchange& all, const Place& partial, const Place& out, uint64_t units,
                                         bool accumulate) {
    wait_for_previous_kernel();
    const auto [epoch, half, first, step] = begin(all);
    // Block b has the same places of every share, so it depends on blocks b alone.
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
        // No other rank reads this rank's share of what it brought, so the sum takes its place.
        each(all.rank, [&](uint64_t unit, uint64_t offset) {
            const Unit* before = accumulate ? unit_of<Unit>(out, unit) : nullptr;
            *reinterpret_cast<Unit*>(all.data[all.rank] + offset) = sum_of<Element, Unit>(all, offset, before);
        });
        came = meet(all, 1, epoch);
    }
    if (came) {
        for (uint32_t next = 0; next < all.ranks; ++next) {
            // Ranks begin with different links.
            const uint32_t rank = (all.rank + next) % all.ranks;
            each(rank, [&](uint64_t unit, uint64_t offset) {
                *unit_of<Unit>(out, unit) = load_exchanged<Unit>(all.data[rank] + offset);
            });
        }
    }
    leave(all, epoch);
}

template <typename Element>
__device__ __forceinline__ void sum_in_pieces(const Exchange& all, const Place& partial, const Place& out, uint64_t units,
                                              bool accumulate) {
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
        // All reads are under way before the first sum.
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

// The squares of a unit's numbers, added up.
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

// Begins a norm's exchange: the weights of this thread's unit, which no kernel writes, are read before the previous one ends.
template <typename Element>
__device__ __forceinline__ Turn begin_norm(const Exchange& all, const Element* weight, uint32_t vector, bool is_in,
                                           uint4& by_words) {
    by_words = is_in ? load_words<VECTOR<Element>>(weight + vector * VECTOR<Element>) : uint4{};
    if (all.apart != 0) {
        let_next_kernel_start();
    }
    wait_for_previous_kernel();
    return begin(all);
}

__device__ __forceinline__ uint4* unit_in(const Place& place, uint64_t row, uint32_t column) {
    return reinterpret_cast<uint4*>(place.start) + row * place.pitch + column;
}

// A thread has the same unit of each of its block's rows, of which a piece has `DEPTH`. They are added up and normalised
// together.
template <uint32_t DEPTH, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm_in_pieces(const Exchange& all, const Place& partial, const Place& residual,
                                                       const Element* weight, float epsilon, const Out& out,
                                                       uint32_t rows) {
    // One is enough: between a piece's sums and the next one's all threads wait for that to come.
    __shared__ float squares_of[DEPTH][WARPS_MAX], largest_of_rows[DEPTH][WARPS_MAX];
    const uint32_t vectors = partial.columns, vector = threadIdx.x;
    const bool is_in = vector < vectors;
    uint4 by_words;
    const Turn turn = begin_norm(all, weight, vector, is_in, by_words);
    const uint8_t* here = all.data[all.rank] + turn.half;
    uint8_t* there = all.data[1 - all.rank] + turn.half;
    // Of each row of a piece: its index there, it, and this thread's unit in rows without gaps.
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
        // All reads are under way before the first sum.
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
        write_normed(out, sum, by_words, squares, epsilon, vector, largest_of_rows,
                     [&](auto work) { each(piece, [&](uint32_t i, uint32_t row, uint64_t) { work(i, row); }); });
    };
    const uint32_t rows_of_a_block = (rows + gridDim.x - 1) / gridDim.x;
    in_pieces(all, turn.epoch, (rows_of_a_block + DEPTH - 1) / DEPTH, push, add);
    leave(all, turn.epoch);
}

// A thread has the same unit of each of its block's rows, of which a piece has one of each of the at most `RANKS` ranks.
// What the ranks bring of one piece and the sums of the one before are on their way together, and told of at once.
template <uint32_t RANKS, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm_in_shares(const Exchange& all, const Place& partial, const Place& residual,
                                                       const Element* weight, float epsilon, const Out& out,
                                                       uint32_t rows) {
    // One is enough: between two pieces' norms all threads wait for sums.
    __shared__ float squares_of[RANKS][WARPS_MAX], largest_of_rows[RANKS][WARPS_MAX];
    const uint32_t vectors = partial.columns, vector = threadIdx.x;
    const bool is_in = vector < vectors;
    uint4 by_words;
    const Turn turn = begin_norm(all, weight, vector, is_in, by_words);
    const uint32_t rows_of_a_block = (rows + gridDim.x - 1) / gridDim.x;
    const uint32_t pieces = (rows_of_a_block + all.ranks - 1) / all.ranks;
    // Blocks begin with different ranks, so that few rows are shared out too.
    const auto row_of = [&](uint32_t piece, uint32_t owner) {
        const uint32_t after = (owner + all.ranks - blockIdx.x % all.ranks) % all.ranks;
        return blockIdx.x + (piece * all.ranks + after) * gridDim.x;
    };
    const auto has_row = [&](uint32_t piece, uint32_t owner) { return row_of(piece, owner) < rows; };
    // In a rank's half stand the sums of all rows, and then what each other rank brings for the rows of its share.
    const auto unit_at = [&](uint32_t rank, uint64_t row) {
        return all.data[rank] + turn.half + (row * vectors + vector) * sizeof(uint4);
    };
    const auto brought = [&](uint32_t to, uint32_t from, uint32_t piece) {
        const uint64_t before = from < to ? from : from - 1;
        return unit_at(to, rows + (before * pieces + piece) * gridDim.x + blockIdx.x);
    };
    // Of each row of a piece: its rank, and it.
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
        write_normed(out, sum, by_words, squares, epsilon, vector, largest_of_rows, [&](auto work) { each(piece, work); });
    };
    push(0);
    announce(all, turn.epoch, 1);
    for (uint32_t round = 0; round <= pieces; ++round) {
        if (round + 1 < pieces) {
            push(round + 1);
        }
        // What the others bring for this round's piece, and their sums of the one before. Who has no row of it waits too, and
        // so knows who does not come.
        if (!have_come(all, turn.epoch, round + 1)) {
            break;
        }
        if (round < pieces) {
            if (has_row(round, all.rank)) {
                add(round);
            }
            announce(all, turn.epoch, round + 2);
        }
        if (round > 0) {
            norm(round - 1);
        }
    }
    leave(all, turn.epoch);
}

// A thread has the same unit of each of its block's rows, and reads the next row's while this one is normalised. At most
// `RANKS` ranks.
template <bool PUSHES, uint32_t RANKS, typename Element, typename Out>
__device__ __forceinline__ void sum_and_norm(const Exchange& all, const Place& partial, const Place& residual,
                                             const Element* weight, float epsilon, const Out& out, uint32_t rows) {
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
    uint32_t turn = 0;
    for (uint64_t row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
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
        const float squares_of_row[1] = {block_sum(squares, squares_of[turn])};
        write_normed(out, sums, by_words, squares_of_row, epsilon, vector, largest_of_rows, [&](auto work) {
            if (is_in) {
                work(0, row);
            }
        });
    }
    leave(all, epoch);
}

template <typename Unit>
__device__ __forceinline__ void gather(const Exchange& all, const Place& part, const Place& out, uint64_t units) {
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

// A thread has the same rows before and after the meeting.
__device__ __forceinline__ void pick_best(const Exchange& all, const float* x, uint32_t pitch, uint32_t first_column,
                                          uint32_t* out, uint32_t rows) {
    wait_for_previous_kernel();
    const Turn turn = begin(all);
    const auto found = [&](uint32_t rank, uint64_t row) { return all.data[rank] + turn.half + row * sizeof(uint2); };
    for (uint64_t row = turn.first; row < rows; row += turn.step) {
        const uint32_t place = out[row];
        *reinterpret_cast<uint2*>(found(all.rank, row)) =
            place == NO_CHOICE ? make_uint2(0, NO_CHOICE)
                               : make_uint2(__float_as_uint(x[row * pitch + place]), first_column + place);
    }
    if (meet(all, 0, turn.epoch)) {
        for (uint64_t row = turn.first; row < rows; row += turn.step) {
            uint2 best = make_uint2(0, NO_CHOICE);
            for (uint32_t rank = 0; rank < all.ranks; ++rank) {
                const uint2 next = load_exchanged<uint2>(found(rank, row));
                // Places come in order, so a later equal never wins.
                const bool is_larger = __uint_as_float(next.x) > __uint_as_float(best.x);
                if (next.y != NO_CHOICE && (best.y == NO_CHOICE || is_larger)) {
                    best = next;
                }
            }
            out[row] = best.y;
        }
    }
    leave(all, turn.epoch);
}

#define KERNELS(name, Element)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_##name(                               \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        one_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_odd_##name(                           \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        one_shot<Element, uint16_t>(all, partial, out, units, accumulate != 0);                                    \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_two_shot_##name(                               \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        two_shot<Element, uint4>(all, partial, out, units, accumulate != 0);                                       \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) all_reduce_pieces_##name(                                 \
        const __grid_constant__ Exchange all, Place partial, Place out, uint64_t units, uint32_t accumulate) {     \
        sum_in_pieces<Element>(all, partial, out, units, accumulate != 0);                                         \
    }
FOR_EACH_ACTIVATION(KERNELS)

#define NORM(kernel, name, THREADS_MAX, Element, ...)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1) kernel##_##name(                                  \
        const __grid_constant__ Exchange all, Place partial, Place residual, const Element* weight, float epsilon, \
        Element* out, uint32_t rows) {                                                                             \
        const Plain<Element> to{partial.columns * VECTOR<Element>, out};                                           \
        __VA_ARGS__(all, partial, residual, weight, epsilon, to, rows);                                            \
    }
#define ROUNDED(kernel, name, THREADS_MAX, Element, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS_MAX, 1) kernel##_rounded_##name(                          \
        const __grid_constant__ Exchange all, Place partial, Place residual, const Element* weight, float epsilon, \
        Element* plain, uint32_t kind, float fixed, uint8_t* data, float* scales, uint32_t rows) {                 \
        const Target<Element> to{partial.columns * VECTOR<Element>, plain, kind, fixed, data, scales};             \
        __VA_ARGS__(all, partial, residual, weight, epsilon, to, rows);                                            \
    }
#define BOTH(...) NORM(__VA_ARGS__) ROUNDED(__VA_ARGS__)
// Rounding the rows of eight ranks' shares would keep 464 bytes a thread in memory.
#define NORMS(name, Element)                                                                                       \
    BOTH(all_reduce_rms_norm, name, NORM_THREADS_MAX, Element, sum_and_norm<false, 8>)                             \
    BOTH(all_reduce_rms_norm_pieces_2, name, NORM_THREADS_MAX, Element, sum_and_norm_in_pieces<2>)                 \
    BOTH(all_reduce_rms_norm_pieces_4, name, NORM_THREADS_MAX / 2, Element, sum_and_norm_in_pieces<4>)             \
    BOTH(all_reduce_rms_norm_shares_4, name, NORM_THREADS_MAX, Element, sum_and_norm_in_shares<4>)                 \
    NORM(all_reduce_rms_norm_shares_8, name, NORM_THREADS_MAX, Element, sum_and_norm_in_shares<8>)                 \
    BOTH(all_reduce_rms_norm_pushed_2, name, NORM_THREADS_MAX, Element, sum_and_norm<true, 2>)                     \
    BOTH(all_reduce_rms_norm_pushed_8, name, NORM_THREADS_MAX, Element, sum_and_norm<true, 8>)
FOR_EACH_ACTIVATION(NORMS)
static_assert(RANKS_MAX == 8, "the largest of those");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather(const __grid_constant__ Exchange all, Place part, Place out, uint64_t units) {
    gather<uint4>(all, part, out, units);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    all_gather_odd(const __grid_constant__ Exchange all, Place part, Place out, uint64_t units) {
    gather<uint16_t>(all, part, out, units);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    best_of_ranks(const __grid_constant__ Exchange all, const float* x, uint32_t pitch, uint32_t first_column, uint32_t* out,
                  uint32_t rows) {
    pick_best(all, x, pitch, first_column, out, rows);
}

extern "C" __global__ void __launch_bounds__(32, 1) part_from_ranks(const __grid_constant__ Exchange all) {
    // The exchanges that this rank has come to are over here. Another may still wait in the last one for what is on its way to
    // it: that gets a millisecond, and is given up with all that follows if it takes longer.
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        __threadfence_system();
        for (const uint64_t start = nanoseconds(); nanoseconds() - start < 1'000'000;) {
        }
        give_up(all, all.rank);
    }
}

// Launch: grid (at most BLOCKS_MAX), block (THREADS of contract::all_reduce), the same on all ranks; part_from_ranks: grid (1),
// block (32). Units are 16 bytes where starts, columns and pitches are whole ones, else 2; `units` is all rows' and fits a half.
// Of a norm: block (a thread for each unit of a row, in whole warps, at most NORM_THREADS_MAX), whole units; what is pushed is
// at most PUSHED_UNITS.
// In pieces: two ranks, whole units, and of 4 rows at most NORM_THREADS_MAX / 2 threads. In shares of R ranks a half has
// rows + (R - 1) * grid * div_ceil(div_ceil(rows, grid), R) rows.
