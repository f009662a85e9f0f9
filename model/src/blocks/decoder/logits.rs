//! The logits of a decoder's rows.

use bursar_kernels::{Backend, KernelError, Scope, Tensor, Weight, ops::rms_norm::RmsNorm};

use super::Decoder;
use crate::flow::LogitsOf;

impl Decoder {
    /// The output projection, `[padded own tokens, hidden]`.
    pub(super) fn head(&self) -> &Weight<'static> {
        self.projection.as_ref().unwrap_or(&self.embedding)
    }

    /// Whether this rank's head computes all the logits that `of` asks for, so
    /// that nothing is gathered.
    pub(super) fn has_own<B: Backend>(&self, scope: &Scope<'_, B>, of: LogitsOf) -> bool {
        self.share.rank.is_alone() || of == LogitsOf::OwnRank && scope.chooses_among_ranks()
    }

    /// Allocates the logits of `rows` rows, including padding columns, `[rows, padded tokens]`.
    pub(super) fn empty_logits<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        rows: usize,
        of: LogitsOf,
    ) -> Result<Tensor<'s>, KernelError> {
        let columns = if self.has_own(scope, of) {
            self.head().rows()
        } else {
            self.share.rank.of() * self.share.tokens_of_each()
        };
        scope.empty_f32([rows, columns])
    }

    /// Writes the logits of `chosen` `[rows, hidden]`, after `norm`, to `logits`, and returns the
    /// logits without padding columns: `[rows, vocabulary]` or `[rows, own tokens]`, possibly with
    /// gaps between rows. `weight` `[padded own tokens, hidden]` is the output projection.
    pub(super) fn project<'s, B: Backend>(
        &self,
        weight: &Weight<'static>,
        scope: &Scope<'_, B>,
        chosen: &Tensor<'_>,
        norm: Option<RmsNorm<'_>>,
        of: LogitsOf,
        mut logits: Tensor<'s>, // [rows, padded tokens]
    ) -> Result<Tensor<'s>, KernelError> {
        if chosen.rows() > 0 {
            let scope = scope.scope();
            let normed = norm.map(|norm| scope.rms_norm(chosen, norm)).transpose()?;
            let normed = normed.as_ref().unwrap_or(chosen);
            if self.has_own(&scope, of) {
                scope.linear_into(normed, weight, None, &mut logits)?;
                self.cap_logits(&scope, &mut logits)?;
            } else {
                let mut own = scope.empty_f32([chosen.rows(), weight.rows()])?;
                scope.linear_into(normed, weight, None, &mut own)?;
                self.cap_logits(&scope, &mut own)?;
                scope.all_gather_into(&own.column_range(0..self.share.tokens_of_each()), &mut logits)?;
            }
        }
        let tokens = if self.has_own(scope, of) { self.share.vocabulary.count } else { self.config.vocabulary };
        Ok(logits.into_column_range(0..tokens))
    }

    /// Applies logit softcapping, if the model has it.
    fn cap_logits<B: Backend>(&self, scope: &Scope<'_, B>, logits: &mut Tensor<'_>) -> Result<(), KernelError> {
        self.config.logit_softcap.map_or(Ok(()), |cap| scope.soft_cap(logits, cap))
    }
}
