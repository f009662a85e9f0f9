//! Launch arguments that only kernels over an E4M3 KV cache need.

use bursar_budgets::Address;

use super::{contract::E4m3Cache, functions::Function, lane::Cuda};
use crate::{DType, KernelError, KvLayer, Tensor};

/// Returns the entry points for an E4M3 cache, or `None` if the cache has the activation type.
pub(super) fn e4m3_cache<'c>(
    cuda: &'c Cuda,
    op: &'static str,
    layer: &KvLayer,
) -> Result<Option<&'c E4m3Cache<Function>>, KernelError> {
    let found = layer.shape.dtype;
    if found != DType::F8E4M3 {
        return Ok(None);
    }
    let expected = "activations; this GPU has no kernels for other types";
    let hopper = cuda.entry_points().hopper.as_ref();
    hopper.map(|hopper| Some(&hopper.e4m3_cache)).ok_or(KernelError::Type { op, what: "layer", expected, found })
}

/// Returns the address of the scales of an E4M3 cache. For other caches the address is 0, and
/// kernels do not read it.
pub(super) fn scales_address(scales: &Option<Tensor<'_>>) -> Address {
    scales.as_ref().map_or(Address(0), Tensor::address)
}
