//! The matrix product, by cuBLASLt.

use super::{
    Cuda,
    blas::{Places, Product},
};
use crate::{DType, KernelError, Tensor, ops::linear::Call};

pub(super) fn linear(cuda: &Cuda, call: Call<'_>) -> Result<(), KernelError> {
    cuda.enter()?;
    if call.out.shape().elements() == 0 {
        return Ok(());
    }
    let product = Product {
        out_features: call.weight.rows(),
        in_features: call.weight.columns(),
        out_pitch: pitch(&call.out),
        x_pitch: pitch(&call.x),
        out_is_f32: call.out.dtype() == DType::F32,
        has_bias: call.bias.is_some(),
        accumulates: call.accumulate,
        rows: call.x.rows(),
    };
    let places = Places {
        weight: call.weight.address().0,
        x: call.x.address().0,
        bias: call.bias.as_ref().map(|bias| bias.address().0),
        out: call.out.address().0,
        workspace: call.scratch.address().0,
        workspace_bytes: call.scratch.bytes().as_usize(),
    };
    let activation = cuda.kernels.target.activation;
    let mut products = cuda.products.borrow_mut();
    // SAFETY: the front has checked the shapes, and the tensors' makers vouch for their memory.
    let put = unsafe {
        let (blas, stream) = (&cuda.kernels.blas, &cuda.stream);
        products.multiply(blas, stream, activation, (product, places), cuda.rehearses.get())
    };
    Ok(put?)
}

/// One row may have any pitch; the library wants one that is no shorter than the row.
fn pitch(tensor: &Tensor<'_>) -> usize {
    tensor.pitch().max(tensor.columns())
}
