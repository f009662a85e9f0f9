//! Conversion of tensor views to pointers and slices.

use std::{marker::PhantomData, ops::Range, slice};

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::threads::Threads;
use crate::{DType, Element, Tensor};

/// End of host addresses on current machines. A dry workspace, which has no memory, returns
/// addresses far above this end.
const HOST_ADDRESSES_END: u64 = 1 << 56;

/// Returns the address of the first element of `tensor`. Panics if `tensor` is not in host memory
/// or has another element type.
pub(super) fn start_of<E: Element>(tensor: &Tensor<'_>) -> *mut E {
    assert_eq!(tensor.dtype(), E::DTYPE, "the view has another element type");
    host_bytes(tensor).cast()
}

/// Returns the address of the first byte of `tensor`, for any element type. Panics if `tensor` is
/// not in host memory.
pub(super) fn host_bytes(tensor: &Tensor<'_>) -> *mut u8 {
    let address = tensor.address().0;
    assert!(address < HOST_ADDRESSES_END, "the view was made while planning and has no memory");
    address as *mut u8
}

#[derive(Clone, Copy)]
pub(super) struct Rows<'a, E> {
    start: *const E,
    rows: usize,
    columns: usize,
    pitch: usize,
    memory: PhantomData<&'a [E]>,
}

// SAFETY: `Rows` is a shared slice with a layout, and its elements are Send and Sync.
unsafe impl<E: Element> Send for Rows<'_, E> {}
// SAFETY: `Rows` is a shared slice with a layout, and its elements are Send and Sync.
unsafe impl<E: Element> Sync for Rows<'_, E> {}

impl<'a, E: Element> Rows<'a, E> {
    /// Creates a view of `tensor`. Panics if the tensor has another element type.
    pub(super) fn of(tensor: &'a Tensor<'_>) -> Self {
        Rows {
            start: start_of(tensor),
            rows: tensor.rows(),
            columns: tensor.columns(),
            pitch: tensor.pitch(),
            memory: PhantomData,
        }
    }

    /// Returns row `row`. Panics if `row` is out of bounds, most likely because of a bad
    /// index in an operand.
    pub(super) fn row(&self, row: usize) -> &'a [E] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the tensor's creator guarantees that all its rows are valid, the row is in
        // bounds, and nothing writes an operand while the operation runs.
        unsafe { slice::from_raw_parts(self.start.add(row * self.pitch), self.columns) }
    }

    /// Returns the elements from column `column` of the first row in `rows` to column
    /// `column + length` of the last row, including all columns in between.
    pub(super) fn span(&self, rows: Range<usize>, column: usize, length: usize) -> &'a [E] {
        assert!(
            rows.start < rows.end && rows.end <= self.rows && column + length <= self.columns,
            "the span is outside the tensor"
        );
        let elements = (rows.len() - 1) * self.pitch + length;
        // SAFETY: the span starts and ends in rows that the tensor's creator guarantees to be
        // valid. The elements between two rows of this view belong to the larger tensor that the
        // view was cut from, and nothing writes them during the operation either.
        unsafe { slice::from_raw_parts(self.start.add(rows.start * self.pitch + column), elements) }
    }

    /// Number of elements from the start of a row to the start of the next.
    pub(super) fn pitch(&self) -> usize {
        self.pitch
    }

    /// Returns all elements. Panics if there are gaps between the rows.
    pub(super) fn all(&self) -> &'a [E] {
        assert!(self.pitch == self.columns || self.rows <= 1, "the rows are contiguous");
        // SAFETY: the tensor's creator guarantees that all its rows are valid, the rows are
        // adjacent, and nothing writes an operand while the operation runs.
        unsafe { slice::from_raw_parts(self.start, self.rows * self.columns) }
    }
}

/// Returns a tensor of indices `[n]` as a slice.
pub(super) fn indices<'a>(tensor: &'a Tensor<'_>) -> &'a [u32] {
    Rows::of(tensor).all()
}

/// Panics unless each entry of `places` is below `rows` and no entry occurs twice.
pub(super) fn assert_places(places: &[u32], rows: usize) {
    let mut taken = vec![false; rows];
    for place in places {
        let place = *place as usize;
        assert!(place < rows, "row {place} of {rows}");
        assert!(!std::mem::replace(&mut taken[place], true), "row {place} is named twice");
    }
}

/// The rows of an output, for threads that each write separate parts.
pub(super) struct Output<'a, E = f32> {
    start: *mut E,
    rows: usize,
    columns: usize,
    pitch: usize,
    memory: PhantomData<&'a [E]>,
}

// SAFETY: callers of `part` keep the slices of different threads disjoint, and
// the elements are Send.
unsafe impl<E: Element> Sync for Output<'_, E> {}

impl<'a> Output<'a> {
    /// Creates an output for a tensor of activations, which the op layer has allocated for this
    /// operation or borrows exclusively.
    pub(super) fn of(tensor: &'a Tensor<'_>) -> Self {
        Output::of_type(tensor)
    }
}

impl<'a, E: Element> Output<'a, E> {
    /// Like [`of`](Output::of), for elements of any type.
    pub(super) fn of_type(tensor: &'a Tensor<'_>) -> Self {
        Output {
            start: start_of(tensor),
            rows: tensor.rows(),
            columns: tensor.columns(),
            pitch: tensor.pitch(),
            memory: PhantomData,
        }
    }

    /// Returns `length` elements of a row, starting at `column`.
    ///
    /// # Safety
    /// No other slice overlaps the returned slice while it is alive.
    #[allow(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    pub(super) unsafe fn part(&self, row: usize, column: usize, length: usize) -> &'a mut [E] {
        assert!(row < self.rows && column + length <= self.columns, "the part is outside the output");
        // SAFETY: the tensor's creator guarantees that its rows are valid, the part is inside one
        // row, and the caller keeps parts disjoint.
        unsafe { slice::from_raw_parts_mut(self.start.add(row * self.pitch + column), length) }
    }
}

/// Equal parts of declared scratch, one per worker.
pub(super) struct Scratch<'a> {
    start: *mut f32,
    elements: usize,
    share: usize,
    memory: PhantomData<&'a [f32]>,
}

// SAFETY: callers of `of_worker` give each part to one worker at a time, and floats are Send.
unsafe impl Sync for Scratch<'_> {}

impl<'a> Scratch<'a> {
    /// Divides `tensor`, which the op layer has allocated for this operation, into
    /// parts of `share` elements.
    pub(super) fn of(tensor: &'a Tensor<'_>, share: usize) -> Self {
        Scratch { start: start_of(tensor), elements: tensor.shape().elements(), share, memory: PhantomData }
    }

    /// Returns the part of `worker`. Panics if there are more workers than declared.
    ///
    /// # Safety
    /// The worker has no other such slice while this one is alive.
    #[allow(clippy::mut_from_ref, reason = "each worker has a separate part")]
    pub(super) unsafe fn of_worker(&self, worker: usize) -> &'a mut [f32] {
        assert!((worker + 1) * self.share <= self.elements, "the declared scratch has a part for each worker");
        // SAFETY: the part is inside the scratch, and the caller holds no other slice of it.
        unsafe { slice::from_raw_parts_mut(self.start.add(worker * self.share), self.share) }
    }
}

/// Calls `write(row, elements)` for each row of `out`. `cost` is the number
/// of multiply-adds per element.
pub(super) fn write_rows(threads: &Threads, out: &Tensor<'_>, cost: usize, write: impl Fn(usize, &mut [f32]) + Sync) {
    let (output, rows, columns) = (Output::of(out), out.rows(), out.columns());
    threads.share(rows, rows * columns * cost, |_, row| {
        // SAFETY: each row is one item, so no two threads write the same row.
        write(row, unsafe { output.part(row, 0, columns) });
    });
}

/// Widens `out.len()` elements of a floating-point tensor's row `row` into `out`.
#[inline(always)]
pub(super) fn widen(tensor: &Tensor<'_>, row: usize, out: &mut [f32]) {
    match tensor.dtype() {
        DType::F32 => out.copy_from_slice(Rows::<f32>::of(tensor).row(row)),
        DType::F16 => Rows::<f16>::of(tensor).row(row).convert_to_f32_slice(out),
        DType::BF16 => {
            // A bf16 is the upper half of an f32. The compiler vectorizes this loop, eight numbers
            // at once.
            let row = Rows::<bf16>::of(tensor).row(row);
            assert_eq!(row.len(), out.len(), "the output row has another length");
            for (out, half) in out.iter_mut().zip(row) {
                *out = f32::from_bits(u32::from(half.to_bits()) << 16);
            }
        }
        _ => unreachable!("the op layer checks for floating-point weights"),
    }
}

/// Adds `weight` times the widened elements of a floating-point tensor's row `row` to `out`.
#[inline(always)]
pub(super) fn add_widened(tensor: &Tensor<'_>, row: usize, weight: f32, out: &mut [f32]) {
    let add = |(sum, number): (&mut f32, f32)| *sum += number * weight;
    match tensor.dtype() {
        DType::F32 => out.iter_mut().zip(Rows::<f32>::of(tensor).row(row).iter().copied()).for_each(add),
        DType::F16 => {
            out.iter_mut().zip(Rows::<f16>::of(tensor).row(row).iter().map(|half| half.to_f32())).for_each(add)
        }
        DType::BF16 => {
            out.iter_mut().zip(Rows::<bf16>::of(tensor).row(row).iter().map(|half| half.to_f32())).for_each(add)
        }
        _ => unreachable!("the op layer checks for floating-point weights"),
    }
}

/// A one-dimensional floating-point tensor as `f32`.
pub(super) fn widened(tensor: &Tensor<'_>) -> Vec<f32> {
    let mut out = vec![0.0; tensor.shape().elements()];
    widen(&tensor.reshape([1, out.len()]), 0, &mut out);
    out
}
