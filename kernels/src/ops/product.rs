//! Checks that all GEMMs share, and the conversion of activations to the format that a GEMM reads.

use super::check;
use crate::{
    ActivationFormat, Activations, Backend, DType, KernelError, Quantization, SCALE_BLOCK, ScaledBy, Scope, Target,
    Tensor, Weight, WeightScales, int4,
};

/// Checks that `weight` has the type in which the target stores weights, or is quantized with
/// scales that fit its shape.
pub(super) fn check_weight(op: &'static str, weight: &Weight<'_>, target: &Target) -> Result<(), KernelError> {
    let data = &weight.data;
    if let Some(blocks) = &weight.blocks {
        check::holds(target.keeps_blocks(), op, "weight", data, "no blocks of quantized elements on this target")?;
        let is_whole = data.dtype() == DType::U8 && data.is_contiguous() && data.bytes() == blocks.bytes();
        return check::holds(is_whole, op, "weight", data, &format!("{} u8 with the blocks", blocks.bytes().0));
    }
    check::holds(data.is_contiguous() && data.columns() > 0, op, "weight", data, "contiguous rows")?;
    let (rows, columns) = (data.rows(), data.columns());
    let Some(scales) = &weight.scales else {
        return check::weight(op, "weight", data, target);
    };
    if data.dtype() == DType::U4 {
        return check_int4(op, data, scales, target);
    }
    let WeightScales { factors, by, activations, zero_points } = scales;
    check::holds(zero_points.is_none(), op, "scales", factors, "no zero points for signed numbers")?;
    let is_quantized_alike = if let ScaledBy::Block { rows: height, columns: width } = *by {
        let is_even = width == SCALE_BLOCK && width.is_multiple_of(height);
        check::holds(is_even, op, "scales", factors, "blocks of a height that divides 128")?;
        *activations == Some(Quantization::Groups)
    } else {
        matches!(activations, Some(Quantization::Rows | Quantization::Fixed(_)))
    };
    check::holds(is_quantized_alike, op, "scales", factors, "activation groups for block scales, rows for row scales")?;
    check::shape(op, "scales", factors, by.shape([rows, columns]))?;
    check::f32(op, "scales", factors)?;
    check::holds(factors.is_contiguous(), op, "scales", factors, "contiguous rows")?;
    match data.dtype() {
        dtype if dtype.needs_scales() => Ok(()),
        found => Err(KernelError::Type { op, what: "weight", expected: "quantized elements for its scales", found }),
    }
}

/// Checks that the scales and the zero points of 4-bit integers fit their shape and the target.
fn check_int4(
    op: &'static str,
    data: &Tensor<'_>,
    WeightScales { factors, by, activations, zero_points }: &WeightScales<'_>,
    target: &Target,
) -> Result<(), KernelError> {
    let group = if let ScaledBy::Block { rows: 1, columns } = *by { columns } else { 0 };
    let is_grouped = int4::GROUPS.contains(&group) && data.columns().is_multiple_of(group);
    check::holds(is_grouped, op, "weight", data, "whole groups of 32, 64 or 128 columns of a row")?;
    let has_blocks = data.rows().is_multiple_of(int4::BLOCK_ROWS);
    check::holds(has_blocks, op, "weight", data, "whole blocks of 8 rows")?;
    check::holds(activations.is_none(), op, "scales", factors, "activations that are not quantized")?;
    check::weight(op, "scales", factors, target)?;
    for part in [Some(factors), zero_points.as_ref()].into_iter().flatten() {
        check::shape(op, "scales", part, [data.rows(), data.columns() / group])?;
        check::holds(part.is_contiguous(), op, "scales", part, "contiguous rows")?;
    }
    match zero_points.as_ref().map(Tensor::dtype) {
        None | Some(DType::U8) => Ok(()),
        Some(found) => Err(KernelError::Type { op, what: "zero points", expected: "u8", found }),
    }
}

/// Checks that `x` contains activations, quantized or unquantized.
fn check_activations(op: &'static str, x: &Activations<'_>, target: &Target) -> Result<(), KernelError> {
    if let Some(plain) = &x.plain {
        check::activation(op, "x", plain, target.activation())?;
    }
    let Some(quantized) = &x.quantized else { return Ok(()) };
    let (rows, columns) = (quantized.data.rows(), quantized.data.columns());
    check::shape(op, "x", x.any(), [rows, columns])?;
    check::shape(op, "scales of x", &quantized.scales, [rows, quantized.quantization.row_scales(columns)])
}

impl<B: Backend> Scope<'_, B> {
    pub(super) fn check_product(
        &self,
        op: &'static str,
        x: &Activations<'_>,
        weight: &Weight<'_>,
        bias: Option<&Tensor<'_>>,
    ) -> Result<(), KernelError> {
        check_activations(op, x, self.target())?;
        check_weight(op, weight, self.target())?;
        check::shape(op, "x", x.any(), [x.rows(), weight.columns()])?;
        let Some(bias) = bias else { return Ok(()) };
        check::weight(op, "bias", bias, self.target())?;
        check::shape(op, "bias", bias, [weight.rows()])
    }

    /// Takes space from the workspace for the format of `x` that `weight` wants, if `x` does
    /// not have that format.
    pub(super) fn quant_scratch_for(
        &self,
        x: &Activations<'_>,
        weight: &Weight<'_>,
    ) -> Result<QuantScratch<'_>, KernelError> {
        let wanted = weight.wants();
        if x.only(wanted).is_some() {
            return Ok(QuantScratch(None));
        }
        Ok(QuantScratch(Some(self.empty_in(ActivationFormat::of(wanted), x.rows(), x.columns())?)))
    }

    /// Returns `x` in the format that `weight` wants. If `x` does not have this format, `x`
    /// is quantized into `quant_scratch`.
    ///
    /// # Panics
    /// If `x` has neither the wanted format nor unquantized rows, because the model's code
    /// requested the wrong format.
    pub(super) fn wanted<'a>(
        &self,
        x: &'a Activations<'_>,
        weight: &Weight<'_>,
        quant_scratch: &'a QuantScratch<'_>,
    ) -> Result<Activations<'a>, KernelError> {
        let Some(quant_scratch) = &quant_scratch.0 else {
            return Ok(x.only(weight.wants()).expect("input in the format of the weight needs no scratch"));
        };
        self.round(x.plain(), quant_scratch)?;
        Ok(quant_scratch.view())
    }
}

/// Space for activations that are quantized for one GEMM.
pub(super) struct QuantScratch<'s>(Option<Activations<'s>>);
