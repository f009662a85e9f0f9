//! The checks that operations share.

use crate::{DType, KernelError, KvLayer, Shape, Target, Tensor};

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

/// `found` must hold floating-point numbers as the target keeps weights.
pub(super) fn weight(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    target: &Target,
) -> Result<(), KernelError> {
    if !found.dtype().is_float() {
        return Err(KernelError::Type { op, what, expected: "floating-point numbers", found: found.dtype() });
    }
    if target.weight(found.dtype()) != found.dtype() {
        return Err(KernelError::Type { op, what, expected: "what the target keeps weights as", found: found.dtype() });
    }
    Ok(())
}

/// `found` must be a weight with one number for each column of `x`.
pub(super) fn column_weight(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    x: &Tensor<'_>,
    target: &Target,
) -> Result<(), KernelError> {
    weight(op, what, found, target)?;
    shape(op, what, found, [x.columns()])
}

/// `x` must be what can be added to `residual`, which is written.
pub(super) fn added(
    op: &'static str,
    x: &Tensor<'_>,
    residual: &mut Tensor<'_>,
    target: &Target,
) -> Result<(), KernelError> {
    activation(op, "x", x, target.activation())?;
    activation(op, "residual", residual, target.activation())?;
    shape(op, "residual", residual, x.shape())?;
    writable(op, "residual", residual);
    Ok(())
}

/// `found` must hold activations, or the f32 in which logits are kept.
pub(super) fn activation_or_f32(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    target: &Target,
) -> Result<(), KernelError> {
    match found.dtype() {
        DType::F32 => Ok(()),
        _ => activation(op, what, found, target.activation()),
    }
}

/// A head must have as many elements as the target's kernels take.
pub(super) fn head_dim(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    head_dim: usize,
    target: &Target,
) -> Result<(), KernelError> {
    holds(target.has_head_dim(head_dim), op, what, found, "heads of 32, 64, 80 or 128 elements on this target")
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
