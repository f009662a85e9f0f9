//! Gated GEMMs of 65 to 256 rows by this project's kernel for Hopper
//! (`kernels/cuda/gate_up_middle.cu`). The gate's input is never written to memory, and the tile
//! width is chosen so that a decode step fills the device.

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{FEW_ROWS, GemmAlgorithm, GemmOperands, GemmProblem},
    contract::{
        GATED_WIDTHS,
        gate_up_middle::{BLOCK_ROWS, CLUSTER, PART_ROWS, SHARED_BYTES, STEP_COLUMNS, THREADS},
    },
    launch::{Extent, arguments, count},
    linear_few::{self, GemmBackend},
    tensor_map::{Rows, TensorMap},
};
use crate::{DType, KernelError};

/// Alignment in bytes of the rows of x and of the weight, which TMA requires.
const ALIGNMENT: usize = 16;
/// Alignment in bytes of output rows.
const OUT_ALIGNMENT: usize = 8;
/// Alignment in bytes of the bias.
const BIAS_ALIGNMENT: u64 = 4;

/// Returns `true` if the kernel supports the GEMM.
fn fits(product: GemmProblem, places: GemmOperands) -> bool {
    let row_bytes = |elements: usize| DType::F16.bytes(elements).as_usize();
    let starts =
        [places.weight as usize, places.x as usize, row_bytes(product.in_features), row_bytes(product.x_pitch)];
    let out = [places.out as usize, row_bytes(product.out_pitch)];
    product.gates
        && product.scheme.is_unquantized()
        && !product.accumulates
        && !product.out_is_f32
        && (linear_few::ROWS_MAX + 1..=FEW_ROWS).contains(&product.rows)
        && product.in_features > 0
        && product.out_features.is_multiple_of(4)
        && starts.iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT))
        && out.iter().all(|bytes| bytes.is_multiple_of(OUT_ALIGNMENT))
        && places.bias.is_none_or(|bias| bias.is_multiple_of(BIAS_ALIGNMENT))
}

/// Returns `true` if the device has this kernel and the kernel supports the GEMM.
pub(super) fn serves(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> bool {
    cuda.kernels.functions.is_machine_code() && fits(product, places)
}

/// Returns `true` if this kernel should compute the GEMM.
pub(super) fn chosen(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> bool {
    serves(cuda, product, places)
        && match cuda.products_by {
            GemmBackend::Library => false,
            GemmBackend::Ours => true,
            GemmBackend::Measured => matches!(cuda.kernels.blas.algorithm_of(product), Some(GemmAlgorithm::Middle)),
        }
}

/// Returns the number of tiles of `width` features.
fn tiles(product: GemmProblem, width: usize) -> usize {
    product.rows.div_ceil(CLUSTER * BLOCK_ROWS) * product.features().div_ceil(width)
}

/// Returns the index in [`GATED_WIDTHS`] of the width that gives the busiest cluster the
/// fewest features. If several widths are equally good, the widest is chosen, because it
/// reads x least often.
fn width(product: GemmProblem, processors: usize) -> usize {
    let clusters = (processors / CLUSTER).max(1);
    let busiest = |&choice: &usize| tiles(product, GATED_WIDTHS[choice]).div_ceil(clusters) * GATED_WIDTHS[choice];
    (0..GATED_WIDTHS.len()).rev().min_by_key(busiest).expect("there are some")
}

/// Returns the number of thread blocks of a launch: at most one cluster per tile, and at most as
/// many clusters as the device runs at once.
fn blocks(product: GemmProblem, width: usize, processors: usize) -> usize {
    CLUSTER * tiles(product, width).min((processors / CLUSTER).max(1))
}

/// Launches the kernel.
///
/// # Safety
/// `places` must match `product`, and [`serves`] must have returned true. No kernel that may still
/// run at the launch may write the weight, because the first copies of weights do not wait for the
/// preceding kernel. Nothing may write the weight until this kernel has ended.
pub(super) unsafe fn launch(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> Result<(), KernelError> {
    let map = |address: u64, of: Rows, tall: usize| {
        TensorMap::of_rows(address, cuda.kernels.target.activation, of, [tall, STEP_COLUMNS])
    };
    let processors = cuda.kernels.target.processors;
    let choice = width(product, processors);
    let features = GATED_WIDTHS[choice];
    let arguments = arguments![
        map(places.x, product.x(), PART_ROWS)?,
        map(places.weight, product.weight(), features)?,
        Address(places.out),
        Address(places.bias.unwrap_or(0)),
        count(product.out_pitch),
        count(product.rows),
        count(product.features()),
        count(product.in_features),
    ];
    let kernel = cuda.entry_points().hopper.as_ref().expect("it is served").gate_up_middle[choice];
    let blocks = blocks(product, features, processors);
    let extent = Extent { grid: [blocks, 1, 1], block: [THREADS, 1], shared: SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

#[cfg(test)]
mod tests {
    use super::{super::blas::QuantScheme, *};

    fn product(rows: usize, out_features: usize) -> GemmProblem {
        GemmProblem {
            scheme: QuantScheme::Unquantized,
            gates: true,
            out_features,
            in_features: 3584,
            out_pitch: out_features / 2,
            x_pitch: 3584,
            out_is_f32: false,
            has_bias: true,
            accumulates: false,
            rows,
        }
    }

    fn places() -> GemmOperands {
        GemmOperands {
            weight: 512,
            x: 1024,
            bias: Some(4),
            weight_scales: 0,
            x_scales: 0,
            x_scale: 1.0,
            out: 2048,
            workspace: 0,
            workspace_bytes: 0,
        }
    }

    #[test]
    fn a_launch_has_pairs_of_blocks_no_more_than_tiles_nor_than_processors() {
        assert_eq!(blocks(product(256, 37_888), 96, 132), 132, "three tiles each");
        assert_eq!(blocks(product(65, 388), 96, 132), 6, "one pair high, three tiles of 96 gates");
        assert_eq!(blocks(product(256, 37_888), 96, 79), 78, "the last has no partner");
    }

    #[test]
    fn tiles_are_as_wide_as_makes_the_busiest_cluster_soonest_done() {
        let chosen = |features: usize| GATED_WIDTHS[width(product(256, 2 * features), 132)];
        assert_eq!(chosen(18_944), 96, "7B: three rounds of 66 tiles");
        assert_eq!(chosen(14_784), 112, "half of 72B: two rounds, where 96 makes a third");
        assert_eq!(chosen(14_336), 112, "two rounds, as before");
        assert_eq!(chosen(8_960), 80, "1.5B: two rounds of the narrowest");
        assert_eq!(chosen(12_288), 96);
        assert!(GATED_WIDTHS.iter().all(|width| width.is_multiple_of(16)), "written in pairs of eight");
        assert_eq!(GATED_WIDTHS[width(product(256, 2 * 64), 1)], 80, "fewer processors than a cluster has");
    }

    #[test]
    fn what_the_copy_engine_cannot_reach_or_has_other_rows_is_left_to_others() {
        let some = product(256, 37_888);
        assert!(fits(some, places()));
        assert!(fits(product(65, 400), places()));
        let otherwise = [
            GemmProblem { rows: linear_few::ROWS_MAX, ..some },
            GemmProblem { rows: FEW_ROWS + 1, ..some },
            GemmProblem { gates: false, ..some },
            GemmProblem { in_features: 3580, ..some },
            GemmProblem { x_pitch: 3588, ..some },
            GemmProblem { out_pitch: 18_946, ..some },
            GemmProblem { out_features: 37_886, ..some },
        ];
        for product in otherwise {
            assert!(!fits(product, places()), "{product:?}");
        }
        for places in [
            GemmOperands { x: 1032, ..places() },
            GemmOperands { out: 4, ..places() },
            GemmOperands { bias: Some(2), ..places() },
        ] {
            assert!(!fits(some, places));
        }
    }
}
