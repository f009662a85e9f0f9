//! The part of a decoder layer in which tokens exchange information.

use bursar_kernels::{ActivationFormat, Activations, Backend, KernelError, Scope, ops::rotary::Rope};

use super::{
    gated_delta_net::GatedDeltaNet, layer_cache::LayerCache, mixed::Mixed, paged_attention::PagedAttention,
    step_inputs::StepInputs,
};
use crate::weights::Linear;

#[expect(clippy::large_enum_variant, reason = "there is one value per layer, so the size does not matter")]
pub enum Mixer {
    Attention(PagedAttention),
    GatedDelta(GatedDeltaNet),
}

impl Mixer {
    /// The activation format that the input projections read directly.
    pub fn reads(&self) -> ActivationFormat {
        match self {
            Mixer::Attention(attention) => attention.qkv.reads(),
            Mixer::GatedDelta(net) => net.reads(),
        }
    }

    /// The output projection, `[hidden, width]`.
    pub fn out(&self) -> &Linear {
        match self {
            Mixer::Attention(attention) => &attention.out,
            Mixer::GatedDelta(net) => net.out(),
        }
    }

    /// Mixes the tokens of `normed` `[tokens, hidden]` with the earlier tokens of their sequences,
    /// and writes keys and values, or the new states, to `cache`.
    pub fn mix<'s, B: Backend>(
        &self,
        scope: &'s Scope<'_, B>,
        normed: &Activations<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<Mixed<'s>, KernelError> {
        match self {
            Mixer::Attention(attention) => attention.mix(scope, normed, rope, step, cache),
            Mixer::GatedDelta(net) => net.mix(scope, normed, step, cache.state()),
        }
    }

    /// Writes keys and values, or the new states, to `cache` and returns no result.
    pub fn write<B: Backend>(
        &self,
        scope: &Scope<'_, B>,
        normed: &Activations<'_>,
        rope: &Rope<'_>,
        step: &StepInputs<'_>,
        cache: &LayerCache,
    ) -> Result<(), KernelError> {
        match self {
            Mixer::Attention(attention) => attention.project(scope, normed, rope, step, cache).map(drop),
            Mixer::GatedDelta(net) => net.mix(scope, normed, step, cache.state()).map(drop),
        }
    }
}
