//! Gated GEMMs of 65 to 256 rows by this project's kernel for Hopper
//! (`kernels/cuda/gemm_medium_m.cu`). The gate's input is never written to memory, and the tile
//! width is chosen so that a decode step fills the device.

use bursar_budgets::Address;

use super::{
    super::{
        arguments::{Extent, arguments, count, gate_number},
        contract::{
            GATED_WIDTHS,
            gemm_medium_m::{PART_ROWS, SHARED_BYTES, STEP_COLUMNS, THREADS},
        },
        lane::Cuda,
        tensor_map::{Rows, TensorMap},
    },
    problem::{GemmOperands, GemmProblem},
    tiles::MediumMTiles,
};
use crate::KernelError;

/// Launches the kernel.
///
/// # Safety
/// `operands` must match `problem`, and the kernel must support the GEMM
/// ([`Kernel::MediumM`](super::table::Kernel)). No kernel that may still run at the launch may
/// write the weight, because the first copies of weights do not wait for the preceding kernel.
/// Nothing may write the weight until this kernel has ended.
pub(super) unsafe fn launch(cuda: &Cuda, problem: GemmProblem, operands: GemmOperands) -> Result<(), KernelError> {
    let map = |address: u64, of: Rows, tall: usize| {
        TensorMap::of_rows(address, cuda.kernels.target.activation, of, [tall, STEP_COLUMNS])
    };
    let tiles = MediumMTiles::of(problem, cuda.kernels.target.sms);
    let width = GATED_WIDTHS[tiles.width];
    let arguments = arguments![
        map(operands.x, problem.x(), PART_ROWS)?,
        map(operands.weight, problem.weight(), width)?,
        Address(operands.out),
        Address(operands.bias.unwrap_or(0)),
        count(problem.out_pitch),
        count(problem.rows),
        count(problem.features()),
        count(problem.in_features),
        gate_number(operands.activation),
    ];
    let kernels = cuda.entry_points().hopper.as_ref().expect("the kernel supports the GEMM");
    let kernel = kernels.gemm_medium_m[tiles.width];
    let extent = Extent { grid: [tiles.blocks, 1, 1], block: [THREADS, 1], shared: SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that their
    // addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments) }
}
