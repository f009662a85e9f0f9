//! Quantization to E4M3, and the outputs of operations that may quantize while they write.

use super::{
    memory::{Output, Rows},
    threads::Threads,
};
use crate::{
    Activations, E4m3, Quantization, QuantizedRows, SCALE_BLOCK, calls::Quantize, e4m3_scale, largest_magnitude,
};

pub(super) fn quantize(threads: &Threads, call: Quantize<'_>) {
    let x = Rows::<f32>::of(&call.x);
    round_rows(threads, &call.out, |row| x.row(row));
}

/// Quantizes the rows that `row` returns.
pub(super) fn round_rows<'x>(threads: &Threads, out: &QuantizedRows<'_>, row: impl Fn(usize) -> &'x [f32] + Sync) {
    let (rows, columns) = (out.data.rows(), out.data.columns());
    let out = QuantizedOutput::of(out);
    threads.share(rows, 4 * rows * columns, |_, at| {
        let x = row(at);
        // SAFETY: each row is one item, so no two threads write the same row.
        unsafe { out.write(at, |first, part| part.copy_from_slice(&x[first..][..part.len()])) };
    });
}

/// Writes each row in all formats that `out` requests. `prepared(row)` returns a function that
/// writes the row's numbers from a column on. The returned function may be called more than once
/// for the same numbers. `cost` is the work per number, in multiply-adds.
pub(super) fn write_activations<F: Fn(usize, &mut [f32])>(
    threads: &Threads,
    out: &Activations<'_>,
    cost: usize,
    prepared: impl Fn(usize) -> F + Sync,
) {
    let (rows, columns) = (out.rows(), out.columns());
    let plain = out.plain.as_ref().map(Output::of);
    let quantized = out.quantized.as_ref().map(QuantizedOutput::of);
    threads.share(rows, rows * columns * cost, |_, row| {
        let write = prepared(row);
        if let Some(plain) = &plain {
            // SAFETY: each row is one item, so no two threads write the same row.
            write(0, unsafe { plain.part(row, 0, columns) });
        }
        if let Some(quantized) = &quantized {
            // SAFETY: each row is one item, so no two threads write the same row.
            unsafe { quantized.write(row, &write) };
        }
    });
}

/// Quantized rows, for threads that each write separate rows.
struct QuantizedOutput<'a> {
    data: Output<'a, E4m3>,
    scales: Output<'a>,
    columns: usize,
    quantization: Quantization,
}

impl<'a> QuantizedOutput<'a> {
    fn of(out: &'a QuantizedRows<'_>) -> Self {
        QuantizedOutput {
            data: Output::of_type(&out.data),
            scales: Output::of(&out.scales),
            columns: out.data.columns(),
            quantization: out.quantization,
        }
    }

    /// Quantizes a row. `numbers` writes the row's numbers from a given column on.
    ///
    /// # Safety
    /// No other thread writes this row.
    #[inline(always)]
    unsafe fn write(&self, row: usize, numbers: impl Fn(usize, &mut [f32])) {
        let mut buffer = [0.0; SCALE_BLOCK];
        // SAFETY: the caller guarantees that no other thread writes this row.
        let (data, scales) = unsafe {
            let scales = self.quantization.row_scales(self.columns);
            (self.data.part(row, 0, self.columns), self.scales.part(row, 0, scales))
        };
        let of_row = match self.quantization {
            Quantization::Groups => None,
            Quantization::Fixed(scale) => Some(scale),
            Quantization::Rows => {
                let mut largest = 0.0f32;
                for first in (0..self.columns).step_by(SCALE_BLOCK) {
                    let part = &mut buffer[..SCALE_BLOCK.min(self.columns - first)];
                    numbers(first, part);
                    largest = largest.max(largest_magnitude(part));
                }
                scales[0] = e4m3_scale(largest);
                Some(scales[0])
            }
        };
        for (group, data) in data.chunks_mut(SCALE_BLOCK).enumerate() {
            let part = &mut buffer[..data.len()];
            numbers(group * SCALE_BLOCK, part);
            let scale = of_row.unwrap_or_else(|| {
                scales[group] = e4m3_scale(largest_magnitude(part));
                scales[group]
            });
            data.iter_mut().zip(&*part).for_each(|(place, number)| *place = E4m3::from_f32(number / scale));
        }
    }
}
