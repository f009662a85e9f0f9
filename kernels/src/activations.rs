//! Activations, the input rows of a matrix product: unquantized (`plain`), quantized
//! ([`Quantization::ELEMENTS`]), or both.

use std::ops::Range;

use bursar_budgets::Bytes;

use crate::{DType, Quantization, Tensor};

/// The formats in which an operation writes the activations that it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationFormat {
    /// Write unquantized rows, in addition to any quantized rows.
    pub is_unquantized: bool,
    /// Write rows quantized this way, in addition to any unquantized rows.
    pub quantization: Option<Quantization>,
}

impl ActivationFormat {
    pub const PLAIN: ActivationFormat = ActivationFormat { is_unquantized: true, quantization: None };

    /// The format that a GEMM reads, given [`Weight::wants`](crate::Weight::wants): unquantized
    /// rows for `None`, otherwise only quantized rows.
    pub fn of(wanted: Option<Quantization>) -> ActivationFormat {
        ActivationFormat { is_unquantized: wanted.is_none(), quantization: wanted }
    }

    /// Combines the formats of two GEMMs that read the same rows.
    ///
    /// # Panics
    /// If the GEMMs read rows that are quantized differently, which no checkpoint requires.
    pub fn and(self, other: ActivationFormat) -> ActivationFormat {
        let quantization = self.quantization.or(other.quantization);
        let is_one = [self, other].iter().all(|format| format.quantization.is_none_or(|own| Some(own) == quantization));
        assert!(is_one, "one input has two quantizations: {self:?} and {other:?}");
        ActivationFormat { is_unquantized: self.is_unquantized || other.is_unquantized, quantization }
    }

    /// Adds unquantized rows to this format.
    pub fn and_plain(self) -> ActivationFormat {
        ActivationFormat { is_unquantized: true, ..self }
    }
}

/// `[rows, columns]` activations, in the formats that their consumers read.
pub struct Activations<'s> {
    /// Unquantized rows, in the target's activation type.
    pub plain: Option<Tensor<'s>>,
    pub quantized: Option<QuantizedRows<'s>>,
}

/// Quantized rows and their scales.
pub struct QuantizedRows<'s> {
    /// `[rows, columns]` [`Quantization::ELEMENTS`], contiguous.
    pub data: Tensor<'s>,
    /// `[rows, row_scales]` f32, contiguous; see [`Quantization::row_scales`].
    pub scales: Tensor<'s>,
    pub quantization: Quantization,
}

impl<'s> Activations<'s> {
    pub fn of_plain(plain: Tensor<'s>) -> Self {
        Activations { plain: Some(plain), quantized: None }
    }

    pub fn rows(&self) -> usize {
        self.any().rows()
    }

    pub fn columns(&self) -> usize {
        self.any().columns()
    }

    /// Returns the rows `range` in each format. Panics if `range` is out of bounds.
    pub(crate) fn row_range(&self, range: Range<usize>) -> Activations<'_> {
        let quantized = self.quantized.as_ref().map(|quantized| QuantizedRows {
            data: quantized.data.row_range(range.clone()),
            scales: quantized.scales.row_range(range.clone()),
            quantization: quantized.quantization,
        });
        Activations { plain: self.plain.as_ref().map(|plain| plain.row_range(range)), quantized }
    }

    /// Returns the bytes of all formats together.
    pub fn bytes(&self) -> Bytes {
        let plain = self.plain.as_ref().map_or(Bytes::ZERO, Tensor::bytes);
        self.quantized.as_ref().map_or(plain, |quantized| plain + quantized.bytes())
    }

    /// Returns the unquantized rows. The model's code chooses the formats when it creates the
    /// activations, so a missing format is a bug, and this method panics.
    pub fn plain(&self) -> &Tensor<'s> {
        self.plain.as_ref().expect("the activations exist in the plain format")
    }

    /// Returns the unquantized rows for writing.
    ///
    /// # Panics
    /// If there are no unquantized rows.
    pub fn plain_mut(&mut self) -> Tensor<'_> {
        let plain = self.plain.as_mut().expect("the activations exist in the plain format");
        plain.row_range_mut(0..plain.rows())
    }

    /// Returns the unquantized rows if they are the only format.
    pub(crate) fn lone_plain(&self) -> Option<&Tensor<'s>> {
        self.plain.as_ref().filter(|_| self.quantized.is_none())
    }

    /// Returns any of the tensors, for its shape.
    pub(crate) fn any(&self) -> &Tensor<'s> {
        let quantized = || &self.quantized.as_ref().expect("the activations exist in some format").data;
        self.plain.as_ref().unwrap_or_else(quantized)
    }

    pub(crate) fn view(&self) -> Activations<'_> {
        Activations {
            plain: self.plain.as_ref().map(Tensor::view),
            quantized: self.quantized.as_ref().map(QuantizedRows::view),
        }
    }

    /// Returns a view of only the rows that are quantized as `wanted`, or of only the unquantized
    /// rows for `None`. Returns `None` if that format is missing.
    pub(crate) fn only(&self, wanted: Option<Quantization>) -> Option<Activations<'_>> {
        match wanted {
            None => Some(Activations { plain: Some(self.plain.as_ref()?.view()), quantized: None }),
            Some(wanted) => {
                let quantized = self.quantized.as_ref().filter(|quantized| quantized.quantization == wanted)?;
                Some(Activations { plain: None, quantized: Some(quantized.view()) })
            }
        }
    }
}

/// Space for activations that are computed one after another, each in a different format.
pub struct ActivationScratch<'s> {
    /// `[rows, columns]` in the target's activation type.
    pub(crate) plain: Option<Tensor<'s>>,
    /// `[rows, columns]` [`Quantization::ELEMENTS`]
    pub(crate) data: Option<Tensor<'s>>,
    /// `[rows, scales_max]` f32. `scales_max` is the largest number of scales that a row has in any
    /// of the formats.
    pub(crate) scales: Option<Tensor<'s>>,
}

impl ActivationScratch<'_> {
    /// Returns activations `[rows, columns]` in `format`, within this space. The activations
    /// contain the output of the last operation that wrote to the space, if that operation wrote
    /// the same format.
    ///
    /// # Panics
    /// If the space was created without this format, or for fewer than `rows` rows.
    pub fn place(&mut self, format: ActivationFormat, rows: usize) -> Activations<'_> {
        const NONE: &str = "the scratch has space for this format";
        let plain = format.is_unquantized.then(|| self.plain.as_mut().expect(NONE).row_range_mut(0..rows));
        let quantized = format.quantization.map(|quantization| {
            let (data, scales) = (self.data.as_mut().expect(NONE), self.scales.as_mut().expect(NONE));
            let (all, of_row) = (scales.columns(), quantization.row_scales(data.columns()));
            assert!(rows <= data.rows() && of_row <= all, "{NONE}: {rows} rows of {quantization:?}");
            let scales = Tensor::over(scales.address(), [rows, of_row].into(), DType::F32);
            QuantizedRows { data: data.row_range_mut(0..rows), scales, quantization }
        });
        Activations { plain, quantized }
    }
}

impl QuantizedRows<'_> {
    /// Bytes of numbers and scales.
    pub fn bytes(&self) -> Bytes {
        self.data.bytes() + self.scales.bytes()
    }

    pub(crate) fn view(&self) -> QuantizedRows<'_> {
        QuantizedRows { data: self.data.view(), scales: self.scales.view(), quantization: self.quantization }
    }
}

/// A view of unquantized activations.
impl<'a> From<&'a Tensor<'_>> for Activations<'a> {
    fn from(plain: &'a Tensor<'_>) -> Self {
        Activations::of_plain(plain.view())
    }
}

/// A second view of the same activations.
impl<'a> From<&'a Activations<'_>> for Activations<'a> {
    fn from(activations: &'a Activations<'_>) -> Self {
        activations.view()
    }
}
