//! Launches of what rounds activations to E4M3: rows as they are, norms and gates (`kernels/cuda/quantize.cu`).

use bursar_budgets::Address;

use super::{
    Cuda,
    contract::{
        HopperEntryPoints,
        fp8::{BY_GROUPS, BY_ROWS, FIXED, GATE_BLOCKS, THREADS_MAX, VECTOR},
    },
    launch::{Arguments, Extent, Function, arguments, count},
};
use crate::{Activations, KernelError, Quantization, Rounded, Tensor, ops};

/// Whether rows of so many columns can be rounded.
pub(super) fn serves(columns: usize) -> bool {
    columns > 0 && columns.is_multiple_of(VECTOR)
}

pub(super) fn quantize(cuda: &Cuda, call: ops::quantize::Call<'_>) -> Result<(), KernelError> {
    launch(cuda, "quantize", |kernels| (kernels.quantize, 1), input(&call.x), None, &call.out)
}

/// The norm of rows that are rounded, whether they are wanted plain too or not.
pub(super) fn rms_norm(cuda: &Cuda, call: &ops::rms_norm::Call<'_>, out: &Rounded<'_>) -> Result<(), KernelError> {
    let before = input(&call.x).with(call.weight.address()).with(call.epsilon);
    launch(cuda, "rms_norm", |kernels| (kernels.rms_norm_rounded, 1), before, call.out.plain.as_ref(), out)
}

/// The norm of rows that a mixture's products are added to first; `before` are the operands of the sum and the norm.
pub(super) fn add_experts_rms_norm(cuda: &Cuda, before: Arguments, out: &Activations<'_>) -> Result<(), KernelError> {
    let rounded = out.rounded.as_ref().expect("it is asked for");
    let kernel = |kernels: &HopperEntryPoints<Function>| (kernels.add_experts_rms_norm_rounded, 1);
    launch(cuda, "add_experts_rms_norm", kernel, before, out.plain.as_ref(), rounded)
}

/// The gate of rows that are rounded, whether they are wanted plain too or not.
pub(super) fn silu_mul(cuda: &Cuda, gate_up: &Tensor<'_>, out: &Activations<'_>) -> Result<(), KernelError> {
    let rounded = out.rounded.as_ref().expect("it is asked for");
    let is_few = out.rows() * GATE_BLOCKS <= 4 * cuda.kernels.target.processors;
    let kernel = |kernels: &HopperEntryPoints<Function>| match is_few {
        true => (kernels.silu_mul_rounded_few, GATE_BLOCKS),
        false => (kernels.silu_mul_rounded, 1),
    };
    launch(cuda, "silu_mul", kernel, input(gate_up), out.plain.as_ref(), rounded)
}

fn input(x: &Tensor<'_>) -> Arguments {
    arguments![x.address(), count(x.pitch())]
}

/// `kernel` gives the kernel and its blocks for a row.
fn launch(
    cuda: &Cuda,
    op: &'static str,
    kernel: impl Fn(&HopperEntryPoints<Function>) -> (Function, usize),
    before: Arguments,
    plain: Option<&Tensor<'_>>,
    out: &Rounded<'_>,
) -> Result<(), KernelError> {
    cuda.enter()?;
    let (rows, columns) = (out.data.rows(), out.data.columns());
    let Some(kernels) = cuda.entry_points().hopper.as_ref().filter(|_| serves(columns)) else {
        return Err(KernelError::NoKernel { op });
    };
    if rows == 0 {
        return Ok(());
    }
    let (kind, fixed) = match out.quantization {
        Quantization::Groups => (BY_GROUPS, 1.0),
        Quantization::Rows => (BY_ROWS, 1.0),
        Quantization::Fixed(scale) => (FIXED, scale),
    };
    let (kernel, blocks) = kernel(kernels);
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
