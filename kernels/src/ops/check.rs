//! The checks that operations share.

use crate::{DType, KernelError, KvLayer, Shape, Tensor};

/// `found` must have the shape `expected`.
pub(super) fn shape(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    expected: impl Into<Shape>,
) -> Result<(), KernelError> {
    let expected = expected.into();
    if found.shape() == expected {
        return Ok(());
    }
    Err(KernelError::Shape { op, what, expected: expected.to_string(), found: found.shape() })
}

/// `found` must satisfy what `expected` says in words.
pub(super) fn holds(
    condition: bool,
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    expected: &str,
) -> Result<(), KernelError> {
    if condition {
        return Ok(());
    }
    Err(KernelError::Shape { op, what, expected: expected.to_owned(), found: found.shape() })
}

/// `found` must hold activations.
pub(super) fn activation(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    activation: DType,
) -> Result<(), KernelError> {
    if found.dtype() == activation {
        return Ok(());
    }
    Err(KernelError::Type { op, what, expected: "the target's activations", found: found.dtype() })
}

/// `found` must hold floating-point numbers of some kind, as weights do.
pub(super) fn float(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    if found.dtype().is_float() {
        return Ok(());
    }
    Err(KernelError::Type { op, what, expected: "floating-point numbers", found: found.dtype() })
}

/// `found` must hold indices.
pub(super) fn indices(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    if found.dtype() == DType::U32 {
        return Ok(());
    }
    Err(KernelError::Type { op, what, expected: "u32 indices", found: found.dtype() })
}

/// `found` must be a list of indices.
pub(super) fn index_list(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    indices(op, what, found)?;
    shape(op, what, found, [found.rows()])
}

/// A layer of the cache must hold activations' type: keys and values are copied, not converted.
pub(super) fn cache(op: &'static str, layer: &KvLayer, activation: DType) -> Result<(), KernelError> {
    if layer.shape.dtype == activation {
        return Ok(());
    }
    Err(KernelError::Type { op, what: "layer", expected: "the target's activations", found: layer.shape.dtype })
}

/// What an operation works on in place must be borrowed alone. The type system says so for the tensor itself; for a
/// view of it this does.
pub(super) fn writable(op: &'static str, what: &'static str, found: &Tensor<'_>) {
    assert!(found.is_writable(), "{op}: {what} is a view that others may have too; make it with a `_mut` method");
}
