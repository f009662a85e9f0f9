// Cuts pictures, given as bytes, into the patch rows that a vision encoder reads, and normalizes
// them.
//
// out[i][channel][frame][y][x] = (level * factor - shift[channel]) / scale[channel]
//
// bytes  [byte_count] u8    each picture is [frames, rows, pixels of a row, 3], with the channels
//                           red, green and blue. Aligned to 4 bytes
// layout [pictures, 4] u32  first byte, patches down, patches across (each < 2^16), number of
//                           frames given. Aligned to 16 bytes
// levels [pictures, 7] f32  factor, three shifts, three scales
// places [3, patches] u32   picture, row and column of each patch
// out    [patches, 3 * frames * side * side]   contiguous; aligned to 16 bytes
//
// If a picture has fewer frames than a patch covers, its last frame is repeated. The value is the
// f32 quotient with an error of at most one unit in the last place, rounded to the element type. A
// patch becomes zeros, and nothing outside `bytes` is read, if the patch is not in its picture, if
// its picture does not exist or is not in `bytes`, or if its picture has no frames or too many.
// side is 1 to 256, frames 1 to 64.
//
// A thread processes four adjacent pixels of a patch in all channels and frames, so that each byte
// is read once and eight bytes are written at once. If the side is odd, a thread processes one
// pixel. A launch with one picture is bound by latency: the loads of a patch's place, its picture's
// layout and its pixels depend on each other (43 % of the stalls on an H200, at 50 % of the L2's
// rate). Staging pixels in shared memory took twice as long. Processing two units per thread at
// once was not faster than processing one unit.
//
// On an H200, with bf16, side 14, 2 frames, in a graph over inputs larger than the L2:
//
//   one picture of 1036 x 1036 pixels (16.2 MB in and out)    9.4 us
//   one step of a video of that size                         11.0 us
//   four pictures of that size                               28 us
//   one picture of 1932 x 1092 pixels                        15.4 us
//   256 pictures of one merged patch                          3.4 us
//   for comparison, a copy of 8 MB                            6.2 us

#include "contract.cuh"
#include "element.cuh"

using contract::patchify::CHANNELS;
using contract::patchify::LEVEL_NUMBERS;
constexpr uint32_t PIXELS_AT_ONCE = contract::patchify::PIXELS;  // per thread, if the side is even
static_assert(contract::patchify::LAYOUT_NUMBERS == 4, "a picture's layout must be one 16-byte load");

// Location of a patch in the bytes.
struct Source {
    const uint8_t* corner;
    uint64_t frame_bytes;
    uint32_t row_bytes;
    uint32_t frames;  // number of frames given; 0 for a patch that does not exist
    bool by_words;    // the patch's picture begins at a multiple of four bytes
};

__device__ __forceinline__ Source find(const uint8_t* bytes, uint32_t byte_count, uint4 layout, uint32_t row,
                                       uint32_t column, uint32_t side, uint32_t frames) {
    const uint32_t down = layout.y, across = layout.z, given = layout.w;
    const Source nowhere = {bytes, 0, 0, 0, false};
    // If no frames are given, the subtraction wraps to a very large number.
    if (row >= down || column >= across || (down | across) >> 16 != 0 || given - 1 >= frames) return nowhere;
    const uint32_t row_bytes = across * side * CHANNELS;
    const uint64_t frame_bytes = static_cast<uint64_t>(down * side) * row_bytes;
    if (layout.x + given * frame_bytes > byte_count) return nowhere;
    const uint64_t corner = layout.x + static_cast<uint64_t>(row * side) * row_bytes + column * side * CHANNELS;
    return {bytes + corner, frame_bytes, row_bytes, given, layout.x % 4 == 0};
}

// Loads two adjacent pixels into the lowest six bytes of the result. With `by_words`, `from` must
// be even, so that the pixels lie in two aligned words. These words end within the picture, because
// `by_words` means that the picture begins at a multiple of four bytes, and an even side makes its
// size a multiple of four bytes.
__device__ __forceinline__ uint2 load_two(const uint8_t* from, bool by_words) {
    if (by_words) {
        const uint64_t address = reinterpret_cast<uint64_t>(from);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(address & ~3ull);
        const uint32_t low = words[0], high = words[1], shift = (address & 3) * 8;
        return make_uint2(__funnelshift_r(low, high, shift), high >> shift);
    }
    return make_uint2(from[0] | from[1] << 8 | from[2] << 16 | from[3] << 24, from[4] | from[5] << 8);
}

// Adjacent pixels of a patch: one if the side is odd, four if it is even.
template <uint32_t PIXELS>
struct Pixels {
    uint32_t words[PIXELS];  // two words per two pixels, lowest byte first

    __device__ __forceinline__ void load(const uint8_t* corner, const Source& source, uint32_t y, uint32_t x,
                                         uint32_t side) {
        const uint8_t* from = corner + y * source.row_bytes + x * CHANNELS;
        if constexpr (PIXELS == 1) {
            words[0] = from[0] | from[1] << 8 | from[2] << 16;
        } else {
            // The side is even, so the two pixels of a pair are always in the same row, but the two
            // pairs may be in different rows.
            const uint8_t* next = x + 2 < side ? from + 2 * CHANNELS : corner + (y + 1) * source.row_bytes;
            const uint2 two = load_two(from, source.by_words), more = load_two(next, source.by_words);
            words[0] = two.x;
            words[1] = two.y;
            words[2] = more.x;
            words[3] = more.y;
        }
    }

    __device__ __forceinline__ float level(uint32_t pixel, uint32_t channel) const {
        const uint32_t byte = pixel % 2 * CHANNELS + channel;
        // The byte becomes the lowest byte of the mantissa of 2^23.
        const uint32_t word = words[PIXELS == 1 ? 0 : pixel / 2 * 2 + byte / 4];
        return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650u | byte % 4)) - 8388608.0f;
    }
};

// Normalization of levels.
struct Levels {
    float factor, shift[CHANNELS], scale[CHANNELS], inverse[CHANNELS];

    __device__ __forceinline__ void load(const float* numbers) {
        factor = numbers[0];
#pragma unroll
        for (uint32_t channel = 0; channel < CHANNELS; ++channel) {
            shift[channel] = numbers[1 + channel];
            scale[channel] = numbers[1 + CHANNELS + channel];
            inverse[channel] = __frcp_rn(scale[channel]);
        }
    }

    __device__ __forceinline__ float value(float level, uint32_t channel) const {
        const float difference = __fsub_rn(__fmul_rn(level, factor), shift[channel]);
        // The product with the inverse is corrected by its distance from the exact quotient.
        const float product = difference * inverse[channel];
        return fmaf(fmaf(-product, scale[channel], difference), inverse[channel], product);
    }
};

template <uint32_t PIXELS, typename Element>
__device__ __forceinline__ void patchify(const uint8_t* bytes, uint32_t byte_count, const uint32_t* layout,
                                         const float* levels, uint32_t pictures, const uint32_t* places,
                                         uint32_t patches, uint32_t side, uint32_t frames, Element* out) {
    const uint32_t patch = blockIdx.x * blockDim.y + threadIdx.y;
    if (patch >= patches) return;
    const uint32_t picture = places[patch], row = places[patches + patch], column = places[2 * patches + patch];
    Source source = {bytes, 0, 0, 0, false};
    Levels normal = {0.0f, {}, {1.0f, 1.0f, 1.0f}, {1.0f, 1.0f, 1.0f}};
    if (picture < pictures) {
        normal.load(levels + picture * LEVEL_NUMBERS);
        const uint4 place = reinterpret_cast<const uint4*>(layout)[picture];
        source = find(bytes, byte_count, place, row, column, side, frames);
    }
    const uint32_t area = side * side;
    out += static_cast<uint64_t>(patch) * CHANNELS * frames * area;
    for (uint32_t first = threadIdx.x * PIXELS; first < area; first += blockDim.x * PIXELS) {
        const uint32_t y = first / side, x = first - y * side;
        float values[CHANNELS][PIXELS] = {};
        for (uint32_t frame = 0; frame < frames; ++frame) {
            if (frame < source.frames) {
                Pixels<PIXELS> pixels;
                pixels.load(source.corner + frame * source.frame_bytes, source, y, x, side);
#pragma unroll
                for (uint32_t channel = 0; channel < CHANNELS; ++channel) {
#pragma unroll
                    for (uint32_t pixel = 0; pixel < PIXELS; ++pixel) {
                        values[channel][pixel] = normal.value(pixels.level(pixel, channel), channel);
                    }
                }
            }
#pragma unroll
            for (uint32_t channel = 0; channel < CHANNELS; ++channel) {
                store<PIXELS>(out + (channel * frames + frame) * area + first, values[channel]);
            }
        }
    }
}

#define KERNEL(name, Element)                                                                                    \
    extern "C" __global__ void __launch_bounds__(contract::patchify::THREADS_MAX) patchify_##name(               \
        const uint8_t* __restrict__ bytes, uint32_t byte_count, const uint32_t* __restrict__ layout,             \
        const float* __restrict__ levels, uint32_t pictures, const uint32_t* __restrict__ places,                \
        uint32_t patches, uint32_t side, uint32_t frames, Element* __restrict__ out) {                           \
        if (side % 2 == 0) {                                                                                     \
            patchify<PIXELS_AT_ONCE>(bytes, byte_count, layout, levels, pictures, places, patches, side, frames, \
                                     out);                                                                       \
        } else {                                                                                                 \
            patchify<1>(bytes, byte_count, layout, levels, pictures, places, patches, side, frames, out);        \
        }                                                                                                        \
    }
FOR_EACH_ACTIVATION(KERNEL)

// Launch: units = side * side / (side even ? PIXELS : 1), wide = min(units, THREADS_MAX), tall =
// THREADS_MAX / wide (of contract::patchify); grid (div_ceil(patches, tall)), block (wide, tall),
// no dynamic shared memory. patches > 0. Any block of at most THREADS_MAX threads is correct.
