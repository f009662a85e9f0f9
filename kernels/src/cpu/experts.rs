//! Products with the weights of each row's experts: expert by expert, panel by panel.

use std::ops::Range;

use super::{
    arithmetic::{Matrix, exp, multiply},
    memory::{Output, Rows, Scratch, indices, widen},
    threads::Threads,
};
use crate::{
    DType, Tensor,
    ops::{add_experts, gated_experts, route::Routing},
    target::{CPU_EXPERT_ROWS, CPU_PANEL_ROWS, cpu_experts_share},
};

pub(super) fn gated_experts(threads: &Threads, call: gated_experts::Call<'_>) {
    let (x, out, features) = (Rows::<f32>::of(&call.x), Output::of(&call.out), call.out.columns());
    let (choices, top) = (indices(&call.routing.choices), call.routing.top);
    let of_row = |place: usize| x.row(choices[place] as usize / top);
    // A panel has as many rows of gate as of up, so that one thread has both products of a feature.
    let panels = Panels { weight: &call.weight, scratch: &call.scratch, out_features: 2 * features, parts: 2 };
    panels.multiply(threads, &call.routing, of_row, |place, columns, [gate, up]| {
        // SAFETY: each place and panel is written once.
        let out = unsafe { out.part(place, columns.start, columns.len()) };
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    });
}

pub(super) fn add_experts(threads: &Threads, call: add_experts::Call<'_>) {
    let (x, products, features) = (Rows::<f32>::of(&call.x), Output::of(&call.products), call.sum.columns());
    let panels = Panels { weight: &call.weight, scratch: &call.scratch, out_features: features, parts: 1 };
    panels.multiply(
        threads,
        &call.routing,
        |place| x.row(place),
        |place, columns, [product, _]| {
            // SAFETY: each place and panel is written once.
            unsafe { products.part(place, columns.start, columns.len()) }.copy_from_slice(product);
        },
    );
    let (products, weights) = (Rows::<f32>::of(&call.products), Rows::<f32>::of(&call.routing.weights));
    let (places, top, sum) = (indices(&call.routing.places), call.routing.top, Output::of(&call.sum));
    threads.share(call.sum.rows(), call.products.shape().elements(), |_, row| {
        // SAFETY: each row is one item.
        let sum = unsafe { sum.part(row, 0, features) };
        for (weight, place) in weights.row(row).iter().zip(&places[row * top..][..top]) {
            let product = products.row(*place as usize);
            sum.iter_mut().zip(product).for_each(|(sum, product)| *sum += weight * product);
        }
    });
}

/// The panels of all experts' weights.
struct Panels<'a> {
    /// `[experts * out_features, in_features]`
    weight: &'a Tensor<'a>,
    scratch: &'a Tensor<'a>,
    out_features: usize,
    /// Parts of an expert's rows of which a panel has a piece each: 2 for gate and up.
    parts: usize,
}

impl Panels<'_> {
    /// Calls `write(place, columns, products)` for each place and each panel's columns of a part, with the products of
    /// each part. The row of a place is `row(place)`.
    #[inline(always)]
    fn multiply<'x>(
        &self,
        threads: &Threads,
        routing: &Routing<'_>,
        row: impl Fn(usize) -> &'x [f32] + Sync,
        write: impl Fn(usize, Range<usize>, [&[f32]; 2]) + Sync,
    ) {
        let (in_features, features) = (self.weight.columns(), self.out_features / self.parts);
        let step = (CPU_PANEL_ROWS / self.parts).min(features);
        let (ends, panels) = (indices(&routing.ends), features.div_ceil(step));
        let share = cpu_experts_share(self.out_features, in_features, self.weight.dtype());
        let scratch = Scratch::of(self.scratch, share);
        let choices = routing.rows() * routing.top;
        let cost = (choices + routing.experts()) * self.out_features * in_features;
        threads.share(routing.experts() * panels, cost, |worker, item| {
            let (expert, panel) = (item / panels, item % panels);
            let places = if expert == 0 { 0 } else { ends[expert - 1] as usize }..ends[expert] as usize;
            if places.is_empty() {
                return;
            }
            let columns = panel * step..features.min((panel + 1) * step);
            // SAFETY: a worker works on one item at a time.
            let scratch = unsafe { scratch.of_worker(worker) };
            let (side_by_side, scratch) = scratch.split_at_mut(CPU_EXPERT_ROWS * in_features);
            let (products, widened) = scratch.split_at_mut(CPU_EXPERT_ROWS * CPU_PANEL_ROWS.min(self.out_features));
            let first = |part: usize| expert * self.out_features + part * features + columns.start;
            let weights = self.panel([first(0), first(self.parts - 1)], columns.len(), widened);
            for place in places.clone().step_by(CPU_EXPERT_ROWS) {
                let count = CPU_EXPERT_ROWS.min(places.end - place);
                for (at, out) in side_by_side.chunks_exact_mut(in_features).take(count).enumerate() {
                    out.copy_from_slice(row(place + at));
                }
                let width = self.parts * columns.len();
                for (part, weight) in weights.iter().take(self.parts).enumerate() {
                    let x = Matrix { start: side_by_side.as_ptr(), strides: [in_features, 1] };
                    let weight = Matrix { start: weight.as_ptr(), strides: [1, in_features] };
                    let out = products[part * columns.len()..].as_mut_ptr();
                    // SAFETY: the rows that were just copied, the panel's piece of this part, and room for both parts'
                    // products of so many rows.
                    unsafe { multiply([count, in_features, columns.len()], (out, width), false, x, weight) };
                }
                for (at, products) in products.chunks_exact(width).take(count).enumerate() {
                    write(place + at, columns.clone(), products.split_at(columns.len()).into());
                }
            }
        });
    }

    /// The rows of both parts as `f32`: the weight itself, or a copy widened into `room`. A lone part stands twice.
    #[inline(always)]
    fn panel<'p>(&'p self, first: [usize; 2], rows: usize, room: &'p mut [f32]) -> [&'p [f32]; 2] {
        if self.weight.dtype() == DType::F32 {
            let all = Rows::<f32>::of(self.weight).all();
            return first.map(|first| &all[first * self.weight.columns()..][..rows * self.weight.columns()]);
        }
        let columns = self.weight.columns();
        for (part, first) in first.into_iter().take(self.parts).enumerate() {
            let room = &mut room[part * rows * columns..][..rows * columns];
            for (at, out) in room.chunks_exact_mut(columns).enumerate() {
                widen(self.weight, first + at, out);
            }
        }
        let last = (self.parts - 1) * rows * columns;
        [&room[..rows * columns], &room[last..][..rows * columns]]
    }
}
