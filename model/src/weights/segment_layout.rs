//! The layout of a weight segment: the address of each claim, and the copies that fill it.

use bursar_budgets::{Address, Bytes};
use bursar_kernels::{DType, Shape, Tensor};

use super::{ComputedScales, Int4Copy, NormScaling, RoutingSkew, WeightCopy, WeightSource};
use crate::checkpoint::RandomTensor;

/// Each tensor starts at a multiple of this many bytes, as tensor-core loads require.
const ALIGNMENT: Bytes = Bytes(256);

/// The base address of a layout that only measures. Memory at this address is never accessed.
const NOWHERE: Address = Address(1 << 40);

/// Assigns addresses in the segment, one copy after the other.
pub(super) struct SegmentLayout {
    base: Address,
    used: Bytes,
    copies: Vec<WeightCopy>,
}

impl SegmentLayout {
    /// A layout that only measures. No computation may access its tensors.
    pub fn dry() -> Self {
        SegmentLayout { base: NOWHERE, used: Bytes(0), copies: Vec::new() }
    }

    /// A layout of the segment that starts at `base`.
    ///
    /// # Safety
    /// `base` must be the start of at least [`used`](Self::used) bytes of backed memory, as
    /// counted after the last copy. The memory must stay backed for as long as a tensor of
    /// the layout is used.
    pub unsafe fn at(base: Address) -> Self {
        SegmentLayout { base, ..SegmentLayout::dry() }
    }

    /// Whether this layout only measures, so that kernels for its weights need not exist.
    pub fn is_dry(&self) -> bool {
        self.base == NOWHERE
    }

    /// Bytes of all copies so far, with alignment and padding.
    pub fn used(&self) -> Bytes {
        self.used
    }

    /// All copies, in the order of their addresses.
    pub fn copies(&self) -> &[WeightCopy] {
        &self.copies
    }

    /// Skips bytes, so that the next copy begins at a multiple of [`ALIGNMENT`].
    pub fn align(&mut self) {
        self.used = self.used.round_up(ALIGNMENT);
    }

    /// The address of the next copy.
    pub fn end(&self) -> Address {
        self.base.offset(self.used)
    }

    /// Adds a copy, and returns the address that it gets.
    pub fn place(&mut self, copy: WeightCopy) -> Address {
        let to = self.end();
        self.used += copy.bytes;
        self.copies.push(WeightCopy { to, ..copy });
        to
    }

    /// The tensor at an address of this segment.
    pub fn tensor(&self, to: Address, shape: impl Into<Shape>, dtype: DType) -> Tensor<'static> {
        // SAFETY: the caller of `at` guarantees that the segment is backed while its tensors are
        // used. No computation accesses the tensors of a layout that only measures.
        unsafe { Tensor::persistent(to, shape, dtype) }
    }

    /// Makes the last copy, which is a router, prefer some experts. Does nothing if its weights are
    /// not random.
    pub fn skew_last(&mut self, skew: RoutingSkew) {
        if let Some(copy) = self.copies.last_mut()
            && let WeightSource::Random(name, RandomTensor::Drawn { seed }) = &copy.source
        {
            copy.source = WeightSource::SkewedRouter(name.clone(), *seed, skew);
        }
    }

    /// Transposes the last copy, which is a matrix, while it is read.
    pub fn transpose_last(&mut self) {
        let copy = self.copies.last_mut().expect("a copy was placed");
        (copy.swapped, copy.row) = (true, (copy.elements() / copy.row.0, 0));
    }

    /// Swaps the axes of each row of the last copy while it is read. A row of the file is a matrix of
    /// this shape.
    pub fn swap_rows_last(&mut self, matrix: [usize; 2]) {
        let copy = self.copies.last_mut().expect("a copy was placed");
        (copy.swapped, copy.row_matrix) = (true, Some(matrix));
    }

    /// Sets how the last copy, which is the weight of a norm, is scaled while it is read.
    pub fn scale_last(&mut self, scaling: NormScaling) {
        if let Some(copy) = self.copies.last_mut() {
            copy.norm = Some(scaling);
        }
    }

    /// Multiplies the rows of each copy with index `first` or above by the checkpoint's vector
    /// `scale`.
    pub fn scale_rows_from(&mut self, first: usize, scale: &str) {
        self.copies[first..].iter_mut().for_each(|copy| copy.scale = Some(scale.to_owned()));
    }

    /// Quantizes copy number `copy` while it is read, and computes its scales.
    pub fn quantize(&mut self, copy: usize, scales: ComputedScales) {
        self.copies[copy].quantized = Some(scales);
    }

    /// Marks each copy with index `first` or above as a duplicate of an earlier one.
    pub fn mark_duplicates_from(&mut self, first: usize) {
        self.copies[first..].iter_mut().for_each(|copy| copy.is_duplicate = true);
    }

    /// Stores the weight of copy number `copy` as packed 4-bit integers.
    pub fn pack(&mut self, copy: usize, int4: Int4Copy) {
        self.copies[copy].int4 = Some(int4);
    }
}
