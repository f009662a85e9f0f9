//! Routing of tokens to experts: softmax over the router's logits, the choice of the `top` largest
//! (Shazeer et al. 2017, arXiv 1701.06538), and a sort of all choices by expert, so that each
//! expert's rows are contiguous.
//!
//! The sizes of all tensors depend only on the numbers of tokens and experts and on `top`, not on
//! the choices, so a plan computes them exactly.

use bursar_budgets::Bytes;

use super::check;
use crate::{Backend, KernelError, RankShard, Scope, Tensor, Weight, Work};

/// Maximum number of experts of a layer.
pub const EXPERTS_MAX: usize = 512;

/// Maximum number of experts of a token.
pub const TOP_MAX: usize = 32;

/// The router's choices. Choice `row * top + rank` is the expert number `rank` of the row, in
/// descending order of likelihood.
///
/// Choices are sorted by expert, and the choices of one expert by row. An index in the sorted order
/// is called a place.
pub struct Routing<'s> {
    /// Number of experts per row.
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
        assert!(held.whole == self.experts() && held.count > 0, "{held:?} of {} experts", self.experts());
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

    /// Returns the bytes of the experts' weight that a pass reads, which is an estimate because the
    /// rows are not routed yet.
    pub(super) fn weight_bytes(&self, weight: &Weight<'_>) -> Bytes {
        let chosen = self.held.count as f64 * share_chosen(self.experts(), self.top, self.rows());
        let each = weight.bytes().0 as f64 / self.held.count as f64;
        Bytes((each * chosen).round() as u64)
    }
}

/// Returns the expected share of experts that at least one of `rows` rows chooses, if each row
/// independently chooses `top` experts at random.
fn share_chosen(experts: usize, top: usize, rows: usize) -> f64 {
    1.0 - (1.0 - top as f64 / experts as f64).powf(rows as f64)
}

/// Chooses experts. Among equal logits, the expert with the lower index comes first. NaN logits
/// come last, and each weight whose softmax includes a NaN is NaN.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, experts]` f32. A gap between rows is allowed.
    pub logits: Tensor<'a>,
    /// `true` if a row's weights are scaled to add up to 1. Otherwise the weights are the
    /// probabilities of the softmax over all experts.
    pub renormalised: bool,
    /// Scratch declared with [`Target::route_scratch`](crate::Target::route_scratch); may be empty.
    pub scratch: Tensor<'a>,
    pub out: Routing<'a>,
    /// `[experts]` u32 counters, to which the number of each expert's choices
    /// is added, with wrapping.
    pub loads: Tensor<'a>,
    /// `[rows]` u32: the KV cache slot of each row. The choices of a row without a slot
    /// ([`NO_SLOT`](super::rotary_kv_write::NO_SLOT)) are not counted.
    pub slots: Option<Tensor<'a>>,
}

impl<B: Backend> Scope<'_, B> {
    /// Chooses `top` experts for each row of `logits` `[rows, experts]` f32, and adds the number of
    /// each expert's choices to `loads` `[experts]` u32, with wrapping.
    ///
    /// # Errors
    /// The shapes disagree, there are more than [`EXPERTS_MAX`] experts, or
    /// `top` is above [`TOP_MAX`].
    pub fn route(
        &self,
        logits: &Tensor<'_>,
        top: usize,
        renormalised: bool,
        loads: &Tensor<'_>,
    ) -> Result<Routing<'_>, KernelError> {
        let out = self.routing(logits, top, loads)?;
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().route_scratch(logits.rows(), logits.columns()))?;
        self.backend.route(Call {
            logits: logits.view(),
            renormalised,
            scratch: scratch.view(),
            out: out.view(),
            loads: loads.view(),
            slots: None,
        })?;
        drop(inner);
        Ok(out)
    }

    /// Checks the arguments, allocates space for the choices, and counts the work.
    pub(super) fn routing(
        &self,
        logits: &Tensor<'_>,
        top: usize,
        loads: &Tensor<'_>,
    ) -> Result<Routing<'_>, KernelError> {
        const OP: &str = "route";
        check::f32(OP, "logits", logits)?;
        let (rows, experts) = (logits.rows(), logits.columns());
        check::holds((1..=EXPERTS_MAX).contains(&experts), OP, "logits", logits, "1 to 512 experts")?;
        check::holds(
            (1..=experts.min(TOP_MAX)).contains(&top),
            OP,
            "logits",
            logits,
            "as many experts as a row takes, of 32 at most",
        )?;
        check::index_list(OP, "loads", loads)?;
        check::shape(OP, "loads", loads, [experts])?;
        check::writable(OP, "loads", loads);
        let out = Routing {
            top,
            weights: self.empty_f32([rows, top])?,
            choices: self.empty_u32([rows * top])?,
            places: self.empty_u32([rows * top])?,
            starts: self.empty_u32([experts + 1])?,
            held: RankShard::all(experts),
        };
        let flops = (rows * experts * (5 + top)) as u64;
        self.count(Work::over(flops, &[logits, &out.weights, &out.choices, &out.places, &out.starts, loads, loads]));
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_choose_any_experts_share_some() {
        let chosen = |rows| (128.0 * share_chosen(128, 8, rows)).round();
        assert_eq!([1, 2, 16, 64, 1000].map(chosen), [8.0, 16.0, 82.0, 126.0, 128.0]);
        assert_eq!(share_chosen(8, 8, 1), 1.0);
    }
}
