//! The end of autotuning: timing of the GEMMs called so far, at small row counts.

use crate::{Backend, DType, KernelError, Scope, calls};

impl<B: Backend> Scope<'_, B> {
    /// Lets the backend time the GEMMs that were called since autotuning began, in all memory that
    /// is left in the workspace. Call this method between [`autotune(true)`](Backend::autotune) and
    /// `autotune(false)`, after the pass has released its memory. No GEMM is measured twice.
    /// Afterward the workspace's high-water mark equals its capacity. In a plan, this method does
    /// nothing.
    ///
    /// # Errors
    /// The device is lost.
    pub fn measure_products(&self) -> Result<(), KernelError> {
        if !B::COMPUTES {
            return Ok(());
        }
        let memory = self.take([self.left().as_usize()], DType::U8)?;
        self.backend.measure(calls::Measure { memory: memory.view() })
    }
}
