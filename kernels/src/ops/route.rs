//! Routing of tokens to experts: softmax over the router's logits, the choice of the `top` largest
//! (Shazeer et al. 2017, arXiv 1701.06538), and a sort of all choices by expert, so that each
//! expert's rows are contiguous.
//!
//! The sizes of all tensors depend only on the numbers of tokens and experts and on `top`, not on
//! the choices, so a plan computes them exactly.

use bursar_budgets::Bytes;

use super::check;
use crate::{Backend, KernelError, RankShard, Scope, Tensor, Weight, Work, calls};

pub use crate::calls::{EXPERTS_MAX, Routing, RoutingRule, TOP_MAX};

impl Routing<'_> {
    /// Returns an estimate of the bytes of the experts' weight that a pass reads. The exact number
    /// is unknown, because the rows are not routed yet.
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

impl<B: Backend> Scope<'_, B> {
    /// Chooses experts by `rule` for each row of `logits` `[rows, experts]` f32, and adds the number
    /// of each expert's choices to `loads` `[experts]` u32, with wrapping.
    ///
    /// # Errors
    /// The shapes disagree, there are more than [`EXPERTS_MAX`] experts, or
    /// `rule.top` is above [`TOP_MAX`].
    ///
    /// # Panics
    /// If `rule.logit_scale` is not above 0.
    pub fn route(
        &self,
        logits: &Tensor<'_>,
        rule: RoutingRule<'_>,
        loads: &Tensor<'_>,
    ) -> Result<Routing<'_>, KernelError> {
        let out = self.routing(logits, rule, loads)?;
        let inner = self.scope();
        let scratch = inner.take_scratch(self.target().route_scratch(logits.rows(), logits.columns()))?;
        self.backend.route(calls::Route {
            logits: logits.view(),
            rule,
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
        rule: RoutingRule<'_>,
        loads: &Tensor<'_>,
    ) -> Result<Routing<'_>, KernelError> {
        const OP: &str = "route";
        let top = rule.top;
        check::f32(OP, "logits", logits)?;
        let (rows, experts) = (logits.rows(), logits.columns());
        check::holds((1..=EXPERTS_MAX).contains(&experts), OP, "logits", logits, "1 to 512 experts")?;
        check::holds(
            (1..=experts.min(TOP_MAX)).contains(&top),
            OP,
            "logits",
            logits,
            "a `top` of 1 to 32 that is at most the number of experts",
        )?;
        if let Some(scales) = rule.expert_scales {
            check::f32(OP, "expert_scales", scales)?;
            check::shape(OP, "expert_scales", scales, [experts])?;
        }
        assert!(rule.logit_scale > 0.0, "the factor of the router's logits is {}, not above 0", rule.logit_scale);
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
    fn the_expected_share_of_chosen_experts_counts_overlaps() {
        let chosen = |rows| (128.0 * share_chosen(128, 8, rows)).round();
        assert_eq!([1, 2, 16, 64, 1000].map(chosen), [8.0, 16.0, 82.0, 126.0, 128.0]);
        assert_eq!(share_chosen(8, 8, 1), 1.0);
    }
}
