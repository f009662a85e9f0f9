//! Errors of operations.

use bursar_budgets::{DeviceError, WorkspaceFull};
use thiserror::Error;

use crate::{DType, Shape};

/// A failed operation. The contents of the operation's output tensors are undefined.
#[derive(Debug, Error)]
pub enum KernelError {
    /// Two shapes that must agree differ.
    #[error("{op}: {what} is {found}; expected {expected}")]
    Shape {
        op: &'static str,
        what: &'static str,
        /// The shape the operation needs, or a condition on it in words.
        expected: String,
        found: Shape,
    },
    /// An operand has a type that the operation does not support.
    #[error("{op}: {what} holds {found}; expected {expected}")]
    Type {
        op: &'static str,
        what: &'static str,
        /// The type the operation needs.
        expected: &'static str,
        found: DType,
    },
    /// The target has no kernel for an operation, or its kernels do not support the sizes of the
    /// operands.
    #[error("{op}: this operation has no GPU kernel yet")]
    NoKernel { op: &'static str },
    /// The workspace is smaller than the pass needs, because it was planned for
    /// another envelope or target.
    #[error(transparent)]
    Workspace(#[from] WorkspaceFull),
    /// The device refused a call or is lost.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
