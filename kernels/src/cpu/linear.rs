//! The GEMM with a weight, panel by panel. Uses the `gemm` crate, as candle does.

use std::ops::Range;

use super::{
    arithmetic::{Matrix, dot, multiply},
    block_products::{self, BlockWeight},
    int4::Int4Weight,
    memory::{Output, Rows, Scratch, start_of, widen, widened},
    quantized,
    threads::Threads,
};
use crate::{
    DType,
    calls::Linear,
    target::{CPU_PANEL_ROWS, cpu_linear_share},
};

/// Largest number of rows of `x` for which the GEMM is computed as dot products. With few rows,
/// packing the operands for `gemm` would cost more than it saves.
const SMALL_M_ROWS: usize = 4;

pub(super) fn linear(threads: &Threads, call: Linear<'_>) {
    let int4 = Int4Weight::of(&call.weight);
    if call.weight.scales.is_some() && int4.is_none() {
        return quantized::linear(threads, call);
    }
    let blocks = BlockWeight::of(&call.weight);
    if let Some(weight) = &blocks
        && call.x.rows() <= block_products::SMALL_M_ROWS
    {
        return block_products::linear(threads, &call, weight);
    }
    let (features, in_features) = (call.weight.rows(), call.weight.columns());
    let scratch = Scratch::of(&call.scratch, cpu_linear_share(features, in_features, call.weight.dtype()));
    let bias = call.bias.as_ref().map(widened);
    let cost = (call.x.rows() + 1) * features * in_features;
    threads.share(features.div_ceil(CPU_PANEL_ROWS), cost, |worker, panel| {
        let rows = panel * CPU_PANEL_ROWS..features.min((panel + 1) * CPU_PANEL_ROWS);
        // SAFETY: a worker processes one panel at a time, so nothing else
        // uses this worker's scratch.
        let weight =
            panel_weight(&call, (blocks.as_ref(), int4.as_ref()), rows.clone(), unsafe { scratch.of_worker(worker) });
        if call.x.rows() <= SMALL_M_ROWS {
            multiply_small_m(&call, rows.clone(), weight);
        } else {
            multiply_large_m(&call, rows.clone(), weight);
        }
        if let Some(bias) = &bias {
            add_bias(&call, rows.clone(), &bias[rows]);
        }
    });
}

/// The rows of a panel as `f32`, `[rows, in_features]`: the weight itself, or a copy widened
/// into the worker's scratch.
#[inline(always)]
fn panel_weight<'a>(
    call: &'a Linear<'_>,
    (blocks, int4): (Option<&BlockWeight<'_>>, Option<&Int4Weight<'_>>),
    rows: Range<usize>,
    scratch: &'a mut [f32],
) -> &'a [f32] {
    let (data, columns) = (&call.weight.data, call.weight.columns());
    if data.dtype() == DType::F32 {
        return &Rows::<f32>::of(data).all()[rows.start * columns..rows.end * columns];
    }
    let scratch = &mut scratch[..rows.len() * columns];
    if let Some(blocks) = blocks {
        blocks.widen(rows, scratch);
        return scratch;
    }
    if let Some(int4) = int4 {
        int4.widen(rows, scratch);
        return scratch;
    }
    for (row, out) in rows.zip(scratch.chunks_exact_mut(columns)) {
        widen(data, row, out);
    }
    scratch
}

/// Computes the panel's columns of the output, or adds to them.
fn multiply_large_m(call: &Linear<'_>, columns: Range<usize>, weight: &[f32]) {
    let (rows, in_features) = (call.x.rows(), call.weight.columns());
    assert_eq!(weight.len(), columns.len() * in_features, "the panel has all columns of its rows");
    let x = Matrix { start: start_of(call.x.plain()), strides: [call.x.plain().pitch(), 1] };
    let weight = Matrix { start: weight.as_ptr(), strides: [1, in_features] };
    // SAFETY: `x` and the panel's columns of `out` are inside tensors whose shapes the op layer has
    // checked, and no other panel writes these columns.
    unsafe {
        let out = start_of::<f32>(&call.out).add(columns.start);
        multiply([rows, in_features, columns.len()], (out, call.out.pitch()), call.accumulate, x, weight);
    }
}

/// Does the same as `multiply_large_m`, with dot products.
#[inline(always)]
fn multiply_small_m(call: &Linear<'_>, columns: Range<usize>, weight: &[f32]) {
    let (x, out) = (Rows::<f32>::of(call.x.plain()), Output::of(&call.out));
    for row in 0..call.x.rows() {
        // SAFETY: no other panel has these columns, so no other thread writes these elements.
        let out = unsafe { out.part(row, columns.start, columns.len()) };
        for (out, weight) in out.iter_mut().zip(weight.chunks_exact(call.weight.columns())) {
            let product = dot(x.row(row), weight);
            *out = if call.accumulate { *out + product } else { product };
        }
    }
}

/// Adds the panel's part of the bias to its columns of the output while they are in cache.
#[inline(always)]
fn add_bias(call: &Linear<'_>, columns: Range<usize>, bias: &[f32]) {
    let out = Output::of(&call.out);
    for row in 0..call.x.rows() {
        // SAFETY: no other panel has these columns, so no other thread writes these elements.
        let out = unsafe { out.part(row, columns.start, columns.len()) };
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
}
