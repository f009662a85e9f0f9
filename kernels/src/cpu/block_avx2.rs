//! The arithmetic of `block_dot` for AVX2, with the same operations in the same order. The code
//! uses intrinsics, because the compiler vectorizes the portable version badly.

use std::arch::x86_64::*;

use crate::blocks::{BLOCK_GROUP, Block, GroupedRow, HalfToF32, Unpacked};

/// Conversion by the CPU's F16C instruction, only for functions that are compiled for F16C.
struct F16c;

impl HalfToF32 for F16c {
    #[inline(always)]
    fn widen(bits: u16) -> f32 {
        // SAFETY: callers are compiled for F16C, so the CPU has it.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits.into()))) }
    }
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn products<B: Block, const ROWS: usize>(
    (blocks, row_bytes): (&[u8], usize),
    x: [GroupedRow<'_>; ROWS],
    out: &mut [[f32; ROWS]],
) {
    let mut unpacked = Unpacked::ZEROS;
    for (blocks, out) in blocks.chunks_exact(row_bytes).zip(out) {
        *out = dot::<B, ROWS>(blocks, x, &mut unpacked);
    }
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn dot<B: Block, const ROWS: usize>(blocks: &[u8], x: [GroupedRow<'_>; ROWS], unpacked: &mut Unpacked) -> [f32; ROWS] {
    let (mut sums, mut offsets) = ([[_mm256_setzero_ps(); 2]; ROWS], [0.0; ROWS]);
    let groups = B::TYPE.elements() / BLOCK_GROUP;
    for (at, block) in blocks.chunks_exact(B::TYPE.bytes()).enumerate() {
        B::unpack::<F16c>(block, unpacked);
        for (group, words) in unpacked.words.as_chunks().0[..groups].iter().enumerate() {
            let weight = converted(words);
            for row in 0..ROWS {
                let (of_row, sum) = (&x[row].groups[at * groups + group], x[row].sums[at * groups + group]);
                let x = loaded(of_row);
                for half in 0..2 {
                    let low = _mm256_mul_ps(weight[half], x[half]);
                    let high = _mm256_mul_ps(weight[half + 2], x[half + 2]);
                    let product = if B::GROUP == BLOCK_GROUP {
                        _mm256_mul_ps(_mm256_set1_ps(unpacked.scales[group]), _mm256_add_ps(low, high))
                    } else {
                        let scales = [2 * group, 2 * group + 1].map(|half| unpacked.scales[half]);
                        let low = _mm256_mul_ps(_mm256_set1_ps(scales[0]), low);
                        _mm256_add_ps(low, _mm256_mul_ps(_mm256_set1_ps(scales[1]), high))
                    };
                    sums[row][half] = _mm256_add_ps(sums[row][half], product);
                }
                if B::HAS_OFFSETS {
                    offsets[row] += unpacked.offsets[group] * sum;
                }
            }
        }
    }
    for row in 0..ROWS {
        offsets[row] += total(sums[row]);
    }
    offsets
}

#[target_feature(enable = "avx2,f16c")]
pub(super) fn widen<B: Block>(blocks: &[u8], out: &mut [f32]) {
    let (kind, mut unpacked) = (B::TYPE, Unpacked::ZEROS);
    for (block, out) in blocks.chunks_exact(kind.bytes()).zip(out.chunks_exact_mut(kind.elements())) {
        B::unpack::<F16c>(block, &mut unpacked);
        let groups = out.as_chunks_mut::<BLOCK_GROUP>().0.iter_mut().zip(unpacked.words.as_chunks().0);
        for (group, (out, words)) in groups.enumerate() {
            let offset = _mm256_set1_ps(unpacked.offsets[group]);
            let quarters = out.as_chunks_mut::<8>().0.iter_mut().zip(converted(words));
            for (quarter, (out, integers)) in quarters.enumerate() {
                let scale = unpacked.scales[(group * BLOCK_GROUP + quarter * 8) / B::GROUP];
                let scaled = _mm256_mul_ps(_mm256_set1_ps(scale), integers);
                let wide = if B::HAS_OFFSETS { _mm256_add_ps(scaled, offset) } else { scaled };
                // SAFETY: the store writes eight numbers, which `out` has, and needs no alignment.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), wide) };
            }
        }
    }
}

/// The elements of a group as f32.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn converted(words: &[u64; BLOCK_GROUP / 8]) -> [__m256; 4] {
    let mut out = [_mm256_setzero_ps(); 4];
    for (out, word) in out.iter_mut().zip(words) {
        *out = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(word.cast_signed())));
    }
    out
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn loaded(x: &[f32; BLOCK_GROUP]) -> [__m256; 4] {
    let mut out = [_mm256_setzero_ps(); 4];
    for (out, x) in out.iter_mut().zip(x.as_chunks::<8>().0) {
        // SAFETY: the load reads eight numbers, which `x` has, and needs no alignment.
        *out = unsafe { _mm256_loadu_ps(x.as_ptr()) };
    }
    out
}

/// The sum of the lanes.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn total(sums: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(sums[0], sums[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}
