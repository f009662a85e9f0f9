//! GEMMs: by cuBLASLt, or by one of this project's kernels if it was measured to be faster. There
//! are kernels for few rows (up to 64), some hundred rows (up to 256) and many rows. Each GPU
//! generation has separate kernels for FP8 weights.

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{GemmOperands, GemmProblem, QuantScheme},
    contract::fp8::BLOCK_ROWS_MIN,
    elementwise, gate_up_middle, linear_e4m3, linear_few, linear_many, quantize, transposed_scales,
};
use crate::{Activations, DType, KernelError, Quantization, Rounded, Tensor, Weight, WeightScales, ops};

pub(super) fn linear(cuda: &Cuda, call: ops::linear::Call<'_>) -> Result<(), KernelError> {
    let operands = Operands::of(&call.x, &call.weight).ok_or(KernelError::NoKernel { op: "linear" })?;
    let product = GemmProblem { accumulates: call.accumulate, ..operands.product(call.bias.as_ref(), &call.out) };
    let places = operands.places(call.bias.as_ref(), &call.scratch, &call.out);
    compute(cuda, product, places, linear_many::Output::PLAIN, || {
        if let Some(kernels) = linear_e4m3::serving(cuda, product, places) {
            // SAFETY: the op layer has checked the shapes, and the creators of the tensors
            // guarantee that their memory is valid.
            return unsafe { linear_e4m3::launch(cuda, kernels, product, places) };
        }
        if !linear_many::library_has(cuda, product, places)? {
            // SAFETY: the op layer has checked the shapes, and the creators of the tensors
            // guarantee that their memory is valid.
            return unsafe { linear_few::launch_in_turns(cuda, product, places) };
        }
        let (blas, stream, activation) = (&cuda.kernels.blas, &cuda.stream, cuda.kernels.target.activation);
        let ((product, places), rest) = linear_many::parts(cuda, product, places);
        // SAFETY: the op layer has checked the shapes, and nothing else uses the workspace until
        // this GEMM has ended.
        let places = unsafe { transposed_scales::transposed(cuda, product, places)? };
        let (mut products, autotunes) = (cuda.products.borrow_mut(), cuda.autotunes.get());
        // SAFETY: the op layer has checked the shapes, and the creators of the tensors guarantee
        // that their memory is valid.
        unsafe { products.multiply(blas, stream, activation, (product, places), autotunes)? };
        match rest {
            // SAFETY: the op layer has checked the shapes, and this kernel uses the workspace only
            // after the library's kernel has ended.
            Some((rest, places)) => unsafe { linear_few::launch(cuda, rest, places, linear_few::CUTS[0]) },
            None => Ok(()),
        }
    })
}

pub(super) fn gated_linear(cuda: &Cuda, call: ops::gated_linear::Call<'_>) -> Result<(), KernelError> {
    let operands = Operands::of(&call.x, &call.weight).ok_or(KernelError::NoKernel { op: "gated_linear" })?;
    let apart = || {
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
    };
    let features = call.weight.rows() / 2;
    let compute = |out: &Tensor<'_>, rounding: linear_many::Output| {
        let product = GemmProblem { gates: true, ..operands.product(call.bias.as_ref(), out) };
        let places = operands.places(call.bias.as_ref(), &call.scratch, out);
        compute(cuda, product, places, rounding, apart)
    };
    match (&call.out.plain, &call.out.rounded) {
        (Some(plain), None) => compute(plain, linear_many::Output::PLAIN),
        (None, Some(rounded)) if !operands.scheme.is_unquantized() => match rounded.quantization {
            Quantization::Groups => compute(&rounded.data, linear_many::Output::groups(rounded.scales.address())),
            Quantization::Fixed(scale) => compute(&rounded.data, linear_many::Output::fixed(scale)),
            // The scale of a row is known only when all tiles of the row are computed.
            // The unquantized output is therefore written to the memory of the gate's
            // input, and rounded afterwards.
            Quantization::Rows => {
                let rows = call.gate_up.rows();
                let plain = Tensor::over(call.gate_up.address(), [rows, features].into(), call.gate_up.dtype());
                let round = || {
                    let out = Rounded {
                        data: rounded.data.view(),
                        scales: rounded.scales.view(),
                        quantization: rounded.quantization,
                    };
                    quantize::quantize(cuda, ops::quantize::Call { x: plain.view(), out })
                };
                compute(&plain, linear_many::Output::followed_by(&round))
            }
        },
        _ => apart(),
    }
}

/// Computes the GEMM with one of this project's kernels if one was chosen, otherwise with `other`.
fn compute(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
    output: linear_many::Output<'_>,
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
        // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that
        // their memory is valid, and kernels that write weights have finished before a pass starts.
        return unsafe { linear_few::launch(cuda, product, places, cut) };
    }
    if gate_up_middle::chosen(cuda, product, places) {
        // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that
        // their memory is valid, and kernels that write weights have finished before a pass starts.
        return unsafe { gate_up_middle::launch(cuda, product, places) };
    }
    if linear_many::chosen(cuda, product, places, output, &other)? {
        // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that
        // their memory is valid, and kernels that write weights have finished before a pass starts.
        return unsafe { linear_many::launch(cuda, product, places, output) };
    }
    other()
}

/// The input operands of a GEMM, with their scales.
pub(super) struct Operands<'a> {
    pub scheme: QuantScheme,
    pub x: &'a Tensor<'a>,
    pub weight: &'a Tensor<'a>,
    pub weight_scales: Address,
    /// Address of the scales of x, or 0 if all of x has the scale `x_scale`.
    pub x_scales: Address,
    pub x_scale: f32,
}

impl<'a> Operands<'a> {
    /// Creates the operands. Returns `None` if `x` is not quantized as the weight requires, or if
    /// the weight's blocks have fewer rows than the kernels support.
    pub(super) fn of(x: &'a Activations<'_>, weight: &'a Weight<'_>) -> Option<Self> {
        let Some(scales) = weight.scales.tensor() else {
            let (scheme, none) = (QuantScheme::Unquantized, Address(0));
            let x = x.lone_plain()?;
            return Some(Operands {
                scheme,
                x,
                weight: &weight.data,
                weight_scales: none,
                x_scales: none,
                x_scale: 1.0,
            });
        };
        let rounded = x.rounded.as_ref().filter(|rounded| Some(rounded.quantization) == weight.wants())?;
        let (scheme, x_scale) = match (&weight.scales, rounded.quantization) {
            (WeightScales::Blocks { height, .. }, _) if *height < BLOCK_ROWS_MIN => return None,
            (WeightScales::Blocks { height, .. }, _) => (QuantScheme::E4m3Blocks { height: *height }, 1.0),
            (_, Quantization::Fixed(scale)) => (QuantScheme::E4m3Fixed, scale),
            _ => (QuantScheme::E4m3Rows, 1.0),
        };
        Some(Operands {
            scheme,
            x: &rounded.data,
            weight: &weight.data,
            weight_scales: scales.address(),
            x_scales: if scheme == QuantScheme::E4m3Fixed { Address(0) } else { rounded.scales.address() },
            x_scale,
        })
    }

    /// Returns the shape of the GEMM, without a gate or accumulation.
    fn product(&self, bias: Option<&Tensor<'_>>, out: &Tensor<'_>) -> GemmProblem {
        GemmProblem {
            scheme: self.scheme,
            gates: false,
            out_features: self.weight.rows(),
            in_features: self.weight.columns(),
            out_pitch: pitch(out),
            x_pitch: pitch(self.x),
            out_is_f32: out.dtype() == DType::F32,
            has_bias: bias.is_some(),
            accumulates: false,
            rows: self.x.rows(),
        }
    }

    fn places(&self, bias: Option<&Tensor<'_>>, scratch: &Tensor<'_>, out: &Tensor<'_>) -> GemmOperands {
        GemmOperands {
            weight: self.weight.address().0,
            x: self.x.address().0,
            bias: bias.map(|bias| bias.address().0),
            weight_scales: self.weight_scales.0,
            x_scales: self.x_scales.0,
            x_scale: self.x_scale,
            out: out.address().0,
            workspace: scratch.address().0,
            workspace_bytes: scratch.bytes().as_usize(),
        }
    }
}

/// Returns the pitch to pass to the library. A single row may have any pitch, but the library
/// requires a pitch of at least the row's length.
fn pitch(tensor: &Tensor<'_>) -> usize {
    tensor.pitch().max(tensor.columns())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_fewer_rows_than_kernels_take_for_one_are_refused() {
        let over = |shape: [usize; 2], dtype| Tensor::over(Address(4096), shape.into(), dtype);
        let scheme = |height: usize| {
            let scales = WeightScales::Blocks { scales: over([64usize.div_ceil(height), 2], DType::F32), height };
            let weight = Weight { data: over([64, 256], DType::F8E4M3), scales };
            let rounded = Rounded {
                data: over([3, 256], DType::F8E4M3),
                scales: over([3, 2], DType::F32),
                quantization: Quantization::Groups,
            };
            let x = Activations { plain: None, rounded: Some(rounded) };
            Operands::of(&x, &weight).map(|operands| operands.scheme)
        };
        for height in [8, 16, 48, 128] {
            assert_eq!(scheme(height), Some(QuantScheme::E4m3Blocks { height }));
        }
        assert_eq!([1, 2, 4].map(scheme), [None; 3]);
    }
}
