//! The end of autotuning: the products that it met are measured at few rows.

use crate::{Backend, DType, KernelError, Scope, Tensor};

/// What a backend may use to measure in.
#[non_exhaustive]
pub struct Call<'a> {
    /// `[bytes]` u8, of any content: all that is left of the workspace.
    pub room: Tensor<'a>,
}

impl<B: Backend> Scope<'_, B> {
    /// Lets the backend measure the products that this autotuning has met, in all that is left of the workspace; to be
    /// called between [`autotune(true)`](Backend::autotune) and `autotune(false)`, when the pass has given its memory
    /// back. What was measured before is not measured again. The workspace's high-water mark is its capacity then.
    ///
    /// # Errors
    /// The device is lost.
    pub fn measure_products(&self) -> Result<(), KernelError> {
        if !B::COMPUTES {
            return Ok(());
        }
        let room = self.take([self.left().as_usize()], DType::U8)?;
        self.backend.measure(Call { room: room.view() })
    }
}
