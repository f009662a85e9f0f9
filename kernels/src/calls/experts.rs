//! Mixtures of experts.

use super::{Linear, RmsNorm};
use crate::{Activations, RankShard, Tensor, Weight};

/// Maximum number of experts of a layer.
pub const EXPERTS_MAX: usize = 512;

/// Maximum number of experts of a token.
pub const TOP_MAX: usize = 32;

/// The router's choices. Choice `row * top + rank` is the expert at this rank of
/// the row, likeliest first.
///
/// Choices are sorted by expert, and the choices of one expert by row. An index in the sorted order
/// is called a place.
pub struct Routing<'s> {
    /// Experts of a row.
    pub top: usize,
    /// `[rows, top]` f32: the factor of each expert's result in the row's sum.
    pub weights: Tensor<'s>,
    /// `[rows * top]` u32: the choice at each place of the sorted order.
    pub choices: Tensor<'s>,
    /// `[rows * top]` u32: the place of each choice.
    pub places: Tensor<'s>,
    /// `[experts + 1]` u32: the first place of each expert, and at the end the number of places.
    pub starts: Tensor<'s>,
    /// The experts whose weights this rank holds. Later operations skip the choices of other
    /// experts, which other ranks compute.
    pub held: RankShard,
}

impl<'s> Routing<'s> {
    /// The same choices on a rank that holds only the weights of the experts in `held`.
    ///
    /// # Panics
    /// If `held` is a share of a different number of experts, or is empty.
    pub fn held(self, held: RankShard) -> Routing<'s> {
        assert!(held.whole == self.experts() && held.count > 0, "{held:?} of {} experts", self.experts());
        Routing { held, ..self }
    }

    /// Number of routed rows.
    pub fn rows(&self) -> usize {
        self.weights.rows()
    }

    /// Number of experts of the layer.
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

/// Chooses experts. Among equal logits, the expert with the lower index comes first. NaN logits
/// come last, and each weight whose softmax includes a NaN is NaN.
#[non_exhaustive]
pub struct Route<'a> {
    /// `[rows, experts]` f32. A gap between rows is allowed.
    pub logits: Tensor<'a>,
    /// Whether a row's weights are scaled to add up to 1. Otherwise they are the probabilities of
    /// the softmax over all experts.
    pub renormalised: bool,
    /// Scratch declared with [`Target::route_scratch`](crate::Target::route_scratch); may be empty.
    pub scratch: Tensor<'a>,
    pub out: Routing<'a>,
    /// `[experts]` u32: the number of each expert's choices is added to it, and wraps.
    pub loads: Tensor<'a>,
    /// `[rows]` u32. The choices of a row without a slot
    /// ([`NO_SLOT`](super::NO_SLOT)) are not counted.
    pub slots: Option<Tensor<'a>>,
}

/// Computes `norm`, then the router's logits from its plain rows, then `routing` of the logits. No
/// other operation reads the logits.
#[non_exhaustive]
pub struct RmsNormRoute<'a> {
    /// The norm, whose output includes plain rows.
    pub norm: RmsNorm<'a>,
    /// The product with the router's weight, into f32 and without a bias.
    pub product: Linear<'a>,
    /// The routing of the product.
    pub routing: Route<'a>,
}

/// Computes `out[place] = silu(gate) * up`, where `[gate | up] = x[row] @ weight[expert]^T` for the
/// row and the expert of the choice at `place` in the sorted order. Rows of `out` for experts that
/// this rank does not hold are undefined.
#[non_exhaustive]
pub struct GatedExperts<'a> {
    /// `[rows, in_features]` activations, only in the format that the weight wants. A gap between
    /// plain rows is allowed.
    pub x: Activations<'a>,
    /// `[experts * 2 * features, in_features]`, contiguous: for each expert that this rank
    /// holds, gate, then up.
    pub weight: Weight<'a>,
    /// The experts of each row.
    pub routing: Routing<'a>,
    /// Scratch declared with
    /// [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// Scratch declared with [`Target::gated_rows_scratch`](crate::Target::gated_rows_scratch).
    /// Empty if `out` has plain rows.
    pub gated: Tensor<'a>,
    /// `[rows * top, features]` in the requested formats, in the routing's sorted order.
    pub out: Activations<'a>,
}

/// Computes `sum[row] = Σ weight of the choice * (x[place] @ weight[expert]^T)` over the choices of
/// each row whose experts this rank holds. The sum is taken in the order of the choices' ranks, so
/// that a row has the same bits whatever the other rows are. The result is added to the contents of
/// `sum` if `accumulate` is set.
#[non_exhaustive]
pub struct AddExperts<'a> {
    /// `[rows * top, in_features]` activations, only in the format that the weight wants, in
    /// the routing's sorted order.
    pub x: Activations<'a>,
    /// `[experts * out_features, in_features]`, contiguous.
    pub weight: Weight<'a>,
    /// The experts of each row.
    pub routing: Routing<'a>,
    /// `[rows * top, out_features]` activations: space for each
    /// expert's product. Undefined afterwards.
    pub products: Tensor<'a>,
    /// Scratch declared with
    /// [`Target::experts_scratch`](crate::Target::experts_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// Add to the contents of `sum` instead of replacing them.
    pub accumulate: bool,
    /// `[rows, out_features]` activations. A gap between rows is allowed.
    pub sum: Tensor<'a>,
}

/// Computes `experts`, whose sum is rounded to the type of activations, and then
/// `out = sum / sqrt(mean(sum^2) + epsilon) * weight`, row by row, with the mean in `f32`.
#[non_exhaustive]
pub struct AddExpertsRmsNorm<'a> {
    /// The sum over experts. It accumulates, and this rank holds all experts of its routing.
    pub experts: AddExperts<'a>,
    /// `[out_features]`, floating point.
    pub weight: Tensor<'a>,
    /// Added to the mean square.
    pub epsilon: f32,
    /// `[rows, out_features]` in the requested formats.
    pub out: Activations<'a>,
}
