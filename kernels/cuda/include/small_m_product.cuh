// GEMMs with few rows on Hopper: the work of a block in gemm_small_m.cu, gemm_small_m_e4m3.cu and
// gemm_small_m_int4.cu. The head of gemm_small_m.cu describes the method.
#pragma once

#include "contract.cuh"
#include "small_m_pieces.cuh"
#include "small_m_stages.cuh"
#include "wgmma.cuh"

// Writes this block's part of a tile to `parts`. Returns true in only one of the blocks that share
// the tile: the block that writes its part last. There, `c` becomes the complete sum.
template <typename Format, uint32_t ROWS>
__device__ __forceinline__ bool gather(float (&c)[ROWS / 8][4], const Arguments<Format>& arguments, const UnitRanges& line,
                                       uint32_t shared, uint32_t tile) {
    constexpr uint32_t VALUES = ROWS / 2;  // per thread
    static_assert(VALUES * MULTIPLIERS == contract::gemm_small_m::PART_NUMBERS<ROWS>, "the host sizes scratch in parts of this size");
    // Values that are added up at once, and parts that are read at once: as many as fit into
    // registers.
    constexpr uint32_t SUMMED = VALUES < 32 ? VALUES : 32, AT_ONCE = SUMMED == 32 ? 2 : 4;
    const uint32_t begin = tile * arguments.steps;
    const uint32_t first = line.block_of(begin), others = line.block_of(begin + arguments.steps - 1) - first;
    float* flat = &c[0][0];
    // A block has at most two parts of shared tiles: its first part, if the block starts inside the
    // tile, and its last part, if the tile starts inside the block.
    const auto part = [&](uint32_t block) {
        const uint32_t slot = 2 * block + (line.start(block) <= begin ? 1u : 0u);
        return arguments.parts + static_cast<uint64_t>(slot) * (VALUES * MULTIPLIERS) + threadIdx.x * 4;
    };
    float* own = part(blockIdx.x);
#pragma unroll
    for (uint32_t four = 0; four < VALUES / 4; ++four) {
        __stcg(reinterpret_cast<float4*>(own + four * 4 * MULTIPLIERS),
               make_float4(flat[four * 4], flat[four * 4 + 1], flat[four * 4 + 2], flat[four * 4 + 3]));
    }
    part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
    const uint32_t word = shared + Shared<ROWS>::WORD_AT;
    if (threadIdx.x == 0) {
        // A thread that sees this count also sees what all threads of this block wrote, because the
        // barrier comes before the count.
        __threadfence();
        const uint32_t before = atomicAdd(arguments.counters + tile, 1u);
        __threadfence();
        if (before == others) {
            arguments.counters[tile] = 0;
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(before) : "memory");
    }
    part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
    uint32_t before;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(before) : "r"(word) : "memory");
    if (before != others) {
        return false;
    }
    // The parts are added in the order of the blocks. This block's own part is in registers and is
    // added at the block's position.
    const uint32_t place = blockIdx.x - first;
#pragma unroll
    for (uint32_t from = 0; from < VALUES; from += SUMMED) {
        float sum[SUMMED] = {};
        const auto add_own = [&] {
#pragma unroll
            for (uint32_t i = 0; i < SUMMED; ++i) {
                sum[i] += flat[from + i];
            }
        };
#pragma unroll 1
        for (uint32_t other = 0; other < others; other += AT_ONCE) {
            float4 held[AT_ONCE][SUMMED / 4];
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                const uint32_t at = min(other + i, others - 1);
                const float* values = part(first + at + (at >= place ? 1u : 0u)) + from * MULTIPLIERS;
#pragma unroll
                for (uint32_t four = 0; four < SUMMED / 4; ++four) {
                    held[i][four] = __ldcg(reinterpret_cast<const float4*>(values + four * 4 * MULTIPLIERS));
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < AT_ONCE; ++i) {
                if (other + i < others) {
                    if (other + i == place) {
                        add_own();
                    }
#pragma unroll
                    for (uint32_t four = 0; four < SUMMED / 4; ++four) {
                        sum[four * 4] += held[i][four].x;
                        sum[four * 4 + 1] += held[i][four].y;
                        sum[four * 4 + 2] += held[i][four].z;
                        sum[four * 4 + 3] += held[i][four].w;
                    }
                }
            }
        }
        if (place == others) {
            add_own();
        }
#pragma unroll
        for (uint32_t i = 0; i < SUMMED; ++i) {
            flat[from + i] = sum[i];
        }
    }
    return true;
}

// The steps of one of the two multiplying warpgroups, and its position in the ring of stages.
template <typename Format, uint32_t ROWS, bool GATED>
struct Steps {
    const Arguments<Format>& arguments;
    const Stages& stages;
    uint32_t shared;
    StageCursor at = {};

    // Adds the products of `tile` for the units from `unit` to `end`. A warpgroup has half of the
    // columns of a low tile, or half of the rows of a tall tile.
    template <bool LOW>
    __device__ __forceinline__ void add(float (&c)[ROWS / 8][4], const Features& tile, uint32_t unit, uint32_t end) {
        if constexpr (Format::IS_INT4) {
            if (arguments.scales.group == 7) {
                add_int4<LOW, true>(c, unit, end);
            } else {
                add_int4<LOW, false>(c, unit, end);
            }
        } else {
            add_chunks<LOW>(c, tile, unit, end);
        }
    }

private:
    // `add` for a weight whose steps are in shared memory in chunks of columns.
    template <bool LOW>
    __device__ __forceinline__ void add_chunks(float (&c)[ROWS / 8][4], const Features& tile, uint32_t unit, uint32_t end) {
        constexpr uint32_t OWN = LOW ? CHUNKS / 2 : CHUNKS;
        const uint32_t warpgroup = threadIdx.x / WARPGROUP;
        const uint32_t skipped = LOW ? warpgroup * OWN : 0u;  // chunks
        const uint32_t weight_from = skipped * stages.chunk_bytes + (LOW ? 0u : warpgroup * HALF_ROWS * ROW_BYTES);
        const uint32_t x_from = stages.weight_bytes + skipped * ROWS * ROW_BYTES;
        // Starts the products of a chunk.
        const auto start = [&](float (&sums)[ROWS / 8][4], uint32_t chunk, int add) {
            multiply(sums, weight_from + chunk * stages.chunk_bytes, x_from + chunk * ROWS * ROW_BYTES, add);
        };
        if constexpr (Format::IS_PLAIN) {
            for (; unit < end; ++unit) {
                await();
                hold(c);
                products_begin();
#pragma unroll
                for (uint32_t chunk = 0; chunk < OWN; ++chunk) {
                    start(c, chunk, 1);
                }
                products_end();
                products_wait<0>();
                hold(c);
                release();
                at.advance(stages);
            }
        } else {
            // Each chunk is a group of columns with separate sums, which are added while the
            // products of the next chunk run.
            static_assert(CHUNK<Format> == GROUP, "a chunk has one scale");
            const uint32_t first = tile.first + (LOW ? 0u : warpgroup * HALF_ROWS) + threadIdx.x % WARPGROUP / 32 * 16 +
                                   threadIdx.x % 32 / 4;
            const uint32_t rows[2] = {row_of_scales(tile, first), row_of_scales(tile, first + 8)};
            for (; unit < end; ++unit) {
                GroupScales<ROWS> scales[OWN];
                await();
                float sums[OWN][ROWS / 8][4];
#pragma unroll
                for (uint32_t chunk = 0; chunk < OWN; ++chunk) {
                    hold(sums[chunk]);
                    products_begin();
                    start(sums[chunk], chunk, 0);
                    products_end();
                    if constexpr (Format::BY_BLOCKS) {
                        const uint32_t from = shared + stages.scales_at + at.stage * StepScales<ROWS, CHUNKS>::BYTES;
                        scales[chunk].template read<CHUNKS>(from, rows, skipped + chunk);
                    }
                }
#pragma unroll
                for (uint32_t chunk = 0; chunk < OWN; ++chunk) {
                    if (chunk + 1 < OWN) {
                        products_wait<1>();
                    } else {
                        products_wait<0>();
                        release();
                    }
                    hold(sums[chunk]);
                    if constexpr (Format::BY_BLOCKS) {
                        scales[chunk].add(c, sums[chunk]);
                    } else {
#pragma unroll
                        for (uint32_t i = 0; i < ROWS / 2; ++i) {
                            c[i / 4][i % 4] += sums[chunk][i / 4][i % 4];
                        }
                    }
                }
                at.advance(stages);
            }
        }
    }

    // `add` for a weight of 4-bit integers. In a low tile, each warpgroup has every second unit.
    // WHOLE: each step is one group.
    template <bool LOW, bool WHOLE>
    __device__ __forceinline__ void add_int4(float (&c)[ROWS / 8][4], uint32_t unit, uint32_t end) {
        constexpr uint32_t STRIDE = LOW ? 2 : 1;
        const Operands operands(arguments.scales, arguments.tile_rows, GATED,
                                threadIdx.x / 32 % (LOW ? WARPGROUP / 32 : MULTIPLIERS / 32));
        // The tile's last step. In this step, a 16-byte unit of the weight (int4.cuh) may have
        // fewer than four words.
        const uint32_t last = unit / arguments.steps * arguments.steps + arguments.steps - 1;
        const uint32_t last_words = words_of_strip(arguments.scales.columns, arguments.steps - 1);
        const uint32_t units = end - unit, skipped = LOW && unit % 2 != threadIdx.x / WARPGROUP ? 1 : 0;
        float odd[ROWS / 8][4] = {};  // sums of every second product, if warps multiply separately
        at.advance(stages, min(skipped, units));
#pragma unroll 1
        for (uint32_t done = skipped; done < units; done += STRIDE) {
            await();
            const uint32_t words = unit + done == last ? last_words : WORDS;
            if constexpr (ROWS <= 16) {
                add_by_warp<WHOLE>(c, odd, operands, words);
            } else {
                add_by_warpgroup<WHOLE>(c, operands, words);
            }
            release();
            at.advance(stages, min(STRIDE, units - done));
        }
        if (ROWS <= 16) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                c[i / 4][i % 4] += odd[i / 4][i % 4];
            }
        }
    }

    using Operands = Int4Operands<Format>;
    using Groups = GroupOperands<typename Format::Element>[2];

    // Dequantizes the operands of 32 columns, which are in word `word` of each of this lane's two
    // units of a step. Reads the scales if a group begins at these columns.
    template <bool WHOLE>
    __device__ __forceinline__ void dequantize(uint32_t (&a)[2][4], const uint32_t (&words)[2][WORDS], uint32_t word,
                                               const Operands& operands, Groups& groups) const {
        const uint32_t of_group = arguments.scales.group - 5;  // log2 of the words of a group
        if (word == 0 || !WHOLE && (word >> of_group << of_group) == word) {
            operands.read_group(groups, shared + stages.scales_at + at.stage * operands.scale_bytes,
                                WHOLE ? 0 : word >> of_group);
        }
        dequantize_span<typename Format::Element>(a, words[0][word], words[1][word], groups[0], groups[1]);
    }

    // Adds the products of a step by wgmma.
    template <bool WHOLE>
    __device__ __forceinline__ void add_by_warpgroup(float (&c)[ROWS / 8][4], const Operands& operands,
                                                     uint32_t unit_words) const {
        using Product = Warpgroup<typename Format::Element>;
        constexpr uint64_t LAYOUT = matrix_layout<CHUNK_COLUMNS>(0, 8 * ROW_BYTES);
        const uint32_t stage = shared + at.stage * stages.bytes, x = matrix_at(0, stage + stages.weight_bytes);
        uint32_t words[2][WORDS], a[WORDS][2][4];
        operands.read(words, stage, unit_words);
        Groups groups;
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            dequantize<WHOLE>(a[word], words, word, operands, groups);
            const uint32_t from = word / (WORDS / CHUNKS) * ROWS * ROW_BYTES + word % (WORDS / CHUNKS) * 64;
            hold(c);
            products_begin();
            Product::multiply_held(c, a[word][0], LAYOUT | (x + from / 16));
            Product::multiply_held(c, a[word][1], LAYOUT | (x + from / 16 + 2));
            products_end();
        }
        // The only wait is after the loop. With a partial wait inside the loop, ptxas serializes
        // the products of each word (warning C7513).
        products_wait<0>();
        hold(c);
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            keep(a[word]);
        }
    }

    // Adds the products of a step by mma.sync: the even ones to `even`, the odd ones to `odd`.
    template <bool WHOLE>
    __device__ __forceinline__ void add_by_warp(float (&even)[ROWS / 8][4], float (&odd)[ROWS / 8][4],
                                                const Operands& operands, uint32_t unit_words) const {
        using Product = TensorCoreElement<typename Format::Element>;
        const uint32_t stage = shared + at.stage * stages.bytes, lane = threadIdx.x % 32;
        uint32_t words[2][WORDS], x[WORDS][ROWS / 8][4];
        operands.read(words, stage, unit_words);
        // Starts all loads before the first product, because the compiler does not move loads above
        // products.
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            const uint32_t from = stages.weight_bytes + word / (WORDS / CHUNKS) * ROWS * ROW_BYTES +
                                  Swizzle<CHUNK_COLUMNS>::place(lane % 8, word % (WORDS / CHUNKS) * 4 + lane / 8);
#pragma unroll
            for (uint32_t tile = 0; tile < ROWS / 8; ++tile) {
                load_quarters(x[word][tile], stage + from + tile * (8 * ROW_BYTES));
            }
        }
        Groups groups;
#pragma unroll
        for (uint32_t word = 0; word < WORDS; ++word) {
            uint32_t a[2][4];
            dequantize<WHOLE>(a, words, word, operands, groups);
#pragma unroll
            for (uint32_t tile = 0; tile < ROWS / 8; ++tile) {
                const uint32_t(&of_x)[4] = x[word][tile];
                Product::multiply_add(even[tile], a[0], of_x[0], of_x[1]);
                Product::multiply_add(odd[tile], a[1], of_x[2], of_x[3]);
            }
        }
    }

    // Keeps the operands of products in their registers up to this point.
    static __device__ __forceinline__ void keep(uint32_t (&a)[2][4]) {
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
        }
    }

    __device__ __forceinline__ void await() const { barrier_wait(shared + Shared<ROWS>::FULL_AT + 8 * at.stage, at.parity); }
    __device__ __forceinline__ void release() const {
        if constexpr (COPIES_SCALES<Format>) {
            __syncwarp();  // all lanes have read their scales
        }
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(shared + Shared<ROWS>::EMPTY_AT + 8 * at.stage);
        }
    }

    // The row of a feature's scales, relative to the tile's first row of scales.
    __device__ __forceinline__ uint32_t row_of_scales(const Features& tile, uint32_t feature) const {
        if constexpr (Format::BY_BLOCKS) {
            return feature / arguments.scales.height - tile.first / arguments.scales.height;
        }
        return 0;
    }

    // Multiplies a chunk at these offsets of the stage. With `add`, the products are added to `c`.
    __device__ __forceinline__ void multiply(float (&c)[ROWS / 8][4], uint32_t weight_from, uint32_t x_from,
                                             int add) const {
        constexpr uint64_t LAYOUT = matrix_layout<CHUNK_COLUMNS>(0, 8 * ROW_BYTES);
        const uint32_t begin = shared + at.stage * stages.bytes;
        const uint64_t weight = matrix_at(LAYOUT, begin + weight_from), x = matrix_at(LAYOUT, begin + x_from);
#pragma unroll
        for (uint32_t k = 0; k < ROW_BYTES / 32; ++k) {
            Warpgroup<typename Format::Operand>::multiply(c, weight + 2 * k, x + 2 * k, add || k > 0);
        }
    }
};

// Processes a tile that is shared by the blocks of one cluster and no other blocks. Each block
// processes a range of the tile's columns. SHARERS warpgroups have sums of the same rows of the
// tile, and divide the rows of x among themselves. Each warpgroup adds up and writes the sums of
// its own rows of x, and sends its sums for the other rows to the warpgroups that have these rows.
// A block calls this function at most once, so that received sums are never overwritten.
template <typename Format, uint32_t ROWS, bool GATED, uint32_t SHARERS>
__device__ __forceinline__ void multiply_together(const Arguments<Format>& arguments,
                                                  Steps<Format, ROWS, GATED>& steps,
                                                  uint32_t tile, uint32_t first, uint32_t last) {
    constexpr uint32_t GROUPS = ROWS / 8 < SHARERS ? 1 : ROWS / 8 / SHARERS, OWNERS = ROWS / 8 / GROUPS;
    constexpr uint32_t IN_BLOCK = SHARERS / TEAM, SENT_BYTES = GROUPS * WARPGROUP * 16;
    static_assert((SHARERS - 1) * SENT_BYTES <= Shared<ROWS>::SUMS_BYTES / 2, "the sums for both warpgroups fit at the same time");
    const uint32_t warpgroup = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
    const uint32_t own = cluster_rank() * IN_BLOCK + warpgroup % IN_BLOCK;
    const auto barrier = [&](uint32_t warpgroup) { return steps.shared + Shared<ROWS>::SUMS_ALL_AT + 8 * warpgroup; };
    // The address at which `warpgroup` receives, from sharer `from`, the sums of group `group`
    // that sharer `to` finishes.
    const auto place = [&](uint32_t warpgroup, uint32_t from, uint32_t to, uint32_t group) {
        const uint32_t at = (from < to ? from : from - 1) * SENT_BYTES + (group * WARPGROUP + thread) * 16;
        return steps.shared + Shared<ROWS>::sums_at(warpgroup) + at;
    };
    const bool is_owner = own < OWNERS;  // false if there are more warpgroups than groups of eight rows
    Piece<Format, GROUPS, GATED> piece(arguments, features_of<Format, GATED>(arguments, tile),
                                        threadIdx.x / 32 % (8 / IN_BLOCK), own * GROUPS);
    if (is_owner) {
        if (thread == 0) {
            barrier_arrive_expecting(barrier(warpgroup), (SHARERS - 1) * SENT_BYTES);
        }
        piece.fetch();
    }
    cluster_wait();
    float c[ROWS / 8][4] = {};
    steps.template add<SHARERS == 2 * TEAM>(c, features_of<Format, GATED>(arguments, tile), first, last);
    // The receiving block has not ended, because it waits for these sums.
#pragma unroll
    for (uint32_t to = 0; to < OWNERS; ++to) {
        if (to != own) {
            const uint32_t there = IN_BLOCK == 2 ? to % 2 : warpgroup;
#pragma unroll
            for (uint32_t group = 0; group < GROUPS; ++group) {
                send_to(to / IN_BLOCK, place(there, own, to, group), barrier(there), c[to * GROUPS + group]);
            }
        }
    }
    if (!is_owner) {
        return;
    }
    barrier_wait_cluster(barrier(warpgroup), 0);
    // Adds the parts in the order of the columns, so that the result does not depend on which
    // warpgroup finishes.
    float sum[GROUPS][4] = {};
#pragma unroll
    for (uint32_t from = 0; from < SHARERS; ++from) {
#pragma unroll
        for (uint32_t group = 0; group < GROUPS; ++group) {
            float part[4];
            if (from != own) {
                load_shared(part, place(warpgroup, from, own, group));
            } else {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) {
                    part[i] = c[from < OWNERS ? from * GROUPS + group : 0][i];
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                sum[group][i] += part[i];
            }
        }
    }
    piece.write(sum);
}

// Returns true if the writing warp writes a tile while the other warps continue to multiply, which
// makes a step of 64 rows 1 % faster. The writing warp writes the unquantized tiles that a block
// computes completely, except the block's last tile. E4M3 tiles are finished twice as fast, and one
// warp is too slow to write them.
template <typename Format>
__device__ __forceinline__ bool is_for_writer(uint32_t begin, uint32_t steps, uint32_t first, uint32_t last) {
    return Format::IS_PLAIN && begin >= first && begin + steps < last;
}

template <typename Format, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void write_tiles(const Arguments<Format>& arguments, uint32_t shared, uint32_t first,
                                            uint32_t last) {
    constexpr uint32_t GROUPS = ROWS < 32 ? ROWS / 8 : 4;  // groups written at once
    const uint32_t threads = arguments.tile_rows <= HALF_ROWS ? WARPGROUP : MULTIPLIERS;
    wait_for_previous_kernel();
    uint32_t tile = (first + arguments.steps - 1) / arguments.steps;
    for (; is_for_writer<Format>(tile * arguments.steps, arguments.steps, first, last); ++tile) {
        part_arrive(WRITER_IS_FREE, threads + 32);
        const Features features = features_of<Format, GATED>(arguments, tile);
        part_sync(TILE_TO_WRITE, threads + 32);
#pragma unroll 1
        for (uint32_t warp = 0; warp < threads / 32; ++warp) {
#pragma unroll 1
            for (uint32_t group = 0; group < ROWS / 8; group += GROUPS) {
                float c[GROUPS][4];
                Piece<Format, GROUPS, GATED> piece(arguments, features, warp, group);
                piece.fetch();
#pragma unroll
                for (uint32_t i = 0; i < GROUPS; ++i) {
                    const uint32_t slot = (group + i) * threads + warp * 32 + threadIdx.x % 32;
                    load_shared(c[i], shared + Shared<ROWS>::SUMS_AT + slot * 16);
                }
                piece.write(c);
            }
        }
    }
}

// The work of the multiplying warpgroups, from the first to the last unit of their block.
template <typename Format, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void multiply(const Arguments<Format>& arguments, const UnitRanges& line, const Stages& stages,
                                         uint32_t shared, uint32_t first, uint32_t last) {
    const uint32_t warpgroup = threadIdx.x / WARPGROUP;
    const bool low = arguments.tile_rows <= HALF_ROWS;
    const uint32_t sums = shared + Shared<ROWS>::sums_at(1) + threadIdx.x % WARPGROUP * 4;
    Steps<Format, ROWS, GATED> steps = {arguments, stages, shared};
    wait_for_previous_kernel();
    const uint32_t lead = blockIdx.x / TEAM * TEAM, own = first / arguments.steps, own_begin = own * arguments.steps;
    if (line.start(lead) == own_begin && line.start(lead + TEAM) == own_begin + arguments.steps) {
        if (low) {
            multiply_together<Format, ROWS, GATED, 2 * TEAM>(arguments, steps, own, first, last);
        } else {
            multiply_together<Format, ROWS, GATED, TEAM>(arguments, steps, own, first, last);
        }
        return;
    }
    for (uint32_t unit = first; unit < last;) {
        const uint32_t tile = unit / arguments.steps;
        const uint32_t begin = tile * arguments.steps;
        const uint32_t end = min(begin + arguments.steps, last);
        const bool whole = unit == begin && end == begin + arguments.steps;
        const Features features = features_of<Format, GATED>(arguments, tile);
        float c[ROWS / 8][4] = {};
        if (low) {
            steps.template add<true>(c, features, unit, end);
        } else {
            steps.template add<false>(c, features, unit, end);
        }
        unit = end;
        if (!whole && !gather<Format, ROWS>(c, arguments, line, shared, tile)) {
            continue;
        }
        float* flat = &c[0][0];
        if (low && warpgroup == 1) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums + i * WARPGROUP * 4), "f"(flat[i]) : "memory");
            }
        }
        if (low) {
            part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
        }
        if (low && warpgroup == 0) {
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 2; ++i) {
                float other;
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(sums + i * WARPGROUP * 4) : "memory");
                flat[i] += other;
            }
        }
        if (!low || warpgroup == 0) {
            if (is_for_writer<Format>(begin, arguments.steps, first, last)) {
                const uint32_t threads = low ? WARPGROUP : MULTIPLIERS;
                part_sync(WRITER_IS_FREE, threads + 32);
#pragma unroll
                for (uint32_t group = 0; group < ROWS / 8; ++group) {
                    store_shared(shared + Shared<ROWS>::SUMS_AT + (group * threads + threadIdx.x) * 16, c[group]);
                }
                part_arrive(TILE_TO_WRITE, threads + 32);
            } else {
                constexpr uint32_t GROUPS = ROWS < 32 ? ROWS / 8 : 4;  // groups written at once
#pragma unroll
                for (uint32_t group = 0; group < ROWS / 8; group += GROUPS) {
                    Piece<Format, GROUPS, GATED> piece(arguments, features, threadIdx.x / 32, group);
                    piece.fetch();
                    piece.write(reinterpret_cast<const float(&)[GROUPS][4]>(c[group]));
                }
            }
        }
        if (low && unit < last) {
            part_sync(MULTIPLIERS_MEET, MULTIPLIERS);
        }
    }
}

template <typename Format, uint32_t ROWS, bool GATED>
__device__ __forceinline__ void small_m(const TensorMap& weight, const TensorMap& x, const Arguments<Format>& arguments) {
    extern __shared__ __align__(1024) uint8_t stages_bytes[];
    let_next_kernel_start();
    const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(stages_bytes));
    const Stages stages = Stages::of<Format, ROWS>(arguments);
    if (threadIdx.x == COPIER) {
        fetch_map(weight);
        fetch_map(x);
        for (uint32_t stage = 0; stage < stages.count; ++stage) {
            // The copying thread arrives once. If the warp copies scales, each of its 32 lanes also
            // arrives after its copies. In a low tile of 4-bit integers, only one warpgroup reads a
            // stage.
            barrier_init(shared + Shared<ROWS>::FULL_AT + 8 * stage, COPIES_SCALES<Format> ? 1 + 32 : 1);
            const bool is_for_one = Format::IS_INT4 && arguments.tile_rows <= HALF_ROWS;  // warpgroup
            barrier_init(shared + Shared<ROWS>::EMPTY_AT + 8 * stage, (is_for_one ? WARPGROUP : MULTIPLIERS) / 32);
        }
        for (uint32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
            barrier_init(shared + Shared<ROWS>::SUMS_ALL_AT + 8 * warpgroup, 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    cluster_arrive();
    UnitRanges line;
    line.units = arguments.tiles * arguments.steps;
    line.blocks = min(gridDim.x, line.units);
    if (blockIdx.x >= line.blocks) {
        wait_for_previous_kernel();
        return;
    }
    const uint32_t first = line.start(blockIdx.x), last = line.start(blockIdx.x + 1);
    // The shuffle shows the compiler that the value is the same in all threads of a warp.
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < MULTIPLIERS / 32) {
        multiply<Format, ROWS, GATED>(arguments, line, stages, shared, first, last);
    } else if (warp == COPIER / 32) {
        const bool leads = is_elected();
        if (COPIES_SCALES<Format> || leads) {
            copy<Format, ROWS, GATED>(weight, x, arguments, stages, shared, first, last, leads);
        }
    } else {
        write_tiles<Format, ROWS, GATED>(arguments, shared, first, last);
    }
}
