//! Products with a weight in blocks of quantized elements. Activations are rounded to 8 bits first:
//! each group of [`BLOCK_GROUP`] columns has a scale, which is its largest magnitude divided by 127
//! (as in llama.cpp, `ggml-quants.c`, but the scale stays f32).
//!
//! For a few rows, the integers are multiplied. For more rows, both operands are widened, and the
//! product is that of other weights. The two differ only by the rounding of f32 sums.

use std::ops::Range;

use super::{
    arithmetic::{Matrix, largest},
    linear::{add_bias, multiply_many},
    memory::{Output, Rows, Scratch, start_of, widened},
    threads::Threads,
};
use crate::{
    BlockRows, DType, Tensor, Weight,
    blocks::{BLOCK_GROUP, Block, Unpacked, for_block_type, widen_blocks},
    calls::Linear,
    target::{CPU_FEW_BLOCK_ROWS, CPU_PANEL_ROWS},
};

/// Output features of one work item with a few rows. The bits of the result do not depend on this
/// number.
const FEATURES_AT_ONCE: usize = 16;

/// Rows of activations that are multiplied by a block once it is unpacked.
const ROWS_AT_ONCE: usize = 4;

const LANES: usize = BLOCK_GROUP / 2;

pub(super) fn linear(threads: &Threads, call: Linear<'_>) {
    if call.x.rows() <= CPU_FEW_BLOCK_ROWS { multiply_few(threads, &call) } else { multiply_all(threads, &call) }
}

/// A weight in blocks, for reading.
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

/// Rounds each group of `x` to 8 bits. `write` gets the group's number, scale and integers.
///
/// If a number of the group is not finite, the scale is NaN, so that all its products are NaN.
#[inline(always)]
fn round_groups(x: &[f32], mut write: impl FnMut(usize, f32, &[i8; BLOCK_GROUP])) {
    // 1.5 * 2^23. The lowest bits of the sum are the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let mut quants = [0; BLOCK_GROUP];
    for (group, x) in x.as_chunks::<BLOCK_GROUP>().0.iter().enumerate() {
        let magnitudes = x.map(f32::abs);
        let poison = x.map(|x| x * 0.0).iter().sum::<f32>();
        let most = largest(&magnitudes);
        let inverse = if most > f32::MIN_POSITIVE { 127.0 / most } else { 0.0 };
        for (quant, x) in quants.iter_mut().zip(x) {
            *quant = (x * inverse + ROUND).to_bits() as i8;
        }
        write(group, most / 127.0 + poison, &quants);
    }
}

/// Rounds a row to 8 bits and widens it again.
#[inline(always)]
pub(super) fn round_row(x: &[f32], out: &mut [f32]) {
    let out = out.as_chunks_mut::<BLOCK_GROUP>().0;
    round_groups(x, |group, scale, quants| {
        out[group].iter_mut().zip(quants).for_each(|(out, quant)| *out = scale * f32::from(*quant));
    });
}

/// A rounded row of activations.
#[derive(Clone, Copy)]
struct RoundedRow<'a> {
    quants: &'a [[u8; BLOCK_GROUP]],
    /// The scale of each group, and the sum of its numbers.
    scales: &'a [[f32; 2]],
}

/// Multiplies a few rows as integers.
fn multiply_few(threads: &Threads, call: &Linear<'_>) {
    let (rows, features, columns) = (call.x.rows(), call.weight.rows(), call.weight.columns());
    let scales = 2 * columns / BLOCK_GROUP;
    let of_scales = call.scratch.row_range(0..rows * scales).into_shape([rows, scales]);
    let of_quants = call.scratch.row_range(rows * scales..rows * (scales + columns / 4));
    let of_quants = Tensor::over(of_quants.address(), [rows, columns].into(), DType::U8);
    let (x, quants_out, scales_out) =
        (Rows::<f32>::of(call.x.plain()), Output::<u8>::of_type(&of_quants), Output::of(&of_scales));
    threads.share(rows, 4 * rows * columns, |_, row| {
        // SAFETY: each row is one item, so no two threads write the same row.
        let (quants_out, scales_out) = unsafe { (quants_out.part(row, 0, columns), scales_out.part(row, 0, scales)) };
        let (quants_out, scales_out) = (quants_out.as_chunks_mut::<BLOCK_GROUP>().0, scales_out.as_chunks_mut::<2>().0);
        round_groups(x.row(row), |group, scale, quants| {
            quants_out[group] = quants.map(i8::cast_unsigned);
            let sum: i32 = quants.iter().map(|quant| i32::from(*quant)).sum();
            scales_out[group] = [scale, scale * sum as f32];
        });
    });
    let (quants, scales) = (Rows::<u8>::of(&of_quants), Rows::<f32>::of(&of_scales));
    let rounded =
        |row: usize| RoundedRow { quants: quants.row(row).as_chunks().0, scales: scales.row(row).as_chunks().0 };
    let weight = BlockWeight::of(&call.weight).expect("the caller checks the format");
    let (bias, out) = (call.bias.as_ref().map(widened), Output::of(&call.out));
    let put = |row: usize, feature: usize, product: f32| {
        // SAFETY: each feature belongs to one item, so no other thread writes this element.
        let out = &mut unsafe { out.part(row, feature, 1) }[0];
        *out = product + bias.as_ref().map_or(0.0, |bias| bias[feature]) + if call.accumulate { *out } else { 0.0 };
    };
    threads.share(features.div_ceil(FEATURES_AT_ONCE), rows * features * columns, |_, item| {
        let own = item * FEATURES_AT_ONCE..features.min((item + 1) * FEATURES_AT_ONCE);
        for (kind, own, bytes) in weight.rows.runs(own) {
            let blocks = weight.bytes[bytes].chunks_exact(kind.bytes_of(columns));
            for (feature, blocks) in own.zip(blocks) {
                let mut row = 0;
                while row + ROWS_AT_ONCE <= rows {
                    let x = std::array::from_fn::<_, ROWS_AT_ONCE, _>(|at| rounded(row + at));
                    let products = for_block_type!(kind, Format => dot::<Format, _>(blocks, x));
                    products.into_iter().enumerate().for_each(|(at, product)| put(row + at, feature, product));
                    row += ROWS_AT_ONCE;
                }
                for row in row..rows {
                    let [product] = for_block_type!(kind, Format => dot::<Format, _>(blocks, [rounded(row)]));
                    put(row, feature, product);
                }
            }
        }
    });
}

/// The products of a row of a weight and rounded rows.
#[inline(always)]
fn dot<B: Block, const ROWS: usize>(blocks: &[u8], x: [RoundedRow<'_>; ROWS]) -> [f32; ROWS] {
    let (mut sums, mut offsets, mut unpacked) = ([[0.0; LANES]; ROWS], [0.0; ROWS], Unpacked::ZEROS);
    let groups = B::TYPE.elements() / BLOCK_GROUP;
    for (at, block) in blocks.chunks_exact(B::TYPE.bytes()).enumerate() {
        B::unpack(block, &mut unpacked);
        for ((x, sums), offset) in x.iter().zip(&mut sums).zip(&mut offsets) {
            let range = at * groups..(at + 1) * groups;
            let x = x.quants[range.clone()].iter().zip(&x.scales[range]);
            for (group, (weight, (x, [scale, sum]))) in
                unpacked.quants.as_chunks::<BLOCK_GROUP>().0.iter().zip(x).enumerate()
            {
                // Two products of 8-bit integers fit into 16 bits, because `x` is never -128.
                let product = |lane: usize| i16::from(weight[lane]) * i16::from(x[lane].cast_signed());
                if B::GROUP == BLOCK_GROUP {
                    let scale = unpacked.scales[group] * scale;
                    for lane in 0..LANES {
                        sums[lane] += scale * f32::from(product(lane) + product(lane + LANES));
                    }
                } else {
                    let [low, high] = [2 * group, 2 * group + 1].map(|half| unpacked.scales[half] * scale);
                    for lane in 0..LANES {
                        sums[lane] += low * f32::from(product(lane)) + high * f32::from(product(lane + LANES));
                    }
                }
                if B::HAS_OFFSETS {
                    *offset += unpacked.offsets[group] * sum;
                }
            }
        }
    }
    std::array::from_fn(|row| total(sums[row]) + offsets[row])
}

/// The sum of all lanes, pair by pair.
#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|at| lanes[at] + lanes[at + 8]);
    let four: [f32; 4] = std::array::from_fn(|at| eight[at] + eight[at + 4]);
    four[0] + four[2] + (four[1] + four[3])
}

/// Multiplies many rows: panels of the weight are widened, and so are the rounded rows.
fn multiply_all(threads: &Threads, call: &Linear<'_>) {
    let (rows, features, columns) = (call.x.rows(), call.weight.rows(), call.weight.columns());
    let (of_x, of_panels) = (
        call.scratch.row_range(0..rows * columns).into_shape([rows, columns]),
        call.scratch.row_range(rows * columns..call.scratch.rows()),
    );
    let (x, rounded) = (Rows::<f32>::of(call.x.plain()), Output::of(&of_x));
    threads.share(rows, 4 * rows * columns, |_, row| {
        // SAFETY: each row is one item, so no two threads write the same row.
        round_row(x.row(row), unsafe { rounded.part(row, 0, columns) });
    });
    let scratch = Scratch::of(&of_panels, CPU_PANEL_ROWS.min(features) * columns);
    let weight = BlockWeight::of(&call.weight).expect("the caller checks the format");
    let bias = call.bias.as_ref().map(widened);
    threads.share(features.div_ceil(CPU_PANEL_ROWS), (rows + 1) * features * columns, |worker, panel| {
        let own = panel * CPU_PANEL_ROWS..features.min((panel + 1) * CPU_PANEL_ROWS);
        // SAFETY: a worker processes one panel at a time, so nothing else
        // uses this worker's scratch.
        let panel = &mut unsafe { scratch.of_worker(worker) }[..own.len() * columns];
        weight.widen(own.clone(), panel);
        let x = Matrix { start: start_of(&of_x), strides: [columns, 1] };
        multiply_many(call, x, own.clone(), panel);
        if let Some(bias) = &bias {
            add_bias(call, own.clone(), &bias[own]);
        }
    });
}
