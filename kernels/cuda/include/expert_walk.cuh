// Tile scheduler of the grouped (MoE) GEMM: which work items a thread block processes, and in which
// order (Hopper).
//
// An item is a tile of the weight's rows times a tile of the token rows routed to one expert (its
// places). Most experts have only one tile of places. The items of these experts are laid out along
// a line, and each block takes a contiguous range of the line. The weights of an expert with
// several tiles of places are needed for each of these tiles. Different blocks process these tiles
// and read the same rows of the weight at the same time: one block reads memory, and the others
// find the rows in the L2 cache.
//
// To make this possible, every block processes experts with several tiles first, in rounds. An
// expert's weight tiles are divided into parts of equal size (only the last part may be smaller),
// each small enough for a block's share of the items. In each round, a block takes one tile of
// places and one part of the weight tiles. Adjacent blocks use the same part. The items that do not
// fit into rounds are appended to the line. A block takes the rest of its share from the line. All
// blocks thus have the same number of items, give or take one. With even routing, nearly all items
// are on the line.
#pragma once

#include "contract.cuh"
#include "expert_list.cuh"
#include "expert_tiles.cuh"

// The number of tiles before each expert. The low half of a word counts the tiles of experts with
// one tile, and the high half counts the tiles of experts with several tiles.
struct Walk : ExpertSums {
    static constexpr uint32_t SHARED = 16;  // first bit of the high half

    // Counts tiles of PLACES places. Must be called by the block's first `COUNTERS` threads, like
    // `sum_up`. There must be fewer than 65,536 tiles.
    template <uint32_t PLACES>
    __device__ __forceinline__ void count(const uint32_t* starts, uint32_t experts) {
        sum_up(starts, experts, [](uint32_t places) {
            const uint32_t tiles = (places + PLACES - 1) / PLACES;
            return tiles > 1 ? tiles << SHARED : tiles;
        });
    }

    // The tiles before an expert, from the half that starts at bit `by`.
    __device__ __forceinline__ uint32_t tiles_before(uint32_t expert, uint32_t by) const {
        return before[expert] >> by & 0xffff;
    }

    // The expert of a tile.
    __device__ __forceinline__ uint32_t expert_of(uint32_t tile, uint32_t by, uint32_t experts) const {
        return last_with(tile, experts, [&](uint32_t expert) { return tiles_before(expert, by); });
    }
};

// Consecutive items of a block for the same tile of places.
struct Run {
    uint32_t expert;
    uint32_t tile;   // index among the expert's tiles of places
    uint32_t first;  // index of the first tile of the weight's rows
    uint32_t end;
    bool is_shared;  // other tiles of places need the same rows

    template <uint32_t PLACES>
    __device__ __forceinline__ Tile places(const uint32_t* starts) const {
        const uint32_t at = starts[expert] + tile * PLACES;
        return {expert, at, min(starts[expert + 1], at + PLACES)};
    }
};

// A block's items, run by run.
class Stretch {
    const Walk& walk;
    const uint32_t experts, across;  // `across` is the number of tiles of the weight's rows
    uint32_t lone_items;             // items of experts with one tile
    uint32_t now, end;               // this block's range of the line
    // Only for experts with several tiles. The items of each tile of places are divided into
    // `parts` parts of `width` items; the last part may have fewer. Parts are numbered by expert,
    // then by rows of the weight, then by tile of places.
    uint32_t parts = 1, width = 0;
    uint32_t in_rounds = 0;  // parts that are processed in rounds
    uint32_t part = 0;       // part that this block processes in its next round
    uint32_t left_over = 0;  // items before the first part that is not in a round

    // Returns the part with this number. Sets `items_before` to the number of items before that
    // part, counting only items of experts with several tiles.
    __device__ __forceinline__ Run run_of(uint32_t number, uint32_t& items_before) const {
        const uint32_t expert = walk.expert_of(number / parts, Walk::SHARED, experts);
        const uint32_t before = walk.tiles_before(expert, Walk::SHARED);
        const uint32_t tiles = walk.tiles_before(expert + 1, Walk::SHARED) - before;
        const uint32_t own = number - before * parts, tile = own % tiles, first = own / tiles * width;
        const uint32_t end = min(first + width, across);
        items_before = before * across + first * tiles + tile * (end - first);
        return {expert, tile, first, end, true};
    }

    __device__ __forceinline__ uint32_t items_before(uint32_t number, uint32_t shared_tiles) const {
        if (parts == 1 || number == shared_tiles * parts) {
            return number / parts * across;
        }
        uint32_t items;
        run_of(number, items);
        return items;
    }

    // Returns the rest of a part, from item `item` on. `item` is an index among the items of
    // experts with several tiles.
    __device__ __forceinline__ Run run_at(uint32_t item) const {
        const uint32_t expert = walk.expert_of(item / across, Walk::SHARED, experts);
        const uint32_t before = walk.tiles_before(expert, Walk::SHARED);
        const uint32_t tiles = walk.tiles_before(expert + 1, Walk::SHARED) - before;
        const uint32_t own = item - before * across, first = own / (tiles * width) * width;
        const uint32_t end = min(first + width, across), of_rows = own - first * tiles;
        const uint32_t tile = of_rows / (end - first);
        return {expert, tile, first + of_rows - tile * (end - first), end, true};
    }

public:
    __device__ __forceinline__ Stretch(const Walk& walk, uint32_t experts, uint32_t across)
        : walk(walk), experts(experts), across(across) {
        const uint32_t lone_tiles = walk.tiles_before(experts, 0), shared_tiles = walk.tiles_before(experts, Walk::SHARED);
        const uint32_t items = (lone_tiles + shared_tiles) * across;
        const uint32_t blocks = gridDim.x, block = blockIdx.x;
        const uint32_t share = items / blocks, more = items % blocks;
        lone_items = lone_tiles * across;
        now = share * block + min(block, more);
        end = now + share + (block < more ? 1 : 0);
        if (shared_tiles > 0) {
            // With fewer items than blocks, the first blocks have one item each.
            const uint32_t least = max(share, 1u);
            parts = (across + least - 1) / least;
            width = (across + parts - 1) / parts;
            in_rounds = min(shared_tiles * parts, least / width * blocks);
            part = block;
            const uint32_t whole = in_rounds / blocks, rest = in_rounds % blocks;
            const uint32_t first = whole * block + min(block, rest), last = first + whole + (block < rest ? 1 : 0);
            now -= items_before(first, shared_tiles);
            end -= items_before(last, shared_tiles);
            left_over = items_before(in_rounds, shared_tiles);
        }
    }

    // Returns false if there are no more runs.
    __device__ __forceinline__ bool next(Run& run) {
        if (part < in_rounds) {
            uint32_t items;
            run = run_of(part, items);
            part += gridDim.x;
            return true;
        }
        if (now >= end) {
            return false;
        }
        if (now < lone_items) {
            const uint32_t tile = now / across, first = now - tile * across;
            run = {walk.expert_of(tile, 0, experts), 0, first, min(across, first + end - now), false};
        } else {
            run = run_at(now - lone_items + left_over);
            run.end = min(run.end, run.first + end - now);
        }
        now += run.end - run.first;
        return true;
    }
};
