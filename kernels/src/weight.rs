//! Weights of GEMMs: the numbers and, for FP8, their scales.

use bursar_budgets::Bytes;

use crate::{DType, Quantization, Tensor};

/// A weight `[out_features, in_features]` and its scales.
pub struct Weight<'m> {
    /// The numbers of the weight, contiguous. They are E4M3 if there are scales.
    pub data: Tensor<'m>,
    /// Factors by which the E4M3 numbers are multiplied.
    pub scales: WeightScales<'m>,
}

/// The scales of a weight. Their kind also determines how activations are quantized before the
/// GEMM.
pub enum WeightScales<'m> {
    /// The weight is unquantized and has no scales.
    Unquantized,
    /// One scale for each block. Activations are quantized in groups of
    /// [`FP8_BLOCK`](crate::FP8_BLOCK) columns.
    Blocks {
        /// `[ceil(out_features / height), ceil(in_features / FP8_BLOCK)]` f32.
        scales: Tensor<'m>,
        /// Rows of a block: [`FP8_BLOCK`](crate::FP8_BLOCK), or fewer if the weight combines
        /// several projections that do not all start at a multiple of
        /// [`FP8_BLOCK`](crate::FP8_BLOCK) rows.
        height: usize,
    },
    /// One scale for each row.
    Rows {
        /// `[out_features]` f32.
        scales: Tensor<'m>,
        /// The scale of all activations. If `None`, each row of activations has a separate scale.
        activations: Option<f32>,
    },
}

impl<'m> Weight<'m> {
    pub fn plain(data: Tensor<'m>) -> Self {
        Weight { data, scales: WeightScales::Unquantized }
    }

    /// Returns the quantization of the activations that this weight is multiplied by, or
    /// `None` for unquantized activations.
    pub fn wants(&self) -> Option<Quantization> {
        match self.scales {
            WeightScales::Unquantized => None,
            WeightScales::Blocks { .. } => Some(Quantization::Groups),
            WeightScales::Rows { activations: None, .. } => Some(Quantization::Rows),
            WeightScales::Rows { activations: Some(scale), .. } => Some(Quantization::Fixed(scale)),
        }
    }

    /// Returns the number of output features, `out_features`.
    pub fn rows(&self) -> usize {
        self.data.rows()
    }

    /// Returns the number of input features, `in_features`.
    pub fn columns(&self) -> usize {
        self.data.columns()
    }

    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// Returns the bytes of numbers and scales.
    pub fn bytes(&self) -> Bytes {
        self.data.bytes() + self.scales.tensor().map_or(Bytes::ZERO, Tensor::bytes)
    }

    pub(crate) fn view(&self) -> Weight<'_> {
        let scales = match &self.scales {
            WeightScales::Unquantized => WeightScales::Unquantized,
            WeightScales::Blocks { scales, height } => WeightScales::Blocks { scales: scales.view(), height: *height },
            WeightScales::Rows { scales, activations } => {
                WeightScales::Rows { scales: scales.view(), activations: *activations }
            }
        };
        Weight { data: self.data.view(), scales }
    }
}

impl<'m> WeightScales<'m> {
    /// Returns the tensor of scales, or `None` if the weight is unquantized.
    pub fn tensor(&self) -> Option<&Tensor<'m>> {
        match self {
            WeightScales::Unquantized => None,
            WeightScales::Blocks { scales, .. } | WeightScales::Rows { scales, .. } => Some(scales),
        }
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
