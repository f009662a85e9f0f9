//! Launches of attention.
use super::Cuda;
use crate::{KernelError, ops};
pub(super) fn paged(_cuda: &Cuda, _call: ops::attention_paged::Call<'_>) -> Result<(), KernelError> {
    todo!()
}
pub(super) fn packed(_cuda: &Cuda, _call: ops::attention_packed::Call<'_>) -> Result<(), KernelError> {
    todo!()
}
