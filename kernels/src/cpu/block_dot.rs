//! Arithmetic on rows in blocks: their products with rows of activations, and their conversion to
//! f32. There is a portable version and a version for AVX2. Both do the same operations in the same
//! order, so they give the same bits.

use std::array;

#[cfg(target_arch = "x86_64")]
use super::block_avx2;
use crate::{
    BlockType,
    blocks::{BLOCK_GROUP, Block, GroupedRow, PortableHalf, Unpacked, converted, for_block_type, widen_blocks},
};

/// Partial sums of a product. Element `i` of a group is added to sum `i % LANES`.
const LANES: usize = BLOCK_GROUP / 2;

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
        return for_block_type!(kind, Format => unsafe { block_avx2::products::<Format, ROWS>((blocks, row_bytes), x, out) });
    }
    for_block_type!(kind, Format => portable_products::<Format, ROWS>((blocks, row_bytes), x, out));
}

/// Widens the bytes of whole blocks. `out` has as many elements as the blocks.
pub(super) fn widen(kind: BlockType, blocks: &[u8], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the check in the line above found that the CPU has AVX2 and F16C.
        return for_block_type!(kind, Format => unsafe { block_avx2::widen::<Format>(blocks, out) });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simd_and_portable_code_give_the_same_bits() {
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
            // Clears bits in the exponent of each f16 number, so that all these numbers are finite.
            // Their high bytes are at offsets 1 and 3 or, in Q6_K, in the last byte of a block.
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
