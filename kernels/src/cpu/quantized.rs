//! GEMMs of quantized operands: dot products within each group of columns that has a scale. The
//! result of a row does not depend on the number of rows.

use super::{
    arithmetic::dot,
    memory::{Output, Rows, Scratch, widened},
    threads::Threads,
};
use crate::{
    Activations, E4m3, Quantization, Weight, WeightScales,
    calls::Linear,
    target::{CPU_PANEL_ROWS, cpu_linear_share},
};

pub(super) fn linear(threads: &Threads, call: Linear<'_>) {
    let x = QuantizedInput::of(&call.x);
    let weight = WeightRows::of(&call.weight).expect("an unquantized weight has a separate GEMM");
    let (features, in_features, rows) = (call.weight.rows(), call.weight.columns(), call.x.rows());
    let scratch = Scratch::of(&call.scratch, cpu_linear_share(features, in_features, call.weight.dtype()));
    let (bias, out) = (call.bias.as_ref().map(widened), Output::of(&call.out));
    threads.share(features.div_ceil(CPU_PANEL_ROWS), (rows + 1) * features * in_features, |worker, panel| {
        let columns = panel * CPU_PANEL_ROWS..features.min((panel + 1) * CPU_PANEL_ROWS);
        // SAFETY: a worker processes one panel at a time, so nothing else
        // uses this worker's scratch.
        let (x_row, panel) = unsafe { scratch.of_worker(worker) }.split_at_mut(in_features);
        let panel = &mut panel[..columns.len() * in_features];
        for (feature, wide) in columns.clone().zip(panel.chunks_exact_mut(in_features)) {
            weight.widen(feature, wide);
        }
        for row in 0..rows {
            x.widen(row, x_row);
            // SAFETY: no other panel has these columns, so no other thread writes these elements.
            let out = unsafe { out.part(row, columns.start, columns.len()) };
            for ((feature, out), wide) in columns.clone().zip(out).zip(panel.chunks_exact(in_features)) {
                let product = weight.product(feature, wide, x_row, x.scales(row));
                *out = if call.accumulate { *out + product } else { product };
                if let Some(bias) = &bias {
                    *out += bias[feature];
                }
            }
        }
    });
}

pub(super) struct QuantizedInput<'a> {
    data: Rows<'a, E4m3>,
    scales: RowScales<'a>,
}

enum RowScales<'a> {
    Stored(Rows<'a, f32>),
    Fixed(f32),
}

impl<'a> QuantizedInput<'a> {
    pub(super) fn of(x: &'a Activations<'_>) -> Self {
        let quantized = x.quantized.as_ref().expect("the op layer quantizes activations for a quantized weight");
        let scales = match quantized.quantization {
            Quantization::Groups | Quantization::Rows => RowScales::Stored(Rows::of(&quantized.scales)),
            Quantization::Fixed(scale) => RowScales::Fixed(scale),
        };
        QuantizedInput { data: Rows::of(&quantized.data), scales }
    }

    #[inline(always)]
    pub(super) fn widen(&self, row: usize, out: &mut [f32]) {
        out.iter_mut().zip(self.data.row(row)).for_each(|(out, number)| *out = number.to_f32());
    }

    #[inline(always)]
    pub(super) fn scales(&self, row: usize) -> &[f32] {
        match &self.scales {
            RowScales::Stored(scales) => scales.row(row),
            RowScales::Fixed(scale) => std::slice::from_ref(scale),
        }
    }
}

/// Read access to the rows of a quantized weight.
pub(super) struct WeightRows<'a> {
    data: Rows<'a, E4m3>,
    scales: &'a WeightScales<'a>,
    group: usize,
}

impl<'a> WeightRows<'a> {
    /// Returns `None` if the weight has no separate scales: it is unquantized, or in blocks.
    pub(super) fn of(weight: &'a Weight<'a>) -> Option<Self> {
        let scales = weight.scales.as_ref()?;
        let group = scales.by.group_columns(weight.columns());
        Some(WeightRows { data: Rows::of(&weight.data), scales, group })
    }

    #[inline(always)]
    pub(super) fn widen(&self, feature: usize, out: &mut [f32]) {
        out.iter_mut().zip(self.data.row(feature)).for_each(|(out, number)| *out = number.to_f32());
    }

    /// Computes the scaled dot product of the weight's row `feature`, already widened in `wide`,
    /// and a widened row `x` of activations with the scales `x_scales`.
    #[inline(always)]
    pub(super) fn product(&self, feature: usize, wide: &[f32], x: &[f32], x_scales: &[f32]) -> f32 {
        let factors = Rows::<f32>::of(&self.scales.factors);
        let scales = match self.scales.by.block_rows() {
            Some(height) => factors.row(feature / height),
            None => &factors.all()[feature..=feature],
        };
        let groups = wide.chunks(self.group).zip(x.chunks(self.group)).zip(scales.iter().zip(x_scales));
        groups.map(|((wide, x), (scale, of_x))| dot(wide, x) * (scale * of_x)).sum()
    }
}
