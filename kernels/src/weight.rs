//! A weight of a product: its numbers, and if they are FP8 the scales that they stand for numbers with.

use bursar_budgets::Bytes;

use crate::{DType, Quantization, Tensor};

/// Rows and columns of a weight's block with a common scale, and columns of a row of activations with one.
pub const FP8_BLOCK: usize = 128;

/// `[out_features, in_features]`, and its scales.
pub struct Weight<'m> {
    /// Plain numbers, or E4M3 if there are scales. Contiguous.
    pub data: Tensor<'m>,
    /// What E4M3 numbers are multiplied by.
    pub scales: Scales<'m>,
}

/// The scales of a weight, and with them how its product rounds activations.
pub enum Scales<'m> {
    /// None: the weight is plain.
    Plain,
    /// One for each block. Activations are rounded by groups of [`FP8_BLOCK`] columns.
    Blocks {
        /// `[ceil(out_features / height), ceil(in_features / FP8_BLOCK)]` f32.
        scales: Tensor<'m>,
        /// Rows of a block: [`FP8_BLOCK`], or less where projections that do not begin at a multiple of that many rows
        /// are one weight.
        height: usize,
    },
    /// `[out_features]` f32: one for each row.
    Rows {
        /// One for each row.
        scales: Tensor<'m>,
        /// The scale of all activations; if there is none, each row of them has its own.
        activations: Option<f32>,
    },
}

impl<'m> Weight<'m> {
    /// A plain weight.
    pub fn plain(data: Tensor<'m>) -> Self {
        Weight { data, scales: Scales::Plain }
    }

    /// How its product wants activations; `None` is plain.
    pub fn wants(&self) -> Option<Quantization> {
        match self.scales {
            Scales::Plain => None,
            Scales::Blocks { .. } => Some(Quantization::Groups),
            Scales::Rows { activations: None, .. } => Some(Quantization::Rows),
            Scales::Rows { activations: Some(scale), .. } => Some(Quantization::Fixed(scale)),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.data.rows()
    }

    /// Input features.
    pub fn columns(&self) -> usize {
        self.data.columns()
    }

    /// The type of its numbers.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The bytes of numbers and scales.
    pub fn bytes(&self) -> Bytes {
        self.data.bytes() + self.scales.tensor().map_or(Bytes::ZERO, Tensor::bytes)
    }

    pub(crate) fn view(&self) -> Weight<'_> {
        let scales = match &self.scales {
            Scales::Plain => Scales::Plain,
            Scales::Blocks { scales, height } => Scales::Blocks { scales: scales.view(), height: *height },
            Scales::Rows { scales, activations } => Scales::Rows { scales: scales.view(), activations: *activations },
        };
        Weight { data: self.data.view(), scales }
    }
}

impl<'m> Scales<'m> {
    /// Their tensor, unless the weight is plain.
    pub fn tensor(&self) -> Option<&Tensor<'m>> {
        match self {
            Scales::Plain => None,
            Scales::Blocks { scales, .. } | Scales::Rows { scales, .. } => Some(scales),
        }
    }
}

/// A plain weight.
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
