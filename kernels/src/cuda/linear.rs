//! The matrix product: by cuBLASLt, or by our own kernels for few rows (up to 64), some hundred rows (up to 256) or
//! many rows, where they were measured to be faster.

use super::{
    Cuda,
    blas::{Places, Product},
    elementwise, gate_up_middle, linear_few, linear_many,
};
use crate::{DType, KernelError, Scales, Tensor, ops};

pub(super) fn linear(cuda: &Cuda, call: ops::linear::Call<'_>) -> Result<(), KernelError> {
    let (Some(x), Scales::Plain) = (call.x.lone_plain(), &call.weight.scales) else {
        return Err(KernelError::NoKernel { op: "linear" });
    };
    let weight = &call.weight.data;
    let product = Product { accumulates: call.accumulate, ..product(x, weight, call.bias.as_ref(), &call.out) };
    let places = places(x, weight, call.bias.as_ref(), &call.scratch, &call.out);
    compute(cuda, product, places, || {
        let (blas, stream, activation) = (&cuda.kernels.blas, &cuda.stream, cuda.kernels.target.activation);
        let (mut products, autotunes) = (cuda.products.borrow_mut(), cuda.autotunes.get());
        // SAFETY: the front has checked the shapes, and the tensors' makers vouch for their memory.
        let put = unsafe { products.multiply(blas, stream, activation, (product, places), autotunes) };
        Ok(put?)
    })
}

pub(super) fn gated_linear(cuda: &Cuda, call: ops::gated_linear::Call<'_>) -> Result<(), KernelError> {
    let (Some(x), Scales::Plain, Some(out)) = (call.x.lone_plain(), &call.weight.scales, call.out.lone_plain()) else {
        return Err(KernelError::NoKernel { op: "gated_linear" });
    };
    let weight = &call.weight.data;
    let product = Product { gates: true, ..product(x, weight, call.bias.as_ref(), out) };
    let places = places(x, weight, call.bias.as_ref(), &call.scratch, out);
    compute(cuda, product, places, || {
        let product = ops::linear::Call {
            x: call.x.view(),
            weight: call.weight.view(),
            bias: call.bias.as_ref().map(Tensor::view),
            accumulate: false,
            scratch: call.scratch.view(),
            out: call.gate_up.view(),
        };
        linear(cuda, product)?;
        elementwise::silu_mul(cuda, ops::silu_mul::Call { gate_up: call.gate_up.view(), out: call.out.view() })
    })
}

/// Computes the product with one of our kernels if it was chosen, otherwise with `other`.
fn compute(
    cuda: &Cuda,
    product: Product,
    places: Places,
    other: impl Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    cuda.enter()?;
    if product.rows == 0 || product.out_features == 0 {
        return Ok(());
    }
    if cuda.autotunes.get() {
        cuda.autotuner.borrow_mut().meet(product, places);
    }
    if let Some(cut) = linear_few::chosen(cuda, product, places) {
        // SAFETY: the front has checked the shapes, the tensors' makers vouch for their memory, and kernels that write
        // weights have finished before a pass starts.
        return unsafe { linear_few::launch(cuda, product, places, cut) };
    }
    if gate_up_middle::chosen(cuda, product, places) {
        // SAFETY: as above.
        return unsafe { gate_up_middle::launch(cuda, product, places) };
    }
    if linear_many::chosen(cuda, product, places, &other)? {
        // SAFETY: as above.
        return unsafe { linear_many::launch(cuda, product, places) };
    }
    other()
}

/// The product's shape, without a gate or accumulation.
fn product(x: &Tensor<'_>, weight: &Tensor<'_>, bias: Option<&Tensor<'_>>, out: &Tensor<'_>) -> Product {
    Product {
        gates: false,
        out_features: weight.rows(),
        in_features: weight.columns(),
        out_pitch: pitch(out),
        x_pitch: pitch(x),
        out_is_f32: out.dtype() == DType::F32,
        has_bias: bias.is_some(),
        accumulates: false,
        rows: x.rows(),
    }
}

fn places(
    x: &Tensor<'_>,
    weight: &Tensor<'_>,
    bias: Option<&Tensor<'_>>,
    scratch: &Tensor<'_>,
    out: &Tensor<'_>,
) -> Places {
    Places {
        weight: weight.address().0,
        x: x.address().0,
        bias: bias.map(|bias| bias.address().0),
        out: out.address().0,
        workspace: scratch.address().0,
        workspace_bytes: scratch.bytes().as_usize(),
    }
}

/// A single row may have any pitch; the library requires one no shorter than the row.
fn pitch(tensor: &Tensor<'_>) -> usize {
    tensor.pitch().max(tensor.columns())
}
