//! The rows that a product reads: plain, rounded to E4M3, or both.

use std::ops::Range;

use bursar_budgets::Bytes;

use crate::{Backend, DType, FP8_BLOCK, KernelError, Scope, Tensor};

/// How activations are rounded to E4M3. A scale is the largest magnitude of what it is for, divided by 448.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantization {
    /// Each group of [`FP8_BLOCK`] columns of a row has a scale.
    Groups,
    /// Each row has a scale.
    Rows,
    /// All numbers have this scale, and what is then larger than 448 becomes it.
    Fixed(f32),
}

impl Quantization {
    /// Scales of a row of `columns` numbers that are stored beside it.
    pub fn row_scales(self, columns: usize) -> usize {
        match self {
            Quantization::Groups => columns.div_ceil(FP8_BLOCK),
            Quantization::Rows => 1,
            Quantization::Fixed(_) => 0,
        }
    }
}

/// What an operation leaves of the activations that it makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActivationFormat {
    /// Plain rows, also beside rounded ones.
    pub is_plain: bool,
    /// Rounded rows.
    pub quantization: Option<Quantization>,
}

impl ActivationFormat {
    /// Plain rows alone.
    pub const PLAIN: ActivationFormat = ActivationFormat { is_plain: true, quantization: None };

    /// What a product reads that wants activations like this; see [`Weight::wants`](crate::Weight::wants).
    pub fn of(wanted: Option<Quantization>) -> ActivationFormat {
        ActivationFormat { is_plain: wanted.is_none(), quantization: wanted }
    }

    /// The same, and plain rows too.
    pub fn and_plain(self) -> ActivationFormat {
        ActivationFormat { is_plain: true, ..self }
    }
}

/// `[rows, columns]` activations, in the formats that their consumers read.
pub struct Activations<'s> {
    /// In the target's type of activations.
    pub plain: Option<Tensor<'s>>,
    /// In E4M3.
    pub rounded: Option<Rounded<'s>>,
}

/// Rows in E4M3 and what they are multiplied by.
pub struct Rounded<'s> {
    /// `[rows, columns]` E4M3, contiguous.
    pub data: Tensor<'s>,
    /// `[rows, row_scales]` f32, contiguous; see [`Quantization::row_scales`].
    pub scales: Tensor<'s>,
    /// How they were rounded.
    pub quantization: Quantization,
}

impl<'s> Activations<'s> {
    /// Plain rows alone.
    pub fn of_plain(plain: Tensor<'s>) -> Self {
        Activations { plain: Some(plain), rounded: None }
    }

    /// Their number of rows.
    pub fn rows(&self) -> usize {
        self.any().rows()
    }

    /// Numbers of a row.
    pub fn columns(&self) -> usize {
        self.any().columns()
    }

    /// The rows `range` in each format. Panics if it is out of bounds.
    pub(crate) fn row_range(&self, range: Range<usize>) -> Activations<'_> {
        let rounded = self.rounded.as_ref().map(|rounded| Rounded {
            data: rounded.data.row_range(range.clone()),
            scales: rounded.scales.row_range(range.clone()),
            quantization: rounded.quantization,
        });
        Activations { plain: self.plain.as_ref().map(|plain| plain.row_range(range)), rounded }
    }

    /// The bytes of all formats.
    pub fn bytes(&self) -> Bytes {
        let plain = self.plain.as_ref().map_or(Bytes::ZERO, Tensor::bytes);
        self.rounded.as_ref().map_or(plain, |rounded| plain + rounded.bytes())
    }

    /// The plain rows. Panics if there are none: the model's code asks for them when it makes the activations.
    pub fn plain(&self) -> &Tensor<'s> {
        self.plain.as_ref().expect("activations that were made plain")
    }

    /// The plain rows, if there are no others.
    pub(crate) fn lone_plain(&self) -> Option<&Tensor<'s>> {
        self.plain.as_ref().filter(|_| self.rounded.is_none())
    }

    /// A tensor with their shape.
    pub(crate) fn any(&self) -> &Tensor<'s> {
        let rounded = || &self.rounded.as_ref().expect("activations have a format").data;
        self.plain.as_ref().unwrap_or_else(rounded)
    }

    pub(crate) fn view(&self) -> Activations<'_> {
        Activations { plain: self.plain.as_ref().map(Tensor::view), rounded: self.rounded.as_ref().map(Rounded::view) }
    }

    /// These rounded rows alone, or the plain ones without `wanted`; `None` if there are none like that.
    pub(crate) fn only(&self, wanted: Option<Quantization>) -> Option<Activations<'_>> {
        match wanted {
            None => Some(Activations { plain: Some(self.plain.as_ref()?.view()), rounded: None }),
            Some(wanted) => {
                let rounded = self.rounded.as_ref().filter(|rounded| rounded.quantization == wanted)?;
                Some(Activations { plain: None, rounded: Some(rounded.view()) })
            }
        }
    }
}

/// Room for activations that are made one after another, each in a format of its own.
pub struct ActivationRoom<'s> {
    plain: Option<Tensor<'s>>,  // [rows, columns]
    data: Option<Tensor<'s>>,   // [rows, columns] E4M3
    scales: Option<Tensor<'s>>, // [rows, most scales of a row] f32
}

impl ActivationRoom<'_> {
    /// Activations `[rows, columns]` in `format`: what was written there last, if that was in the same one.
    ///
    /// # Panics
    /// If the room was not taken for this format, or for fewer rows.
    pub fn place(&mut self, format: ActivationFormat, rows: usize) -> Activations<'_> {
        const NONE: &str = "room for this format";
        let plain = format.is_plain.then(|| self.plain.as_mut().expect(NONE).row_range_mut(0..rows));
        let rounded = format.quantization.map(|quantization| {
            let (data, scales) = (self.data.as_mut().expect(NONE), self.scales.as_mut().expect(NONE));
            let (all, of_row) = (scales.columns(), quantization.row_scales(data.columns()));
            assert!(rows <= data.rows() && of_row <= all, "{NONE}: {rows} rows of {quantization:?}");
            let scales = Tensor::over(scales.address(), [rows, of_row].into(), DType::F32);
            Rounded { data: data.row_range_mut(0..rows), scales, quantization }
        });
        Activations { plain, rounded }
    }
}

impl Rounded<'_> {
    /// The bytes of numbers and scales.
    pub fn bytes(&self) -> Bytes {
        self.data.bytes() + self.scales.bytes()
    }

    pub(crate) fn view(&self) -> Rounded<'_> {
        Rounded { data: self.data.view(), scales: self.scales.view(), quantization: self.quantization }
    }
}

/// A view of plain activations.
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

impl<B: Backend> Scope<'_, B> {
    /// Takes room for activations `[rows, columns]` in any of `formats`, in one at a time.
    pub fn room_in(
        &self,
        formats: impl IntoIterator<Item = ActivationFormat>,
        rows: usize,
        columns: usize,
    ) -> Result<ActivationRoom<'_>, KernelError> {
        let mut of_all = (false, None);
        for format in formats {
            of_all.0 |= format.is_plain;
            let scales = format.quantization.map(|quantization| quantization.row_scales(columns));
            of_all.1 = of_all.1.max(scales);
        }
        let (is_plain, scales) = of_all;
        Ok(ActivationRoom {
            plain: is_plain.then(|| self.empty([rows, columns])).transpose()?,
            data: scales.map(|_| self.take([rows, columns], DType::F8E4M3)).transpose()?,
            scales: scales.map(|of_row| self.empty_f32([rows, of_row])).transpose()?,
        })
    }

    /// Takes uninitialised activations `[rows, columns]` in this format.
    pub(crate) fn empty_in(
        &self,
        format: ActivationFormat,
        rows: usize,
        columns: usize,
    ) -> Result<Activations<'_>, KernelError> {
        let plain = if format.is_plain { Some(self.empty([rows, columns])?) } else { None };
        let rounded = match format.quantization {
            Some(quantization) => Some(Rounded {
                data: self.take([rows, columns], DType::F8E4M3)?,
                scales: self.empty_f32([rows, quantization.row_scales(columns)])?,
                quantization,
            }),
            None => None,
        };
        Ok(Activations { plain, rounded })
    }
}
