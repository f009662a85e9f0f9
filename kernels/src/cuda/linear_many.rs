//! Products of many rows by our own kernels for Hopper (`kernels/cuda/linear_gated_hopper.cu`): where a gate follows, what
//! it reads is never written.
//!
//! Autotuning measures each of them once beside what the library takes, with the operands of its pass. With a gate the
//! faster is kept for the size and for smaller ones, as the library's algorithms are. Without one ours is little faster
//! where it is faster at all, and much slower where its tall tiles leave processors idle: it is kept for sizes close below.

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{FEW_ROWS, GemmAlgorithm, Places, Product},
    launch::{Extent, arguments, count},
    linear_few::ProductsBy,
    tensor_map::{Rows, TensorMap},
};
use crate::{DType, KernelError};

/// Rows of x of one block's tile, and blocks that share the weights of theirs.
const TILE_ROWS: usize = 128;
const CLUSTER: usize = 2;

/// Rows of the weight of one tile, and columns of a step.
const TILE_WEIGHTS: usize = 256;
const STEP_COLUMNS: usize = 64;

const THREADS: usize = 384;

/// Four stages of 48 KiB, and four boxes on their way out.
const SHARED: usize = 4 * 48 * 1024 + 4 * 8 * 1024;

/// Pairs of row tiles that all blocks go down before they go to the next columns.
const GROUP: u32 = 16;

/// Rows start on so many bytes, for the copy engine; biases are read in pairs.
const ALIGNMENT: usize = 16;
const BIAS_ALIGNMENT: u64 = 4;

/// Times that each way is run at a time, and how often: the shortest of all is what counts.
const RUNS: usize = 4;
const TRIALS: usize = 2;

/// Two measurements of the same differ by some per cent.
const CLEARLY: f32 = 0.97;

/// Whether the kernels' contract holds.
fn fits(product: Product, places: Places) -> bool {
    let row_bytes = |elements: usize| DType::F16.bytes(elements).as_usize();
    let starts = [places.weight as usize, places.x as usize, places.out as usize];
    let rows = [product.in_features, product.x_pitch, product.out_pitch].map(row_bytes);
    product.rows > FEW_ROWS
        && !product.out_is_f32
        && !(product.gates && product.accumulates)
        && product.in_features > 0
        && product.features().is_multiple_of(2)
        && starts.iter().chain(&rows).all(|bytes| bytes.is_multiple_of(ALIGNMENT))
        && places.bias.is_none_or(|bias| bias.is_multiple_of(BIAS_ALIGNMENT))
}

/// Blocks of a launch: no more than there is work for, nor than run at a time.
fn blocks(product: Product, processors: usize) -> usize {
    let across = TILE_WEIGHTS / if product.gates { 2 } else { 1 };
    let tiles = product.rows.div_ceil(CLUSTER * TILE_ROWS) * product.features().div_ceil(across);
    CLUSTER * tiles.min(processors / CLUSTER)
}

/// Whether our kernel is the one to compute the product, which `other` computes too. While autotuning both are measured
/// the first time, and the output holds what neither means.
///
/// # Errors
/// What the device says of a measurement.
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
        // The first runs bring what they need, and are not counted.
        other()?;
        // SAFETY: as the front says, and it fits.
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
            // The library's algorithm is measured by now, and stays for smaller sizes.
            cuda.kernels.blas.ours().insert(product);
        }
    }
    if product.gates {
        return Ok(matches!(cuda.kernels.blas.algorithm_of(product), Some(GemmAlgorithm::Many)));
    }
    let close = Product { rows: product.rows / 3 * 4, ..product };
    Ok(cuda.kernels.blas.ours().range(product..=close).next().is_some())
}

/// Launches it.
///
/// # Safety
/// The places are as the product says, and [`chosen`] says yes.
pub(super) unsafe fn launch(cuda: &Cuda, product: Product, places: Places) -> Result<(), KernelError> {
    let map = |address: u64, of: Rows, tall: usize| {
        TensorMap::of_rows(address, cuda.kernels.target.activation, of, [tall, STEP_COLUMNS])
    };
    let Product { rows, in_features, .. } = product;
    let columns = product.features();
    let arguments = arguments![
        map(places.x, product.x(), TILE_ROWS)?,
        map(places.weight, product.weight(), TILE_WEIGHTS / 2)?,
        map(places.out, Rows { rows, columns, pitch: product.out_pitch }, TILE_ROWS / 2)?,
        Address(places.bias.unwrap_or(0)),
        count(rows),
        count(columns),
        count(in_features),
        GROUP,
    ];
    let op = match (product.gates, product.accumulates) {
        (true, _) => "linear_gated_hopper",
        (false, true) => "linear_add_hopper",
        (false, false) => "linear_hopper",
    };
    let blocks = blocks(product, cuda.kernels.target.processors);
    let extent = Extent { grid: [blocks, 1, 1], block: [THREADS, 1], shared: SHARED };
    // SAFETY: these are the kernel's parameters, and the caller vouches for what they point to.
    unsafe { cuda.launch(&cuda.kernel(op), extent, arguments) }
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
