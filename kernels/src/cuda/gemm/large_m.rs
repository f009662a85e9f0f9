//! GEMMs of more than 256 rows, or of more than 64 rows with quantized weights, by this project's
//! kernels for Hopper (`kernels/cuda/gemm_large_m.cu`, `gemm_large_m_e4m3.cu`). In a gated MLP the
//! outputs of the gate and up GEMMs stay on chip; only `activation(gate) * up` is written.

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Extent, arguments, count, gate_number},
        contract::gemm_large_m::{BOX, SHARED_BYTES, STEP_COLUMNS, THREADS, TILE_ROWS, TILE_WEIGHTS},
        lane::Cuda,
        tensor_map::{Rows, TensorMap},
    },
    problem::{GemmOperands, GemmProblem},
    scale_arguments::with_scales,
    tiles::large_m_blocks,
};
use crate::{KernelError, Quantization, SCALE_BLOCK};

/// Pairs of row tiles that all thread blocks process before they move to the next columns.
const GROUP: u32 = 16;

/// Format of the output, and an action that follows the launch.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    /// Address of the scales of a quantized output, one for each 128 columns of a row. If `None`,
    /// the whole output has the scale `scale`.
    scales: Option<Address>,
    scale: f32,
    /// Called after the kernel is launched.
    then: Option<&'a dyn Fn() -> Result<(), KernelError>>,
}

impl<'a> Output<'a> {
    /// An output that is not quantized, or a quantized output with the scale 1.
    pub(super) const PLAIN: Output<'static> = Output { scales: None, scale: 1.0, then: None };

    /// Returns an output in the activation type. `then` is called after the launch
    /// and reads the output.
    pub(super) fn followed_by(then: &'a dyn Fn() -> Result<(), KernelError>) -> Self {
        Output { then: Some(then), ..Output::PLAIN }
    }

    pub(super) fn groups(scales: Address) -> Self {
        Output { scales: Some(scales), ..Output::PLAIN }
    }

    pub(super) fn fixed(scale: f32) -> Self {
        Output { scale, ..Output::PLAIN }
    }
}

/// Launches the kernel, then calls `output.then`.
///
/// # Safety
/// `operands` and `output` must match `problem`, and the kernel must support the GEMM
/// ([`Kernel::LargeM`](super::table::Kernel)).
pub(super) unsafe fn launch(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    output: Output<'_>,
) -> Result<(), KernelError> {
    let activation = cuda.kernels.target.activation;
    let is_unquantized = problem.is_unquantized();
    let step = if is_unquantized { STEP_COLUMNS } else { SCALE_BLOCK };
    let (x_type, weight_type) = (problem.x_type(activation), problem.weight_type(activation));
    let GemmProblem { rows, in_features, .. } = problem;
    let columns = problem.features();
    let out = Rows { rows, columns, pitch: problem.out_pitch };
    let (out_type, wide) =
        if operands.out_is_quantized { (Quantization::ELEMENTS, 2 * BOX) } else { (activation, BOX) };
    let mut arguments = arguments![
        TensorMap::of_rows(operands.x, x_type, problem.x(), [TILE_ROWS, step])?,
        TensorMap::of_rows(operands.weight, weight_type, problem.weight(), [TILE_WEIGHTS / 2, step])?,
        TensorMap::of_rows(operands.out, out_type, out, [BOX, wide])?,
        Address(operands.bias.unwrap_or(0)),
        count(rows),
        count(columns),
        count(in_features),
        GROUP,
    ];
    if is_unquantized {
        arguments = arguments.with(gate_number(operands.activation));
    }
    if !is_unquantized {
        let scales = output.scales.unwrap_or(Address(0));
        arguments = with_scales(arguments, problem, operands).with(scales).with(output.scale);
    }
    let kernels = cuda.entry_points().hopper.as_ref().expect("the kernel supports the GEMM");
    let quantized = problem.scheme.map(|scheme| kernels.gemm_large_m_quantized.of(scheme));
    let kernel = match (quantized, problem.gates, problem.accumulates) {
        (Some(quantized), true, _) if operands.out_is_quantized => quantized.gated_rounded,
        (Some(quantized), true, _) => quantized.gated,
        (Some(quantized), false, true) => quantized.add,
        (Some(quantized), false, false) => quantized.plain,
        (None, true, _) => kernels.gemm_large_m_gated,
        (None, false, true) => kernels.gemm_large_m_add,
        (None, false, false) => kernels.gemm_large_m,
    };
    let blocks = large_m_blocks(problem, cuda.kernels.target.sms);
    let extent = Extent { grid: [blocks, 1, 1], block: [THREADS, 1], shared: SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments)? };
    output.then.map_or(Ok(()), |then| then())
}
