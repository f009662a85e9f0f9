//! Products of a few rows with a weight in blocks of quantized elements. The integers of each block
//! are multiplied by unrounded activations in f32, and the sum is scaled.

use std::{array, ops::Range};

use super::{
    arithmetic::sum,
    block_dot::{products, widen},
    memory::{Output, Rows, widened},
    threads::Threads,
};
use crate::{
    BlockRows, Weight,
    blocks::{BLOCK_GROUP, GroupedRow},
    calls::Linear,
};

/// Largest number of rows of activations for which blocks are unpacked again for each
/// [`ROWS_AT_ONCE`] rows. For more rows, panels of the weight are dequantized to f32 for `gemm`.
pub(super) const SMALL_M_ROWS: usize = 8;

/// Rows of activations that are multiplied by a block once it is unpacked. The rows that remain are
/// multiplied one at a time.
const ROWS_AT_ONCE: usize = 4;

/// Output features of one work item. The bits of the result do not depend on this number.
const FEATURES_AT_ONCE: usize = 16;

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

    /// Dequantizes adjacent rows to f32. `out` has one element for each element of the rows.
    pub(super) fn widen(&self, rows: Range<usize>, mut out: &mut [f32]) {
        for (kind, rows, bytes) in self.rows.runs(rows) {
            let own;
            (own, out) = out.split_at_mut(rows.len() * self.rows.columns());
            widen(kind, &self.bytes[bytes], own);
        }
    }
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
    let bias = call.bias.as_ref().map(widened);
    let results = Results { out: Output::of(&call.out), bias: bias.as_deref(), accumulate: call.accumulate };
    threads.share(features.div_ceil(FEATURES_AT_ONCE), rows * features * columns, |_, item| {
        let own = item * FEATURES_AT_ONCE..features.min((item + 1) * FEATURES_AT_ONCE);
        for (kind, own, bytes) in weight.rows.runs(own) {
            let blocks = (&weight.bytes[bytes], kind.bytes_of(columns));
            let mut row = 0;
            while row + ROWS_AT_ONCE <= rows {
                let x = array::from_fn(|at| grouped(row + at));
                let mut found = [[0.0; ROWS_AT_ONCE]; FEATURES_AT_ONCE];
                products(kind, blocks, x, &mut found[..own.len()]);
                // SAFETY: these features belong to one item, so no other thread writes them.
                unsafe { results.put(row, own.clone(), &found) };
                row += ROWS_AT_ONCE;
            }
            for row in row..rows {
                let mut found = [[0.0]; FEATURES_AT_ONCE];
                products(kind, blocks, [grouped(row)], &mut found[..own.len()]);
                // SAFETY: these features belong to one item, so no other thread writes them.
                unsafe { results.put(row, own.clone(), &found) };
            }
        }
    });
}

/// The output of a call.
struct Results<'a> {
    out: Output<'a>,
    bias: Option<&'a [f32]>,
    accumulate: bool,
}

impl Results<'_> {
    /// Writes the products of the rows from `first` on with `features`.
    ///
    /// # Safety
    /// No other thread accesses these elements of the output.
    unsafe fn put<const ROWS: usize>(&self, first: usize, features: Range<usize>, products: &[[f32; ROWS]]) {
        for row in 0..ROWS {
            // SAFETY: the caller guarantees that no other thread accesses these elements.
            let out = unsafe { self.out.part(first + row, features.start, features.len()) };
            for ((out, feature), products) in out.iter_mut().zip(features.clone()).zip(products) {
                *out = if self.accumulate { *out + products[row] } else { products[row] };
                if let Some(bias) = self.bias {
                    *out += bias[feature];
                }
            }
        }
    }
}
