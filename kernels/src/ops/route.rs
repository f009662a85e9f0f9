//! Which experts compute which token: softmax over the router's logits, the largest `top` of them (Shazeer et al. 2017,
//! arXiv 1701.06538), and all choices in the order of their experts, so that each expert's rows lie together.
//!
//! Everything is as large as the step's tokens times `top`, whatever is chosen, so a plan needs no guess.

use bursar_budgets::Bytes;

use super::check;
use crate::{Backend, KernelError, Scope, Share, Tensor, Weight, Work};

/// Most experts of a layer.
pub const EXPERTS_MAX: usize = 512;

/// Most experts of a token.
pub const TOP_MAX: usize = 32;

/// What the router has chosen. Choice `row * top + rank` is a row's expert of that rank, the likeliest first.
///
/// Choices stand sorted by expert, those of one expert by row.
pub struct Routing<'s> {
    /// Experts of a row.
    pub top: usize,
    /// `[rows, top]` f32: by how much the expert's result counts.
    pub weights: Tensor<'s>,
    /// `[rows * top]` u32: the choice at each place of the sorted order.
    pub choices: Tensor<'s>,
    /// `[rows * top]` u32: the place of each choice.
    pub places: Tensor<'s>,
    /// `[experts + 1]` u32: where each expert's places start, and at last where they end.
    pub starts: Tensor<'s>,
    /// The experts whose weights are here. Choices of others are left out of what follows: other ranks compute them.
    pub held: Share,
}

impl<'s> Routing<'s> {
    /// The same choices, where only these experts' weights are here.
    ///
    /// # Panics
    /// If `held` is a share of another number of experts, or of none.
    pub fn held(self, held: Share) -> Routing<'s> {
        assert!(held.whole == self.experts() && held.count > 0, "{held:?} of {} experts", self.experts());
        Routing { held, ..self }
    }

    /// Rows that were routed.
    pub fn rows(&self) -> usize {
        self.weights.rows()
    }

    /// Experts that there are.
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

    /// What a pass reads of an expert-wise weight, as far as one knows before rows are routed.
    pub(super) fn weight_bytes(&self, weight: &Weight<'_>) -> Bytes {
        let chosen = self.held.count as f64 * share_chosen(self.experts(), self.top, self.rows());
        let each = weight.bytes().0 as f64 / self.held.count as f64;
        Bytes((each * chosen).round() as u64)
    }
}

/// The share of experts that one of `rows` chooses, if each chooses any `top`, whatever the others do.
fn share_chosen(experts: usize, top: usize, rows: usize) -> f64 {
    1.0 - (1.0 - top as f64 / experts as f64).powf(rows as f64)
}

/// Chooses experts. Of equal logits the expert of the lower index comes first. A row whose logits are not numbers gets
/// weights that are none, of any experts.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[rows, experts]` f32; a gap between rows is allowed.
    pub logits: Tensor<'a>,
    /// Whether a row's weights add up to 1. If not, they are its shares of the softmax over all experts.
    pub renormalised: bool,
    /// Scratch declared with [`Target::route_scratch`](crate::Target::route_scratch); may be empty.
    pub scratch: Tensor<'a>,
    /// What is chosen.
    pub out: Routing<'a>,
    /// `[experts]` u32: each expert's choices are added to it, and it wraps.
    pub loads: Tensor<'a>,
    /// `[rows]` u32: choices of a row without a slot ([`NO_SLOT`](super::rotary_kv_write::NO_SLOT)) are not added.
    pub slots: Option<Tensor<'a>>,
}

impl<B: Backend> Scope<'_, B> {
    /// Chooses `top` experts for each row of `logits` `[rows, experts]` f32, and counts the choices in `loads` `[experts]`
    /// u32, which wraps.
    ///
    /// # Errors
    /// Shapes disagree, or there are more than [`EXPERTS_MAX`] experts or [`TOP_MAX`] of a row.
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

    /// Checks what is routed, takes room for what is chosen, and counts the work.
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
            held: Share::all(experts),
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
