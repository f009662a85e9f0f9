//! Products of a few rows with a weight in blocks of quantized elements. The integers of each block
//! are multiplied by unrounded activations in f32, and the sum is scaled.

use std::{array, ops::Range};

use super::{
    arithmetic::sum,
    memory::{Output, Rows, widened},
    threads::Threads,
};
use crate::{
    BlockRows, Weight,
    blocks::{BLOCK_GROUP, Block, Unpacked, for_block_type, widen_blocks},
    calls::Linear,
};

/// Largest number of rows of activations for which blocks are unpacked again for each
/// [`ROWS_AT_ONCE`] rows. For more rows, panels of the weight are widened for `gemm`.
pub(super) const SMALL_M_ROWS: usize = 8;

/// Rows of activations that are multiplied by a block once it is unpacked.
const ROWS_AT_ONCE: usize = 4;

/// Output features of one work item. The bits of the result do not depend on this number.
const FEATURES_AT_ONCE: usize = 16;

const LANES: usize = BLOCK_GROUP / 2;

/// Read access to a weight in blocks.
pub(super) struct BlockWeight<'a> {
    rows: &'a BlockRows,
    bytes: &'a [u8],
}

impl<'a> BlockWeight<'a> {
    /// Returns `None` if the weight is not in blocks.
    pub(super) fn of(weight: &'a Weight<'_>) -> Option<Self> {
        Some(BlockWeight { rows: weight.blocks.as_ref()?, bytes: Rows::of(&weight.data).all() })
    }

    /// Widens adjacent rows.
    #[inline(always)]
    pub(super) fn widen(&self, rows: Range<usize>, mut out: &mut [f32]) {
        for (kind, rows, bytes) in self.rows.runs(rows) {
            let own;
            (own, out) = out.split_at_mut(rows.len() * self.rows.columns());
            widen_blocks(kind, &self.bytes[bytes], own);
        }
    }
}

/// A row of activations.
#[derive(Clone, Copy)]
struct GroupedRow<'a> {
    groups: &'a [[f32; BLOCK_GROUP]],
    /// The sum of each group.
    sums: &'a [f32],
}

pub(super) fn linear(threads: &Threads, call: &Linear<'_>, weight: &BlockWeight<'_>) {
    let (rows, features, columns) = (call.x.rows(), call.weight.rows(), call.weight.columns());
    let groups = columns / BLOCK_GROUP;
    let (x, of_sums) = (Rows::<f32>::of(call.x.plain()), call.scratch.row_range(0..rows * groups));
    let of_sums = of_sums.into_shape([rows, groups]);
    let sums_out = Output::of(&of_sums);
    threads.share(rows, rows * columns, |_, row| {
        // SAFETY: each row is one item, so no two threads write the same row.
        let sums_out = unsafe { sums_out.part(row, 0, groups) };
        sums_out.iter_mut().zip(x.row(row).as_chunks::<BLOCK_GROUP>().0).for_each(|(out, group)| *out = sum(group));
    });
    let sums = Rows::<f32>::of(&of_sums);
    let grouped = |row: usize| GroupedRow { groups: x.row(row).as_chunks().0, sums: sums.row(row) };
    let (bias, out) = (call.bias.as_ref().map(widened), Output::of(&call.out));
    let put = |row: usize, feature: usize, product: f32| {
        // SAFETY: each feature belongs to one item, so no other thread writes this element.
        let out = &mut unsafe { out.part(row, feature, 1) }[0];
        *out = if call.accumulate { *out + product } else { product };
        if let Some(bias) = &bias {
            *out += bias[feature];
        }
    };
    threads.share(features.div_ceil(FEATURES_AT_ONCE), rows * features * columns, |_, item| {
        let own = item * FEATURES_AT_ONCE..features.min((item + 1) * FEATURES_AT_ONCE);
        for (kind, own, bytes) in weight.rows.runs(own) {
            let blocks = weight.bytes[bytes].chunks_exact(kind.bytes_of(columns));
            for (feature, blocks) in own.zip(blocks) {
                let mut row = 0;
                while row + ROWS_AT_ONCE <= rows {
                    let x = array::from_fn::<_, ROWS_AT_ONCE, _>(|at| grouped(row + at));
                    let products = for_block_type!(kind, Format => dot::<Format, _>(blocks, x));
                    products.into_iter().enumerate().for_each(|(at, product)| put(row + at, feature, product));
                    row += ROWS_AT_ONCE;
                }
                for row in row..rows {
                    let [product] = for_block_type!(kind, Format => dot::<Format, _>(blocks, [grouped(row)]));
                    put(row, feature, product);
                }
            }
        }
    });
}

/// The products of a row of a weight and rows of activations.
#[inline(always)]
fn dot<B: Block, const ROWS: usize>(blocks: &[u8], x: [GroupedRow<'_>; ROWS]) -> [f32; ROWS] {
    let (mut sums, mut offsets, mut unpacked) = ([[0.0; LANES]; ROWS], [0.0; ROWS], Unpacked::ZEROS);
    let groups = B::TYPE.elements() / BLOCK_GROUP;
    for (at, block) in blocks.chunks_exact(B::TYPE.bytes()).enumerate() {
        B::unpack(block, &mut unpacked);
        for (group, weight) in unpacked.quants.as_chunks::<BLOCK_GROUP>().0[..groups].iter().enumerate() {
            for ((x, sums), offset) in x.iter().zip(&mut sums).zip(&mut offsets) {
                let (x, sum) = (&x.groups[at * groups + group], x.sums[at * groups + group]);
                let product = |lane: usize| f32::from(weight[lane]) * x[lane];
                if B::GROUP == BLOCK_GROUP {
                    for lane in 0..LANES {
                        sums[lane] += unpacked.scales[group] * (product(lane) + product(lane + LANES));
                    }
                } else {
                    let [low, high] = [2 * group, 2 * group + 1].map(|half| unpacked.scales[half]);
                    for lane in 0..LANES {
                        sums[lane] += low * product(lane) + high * product(lane + LANES);
                    }
                }
                if B::HAS_OFFSETS {
                    *offset += unpacked.offsets[group] * sum;
                }
            }
        }
    }
    array::from_fn(|row| sums[row].iter().sum::<f32>() + offsets[row])
}
