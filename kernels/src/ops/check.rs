//! Argument checks shared by the operations.

use crate::{DType, KernelError, ScaledLayer, Shape, Target, Tensor};

/// Checks that `found` has the shape `expected`.
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

/// Returns an error unless `condition` holds. `expected` describes the condition in words.
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

/// Checks that `found` contains activations.
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

/// Checks that `found` contains floating-point numbers of the type in which
/// the target stores weights.
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
        return Err(KernelError::Type { op, what, expected: "the target's type of weights", found: found.dtype() });
    }
    Ok(())
}

/// Checks that `found` is a weight with one element per column of `x`.
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

/// Checks that `x` and `residual` have the activation type and equal shapes, and
/// that `residual` is writable.
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

/// Checks that `found` contains activations or f32, the type of logits.
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

/// Checks that `found` contains f32.
pub(super) fn f32(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    match found.dtype() {
        DType::F32 => Ok(()),
        dtype => Err(KernelError::Type { op, what, expected: "f32", found: dtype }),
    }
}

/// Checks that `head_dim` is one of the `sizes` that the target's kernels support.
/// `None` means all sizes.
pub(super) fn head_dim(
    op: &'static str,
    what: &'static str,
    found: &Tensor<'_>,
    head_dim: usize,
    sizes: Option<&[usize]>,
) -> Result<(), KernelError> {
    let Some(sizes) = sizes.filter(|sizes| !sizes.contains(&head_dim)) else { return Ok(()) };
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let listed =
        sizes.split_last().map(|(last, others)| format!("{} or {last}", others.join(", "))).unwrap_or_default();
    Err(KernelError::Shape {
        op,
        what,
        expected: format!("heads of {listed} elements on this target"),
        found: found.shape(),
    })
}

/// Checks that `found` contains u32 indices.
pub(super) fn indices(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    if found.dtype() == DType::U32 {
        return Ok(());
    }
    Err(KernelError::Type { op, what, expected: "u32 indices", found: found.dtype() })
}

/// Checks that `found` is a one-dimensional list of indices.
pub(super) fn index_list(op: &'static str, what: &'static str, found: &Tensor<'_>) -> Result<(), KernelError> {
    indices(op, what, found)?;
    shape(op, what, found, [found.rows()])
}

/// Checks that a layer of the cache has the activation type, or is quantized with a scale for the
/// keys and a scale for the values of each head.
pub(super) fn cache(op: &'static str, cache: ScaledLayer<'_>, activation: DType) -> Result<(), KernelError> {
    let found = cache.layer.shape;
    match (found.dtype, cache.scales) {
        (dtype, Some(scales)) if dtype.needs_scales() => {
            f32(op, "scales", scales)?;
            shape(op, "scales", scales, [2, found.kv_heads])?;
            holds(scales.is_contiguous(), op, "scales", scales, "contiguous rows")
        }
        (dtype, None) if dtype == activation => Ok(()),
        (dtype, _) => {
            let expected = "the target's activations without scales, or quantized elements with scales";
            Err(KernelError::Type { op, what: "layer", expected, found: dtype })
        }
    }
}

/// Panics unless `found`, which an operation changes in place, is borrowed exclusively. The type
/// system ensures this for an owned tensor, but not for a view.
pub(super) fn writable(op: &'static str, what: &'static str, found: &Tensor<'_>) {
    assert!(found.is_writable(), "{op}: {what} is a view that may be shared; create it with a `_mut` method");
}
