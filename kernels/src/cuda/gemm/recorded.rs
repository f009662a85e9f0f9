//! Pure: the GEMMs that passes have called during autotuning, and the weights with which autotuning
//! measures these GEMMs.

use std::collections::BTreeMap;

use super::problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS};
use crate::AUTOTUNED_LAYERS;

/// Maximum number of weights in one trial: one for each layer that autotuning runs.
const WEIGHTS_MAX: usize = AUTOTUNED_LAYERS;

/// The GEMMs called since autotuning began.
#[derive(Default)]
pub(in super::super) struct RecordedGemms {
    /// GEMMs by shape, with `rows` set to 0.
    pub(super) by_shape: BTreeMap<GemmProblem, RecordedGemm>,
}

/// Addresses of one layer's weight, bias and weight scales, and the fixed
/// scale for its activations.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct LayerWeight {
    pub weight: u64,
    pub bias: Option<u64>,
    pub scales: u64,
    /// Address of the zero points of 4-bit integers, or 0.
    pub zero_points: u64,
    pub x_scale: f32,
}

#[derive(Default)]
pub(super) struct RecordedGemm {
    /// Weights of up to `WEIGHTS_MAX` layers.
    pub weights: Vec<LayerWeight>,
    pub has_few_rows: bool,
}

impl RecordedGemms {
    /// Records a GEMM and its weight.
    pub(super) fn record(&mut self, problem: GemmProblem, operands: GemmOperands) {
        let recorded = self.by_shape.entry(GemmProblem { rows: 0, ..problem }).or_default();
        let GemmOperands { weight, bias, weight_scales: scales, weight_zero_points: zero_points, x_scale, .. } =
            operands;
        let weight = LayerWeight { weight, bias, scales, zero_points, x_scale };
        recorded.has_few_rows |= problem.rows <= MEMORY_BOUND_ROWS;
        if recorded.weights.len() < WEIGHTS_MAX && !recorded.weights.contains(&weight) {
            recorded.weights.push(weight);
        }
    }
}
