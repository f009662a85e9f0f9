// Which items of a product with experts' weights a block of Hopper works on, and in which order.
//
// An item is a tile of the weight's rows times a tile of an expert's places. Experts with one tile of places, which are most,
// stand on a line, item by item, of which blocks take stretches. The weights of an expert with several tiles are wanted by
// each of those, so these tiles have blocks of their own, which read the same rows at the same time: one reads memory, the
// others find the rows in the L2 cache.
//
// To that end experts with several tiles come first in every block, in rounds. A round of a block is a part of the weight's
// rows that fits into the block's share, with one tile of places; neighbouring blocks have the same rows. What is left of its
// share a block takes of the line, at whose end stands what the rounds had no room for. So all blocks have equal numbers of
// items, to one. With even routing nearly all is line.
#pragma once

#include "contract.cuh"
#include "expert_list.cuh"
#include "expert_tiles.cuh"

// Tiles before each expert: in the low half those of experts that have one, in the high half those of experts with several.
struct Walk : ExpertSums {
    static constexpr uint32_t SHARED = 16;  // bits to the high half

    // Counts tiles of PLACES places, as `sum_up`. There are less than 65,536.
    template <uint32_t PLACES>
    __device__ __forceinline__ void count(const uint32_t* starts, uint32_t experts) {
        sum_up(starts, experts, [](uint32_t places) {
            const uint32_t tiles = (places + PLACES - 1) / PLACES;
            return tiles > 1 ? tiles << SHARED : tiles;
        });
    }

    // Of those that are counted `by` so many bits up, before an expert.
    __device__ __forceinline__ uint32_t tiles_before(uint32_t expert, uint32_t by) const {
        return before[expert] >> by & 0xffff;
    }

    // The expert of a tile.
    __device__ __forceinline__ uint32_t expert_of(uint32_t tile, uint32_t by, uint32_t experts) const {
        return last_with(tile, experts, [&](uint32_t expert) { return tiles_before(expert, by); });
    }
};

// Items that follow each other in a block and have the same places.
struct Run {
    uint32_t expert;
    uint32_t tile;   // of the expert's places
    uint32_t first;  // tile of the weight's rows
    uint32_t end;
    bool is_shared;  // other tiles want the same rows

    template <uint32_t PLACES>
    __device__ __forceinline__ Tile places(const uint32_t* starts) const {
        const uint32_t at = starts[expert] + tile * PLACES;
        return {expert, at, min(starts[expert + 1], at + PLACES)};
    }
};

// A block's items, run by run.
class Stretch {
    const Walk& walk;
    const uint32_t experts, across;  // tiles of the weight's rows
    uint32_t lone_items;             // of experts that have one tile
    uint32_t now, end;               // of the line
    // Of experts with several tiles: `parts` of a tile, each of `width` items but for the last, which may have fewer. Parts
    // are numbered by expert, then by rows of the weight, then by tiles of places.
    uint32_t parts = 1, width = 0;
    uint32_t in_rounds = 0;  // parts that have a round
    uint32_t part = 0;       // of this block's next round
    uint32_t left_over = 0;  // items in front of the first part without a round

    // The part of this number, and how many items of experts with several tiles are in front of it.
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

    // What of a part begins at this one of the items of experts with several tiles.
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
            // Fewer items than blocks: the first blocks have one each.
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

    // False if there is none.
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
