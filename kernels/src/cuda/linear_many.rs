//! Products of more than 256 rows by our own kernels for Hopper (`kernels/cuda/linear_gated_hopper.cu`). If a gate
//! follows, its input is never written to memory.
//!
//! Autotuning times each once against cuBLASLt, on the operands of the pass. For a product with a gate, the faster one
//! is kept for this size and for smaller ones, as for cuBLASLt's algorithms. Without a gate, our kernel is at best a
//! little faster, and much slower if its tall tiles leave processors idle, so it is kept only for sizes slightly
//! smaller.

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{FEW_ROWS, GemmAlgorithm, Places, Product},
    contract::linear_many::{BOX, CLUSTER, SHARED_BYTES, STEP_COLUMNS, THREADS, TILE_ROWS, TILE_WEIGHTS},
    launch::{Extent, arguments, count},
    linear_few::ProductsBy,
    tensor_map::{Rows, TensorMap},
};
use crate::{DType, KernelError};

/// Pairs of row tiles that all blocks process before moving to the next columns.
const GROUP: u32 = 16;

/// Alignment of rows in bytes, for the copy engine; and of biases, which are read in pairs.
const ALIGNMENT: usize = 16;
const BIAS_ALIGNMENT: u64 = 4;

/// Columns of the output are a multiple of this: the copy engine writes whole pieces of 16 bytes, also past the last column.
const COLUMNS: usize = 8;

/// Runs per timing, and timings per implementation; the shortest counts.
const RUNS: usize = 4;
const TRIALS: usize = 2;

/// Our kernel must be at least 3 % faster, because two measurements of the same kernel differ by a few per cent.
const CLEARLY: f32 = 0.97;

/// Whether the kernels support the product.
fn fits(product: Product, places: Places) -> bool {
    let row_bytes = |elements: usize| DType::F16.bytes(elements).as_usize();
    let starts = [places.weight as usize, places.x as usize, places.out as usize];
    let rows = [product.in_features, product.x_pitch, product.out_pitch].map(row_bytes);
    product.rows > FEW_ROWS
        && !product.out_is_f32
        && !(product.gates && product.accumulates)
        && product.in_features > 0
        && product.features().is_multiple_of(COLUMNS)
        && starts.iter().chain(&rows).all(|bytes| bytes.is_multiple_of(ALIGNMENT))
        && places.bias.is_none_or(|bias| bias.is_multiple_of(BIAS_ALIGNMENT))
}

/// Blocks per launch: no more than there are tiles, nor than run at once.
fn blocks(product: Product, processors: usize) -> usize {
    let across = TILE_WEIGHTS / if product.gates { 2 } else { 1 };
    let tiles = product.rows.div_ceil(CLUSTER * TILE_ROWS) * product.features().div_ceil(across);
    CLUSTER * tiles.min(processors / CLUSTER)
}

/// Whether our kernel is to compute the product, which `other` computes too. While autotuning, the first call times
/// both, after which the output is meaningless.
///
/// # Errors
/// Any error the device reports for a measurement.
pub(super) fn chosen(
    cuda: &Cuda,
    product: Product,
    places: Places,
    other: impl Fn() -> Result<(), KernelError>,
) -> Result<bool, KernelError> {
    if !cuda.kernels.functions.is_machine_code() || !fits(product, places) {
        return Ok(false);
    }
    match cuda.products_by {
        ProductsBy::Library => return Ok(false),
        ProductsBy::Ours => return Ok(true),
        ProductsBy::Measured => {}
    }
    let is_measured = || cuda.kernels.blas.measured().contains_key(&product);
    if cuda.autotunes.get() && !is_measured() {
        // Warm-up: the first runs load what they need and are not timed.
        other()?;
        // SAFETY: the front has checked the call, and the product fits.
        let ours = || unsafe { launch(cuda, product, places) };
        ours()?;
        let time = |run: &dyn Fn() -> Result<(), KernelError>| {
            cuda.clock.time(&cuda.stream, || (0..RUNS).try_for_each(|_| run()))
        };
        let mut shortest = [f32::INFINITY; 2];
        for _ in 0..TRIALS {
            shortest = [shortest[0].min(time(&other)?), shortest[1].min(time(&ours)?)];
        }
        if product.gates {
            let way = if shortest[1] < shortest[0] { GemmAlgorithm::Many } else { GemmAlgorithm::Apart };
            cuda.kernels.blas.measured().insert(product, way);
        } else if shortest[1] < CLEARLY * shortest[0] {
            // cuBLASLt's algorithm is measured by now and is kept for smaller sizes.
            cuda.kernels.blas.ours().insert(product);
        }
    }
    if product.gates {
        return Ok(matches!(cuda.kernels.blas.algorithm_of(product), Some(GemmAlgorithm::Many)));
    }
    let close = Product { rows: product.rows / 3 * 4, ..product };
    Ok(cuda.kernels.blas.ours().range(product..=close).next().is_some())
}

/// Launches the kernel.
///
/// # Safety
/// `places` match `product`, and [`chosen`] returned true.
pub(super) unsafe fn launch(cuda: &Cuda, product: Product, places: Places) -> Result<(), KernelError> {
    let map = |address: u64, of: Rows, tall: usize| {
        TensorMap::of_rows(address, cuda.kernels.target.activation, of, [tall, STEP_COLUMNS])
    };
    let Product { rows, in_features, .. } = product;
    let columns = product.features();
    let arguments = arguments![
        map(places.x, product.x(), TILE_ROWS)?,
        map(places.weight, product.weight(), TILE_WEIGHTS / 2)?,
        map(places.out, Rows { rows, columns, pitch: product.out_pitch }, BOX)?,
        Address(places.bias.unwrap_or(0)),
        count(rows),
        count(columns),
        count(in_features),
        GROUP,
    ];
    let kernels = cuda.entry_points().hopper.as_ref().expect("the product was chosen");
    let kernel = match (product.gates, product.accumulates) {
        (true, _) => kernels.linear_gated,
        (false, true) => kernels.linear_add,
        (false, false) => kernels.linear,
    };
    let blocks = blocks(product, cuda.kernels.target.processors);
    let extent = Extent { grid: [blocks, 1, 1], block: [THREADS, 1], shared: SHARED_BYTES };
    // SAFETY: these are the kernel's parameters, and the caller vouches for what they point to.
    unsafe { cuda.launch(kernel, extent, arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(gates: bool, rows: usize, out_features: usize) -> Product {
        Product {
            gates,
            out_features,
            in_features: 3584,
            out_pitch: out_features / if gates { 2 } else { 1 },
            x_pitch: 3584,
            out_is_f32: false,
            has_bias: true,
            accumulates: false,
            rows,
        }
    }

    fn places() -> Places {
        Places { weight: 512, x: 1024, bias: Some(4), out: 2048, workspace: 0, workspace_bytes: 0 }
    }

    #[test]
    fn a_launch_has_pairs_of_blocks_no_more_than_tiles_nor_than_processors() {
        assert_eq!(blocks(product(true, 8192, 37_888), 132), 132);
        assert_eq!(blocks(product(true, 257, 272), 132), 8, "two pairs of row tiles, two tiles of 128 gates");
        assert_eq!(blocks(product(false, 256, 256), 132), 2);
        assert_eq!(blocks(product(false, 8192, 4608), 79), 78, "the last has no partner");
    }

    #[test]
    fn what_the_copy_engine_or_the_pairs_of_a_bias_cannot_reach_is_left_to_the_library() {
        let many = product(false, 257, 4608);
        assert!(fits(many, places()));
        assert!(fits(product(true, 8192, 37_888), places()));
        let otherwise = [
            Product { rows: FEW_ROWS, ..many },
            Product { out_is_f32: true, ..many },
            Product { in_features: 3580, x_pitch: 3584, ..many },
            Product { x_pitch: 3588, ..many },
            Product { out_pitch: 4609, ..many },
            Product { out_features: 4607, ..many },
            Product { out_features: 4606, out_pitch: 4608, ..many },
        ];
        for product in otherwise {
            assert!(!fits(product, places()), "{product:?}");
        }
        for places in
            [Places { x: 1032, ..places() }, Places { out: 8, ..places() }, Places { bias: Some(2), ..places() }]
        {
            assert!(!fits(many, places));
        }
    }
}
