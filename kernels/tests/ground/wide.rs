//! Operands with gaps between their rows: views of wider tensors.

use bursar_kernels::*;
use half::{bf16, f16};

use super::{Random, narrowed, rounded, widened};

/// Number of columns before and after a view, in the underlying tensor. Attention on a GPU needs
/// rows aligned to 16 bytes.
pub(super) fn margins(dtype: DType) -> (usize, usize) {
    if dtype == DType::F32 { (3, 2) } else { (8, 8) }
}

/// A tensor whose columns between the margins are an operand.
#[derive(Clone)]
pub(super) struct Wide {
    activation: DType,
    columns: usize,
    pub(super) numbers: Vec<f32>,
}

impl Wide {
    pub(super) fn new(activation: DType, rows: usize, columns: usize, random: &mut Random) -> Self {
        let (before, behind) = margins(activation);
        let numbers = rounded(activation, &random.floats(rows * (before + columns + behind)));
        Wide { activation, columns, numbers: numbers.into_iter().map(|number| number as f32).collect() }
    }

    fn before(&self) -> usize {
        margins(self.activation).0
    }

    pub(super) fn pitch(&self) -> usize {
        self.columns + margins(self.activation).0 + margins(self.activation).1
    }

    pub(super) fn at(&self, row: usize, column: usize) -> f64 {
        f64::from(self.numbers[row * self.pitch() + self.before() + column])
    }

    pub(super) fn row(&self, row: usize) -> Vec<f64> {
        widened(&self.numbers[row * self.pitch() + self.before()..][..self.columns])
    }

    /// The whole tensor, with the operand's elements changed.
    pub(super) fn changed(self, change: impl Fn(usize, usize, f64) -> f64) -> Vec<f64> {
        let (pitch, before) = (self.pitch(), self.before());
        let element = |(at, number): (usize, &f32)| {
            let (row, column) = (at / pitch, (at % pitch).wrapping_sub(before));
            if column < self.columns { change(row, column, f64::from(*number)) } else { f64::from(*number) }
        };
        self.numbers.iter().enumerate().map(element).collect()
    }
}

pub(super) fn wide<'s, B: Backend>(
    scope: &'s Scope<'_, B>,
    rows: usize,
    columns: usize,
    random: &mut Random,
) -> Result<Tensor<'s>, KernelError> {
    let wide = Wide::new(scope.target().activation(), rows, columns, random);
    narrowed(scope, [rows, wide.pitch()], wide.activation, &wide.numbers)
}

pub(super) fn inside<'t>(wide: &'t Tensor<'_>) -> Tensor<'t> {
    let (before, behind) = margins(wide.dtype());
    wide.column_range(before..wide.columns() - behind)
}

/// Downloads a tensor of activations or indices as `f32`.
pub(super) fn floats<B: Backend>(scope: &Scope<'_, B>, tensor: &Tensor<'_>) -> Result<Vec<f32>, KernelError> {
    Ok(match tensor.dtype() {
        DType::F16 => scope.download::<f16>(tensor)?.into_iter().map(f32::from).collect(),
        DType::BF16 => scope.download::<bf16>(tensor)?.into_iter().map(f32::from).collect(),
        _ => scope.download(tensor)?,
    })
}
