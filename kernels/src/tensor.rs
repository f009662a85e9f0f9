//! Tensors: typed, shaped views of memory. The lease of the memory belongs to the tensor's creator.

use std::{marker::PhantomData, ops::Range};

use bursar_budgets::{Address, Bytes};

use crate::{DType, Shape};

/// A view of device memory. A tensor does not own or free the memory.
///
/// Each row is contiguous, and rows start `pitch` elements apart, so a range of columns (for
/// example, the queries of a fused projection) is a view too. The lifetime `'m` is the lifetime of
/// the memory: a temporary cannot outlive the frame that it was allocated from.
///
/// Each piece of memory has one tensor, and views borrow from that tensor. An operation that works
/// in place takes the tensor itself or a view made by one of the `_mut` methods, which borrow
/// exclusively. Shared views are read-only: an operation panics instead of writing to one.
///
/// ```compile_fail,E0597
/// use bursar_budgets::Workspace;
/// use bursar_kernels::{Plan, Scope, WorkCounter, Target};
///
/// let (workspace, counter) = (Workspace::dry(), WorkCounter::default());
/// let plan = Plan::new(Target::Cpu { threads: 1 });
/// let kept;
/// {
///     let pass = Scope::new(&plan, &workspace, &counter);
///     kept = pass.empty([3, 64])?; // `pass` does not live long enough
/// }
/// println!("{:?}", kept.shape());
/// # Ok::<(), bursar_kernels::KernelError>(())
/// ```
///
/// ```compile_fail,E0502
/// # use bursar_budgets::Workspace;
/// # use bursar_kernels::{Plan, Scope, WorkCounter, Target, ops::gelu::Gelu};
/// # let (workspace, counter) = (Workspace::dry(), WorkCounter::default());
/// # let plan = Plan::new(Target::Cpu { threads: 1 });
/// # let pass = Scope::new(&plan, &workspace, &counter);
/// let mut hidden = pass.empty([3, 64])?;
/// let part = hidden.column_range(0..32);
/// pass.gelu(&mut hidden, Gelu::Erf)?; // `hidden` is borrowed by `part`
/// println!("{:?}", part.shape());
/// # Ok::<(), bursar_kernels::KernelError>(())
/// ```
#[derive(Debug)]
pub struct Tensor<'m> {
    address: Address,
    shape: Shape,
    pitch: usize,
    dtype: DType,
    /// `true` if no other usable view of this memory exists.
    writable: bool,
    memory: PhantomData<&'m ()>,
}

impl<'m> Tensor<'m> {
    /// Creates a view of memory that outlives every pass: weights, caches, fixed input buffers.
    ///
    /// # Safety
    /// As long as operations use the view, or any view made from it, `address` must be the start of
    /// `dtype.bytes(shape.elements())` bytes of backed device memory that is aligned to the
    /// element type. Nothing else may write this memory while an operation reads it, or read it
    /// while an operation writes it.
    pub unsafe fn persistent(address: Address, shape: impl Into<Shape>, dtype: DType) -> Tensor<'static> {
        Tensor::over(address, shape.into(), dtype)
    }

    pub(crate) fn over(address: Address, shape: Shape, dtype: DType) -> Tensor<'m> {
        Tensor { address, shape, pitch: shape.columns(), dtype, writable: true, memory: PhantomData }
    }

    /// Returns a second view of the same memory, for use in a struct of [`calls`](crate::calls).
    pub(crate) fn view(&self) -> Tensor<'_> {
        Tensor { ..*self }
    }

    /// Returns the address of the first element.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Returns the extents, outermost first.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the outermost extent.
    pub fn rows(&self) -> usize {
        self.shape.rows()
    }

    /// Returns the product of all extents except the outermost.
    pub fn columns(&self) -> usize {
        self.shape.columns()
    }

    /// Returns the number of elements from the start of a row to the start of the next.
    pub fn pitch(&self) -> usize {
        self.pitch
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns `true` if there are no gaps between rows.
    pub fn is_contiguous(&self) -> bool {
        self.pitch == self.columns() || self.rows() <= 1
    }

    /// Returns `true` for a tensor itself and for exclusive views, which operations
    /// may change in place.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the bytes of the elements, without gaps between rows.
    pub fn bytes(&self) -> Bytes {
        self.dtype.bytes(self.shape.elements())
    }

    /// Returns the rows `range` of this tensor, read-only. Panics if `range` is out of bounds.
    pub fn row_range(&self, range: Range<usize>) -> Tensor<'_> {
        Tensor { writable: false, ..self.rows_at(range) }
    }

    /// Returns the rows `range` of this tensor, writable. Panics if `range` is out of bounds.
    pub fn row_range_mut(&mut self, range: Range<usize>) -> Tensor<'_> {
        self.rows_at(range)
    }

    /// Returns the rows before `at` and the rows from `at` on, both writable. Panics if `at`
    /// is out of bounds.
    pub fn split_rows_mut(&mut self, at: usize) -> (Tensor<'_>, Tensor<'_>) {
        (self.rows_at(0..at), self.rows_at(at..self.rows()))
    }

    /// Returns the columns `range` of every row, as `[rows, range.len()]`, read-only. Panics if
    /// `range` is out of bounds.
    pub fn column_range(&self, range: Range<usize>) -> Tensor<'_> {
        Tensor { writable: false, ..self.columns_at(range) }
    }

    /// Returns the columns `range` of every row, as `[rows, range.len()]`, writable. Panics if
    /// `range` is out of bounds.
    pub fn column_range_mut(&mut self, range: Range<usize>) -> Tensor<'_> {
        self.columns_at(range)
    }

    /// Turns this tensor into the columns `range` of every row. The result is writable if this
    /// tensor is. Panics if `range` is out of bounds.
    pub fn into_column_range(self, range: Range<usize>) -> Tensor<'m> {
        let Tensor { address, shape, pitch, .. } = self.columns_at(range);
        Tensor { address, shape, pitch, ..self }
    }

    /// Returns the same elements in another shape, read-only. Panics if rows have gaps or
    /// the element counts differ.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Tensor<'_> {
        Tensor { writable: false, ..self.reshaped(shape.into()) }
    }

    /// Turns this tensor or view into another shape. The result is writable if this tensor is.
    /// Panics if rows have gaps or the element counts differ.
    pub fn into_shape(self, shape: impl Into<Shape>) -> Tensor<'m> {
        let Tensor { shape, pitch, .. } = self.reshaped(shape.into());
        Tensor { shape, pitch, ..self }
    }

    fn rows_at(&self, range: Range<usize>) -> Tensor<'_> {
        assert!(
            range.start <= range.end && range.end <= self.rows(),
            "rows {range:?} of a tensor of {} rows",
            self.rows()
        );
        let mut extents = self.shape.extents().to_vec();
        extents[0] = range.len();
        Tensor {
            address: self.address.offset(self.dtype.bytes(range.start * self.pitch)),
            shape: Shape::new(&extents),
            ..*self
        }
    }

    fn columns_at(&self, range: Range<usize>) -> Tensor<'_> {
        assert!(
            range.start <= range.end && range.end <= self.columns(),
            "columns {range:?} of a tensor of {} columns",
            self.columns()
        );
        Tensor {
            address: self.address.offset(self.dtype.bytes(range.start)),
            shape: Shape::new(&[self.rows(), range.len()]),
            ..*self
        }
    }

    fn reshaped(&self, shape: Shape) -> Tensor<'_> {
        assert!(self.is_contiguous(), "only a contiguous tensor can be reshaped");
        assert_eq!(shape.elements(), self.shape.elements(), "{} does not reshape to {shape}", self.shape);
        Tensor { shape, pitch: shape.columns(), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: [usize; 2]) -> Tensor<'static> {
        Tensor::over(Address(4096), shape.into(), DType::F32)
    }

    #[test]
    fn a_range_of_columns_keeps_the_pitch_of_the_whole() {
        let qkv = tensor([5, 12]);
        let keys = qkv.column_range(4..8);
        assert_eq!(keys.address(), Address(4096 + 16));
        assert_eq!((keys.shape().extents(), keys.pitch()), (&[5, 4][..], 12));
        assert!(!keys.is_contiguous());
        let last = keys.row_range(3..5);
        assert_eq!(last.address(), Address(4096 + 16 + 3 * 48));
    }

    #[test]
    fn a_tensor_narrowed_to_some_columns_stays_writable() {
        let logits = tensor([5, 12]).into_column_range(0..10);
        assert_eq!((logits.rows(), logits.columns(), logits.pitch()), (5, 10, 12));
        assert!(logits.is_writable() && !logits.is_contiguous());
    }

    #[test]
    fn split_rows_are_adjacent_and_writable() {
        let mut rows = tensor([5, 12]);
        let (first, second) = rows.split_rows_mut(2);
        assert_eq!((first.rows(), second.rows(), second.address()), (2, 3, Address(4096 + 2 * 48)));
        assert!(first.is_writable() && second.is_writable());
    }

    #[test]
    #[should_panic(expected = "rows 2..6 of a tensor of 5 rows")]
    fn a_row_range_out_of_bounds_panics() {
        tensor([5, 12]).row_range(2..6);
    }

    #[test]
    #[should_panic(expected = "only a contiguous tensor can be reshaped")]
    fn reshaping_a_tensor_with_gaps_panics() {
        tensor([5, 12]).column_range(0..6).reshape([30]);
    }

    #[test]
    fn only_a_view_with_an_exclusive_borrow_is_writable() {
        let mut hidden = tensor([5, 12]);
        assert!(hidden.is_writable() && hidden.column_range_mut(3..7).row_range_mut(1..2).is_writable());
        assert!(!hidden.row_range(0..5).is_writable());
        assert!(
            !hidden.reshape([60]).row_range_mut(0..4).is_writable(),
            "a tensor made from a shared view is not writable"
        );
    }
}
