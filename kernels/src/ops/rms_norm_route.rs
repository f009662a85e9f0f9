//! The operations before the experts of a mixture: the norm of the residual stream, the router's
//! logits, and the routing.

use super::{
    check,
    rms_norm::RmsNorm,
    route::{Routing, RoutingRule},
};
use crate::{Activations, Backend, DType, KernelError, Scope, Tensor, Weight, Work, calls};

#[derive(Clone, Copy)]
pub struct Router<'a> {
    /// `[experts, hidden]`, contiguous.
    pub weight: &'a Tensor<'a>,
    pub rule: RoutingRule<'a>,
    /// `[experts]` u32 counters, to which the number of each expert's choices
    /// is added, with wrapping.
    pub loads: &'a Tensor<'a>,
    /// `[rows]` u32: the KV cache slot of each row. Rows without a slot
    /// ([`NO_SLOT`](super::rotary_kv_write::NO_SLOT)) are padding of a captured step, and their
    /// choices are not counted.
    pub slots: Option<&'a Tensor<'a>>,
}

impl<B: Backend> Scope<'_, B> {
    /// Normalizes the rows of `x` `[rows, hidden]` into `normed` like
    /// [`rms_norm_into`](Scope::rms_norm_into), and [`route`](Scope::route)s them by `router`. The
    /// logits are f32, because rounding could change which experts are chosen.
    ///
    /// # Errors
    /// The errors of [`rms_norm_into`](Scope::rms_norm_into), [`route`](Scope::route) and
    /// [`linear_into`](Scope::linear_into).
    ///
    /// # Panics
    /// If `normed` has no unquantized rows.
    pub fn rms_norm_route(
        &self,
        x: &Tensor<'_>,
        norm: RmsNorm<'_>,
        normed: &mut Activations<'_>,
        router: Router<'_>,
    ) -> Result<Routing<'_>, KernelError> {
        const OP: &str = "rms_norm_route";
        norm.check(OP, x, normed, self.target())?;
        let (rows, weight) = (x.rows(), Weight::from(router.weight));
        let plain = Activations::from(normed.plain());
        self.check_product(OP, &plain, &weight, None)?;
        let (experts, hidden) = (weight.rows(), weight.columns());
        if let Some(slots) = router.slots {
            check::index_list(OP, "slots", slots)?;
            check::shape(OP, "slots", slots, [rows])?;
        }
        let logits = self.empty_f32([rows, experts])?;
        let out = self.routing(&logits, router.rule, router.loads)?;
        let mut work =
            Work::over((rows * hidden * (4 + 2 * experts)) as u64, &[x, norm.weight, normed.plain(), &logits]);
        work.bytes += normed.bytes() + weight.bytes();
        self.count(work);
        let inner = self.scope();
        let of_product =
            inner.take_scratch(self.target().linear_scratch([experts, hidden], weight.dtype(), DType::F32))?;
        let of_routing = inner.take_scratch(self.target().route_scratch(rows, experts))?;
        self.backend.rms_norm_route(calls::RmsNormRoute {
            norm: norm.call(x, normed),
            product: calls::Linear {
                x: plain.view(),
                weight: weight.view(),
                bias: None,
                accumulate: false,
                scratch: of_product.view(),
                out: logits.view(),
            },
            routing: calls::Route {
                logits: logits.view(),
                rule: router.rule,
                scratch: of_routing.view(),
                out: out.view(),
                loads: router.loads.view(),
                slots: router.slots.map(Tensor::view),
            },
        })?;
        drop(inner);
        Ok(out)
    }
}
