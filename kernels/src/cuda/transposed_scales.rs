//! Scales by blocks in the layouts that cuBLASLt reads (`kernels/cuda/turn_scales.cu`). The
//! scales of x are transposed, so that scales of adjacent rows are adjacent. The scales of
//! each row of weight blocks are padded to a multiple of four. Both are written to the end
//! of the GEMM's workspace.

use bursar_budgets::{Address, Bytes};

use super::{
    Cuda,
    blas::{GemmOperands, GemmProblem, QuantScheme},
    contract::turn_scales::{PADDED, THREADS, TILE},
    launch::{Extent, arguments, count},
};
use crate::{DType, FP8_BLOCK, KernelError};

/// Alignment of addresses in the workspace, in bytes.
const ALIGNMENT: u64 = 256;

/// Alignment of a weight's scales, in bytes, if cuBLASLt reads them without a copy.
const SCALES_ALIGNMENT: u64 = 16;

/// The library requires a multiple of this number of rows of x, because its copies require that
/// each row of the transposed scales is aligned.
pub(super) const ROWS: usize = 4;

/// Addresses of a GEMM's converted scales in its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scratch {
    transposed: u64,
    /// Address of the weight's padded scales, or `None` if cuBLASLt reads the weight's
    /// scales without a copy.
    padded: Option<u64>,
    /// Bytes of the workspace that remain.
    workspace_bytes: u64,
}

impl Scratch {
    /// Places the converted scales in the workspace. Returns `None` if the library does not support
    /// such a GEMM, or if its scales would take more than half of the workspace.
    fn within(product: GemmProblem, places: GemmOperands) -> Option<Scratch> {
        let has_layout = product.scheme == QuantScheme::E4m3Blocks { height: FP8_BLOCK }
            && product.rows.is_multiple_of(ROWS)
            && product.in_features.is_multiple_of(FP8_BLOCK)
            && product.in_features > 0;
        if !has_layout {
            return None;
        }
        let groups = groups(product);
        let is_padded = !groups.is_multiple_of(PADDED);
        if !is_padded && !places.weight_scales.is_multiple_of(SCALES_ALIGNMENT) {
            return None;
        }
        let padded_bytes = if is_padded { weight_scales_bytes(product).0 } else { 0 };
        let end = places.workspace + places.workspace_bytes as u64;
        let transposed = end.checked_sub(DType::F32.bytes(product.rows * groups).0)? / ALIGNMENT * ALIGNMENT;
        let first = transposed.checked_sub(padded_bytes)? / ALIGNMENT * ALIGNMENT;
        let workspace_bytes = first.checked_sub(places.workspace)?;
        let fits = workspace_bytes >= places.workspace_bytes as u64 / 2;
        let padded = is_padded.then_some(first);
        fits.then_some(Scratch { transposed, padded, workspace_bytes })
    }
}

fn groups(product: GemmProblem) -> usize {
    product.in_features.div_ceil(FP8_BLOCK)
}

/// Returns the bytes of a weight's padded scales.
fn weight_scales_bytes(product: GemmProblem) -> Bytes {
    DType::F32.bytes(blocks(product) * groups(product).next_multiple_of(PADDED))
}

fn blocks(product: GemmProblem) -> usize {
    product.out_features.div_ceil(FP8_BLOCK)
}

/// Returns `true` if the library supports the GEMM's scales, and they fit in the workspace.
pub(super) fn fit(product: GemmProblem, places: GemmOperands) -> bool {
    Scratch::within(product, places).is_some()
}

/// Converts the scales of a GEMM with scales by blocks, and returns its operands in the form that
/// the library needs. The operands of any other GEMM are returned unchanged.
///
/// # Safety
/// `places` must match `product`, and nothing else may use the workspace until the GEMM has ended.
///
/// # Panics
/// If the scales of a GEMM with scales by blocks do not [`fit`].
pub(super) unsafe fn transposed(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
) -> Result<GemmOperands, KernelError> {
    if !matches!(product.scheme, QuantScheme::E4m3Blocks { .. }) {
        return Ok(places);
    }
    let scratch = Scratch::within(product, places).expect("the library was asked for it");
    let (groups, blocks) = (groups(product), blocks(product));
    let padded_groups = groups.next_multiple_of(PADDED);
    let more = scratch.padded.map_or(0, |_| (blocks * padded_groups).div_ceil(THREADS));
    let extent = Extent::line(product.rows.div_ceil(TILE) * groups.div_ceil(TILE) + more, THREADS);
    let arguments = arguments![
        Address(places.x_scales),
        Address(scratch.transposed),
        count(product.rows),
        count(groups),
        Address(places.weight_scales),
        Address(scratch.padded.unwrap_or(0)),
        count(blocks),
        count(padded_groups),
    ];
    let kernel = cuda.entry_points().hopper.as_ref().expect("the library was asked for it").turn_scales;
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments)? };
    Ok(as_asked(product, places))
}

/// Returns the operands of a GEMM in the form that the library needs: with the addresses of the
/// scales that [`transposed`] converts, and with the rest of the workspace.
///
/// # Panics
/// If the scales of a GEMM with scales by blocks do not [`fit`].
pub(super) fn as_asked(product: GemmProblem, places: GemmOperands) -> GemmOperands {
    if !matches!(product.scheme, QuantScheme::E4m3Blocks { .. }) {
        return places;
    }
    let scratch = Scratch::within(product, places).expect("the library was asked for it");
    GemmOperands {
        x_scales: scratch.transposed,
        weight_scales: scratch.padded.unwrap_or(places.weight_scales),
        workspace_bytes: scratch.workspace_bytes as usize,
        ..places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(rows: usize, in_features: usize, height: usize) -> GemmProblem {
        GemmProblem {
            scheme: QuantScheme::E4m3Blocks { height },
            gates: false,
            out_features: 384,
            in_features,
            out_pitch: 384,
            x_pitch: in_features,
            out_is_f32: false,
            has_bias: false,
            accumulates: false,
            rows,
        }
    }

    fn places(workspace_bytes: usize) -> GemmOperands {
        GemmOperands {
            weight: 512,
            x: 1024,
            bias: None,
            weight_scales: 2048,
            x_scales: 4096,
            x_scale: 1.0,
            out: 8192,
            workspace: 1 << 20,
            workspace_bytes,
        }
    }

    #[test]
    fn scales_stand_behind_what_is_left_of_the_workspace() {
        let scratch = Scratch::within(product(100, 512, 128), places(1 << 20)).expect("it fits");
        assert_eq!(scratch.padded, None, "four groups need no more");
        assert!(scratch.transposed + 100 * 4 * 4 <= 2 << 20 && scratch.transposed.is_multiple_of(256));
        assert_eq!(scratch.transposed, (1 << 20) + scratch.workspace_bytes);
        let scratch = Scratch::within(product(100, 640, 128), places(1 << 20)).expect("it fits");
        let padded = scratch.padded.expect("five groups are filled up to eight");
        assert!(padded + 3 * 8 * 4 <= scratch.transposed && padded == (1 << 20) + scratch.workspace_bytes);
        assert!(scratch.transposed + 100 * 5 * 4 <= 2 << 20);
    }

    #[test]
    fn what_the_library_does_not_take_or_takes_too_much_room_has_none() {
        assert!(fit(product(4, 128, 128), places(1 << 20)));
        assert!(fit(product(4, 1536, 128), places(1 << 20)));
        for other in [product(5, 128, 128), product(4, 144, 128), product(4, 128, 64), product(4, 0, 128)] {
            assert!(!fit(other, places(1 << 20)), "{other:?}");
        }
        let plain = GemmProblem { scheme: QuantScheme::E4m3Rows, ..product(4, 128, 128) };
        assert!(!fit(plain, places(1 << 20)));
        assert!(!fit(product(4096, 4096, 128), places(1 << 19)), "half a mebibyte of scales");
        assert!(!fit(product(4, 128, 128), places(0)), "no scratch");
        let odd = GemmOperands { weight_scales: 2052, ..places(1 << 20) };
        assert!(!fit(product(4, 512, 128), odd) && fit(product(4, 640, 128), odd), "a copy may start anywhere");
    }
}
