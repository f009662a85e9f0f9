//! The kernels over a quantized KV cache.

use super::{contract::QuantizedCache, functions::Function, lane::Cuda};
use crate::{KernelError, KvLayer};

/// Returns the entry points for a quantized cache, or `None` if the cache has the activation type.
pub(super) fn quantized_cache<'c>(
    cuda: &'c Cuda,
    op: &'static str,
    layer: &KvLayer,
) -> Result<Option<&'c QuantizedCache<Function>>, KernelError> {
    let found = layer.shape.dtype;
    if !found.needs_scales() {
        return Ok(None);
    }
    let expected = "activations; this GPU has no kernels for other types";
    let hopper = cuda.entry_points().hopper.as_ref();
    hopper.map(|hopper| Some(&hopper.quantized_cache)).ok_or(KernelError::Type { op, what: "layer", expected, found })
}
