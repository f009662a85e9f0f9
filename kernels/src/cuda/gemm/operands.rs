//! The operands of a GEMM, from the tensors of an operation.

use bursar_budgets::Address;

use super::{
    super::contract::quantize::BLOCK_ROWS_MIN,
    problem::{GemmOperands, GemmProblem},
};
use crate::{Activations, DType, Quantization, QuantizationScheme, Tensor, Weight, calls::GateActivation};

/// The input operands of a GEMM, with their scales.
pub(in super::super) struct Operands<'a> {
    pub scheme: Option<QuantizationScheme>,
    pub x: &'a Tensor<'a>,
    pub weight: &'a Tensor<'a>,
    pub weight_scales: Address,
    /// Address of the zero points of 4-bit integers, or 0 if there are no zero points.
    pub weight_zero_points: Address,
    /// Address of the scales of x, or 0 if all of x has the scale `x_scale`.
    pub x_scales: Address,
    pub x_scale: f32,
}

impl<'a> Operands<'a> {
    /// Creates the operands. Returns `None` if `x` is not quantized as the weight requires, or if
    /// the weight's blocks have fewer rows than the kernels support.
    pub(in super::super) fn of(x: &'a Activations<'_>, weight: &'a Weight<'_>) -> Option<Self> {
        let scheme = weight.scheme();
        let x_scheme = scheme.filter(|scheme| scheme.activations.is_some());
        if x_scheme.and_then(|scheme| scheme.weights.block_rows()).is_some_and(|height| height < BLOCK_ROWS_MIN) {
            return None;
        }
        let (x, x_scales, x_scale) = match weight.wants() {
            None => (x.lone_plain()?, Address(0), 1.0),
            Some(wanted) => {
                let quantized = x.quantized.as_ref().filter(|quantized| quantized.quantization == wanted)?;
                match wanted {
                    Quantization::Fixed(scale) => (&quantized.data, Address(0), scale),
                    Quantization::Groups | Quantization::Rows => (&quantized.data, quantized.scales.address(), 1.0),
                }
            }
        };
        let weight_scales = weight.scales.as_ref().map_or(Address(0), |scales| scales.factors.address());
        let zero_points = weight.scales.as_ref().and_then(|scales| scales.zero_points.as_ref());
        let weight_zero_points = zero_points.map_or(Address(0), Tensor::address);
        Some(Operands { scheme, x, weight: &weight.data, weight_scales, weight_zero_points, x_scales, x_scale })
    }

    /// Returns the shape of the GEMM, without a gate or accumulation.
    pub(super) fn problem(&self, bias: Option<&Tensor<'_>>, out: &Tensor<'_>) -> GemmProblem {
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

    /// Returns the addresses of the operands.
    pub(super) fn addresses(&self, bias: Option<&Tensor<'_>>, scratch: &Tensor<'_>, out: &Tensor<'_>) -> GemmOperands {
        GemmOperands {
            weight: self.weight.address().0,
            x: self.x.address().0,
            bias: bias.map(|bias| bias.address().0),
            weight_scales: self.weight_scales.0,
            weight_zero_points: self.weight_zero_points.0,
            x_scales: self.x_scales.0,
            x_scale: self.x_scale,
            out: out.address().0,
            out_is_quantized: out.dtype() == Quantization::ELEMENTS,
            activation: GateActivation::Silu,
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
    use crate::{QuantizedRows, WeightScales};

    #[test]
    fn blocks_of_fewer_rows_than_kernels_take_for_one_are_refused() {
        let over = |shape: [usize; 2], dtype| Tensor::over(Address(4096), shape.into(), dtype);
        let scheme = |height: usize| {
            let scales = WeightScales::blocks(over([64usize.div_ceil(height), 2], DType::F32), height);
            let weight = Weight { scales: Some(scales), ..Weight::plain(over([64, 256], Quantization::ELEMENTS)) };
            let quantized = QuantizedRows {
                data: over([3, 256], Quantization::ELEMENTS),
                scales: over([3, 2], DType::F32),
                quantization: Quantization::Groups,
            };
            let x = Activations { plain: None, quantized: Some(quantized) };
            Operands::of(&x, &weight).and_then(|operands| operands.scheme)
        };
        for height in [8, 16, 48, 128] {
            assert_eq!(scheme(height), Some(QuantizationScheme::BLOCK.in_memory(height)));
        }
        assert_eq!([1, 2, 4].map(scheme), [None; 3]);
    }
}
