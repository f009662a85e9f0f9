//! Attention of a tile of queries over tiles of keys, for both attention operations.
//! Scores exist for one tile of keys at a time and are folded into a running softmax
//! (Milakov and Gimelshein 2018; FlashAttention).

use std::ops::Range;

use super::arithmetic::{Matrix, exp, largest, multiply, sum};
use crate::target::{CPU_TILE_KEYS as KEYS, CPU_TILE_QUERIES as QUERIES};

/// One thread's scratch: the state of a tile of queries, and space for gathered keys and values.
pub(super) struct Tile<'s> {
    pub(super) running: Running<'s>,
    pub(super) gathered: Gathered<'s>,
}

/// A tile of queries. For each query there are the weighted sum of the values so far, the largest
/// score and the sum of weights.
pub(super) struct Running<'s> {
    head_dim: usize,
    count: usize,
    queries: &'s mut [f32], // [QUERIES, head_dim]
    sums: &'s mut [f32],    // [QUERIES, head_dim]
    scores: &'s mut [f32],  // [QUERIES, KEYS]
    largest: &'s mut [f32], // [QUERIES]
    weights: &'s mut [f32], // [QUERIES]
}

/// Space for keys and values that are not evenly spaced in memory.
pub(super) struct Gathered<'s> {
    pub(super) keys: &'s mut [f32],   // [KEYS, head_dim]
    pub(super) values: &'s mut [f32], // [KEYS, head_dim]
}

/// Vectors of one head, `pitch` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Vectors<'v> {
    /// The elements from the first vector's first element on.
    pub(super) elements: &'v [f32],
    pub(super) pitch: usize,
}

impl<'s> Tile<'s> {
    /// Divides one thread's scratch, `cpu_attention_tile(head_dim)` elements.
    pub(super) fn over(scratch: &'s mut [f32], head_dim: usize) -> Self {
        let (queries, rest) = scratch.split_at_mut(QUERIES * head_dim);
        let (sums, rest) = rest.split_at_mut(QUERIES * head_dim);
        let (keys, rest) = rest.split_at_mut(KEYS * head_dim);
        let (values, rest) = rest.split_at_mut(KEYS * head_dim);
        let (scores, rest) = rest.split_at_mut(QUERIES * KEYS);
        let (largest, weights) = rest.split_at_mut(QUERIES);
        let running = Running { head_dim, count: 0, queries, sums, scores, largest, weights };
        Tile { running, gathered: Gathered { keys, values } }
    }
}

impl Running<'_> {
    /// Resets the tile to at most [`QUERIES`] queries, multiplied by `scale`.
    pub(super) fn start<'q>(&mut self, queries: impl ExactSizeIterator<Item = &'q [f32]>, scale: f32) {
        self.count = queries.len();
        assert!(self.count <= QUERIES, "{} queries do not fit a tile of {QUERIES}", self.count);
        for (out, query) in self.queries.chunks_exact_mut(self.head_dim).zip(queries) {
            out.iter_mut().zip(query).for_each(|(out, query)| *out = query * scale);
        }
        self.sums[..self.count * self.head_dim].fill(0.0);
        self.largest[..self.count].fill(f32::NEG_INFINITY);
        self.weights[..self.count].fill(0.0);
    }

    /// Folds in `count` keys, at most [`KEYS`], with their values. A query attends only to the keys
    /// `visible(query)`, a range that may extend beyond `count`. The other keys get weight 0, but
    /// their values must not be NaN or infinite.
    #[inline(always)]
    pub(super) fn fold(
        &mut self,
        count: usize,
        keys: Vectors<'_>,
        values: Vectors<'_>,
        visible: impl Fn(usize) -> Range<usize>,
    ) {
        self.score(count, keys);
        for query in 0..self.count {
            let Range { start, end } = visible(query);
            self.weigh(query, count, start.min(count)..end.min(count));
        }
        self.add(count, values);
    }

    /// Computes the weighted mean of a query's values, which is NaN if the query attended to no
    /// keys.
    pub(super) fn finish(&self, query: usize, out: &mut [f32]) {
        let factor = self.weights[query].recip();
        let sums = &self.sums[query * self.head_dim..][..self.head_dim];
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * factor);
    }

    /// `scores = queries @ keys^T`.
    fn score(&mut self, count: usize, keys: Vectors<'_>) {
        keys.assert_hold(count, self.head_dim);
        assert!(self.count <= QUERIES && count <= KEYS);
        let queries = Matrix { start: self.queries.as_ptr(), strides: [self.head_dim, 1] };
        let keys = Matrix { start: keys.elements.as_ptr(), strides: [1, keys.pitch] };
        // SAFETY: `scores` has `[QUERIES, KEYS]` elements and `queries` has
        // `[QUERIES, head_dim]`. The assertions above check both counts against these sizes, and
        // that `keys` contains `count` vectors.
        unsafe { multiply([self.count, self.head_dim, count], (self.scores.as_mut_ptr(), KEYS), false, queries, keys) };
    }

    /// Turns a query's scores into weights, relative to its largest score so far.
    #[inline(always)]
    fn weigh(&mut self, query: usize, count: usize, visible: Range<usize>) {
        let scores = &mut self.scores[query * KEYS..][..count];
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        let seen = &mut scores[visible];
        if seen.is_empty() {
            return;
        }
        let largest = largest(seen).max(self.largest[query]);
        seen.iter_mut().for_each(|score| *score = exp(*score - largest));
        let shrink = if self.weights[query] == 0.0 { 0.0 } else { exp(self.largest[query] - largest) };
        if shrink != 1.0 {
            self.sums[query * self.head_dim..][..self.head_dim].iter_mut().for_each(|sum| *sum *= shrink);
        }
        self.weights[query] = self.weights[query] * shrink + sum(seen);
        self.largest[query] = largest;
    }

    /// `sums += weights @ values`.
    fn add(&mut self, count: usize, values: Vectors<'_>) {
        values.assert_hold(count, self.head_dim);
        let weights = Matrix { start: self.scores.as_ptr(), strides: [KEYS, 1] };
        let values = Matrix { start: values.elements.as_ptr(), strides: [values.pitch, 1] };
        let sums = (self.sums.as_mut_ptr(), self.head_dim);
        // SAFETY: `scores` has `[QUERIES, KEYS]` elements and `sums` has `[QUERIES, head_dim]`.
        // `score` has checked both counts against these sizes, and the assertion above checks that
        // `values` contains `count` vectors.
        unsafe { multiply([self.count, count, self.head_dim], sums, true, weights, values) };
    }
}

impl Vectors<'_> {
    fn assert_hold(&self, count: usize, head_dim: usize) {
        let end = count.saturating_sub(1) * self.pitch + head_dim;
        assert!(self.elements.len() >= end, "{count} vectors do not fit {} elements", self.elements.len());
    }
}
