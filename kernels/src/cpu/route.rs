//! Choice of experts, and the sort of the choices by expert.

use super::{
    arithmetic::{exp, sum},
    memory::{Output, Rows, indices},
    threads::Threads,
};
use crate::calls::{NO_SLOT, Route, RoutingRule};

pub(super) fn route(threads: &Threads, call: Route<'_>) {
    let (rows, experts, top) = (call.logits.rows(), call.logits.columns(), call.out.top);
    let (logits, weights) = (Rows::<f32>::of(&call.logits), Output::of(&call.out.weights));
    let by_row = call.out.places.reshape([rows, top]);
    let chosen = Output::<u32>::of_type(&by_row);
    threads.share(rows, rows * experts * top, |_, row| {
        // SAFETY: each row is one item, so no two threads write the same row.
        let (chosen, weights) = unsafe { (chosen.part(row, 0, top), weights.part(row, 0, top)) };
        choose(logits.row(row), chosen, weights, &call.rule);
    });
    let lists = [&call.out.choices, &call.out.places, &call.out.starts].map(|list| list.reshape([1, list.rows()]));
    // SAFETY: the threads above are done, and the three lists do not overlap.
    let [choices, places, starts] =
        lists.each_ref().map(|list| unsafe { Output::<u32>::of_type(list).part(0, 0, list.columns()) });
    sort(choices, places, starts);
    let loads = call.loads.reshape([1, experts]);
    // SAFETY: the op layer has checked that `loads` is an exclusive view, so
    // nothing else accesses it.
    let loads = unsafe { Output::<u32>::of_type(&loads).part(0, 0, experts) };
    let slots = call.slots.as_ref().map(indices);
    let counts = |choice: &u32| slots.is_none_or(|slots| slots[*choice as usize / top] != NO_SLOT);
    for (load, places) in loads.iter_mut().zip(starts.windows(2)) {
        let chosen = &choices[places[0] as usize..places[1] as usize];
        *load = load.wrapping_add(chosen.iter().filter(|choice| counts(choice)).count() as u32);
    }
}

/// Chooses the experts of one row, in descending order of their logits, and computes their weights.
#[inline(always)]
fn choose(logits: &[f32], chosen: &mut [u32], weights: &mut [f32], rule: &RoutingRule<'_>) {
    let of = |expert: usize| if logits[expert].is_nan() { f32::NEG_INFINITY } else { logits[expert] };
    for rank in 0..chosen.len() {
        let left = (0..logits.len()).filter(|expert| !chosen[..rank].contains(&(*expert as u32)));
        let best = left.reduce(|best, expert| if of(expert) > of(best) { expert } else { best });
        chosen[rank] = best.expect("there are at least as many experts as are chosen per row") as u32;
    }
    let largest = logits[chosen[0] as usize];
    let exponential = |logit: f32| exp(rule.logit_scale * (logit - largest));
    weights.iter_mut().zip(&*chosen).for_each(|(weight, expert)| *weight = exponential(logits[*expert as usize]));
    let total = if rule.renormalized { sum(weights) } else { logits.iter().map(|logit| exponential(*logit)).sum() };
    weights.iter_mut().for_each(|weight| *weight /= total);
    if let Some(scales) = rule.expert_scales {
        let scales = Rows::<f32>::of(scales).all();
        weights.iter_mut().zip(&*chosen).for_each(|(weight, expert)| *weight *= scales[*expert as usize]);
    }
}

/// Sorts the choices. On entry, `places` has each choice's expert. On return, `places` has each
/// choice's position in the sorted order.
fn sort(choices: &mut [u32], places: &mut [u32], starts: &mut [u32]) {
    starts.fill(0);
    // `next[expert]` is the next free position of an expert. It is the element
    // `starts[expert + 1]`, which must contain the end of the expert's positions on return. It has
    // that value once all choices of the expert have positions.
    let next = &mut starts[1..];
    places.iter().for_each(|expert| next[*expert as usize] += 1);
    let mut start = 0;
    for next in &mut *next {
        (*next, start) = (start, start + *next);
    }
    for (choice, place) in places.iter_mut().enumerate() {
        let next = &mut next[*place as usize];
        *place = *next;
        choices[*next as usize] = choice as u32;
        *next += 1;
    }
}
