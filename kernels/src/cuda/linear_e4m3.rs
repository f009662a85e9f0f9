//! GEMMs of FP8 weights on GPU generations other than Hopper (`kernels/cuda/linear_e4m3.cu`).

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{GemmOperands, GemmProblem, QuantScheme},
    contract::{
        TILED_ROWS, TiledE4m3,
        linear_e4m3::{
            ADD_TO_OUT, BY_BLOCKS, FEW_FEATURES, FEW_THREADS, IS_BF16, MANY_FEATURES, MANY_ROWS, MANY_SHARED_BYTES,
            MANY_THREADS, OUT_IS_F32,
        },
    },
    launch::{Extent, Function, arguments, count},
};
use crate::{DType, KernelError};

/// Alignment of rows in bytes: the number of bytes that a thread reads at once.
const ALIGNMENT: usize = 16;

/// Returns the kernels for the GEMM, if it is an E4M3 GEMM that these kernels support.
pub(super) fn serving(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> Option<&TiledE4m3<Function>> {
    let starts = [places.weight as usize, places.x as usize, product.in_features, product.x_pitch];
    let is_served = !product.scheme.is_unquantized()
        && !product.gates
        && product.in_features > 0
        && starts.iter().all(|start| start.is_multiple_of(ALIGNMENT));
    cuda.entry_points().linear_e4m3.as_ref().filter(|_| is_served)
}

/// Launches the kernel for the GEMM's number of rows.
///
/// # Safety
/// `places` must match `product`, `product` must have at least one row and one feature, and
/// `kernels` must come from [`serving`].
pub(super) unsafe fn launch(
    cuda: &Cuda,
    kernels: &TiledE4m3<Function>,
    product: GemmProblem,
    places: GemmOperands,
) -> Result<(), KernelError> {
    let (height, by_blocks) = match product.scheme {
        QuantScheme::E4m3Blocks { height } => (height, BY_BLOCKS),
        _ => (1, 0),
    };
    let is = |holds: bool, flag: u32| u32::from(holds) * flag;
    let flags = by_blocks
        | is(product.accumulates, ADD_TO_OUT)
        | is(product.out_is_f32, OUT_IS_F32)
        | is(cuda.kernels.target.activation == DType::BF16, IS_BF16);
    let arguments = arguments![
        Address(places.weight),
        Address(places.x),
        Address(places.weight_scales),
        Address(places.x_scales),
        places.x_scale,
        Address(places.bias.unwrap_or(0)),
        Address(places.out),
        count(product.rows),
        count(product.out_features),
        count(product.in_features),
        count(product.x_pitch),
        count(product.out_pitch),
        count(height),
        flags,
    ];
    let few = TILED_ROWS.iter().position(|most| product.rows <= *most);
    let (kernel, extent) = match few {
        Some(size) => (kernels.few[size], Extent::line(product.out_features.div_ceil(FEW_FEATURES), FEW_THREADS)),
        None => {
            let grid = [product.rows.div_ceil(MANY_ROWS), product.out_features.div_ceil(MANY_FEATURES), 1];
            (kernels.many, Extent { grid, block: [MANY_THREADS, 1], shared: MANY_SHARED_BYTES })
        }
    };
    // SAFETY: the arguments match the kernels' parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments) }
}
