//! What can go wrong in an operation.

use bursar_budgets::{DeviceError, WorkspaceFull};
use thiserror::Error;

use crate::{DType, Shape};

/// A failed operation. The contents of the tensors it would have written are undefined.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Two shapes that must agree do not.
    #[error("{op}: {what} is {found}; expected {expected}")]
    Shape {
        /// The operation's name.
        op: &'static str,
        /// The operand's name.
        what: &'static str,
        /// The shape the operation needs, or a condition on it in words.
        expected: String,
        /// The shape it was given.
        found: Shape,
    },
    /// An operand of a type that the operation does not take.
    #[error("{op}: {what} holds {found}; expected {expected}")]
    Type {
        /// The operation's name.
        op: &'static str,
        /// The operand's name.
        what: &'static str,
        /// The type the operation needs.
        expected: &'static str,
        /// The type it was given.
        found: DType,
    },
    /// The target has no kernel for an operation.
    #[error("{op}: this operation has no GPU kernel yet")]
    NoKernel {
        /// The operation's name.
        op: &'static str,
    },
    /// The workspace is smaller than the pass needs, because it was planned for another envelope or target.
    #[error(transparent)]
    Workspace(#[from] WorkspaceFull),
    /// The device refused or is lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
