//! Arithmetic on rows in blocks: their products with rows of activations, and their elements. There
//! is a portable version and a version for AVX2. Both do the same operations in the same order, so
//! they give the same bits.
//!
//! The version for AVX2 is written with intrinsics, because the compiler vectorizes the portable
//! version badly.

use std::array;

use crate::{
    BlockType,
    blocks::{BLOCK_GROUP, Block, PortableHalf, Unpacked, converted, for_block_type, widen_blocks},
};

/// Partial sums of a product. Element `i` of a group is added to sum `i % LANES`.
const LANES: usize = BLOCK_GROUP / 2;

/// A row of activations.
#[derive(Clone, Copy)]
pub(super) struct GroupedRow<'a> {
    pub groups: &'a [[f32; BLOCK_GROUP]],
    /// The sum of each group.
    pub sums: &'a [f32],
}

/// Computes the products of adjacent rows of a weight with `ROWS` rows of activations. `row_bytes`
/// are the bytes of one row of the weight. `out` has an element for each row of the weight.
pub(super) fn products<const ROWS: usize>(
    kind: BlockType,
    (blocks, row_bytes): (&[u8], usize),
    x: [GroupedRow<'_>; ROWS],
    out: &mut [[f32; ROWS]],
) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the check in the line above found that the CPU has AVX2 and F16C.
        return for_block_type!(kind, Format => unsafe { avx2::products::<Format, ROWS>((blocks, row_bytes), x, out) });
    }
    for_block_type!(kind, Format => portable_products::<Format, ROWS>((blocks, row_bytes), x, out));
}

/// Widens the bytes of whole blocks. `out` has as many elements as the blocks.
pub(super) fn widen(kind: BlockType, blocks: &[u8], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the check in the line above found that the CPU has AVX2 and F16C.
        return for_block_type!(kind, Format => unsafe { avx2::widen::<Format>(blocks, out) });
    }
    widen_blocks(kind, blocks, out);
}

fn portable_products<B: Block, const ROWS: usize>(
    (blocks, row_bytes): (&[u8], usize),
    x: [GroupedRow<'_>; ROWS],
    out: &mut [[f32; ROWS]],
) {
    let mut unpacked = Unpacked::ZEROS;
    for (blocks, out) in blocks.chunks_exact(row_bytes).zip(out) {
        *out = dot::<B, ROWS>(blocks, x, &mut unpacked);
    }
}

fn dot<B: Block, const ROWS: usize>(blocks: &[u8], x: [GroupedRow<'_>; ROWS], unpacked: &mut Unpacked) -> [f32; ROWS] {
    let (mut sums, mut offsets) = ([[0.0; LANES]; ROWS], [0.0; ROWS]);
    let groups = B::TYPE.elements() / BLOCK_GROUP;
    for (at, block) in blocks.chunks_exact(B::TYPE.bytes()).enumerate() {
        B::unpack::<PortableHalf>(block, unpacked);
        for group in 0..groups {
            let mut weight = [0.0; BLOCK_GROUP];
            for (at, out) in weight.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                *out = converted(unpacked.words[group * 4 + at]);
            }
            for ((x, sums), offset) in x.iter().zip(&mut sums).zip(&mut offsets) {
                let (x, sum) = (&x.groups[at * groups + group], x.sums[at * groups + group]);
                let product = |lane: usize| weight[lane] * x[lane];
                if B::GROUP == BLOCK_GROUP {
                    for (lane, sum) in sums.iter_mut().enumerate() {
                        *sum += unpacked.scales[group] * (product(lane) + product(lane + LANES));
                    }
                } else {
                    let [low, high] = [2 * group, 2 * group + 1].map(|half| unpacked.scales[half]);
                    for (lane, sum) in sums.iter_mut().enumerate() {
                        *sum += low * product(lane) + high * product(lane + LANES);
                    }
                }
                if B::HAS_OFFSETS {
                    *offset += unpacked.offsets[group] * sum;
                }
            }
        }
    }
    array::from_fn(|row| {
        let eight: [f32; 8] = array::from_fn(|lane| sums[row][lane] + sums[row][lane + 8]);
        let four: [f32; 4] = array::from_fn(|lane| eight[lane] + eight[lane + 4]);
        (four[0] + four[2]) + (four[1] + four[3]) + offsets[row]
    })
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{BLOCK_GROUP, Block, GroupedRow, LANES, Unpacked};
    use crate::blocks::HalfToF32;

    /// The conversion of the CPU. It is only for functions that are compiled for F16C.
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
    fn dot<B: Block, const ROWS: usize>(
        blocks: &[u8],
        x: [GroupedRow<'_>; ROWS],
        unpacked: &mut Unpacked,
    ) -> [f32; ROWS] {
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
    fn total(sums: [__m256; LANES / 8]) -> f32 {
        let eight = _mm256_add_ps(sums[0], sums[1]);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_the_cpu_and_portable_code_give_the_same_bits() {
        use BlockType::*;
        let mut state = 7u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let columns = 768;
        let x: Vec<f32> = (0..3 * columns).map(|_| f32::from(random()) / 37.0 - 3.0).collect();
        let groups = x.as_chunks::<BLOCK_GROUP>().0;
        let sums: Vec<f32> = groups.iter().map(|group| group.iter().sum()).collect();
        let of_row = columns / BLOCK_GROUP;
        let x = array::from_fn::<_, 3, _>(|row| {
            let own = row * of_row..(row + 1) * of_row;
            GroupedRow { groups: &groups[own.clone()], sums: &sums[own] }
        });
        for kind in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K] {
            let mut blocks: Vec<u8> = (0..5 * kind.bytes_of(columns)).map(|_| random()).collect();
            // The exponents of all f16 numbers are made finite: bytes at odd offsets below 4, and the
            // last byte, are the high bytes of such numbers.
            for block in blocks.chunks_exact_mut(kind.bytes()) {
                [1, 3, kind.bytes() - 1].into_iter().for_each(|at| block[at] &= 0xbb);
            }
            let row_bytes = kind.bytes_of(columns);
            let [mut found, mut expected] = [[[f32::NAN; 3]; 5]; 2];
            products::<3>(kind, (&blocks, row_bytes), x, &mut found);
            for_block_type!(kind, Format => portable_products::<Format, 3>((&blocks, row_bytes), x, &mut expected));
            let bits = |all: &[f32]| all.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
            assert!(expected.as_flattened().iter().all(|product| product.is_finite()), "{kind}: {expected:?}");
            assert_eq!(bits(found.as_flattened()), bits(expected.as_flattened()), "{kind}");
            let [mut found, mut expected] = [vec![f32::NAN; 5 * columns], vec![f32::NAN; 5 * columns]];
            widen(kind, &blocks, &mut found);
            widen_blocks(kind, &blocks, &mut expected);
            assert_eq!(bits(&found), bits(&expected), "{kind}");
        }
    }
}
