//! Weights of GEMMs: the numbers and, if they are quantized, their scales.

use bursar_budgets::Bytes;

use crate::{BlockRows, DType, Quantization, QuantizationScheme, SCALE_BLOCK, ScaledBy, Tensor};

/// A weight `[out_features, in_features]` and its scales.
pub struct Weight<'m> {
    /// The numbers of the weight, contiguous. They are quantized if there are scales. The shape is
    /// that of the weight, or `[bytes]` u8 for a weight in blocks.
    pub data: Tensor<'m>,
    /// `None` if the weight is unquantized or stored in blocks.
    pub scales: Option<WeightScales<'m>>,
    /// The rows of a weight that is stored in blocks of quantized elements. The blocks contain the
    /// scales. `None` for other weights.
    pub blocks: Option<BlockRows>,
}

/// The scales of a weight, and the quantization of the activations that it is multiplied by.
pub struct WeightScales<'m> {
    /// Factors by which the numbers are multiplied, in the shape [`ScaledBy::shape`], in f32. For
    /// [4-bit integers](crate::int4), they have the target's type of weights, and the order in
    /// memory is that of [`int4::scale_index`](crate::int4::scale_index).
    pub factors: Tensor<'m>,
    /// Zero points of [4-bit integers](crate::int4), u8, in the shape and order of the scales.
    /// `None` if all zero points are [`int4::ZERO_POINT`](crate::int4::ZERO_POINT).
    pub zero_points: Option<Tensor<'m>>,
    /// The part that shares a scale. If a weight is multiplied by quantized activations, its blocks
    /// have [`SCALE_BLOCK`] columns and [`SCALE_BLOCK`] rows, or fewer rows if the weight combines
    /// projections that do not all start at a multiple of [`SCALE_BLOCK`] rows.
    pub by: ScaledBy,
    /// If `None`, the weight is multiplied by unquantized activations.
    pub activations: Option<Quantization>,
}

impl<'m> Weight<'m> {
    pub fn plain(data: Tensor<'m>) -> Self {
        Weight { data, scales: None, blocks: None }
    }

    /// Returns a weight in blocks. `data` is `[bytes]` u8 with the bytes of `blocks`, and needs no
    /// alignment.
    pub fn in_blocks(data: Tensor<'m>, blocks: BlockRows) -> Self {
        Weight { blocks: Some(blocks), ..Weight::plain(data) }
    }

    /// Returns how the weight is stored and how its activations are quantized, or `None` if the
    /// weight is unquantized or stored in blocks.
    pub fn scheme(&self) -> Option<QuantizationScheme> {
        self.scales.as_ref().map(|scales| QuantizationScheme {
            elements: self.dtype(),
            weights: scales.by,
            activations: scales.activations.map(|quantized| quantized.map(drop)),
            has_zero_points: scales.zero_points.is_some(),
        })
    }

    /// Returns the quantization of the activations that this weight is multiplied by, or
    /// `None` for unquantized activations.
    pub fn wants(&self) -> Option<Quantization> {
        self.scales.as_ref()?.activations
    }

    /// Returns the number of output features, `out_features`.
    pub fn rows(&self) -> usize {
        self.blocks.as_ref().map_or_else(|| self.data.rows(), BlockRows::rows)
    }

    /// Returns the number of input features, `in_features`.
    pub fn columns(&self) -> usize {
        self.blocks.as_ref().map_or_else(|| self.data.columns(), BlockRows::columns)
    }

    /// Returns the type of the numbers, which is u8 for a weight in blocks.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Returns the bytes of numbers, scales and zero points.
    pub fn bytes(&self) -> Bytes {
        self.data.bytes() + self.scales.as_ref().map_or(Bytes::ZERO, WeightScales::bytes)
    }

    pub(crate) fn view(&self) -> Weight<'_> {
        let scales = self.scales.as_ref().map(WeightScales::view);
        Weight { data: self.data.view(), scales, blocks: self.blocks.clone() }
    }
}

impl<'m> WeightScales<'m> {
    /// Returns scales `[out_features]`, one for each row. `activations` is the scale of all
    /// activations. If `None`, each row of activations has a separate scale.
    pub fn rows(factors: Tensor<'m>, activations: Option<f32>) -> Self {
        let activations = activations.map_or(Quantization::Rows, Quantization::Fixed);
        WeightScales { factors, zero_points: None, by: ScaledBy::Row, activations: Some(activations) }
    }

    /// Returns scales `[ceil(out_features / height), ceil(in_features / SCALE_BLOCK)]`, one for
    /// each block of `height` rows.
    pub fn blocks(factors: Tensor<'m>, height: usize) -> Self {
        let by = ScaledBy::Block { rows: height, columns: SCALE_BLOCK };
        WeightScales { factors, zero_points: None, by, activations: Some(Quantization::Groups) }
    }

    /// Returns scales and zero points `[out_features, in_features / group]` of 4-bit integers, one
    /// for each `group` columns of a row, in the order of
    /// [`int4::scale_index`](crate::int4::scale_index). Scales start at a multiple of 16 bytes, and
    /// zero points start at a multiple of 8 bytes.
    pub fn int4(factors: Tensor<'m>, zero_points: Option<Tensor<'m>>, group: usize) -> Self {
        WeightScales { factors, zero_points, by: ScaledBy::Block { rows: 1, columns: group }, activations: None }
    }

    fn bytes(&self) -> Bytes {
        self.factors.bytes() + self.zero_points.as_ref().map_or(Bytes::ZERO, Tensor::bytes)
    }

    fn view(&self) -> WeightScales<'_> {
        let zero_points = self.zero_points.as_ref().map(Tensor::view);
        WeightScales { factors: self.factors.view(), zero_points, by: self.by, activations: self.activations }
    }
}

impl<'a> From<&'a Tensor<'_>> for Weight<'a> {
    fn from(data: &'a Tensor<'_>) -> Self {
        Weight::plain(data.view())
    }
}

/// A second view of the same weight.
impl<'a> From<&'a Weight<'_>> for Weight<'a> {
    fn from(weight: &'a Weight<'_>) -> Self {
        weight.view()
    }
}
