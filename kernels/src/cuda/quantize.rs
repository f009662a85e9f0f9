//! Launches of what rounds activations to E4M3: rows as they are, norms and gates (`kernels/cuda/quantize.cu`).

use bursar_budgets::Address;

use super::{
    Cuda,
    contract::fp8::{BY_GROUPS, BY_ROWS, FIXED, GATE_BLOCKS, THREADS_MAX, VECTOR},
    launch::{Arguments, Extent, Function, arguments, count},
};
use crate::{Activations, KernelError, Quantization, Rounded, Tensor, ops};

/// Whether rows of so many columns can be rounded.
pub(super) fn serves(columns: usize) -> bool {
    columns > 0 && columns.is_multiple_of(VECTOR)
}

pub(super) fn quantize(cuda: &Cuda, call: ops::quantize::Call<'_>) -> Result<(), KernelError> {
    launch(cuda, "quantize", (cuda.entry_points().quantize, 1), input(&call.x), None, &call.out)
}

/// The norm of rows that are rounded, whether they are wanted plain too or not.
pub(super) fn rms_norm(cuda: &Cuda, call: &ops::rms_norm::Call<'_>, out: &Rounded<'_>) -> Result<(), KernelError> {
    let before = input(&call.x).with(call.weight.address()).with(call.epsilon);
    launch(cuda, "rms_norm", (cuda.entry_points().rms_norm_rounded, 1), before, call.out.plain.as_ref(), out)
}

/// The norm of rows that a mixture's products are added to first, on Hopper; `before` are the operands of the sum and the
/// norm.
pub(super) fn add_experts_rms_norm(cuda: &Cuda, before: Arguments, out: &Activations<'_>) -> Result<(), KernelError> {
    const OP: &str = "add_experts_rms_norm";
    let rounded = out.rounded.as_ref().expect("it is asked for");
    let hopper = cuda.entry_points().hopper.as_ref().ok_or(KernelError::NoKernel { op: OP })?;
    launch(cuda, OP, (hopper.add_experts_rms_norm_rounded, 1), before, out.plain.as_ref(), rounded)
}

/// The gate of rows that are rounded, whether they are wanted plain too or not.
pub(super) fn silu_mul(cuda: &Cuda, gate_up: &Tensor<'_>, out: &Activations<'_>) -> Result<(), KernelError> {
    let rounded = out.rounded.as_ref().expect("it is asked for");
    let is_few = out.rows() * GATE_BLOCKS <= 4 * cuda.kernels.target.processors;
    let kernels = cuda.entry_points();
    let kernel = match &kernels.hopper {
        Some(hopper) if is_few => (hopper.silu_mul_rounded_few, GATE_BLOCKS),
        _ => (kernels.silu_mul_rounded, 1),
    };
    launch(cuda, "silu_mul", kernel, input(gate_up), out.plain.as_ref(), rounded)
}

fn input(x: &Tensor<'_>) -> Arguments {
    arguments![x.address(), count(x.pitch())]
}

/// Launches a kernel that has so many blocks for a row.
fn launch(
    cuda: &Cuda,
    op: &'static str,
    (kernel, blocks): (Function, usize),
    before: Arguments,
    plain: Option<&Tensor<'_>>,
    out: &Rounded<'_>,
) -> Result<(), KernelError> {
    cuda.enter()?;
    let (rows, columns) = (out.data.rows(), out.data.columns());
    if !serves(columns) {
        return Err(KernelError::NoKernel { op });
    }
    if rows == 0 {
        return Ok(());
    }
    let (kind, fixed) = match out.quantization {
        Quantization::Groups => (BY_GROUPS, 1.0),
        Quantization::Rows => (BY_ROWS, 1.0),
        Quantization::Fixed(scale) => (FIXED, scale),
    };
    let threads = (columns / VECTOR).div_ceil(blocks).next_multiple_of(32).min(THREADS_MAX);
    let arguments = before
        .with(count(columns))
        .with(plain.map_or(Address(0), Tensor::address))
        .with(kind)
        .with(fixed)
        .with(out.data.address())
        .with(out.scales.address());
    // SAFETY: these are the kernels' parameters, and the fronts have checked the shapes.
    unsafe { cuda.launch(kernel, Extent::line(rows * blocks, threads), arguments) }
}
