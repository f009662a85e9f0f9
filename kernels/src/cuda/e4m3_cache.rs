//! What launches over a cache in E4M3 have beyond others.

use bursar_budgets::Address;

use super::{Cuda, contract::E4m3Cache, launch::Function};
use crate::{DType, KernelError, KvLayer, Tensor};

/// The entry points of a cache in E4M3; `None` for one of activations' type.
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

/// The scales of a cache in E4M3 for kernels, which do not look at them otherwise.
pub(super) fn scales_address(scales: &Option<Tensor<'_>>) -> Address {
    scales.as_ref().map_or(Address(0), Tensor::address)
}
