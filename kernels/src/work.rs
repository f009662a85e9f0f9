//! The cost of a pass: floating-point operations and bytes, counted by the methods in `ops`.

use std::{cell::Cell, ops::AddAssign};

use bursar_budgets::Bytes;

use crate::Tensor;

/// Floating-point operations, and the bytes that must be read from and written to device memory
/// (each input once, each output once). Divided by a device's rates, they give the roofline's lower
/// bound on a pass's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Floating-point operations. A multiply-add counts as two.
    pub flops: u64,
    /// The part of `flops` in GEMMs that the target multiplies in a quantized type, which is twice
    /// as fast as in 16 bits.
    pub quantized_flops: u64,
    /// Bytes read and written.
    pub bytes: Bytes,
}

impl Work {
    /// Returns the work of `flops` operations over `tensors`, if each tensor is read or written
    /// once.
    pub fn over(flops: u64, tensors: &[&Tensor<'_>]) -> Self {
        Work { flops, bytes: tensors.iter().map(|tensor| tensor.bytes()).sum(), ..Work::default() }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.flops += other.flops;
        self.quantized_flops += other.quantized_flops;
        self.bytes += other.bytes;
    }
}

/// The running sum of a pass's [`Work`].
#[derive(Debug, Default)]
pub struct WorkCounter(Cell<Work>);

impl WorkCounter {
    /// Returns the work counted so far.
    pub fn total(&self) -> Work {
        self.0.get()
    }

    pub(crate) fn add(&self, work: Work) {
        let mut total = self.0.get();
        total += work;
        self.0.set(total);
    }
}
