//! GEMMs with the weights of each row's experts, computed expert by expert and panel by panel.

use std::ops::Range;

use super::{
    arithmetic::{Matrix, multiply, silu},
    block_products::BlockWeight,
    gelu::gelu_tanh,
    memory::{Output, Rows, Scratch, indices, widen},
    quantize::round_rows,
    quantized::{QuantizedInput, WeightRows},
    threads::Threads,
};
use crate::{
    Activations, DType, Tensor, Weight,
    calls::{self, GateActivation, Routing},
    target::{CPU_EXPERT_ROWS, CPU_PANEL_ROWS, cpu_experts_share},
};

pub(super) fn gated_experts(threads: &Threads, call: calls::GatedExperts<'_>) {
    match call.activation {
        GateActivation::Silu => gate(threads, &call, silu),
        GateActivation::GeluTanh => gate(threads, &call, gelu_tanh),
    }
}

fn gate(threads: &Threads, call: &calls::GatedExperts<'_>, activate: impl Fn(f32) -> f32 + Sync) {
    let (rows, features) = (call.out.rows(), call.out.columns());
    // Rows are quantized as a whole, but a panel has only some columns of a row, so quantization
    // needs the unquantized rows.
    let reshaped;
    let plain = match &call.out.plain {
        Some(plain) => plain,
        None => {
            reshaped = call.gated.reshape([rows, features]);
            &reshaped
        }
    };
    let out = Output::of(plain);
    let (choices, top) = (indices(&call.routing.choices), call.routing.top);
    let of_row = |place: usize| choices[place] as usize / top;
    // A panel has as many gate rows as up rows, so that one thread computes both dot products of a
    // feature.
    let panels = Panels {
        x: Operand::of(&call.x),
        weight: &call.weight,
        scratch: &call.scratch,
        out_features: 2 * features,
        parts: 2,
    };
    panels.multiply(threads, &call.routing, of_row, |place, columns, [gate, up]| {
        // SAFETY: `multiply` processes each pair of sorted position and panel once, so no other
        // thread writes these elements.
        let out = unsafe { out.part(place, columns.start, columns.len()) };
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = activate(*gate) * up;
        }
    });
    if let Some(quantized) = &call.out.quantized {
        let plain = Rows::<f32>::of(plain);
        // Rows for experts of other ranks still have the contents of an earlier operation. They are
        // quantized too, although nothing reads them.
        round_rows(threads, quantized, |row| plain.row(row));
    }
}

pub(super) fn add_experts(threads: &Threads, call: calls::AddExperts<'_>) {
    let (products, features) = (Output::of(&call.products), call.sum.columns());
    let panels = Panels {
        x: Operand::of(&call.x),
        weight: &call.weight,
        scratch: &call.scratch,
        out_features: features,
        parts: 1,
    };
    panels.multiply(
        threads,
        &call.routing,
        |place| place,
        |place, columns, [product, _]| {
            // SAFETY: `multiply` processes each pair of sorted position and panel once, so no other
            // thread writes these elements.
            unsafe { products.part(place, columns.start, columns.len()) }.copy_from_slice(product);
        },
    );
    let (products, weights) = (Rows::<f32>::of(&call.products), Rows::<f32>::of(&call.routing.weights));
    let (places, top, sum) = (indices(&call.routing.places), call.routing.top, Output::of(&call.sum));
    let here = places_here(&call.routing);
    threads.share(call.sum.rows(), call.products.shape().elements(), |_, row| {
        // SAFETY: each row is one work item, so no other thread writes this row.
        let sum = unsafe { sum.part(row, 0, features) };
        if !call.accumulate {
            sum.fill(0.0);
        }
        for (weight, place) in weights.row(row).iter().zip(&places[row * top..][..top]) {
            if !here.contains(&(*place as usize)) {
                continue;
            }
            let product = products.row(*place as usize);
            sum.iter_mut().zip(product).for_each(|(sum, product)| *sum += weight * product);
        }
    });
}

/// The range of positions of an expert's choices in the order sorted by expert.
fn places_of(expert: usize, starts: &[u32]) -> Range<usize> {
    starts[expert] as usize..starts[expert + 1] as usize
}

/// The range of sorted positions of the choices of all experts that this rank holds.
fn places_here(routing: &Routing<'_>) -> Range<usize> {
    let (starts, held) = (indices(&routing.starts), routing.held.range());
    starts[held.start] as usize..starts[held.end] as usize
}

/// The rows that are multiplied by the experts' weights.
enum Operand<'a> {
    Plain(Rows<'a, f32>),
    Quantized(QuantizedInput<'a>),
}

impl<'a> Operand<'a> {
    fn of(x: &'a Activations<'_>) -> Self {
        match &x.plain {
            Some(plain) => Operand::Plain(Rows::of(plain)),
            None => Operand::Quantized(QuantizedInput::of(x)),
        }
    }

    /// Copies a row, widened if it is quantized.
    #[inline(always)]
    fn copy(&self, row: usize, out: &mut [f32]) {
        match self {
            Operand::Plain(rows) => out.copy_from_slice(rows.row(row)),
            Operand::Quantized(rows) => rows.widen(row, out),
        }
    }
}

/// The panels of all experts' weights.
struct Panels<'a> {
    x: Operand<'a>,
    /// `[experts * out_features, in_features]`
    weight: &'a Weight<'a>,
    scratch: &'a Tensor<'a>,
    out_features: usize,
    /// Number of equal parts of an expert's rows: 2 for gate and up, otherwise 1. A panel has the
    /// same rows of each part.
    parts: usize,
}

impl Panels<'_> {
    /// Calls `write(place, columns, products)` for each pair of sorted position `place` and panel.
    /// `columns` are the panel's columns within each part, and `products` has the products of each
    /// part. The row of `x` that is multiplied is `row(place)`.
    #[inline(always)]
    fn multiply(
        &self,
        threads: &Threads,
        routing: &Routing<'_>,
        row: impl Fn(usize) -> usize + Sync,
        write: impl Fn(usize, Range<usize>, [&[f32]; 2]) + Sync,
    ) {
        let (in_features, features) = (self.weight.columns(), self.out_features / self.parts);
        let step = (CPU_PANEL_ROWS / self.parts).min(features);
        let (starts, panels) = (indices(&routing.starts), features.div_ceil(step));
        let share = cpu_experts_share(self.out_features, in_features, self.weight.dtype());
        let scratch = Scratch::of(self.scratch, share);
        let choices = routing.rows() * routing.top;
        let held = routing.held;
        let cost = (choices + held.count) * self.out_features * in_features;
        threads.share(held.count * panels, cost, |worker, item| {
            let (expert, panel) = (item / panels, item % panels);
            let places = places_of(held.first + expert, starts);
            if places.is_empty() {
                return;
            }
            let columns = panel * step..features.min((panel + 1) * step);
            // SAFETY: a worker processes one item at a time, so nothing else
            // uses this worker's scratch.
            let scratch = unsafe { scratch.of_worker(worker) };
            let (side_by_side, scratch) = scratch.split_at_mut(CPU_EXPERT_ROWS * in_features);
            let (products, widened) = scratch.split_at_mut(CPU_EXPERT_ROWS * CPU_PANEL_ROWS.min(self.out_features));
            let first = |part: usize| expert * self.out_features + part * features + columns.start;
            let weights = self.panel([first(0), first(self.parts - 1)], columns.len(), widened);
            for place in places.clone().step_by(CPU_EXPERT_ROWS) {
                let count = CPU_EXPERT_ROWS.min(places.end - place);
                for (at, out) in side_by_side.chunks_exact_mut(in_features).take(count).enumerate() {
                    self.x.copy(row(place + at), out);
                }
                let width = self.parts * columns.len();
                if let Operand::Quantized(x) = &self.x {
                    let of_weight =
                        WeightRows::of(self.weight).expect("activations are quantized for a quantized weight");
                    for (at, products) in products.chunks_exact_mut(width).take(count).enumerate() {
                        let (wide, scales) =
                            (&side_by_side[at * in_features..][..in_features], x.scales(row(place + at)));
                        for (column, out) in products.iter_mut().enumerate() {
                            let (part, column) = (column / columns.len(), column % columns.len());
                            let weight = &weights[part][column * in_features..][..in_features];
                            *out = of_weight.product(first(part) + column, weight, wide, scales);
                        }
                        write(place + at, columns.clone(), products.split_at(columns.len()).into());
                    }
                    continue;
                }
                for (part, weight) in weights.iter().take(self.parts).enumerate() {
                    let x = Matrix { start: side_by_side.as_ptr(), strides: [in_features, 1] };
                    let weight = Matrix { start: weight.as_ptr(), strides: [1, in_features] };
                    let out = products[part * columns.len()..].as_mut_ptr();
                    // SAFETY: `x` has the `count` rows copied above, `weight` has the panel's rows
                    // of this part, and `products` has space for `count` rows of both parts.
                    unsafe { multiply([count, in_features, columns.len()], (out, width), false, x, weight) };
                }
                for (at, products) in products.chunks_exact(width).take(count).enumerate() {
                    write(place + at, columns.clone(), products.split_at(columns.len()).into());
                }
            }
        });
    }

    #[inline(always)]
    fn widen(&self, row: usize, out: &mut [f32]) {
        match (WeightRows::of(self.weight), BlockWeight::of(self.weight)) {
            (Some(weight), _) => weight.widen(row, out),
            (_, Some(weight)) => weight.widen(row..row + 1, out),
            _ => widen(&self.weight.data, row, out),
        }
    }

    /// Returns the rows of both parts as `f32`: the weight itself, or a copy widened into
    /// `scratch`. If there is only one part, both entries of the result are that part.
    #[inline(always)]
    fn panel<'p>(&'p self, first: [usize; 2], rows: usize, scratch: &'p mut [f32]) -> [&'p [f32]; 2] {
        if self.weight.dtype() == DType::F32 {
            let all = Rows::<f32>::of(&self.weight.data).all();
            return first.map(|first| &all[first * self.weight.columns()..][..rows * self.weight.columns()]);
        }
        let columns = self.weight.columns();
        for (part, first) in first.into_iter().take(self.parts).enumerate() {
            let scratch = &mut scratch[part * rows * columns..][..rows * columns];
            for (at, out) in scratch.chunks_exact_mut(columns).enumerate() {
                self.widen(first + at, out);
            }
        }
        let last = (self.parts - 1) * rows * columns;
        [&scratch[..rows * columns], &scratch[last..][..rows * columns]]
    }
}
