//! Launch arguments that only kernels over a quantized KV cache need.

use bursar_budgets::Address;

use super::{contract::QuantizedCache, functions::Function, lane::Cuda};
use crate::{KernelError, KvLayer, Tensor};

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

/// Returns the address of the scales of a quantized cache. For other caches the address is 0, and
/// kernels do not read it.
pub(super) fn address_or_null(scales: &Option<Tensor<'_>>) -> Address {
    scales.as_ref().map_or(Address(0), Tensor::address)
}
