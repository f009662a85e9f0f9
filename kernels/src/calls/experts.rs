//! Mixtures of experts.

use super::{GateActivation, Linear, RmsNorm};
use crate::{Activations, RankShard, Tensor, Weight};

/// Maximum number of experts of a layer.
pub const EXPERTS_MAX: usize = 512;

/// Maximum number of experts that are chosen for a token.
pub const TOP_MAX: usize = 32;

/// The router's choices. Choice `row * top + rank` is the expert number `rank` of the row, in
/// descending order of likelihood.
///
/// Choices are sorted by expert, and the choices of one expert by row. An index in the sorted order
/// is called a place.
pub struct Routing<'s> {
    /// Number of experts that are chosen for each row.
    pub top: usize,
    /// `[rows, top]` f32: the factor of each expert's result in the row's sum.
    pub weights: Tensor<'s>,
    /// `[rows * top]` u32: the choice at each place of the sorted order.
    pub choices: Tensor<'s>,
    /// `[rows * top]` u32: the place of each choice.
    pub places: Tensor<'s>,
    /// `[experts + 1]` u32: the first place of each expert, and at the end the number of places.
    pub starts: Tensor<'s>,
    /// The experts whose weights are on this rank. Later operations skip the choices of all other
    /// experts, which other ranks compute.
    pub held: RankShard,
}

impl<'s> Routing<'s> {
    /// Returns the same choices for a rank that has only the weights of the experts in `held`.
    ///
    /// # Panics
    /// If `held` is a share of a different number of experts, or is empty.
    pub fn held(self, held: RankShard) -> Routing<'s> {
        assert!(
            held.whole == self.experts() && held.count > 0,
            "{held:?} does not match a layer of {} experts",
            self.experts()
        );
        Routing { held, ..self }
    }

    /// Returns the number of routed rows.
    pub fn rows(&self) -> usize {
        self.weights.rows()
    }

    /// Returns the number of experts of the layer.
    pub fn experts(&self) -> usize {
        self.starts.rows() - 1
    }

    pub(crate) fn view(&self) -> Routing<'_> {
        Routing {
            top: self.top,
            weights: self.weights.view(),
            choices: self.choices.view(),
            places: self.places.view(),
            starts: self.starts.view(),
            held: self.held,
        }
    }
}

/// Rule for choosing a row's experts from its logits and computing their routing weights.
#[derive(Clone, Copy)]
pub struct RoutingRule<'a> {
    /// Number of experts that are chosen for each row.
    pub top: usize,
    /// `true` if a row's weights are scaled to add up to 1. Otherwise the weights are the
    /// probabilities of the softmax over all experts.
    pub renormalized: bool,
    /// Factor of the logits. It must be greater than 0, because experts are chosen by the unscaled
    /// logits.
    pub logit_scale: f32,
    /// `[experts]` f32: factor of each expert's routing weight, applied after renormalization.
    /// `None` means 1.
    pub expert_scales: Option<&'a Tensor<'a>>,
}

impl RoutingRule<'_> {
    /// Chooses the `top` experts and renormalizes their weights to add up to 1.
    pub fn renormalized(top: usize) -> Self {
        RoutingRule { renormalized: true, ..RoutingRule::softmax(top) }
    }

    /// Chooses the `top` experts. Their weights are their softmax probabilities over all experts.
    pub fn softmax(top: usize) -> Self {
        RoutingRule { top, renormalized: false, logit_scale: 1.0, expert_scales: None }
    }
}

/// Chooses experts. Among equal logits, the expert with the lower index comes first. NaN logits
/// come last, and each weight whose softmax includes a NaN is NaN.
#[non_exhaustive]
pub struct Route<'a> {
    /// `[rows, experts]` f32. A gap between rows is allowed.
    pub logits: Tensor<'a>,
    /// `top` equals the number of choices per row in `out`.
    pub rule: RoutingRule<'a>,
    /// Scratch declared with [`Target::route_scratch`](crate::Target::route_scratch); may be empty.
    pub scratch: Tensor<'a>,
    pub out: Routing<'a>,
    /// `[experts]` u32 counters, to which the number of each expert's choices
    /// is added, with wrapping.
    pub loads: Tensor<'a>,
    /// `[rows]` u32: the KV cache slot of each row. The choices of a row without a slot
    /// ([`NO_SLOT`](super::NO_SLOT)) are not counted.
    pub slots: Option<Tensor<'a>>,
}

/// Computes `norm`, then the router's logits from the unquantized rows of the norm, then `routing`
/// of the logits. No other operation reads the logits.
#[non_exhaustive]
pub struct RmsNormRoute<'a> {
    /// The norm, whose output includes unquantized rows.
    pub norm: RmsNorm<'a>,
    /// The GEMM with the router's weight, with f32 output and without a bias.
    pub product: Linear<'a>,
    /// The routing, whose logits are the output of `product`.
    pub routing: Route<'a>,
}

/// Computes `out[place] = activation(gate) * up`, where `[gate | up] = x[row] @ weight[expert]^T` for
/// the row and the expert of the choice at `place` in the sorted order. Rows of `out` for experts that
/// this rank does not hold are undefined.
#[non_exhaustive]
pub struct GatedExperts<'a> {
    /// `[rows, in_features]` activations, only in the format that the weight requires. A gap
    /// between unquantized rows is allowed.
    pub x: Activations<'a>,
    /// `[experts * 2 * features, in_features]`, contiguous: for each expert of this rank, the gate
    /// rows, then the up rows.
    pub weight: Weight<'a>,
    /// The experts of each row.
    pub routing: Routing<'a>,
    pub activation: GateActivation,
    /// Scratch declared with
    /// [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// Scratch declared with [`Target::gated_rows_scratch`](crate::Target::gated_rows_scratch).
    /// Empty if `out` has unquantized rows.
    pub gated: Tensor<'a>,
    /// `[rows * top, features]` in the requested formats, in the routing's sorted order.
    pub out: Activations<'a>,
}

/// Computes `sum[row] = Σ weight of the choice * (x[place] @ weight[expert]^T)` over the choices of
/// each row whose experts this rank holds. The terms are added in the order of the choices' ranks,
/// so that the bits of a row do not depend on the other rows. The result is added to the contents
/// of `sum` if `accumulate` is set.
#[non_exhaustive]
pub struct AddExperts<'a> {
    /// `[rows * top, in_features]` activations, only in the format that the weight requires, in the
    /// routing's sorted order.
    pub x: Activations<'a>,
    /// `[experts * out_features, in_features]`, contiguous: the rows of each expert of this rank.
    pub weight: Weight<'a>,
    /// The experts of each row.
    pub routing: Routing<'a>,
    /// `[rows * top, out_features]` activations: space for the GEMM result of each choice. The
    /// contents are undefined afterward.
    pub products: Tensor<'a>,
    /// Scratch declared with
    /// [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// `true` to add to the contents of `sum` instead of replacing them.
    pub accumulate: bool,
    /// `[rows, out_features]` activations. A gap between rows is allowed.
    pub sum: Tensor<'a>,
}

/// Computes `experts`, whose sum is rounded to the type of activations, and then
/// `out = sum / sqrt(mean(sum^2) + epsilon) * (weight + weight_offset)`, row by row, with the mean
/// in `f32`.
#[non_exhaustive]
pub struct AddExpertsRmsNorm<'a> {
    /// The sum over experts, with `accumulate` set. This rank has all experts of the routing.
    pub experts: AddExperts<'a>,
    /// `[out_features]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to each weight: 1 for norms whose stored weights are centered on zero, otherwise 0.
    pub weight_offset: f32,
    /// Constant added to the mean square.
    pub epsilon: f32,
    /// `[rows, out_features]` in the requested formats.
    pub out: Activations<'a>,
}
