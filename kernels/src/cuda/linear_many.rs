//! GEMMs of more than 256 rows, or of more than 64 rows with FP8 weights, by this project's kernels
//! for Hopper (`kernels/cuda/linear_gated_hopper.cu`, `linear_many_e4m3.cu`). The input of a gate
//! is never written to memory.
//!
//! Autotuning times each kernel once against cuBLASLt, on the operands of the pass. For a gated
//! GEMM, the faster implementation is kept for this size and for smaller sizes, like cuBLASLt's
//! algorithms. For an ungated GEMM, this project's kernel is at best a little faster, and much
//! slower if its tall tiles leave SMs idle, so it is kept only for this size and for sizes down to
//! three quarters of it.

use bursar_budgets::Address;

use super::{
    Cuda,
    blas::{FEW_ROWS, GemmAlgorithm, GemmOperands, GemmProblem, QuantScheme},
    contract::{
        LinearE4m3,
        linear_many::{BOX, CLUSTER, SHARED_BYTES, STEP_COLUMNS, THREADS, TILE_ROWS, TILE_WEIGHTS},
    },
    launch::{Extent, Function, arguments, count},
    linear_few::{self, GemmBackend},
    tensor_map::{Rows, TensorMap},
    transposed_scales,
};
use crate::{DType, FP8_BLOCK, KernelError};

/// Pairs of row tiles that all thread blocks process before they move to the next columns.
const GROUP: u32 = 16;

/// Alignment in bytes of rows, which TMA requires.
const ALIGNMENT: usize = 16;

/// Alignment in bytes of biases, which are read in pairs.
const BIAS_ALIGNMENT: u64 = 4;

/// The number of output columns must be a multiple of this number, because TMA writes whole units
/// of 16 bytes, even past the last column.
const COLUMNS: usize = 8;

/// Runs per timing.
const RUNS: usize = 4;

/// Timings per implementation. The shortest timing counts.
const TRIALS: usize = 2;

/// The first version of the library that supports scales by rows and by blocks for E4M3 GEMMs.
const SCALED_FROM: usize = 120_900;

/// Minimum number of rows at which a GEMM is split so that the library computes all rows except the
/// last one to three. This project's kernel reads the whole weight for the last rows, which takes
/// as long as the library takes for about 140 rows (4 TB/s, 1,100 TFLOP/s).
const SPLIT_FROM: usize = 2048;

/// The time of this project's kernel must be less than this fraction of the library's time, because
/// two measurements of the same kernel differ by a few per cent.
const CLEARLY: f32 = 0.97;

/// Format of the output, and an action that follows the launch.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    /// `true` if the output is E4M3. Only gated GEMMs support E4M3 outputs.
    is_rounded: bool,
    /// Address of the scales of an E4M3 output, one for each 128 columns of a row. If `None`, the
    /// whole output has the scale `scale`.
    scales: Option<Address>,
    scale: f32,
    /// Called after the kernel is launched.
    then: Option<&'a dyn Fn() -> Result<(), KernelError>>,
}

impl<'a> Output<'a> {
    pub(super) const PLAIN: Output<'static> = Output { is_rounded: false, scales: None, scale: 1.0, then: None };

    /// Returns an output in the activation type. `then` is called after the launch
    /// and reads the output.
    pub(super) fn followed_by(then: &'a dyn Fn() -> Result<(), KernelError>) -> Self {
        Output { then: Some(then), ..Output::PLAIN }
    }

    pub(super) fn groups(scales: Address) -> Self {
        Output { is_rounded: true, scales: Some(scales), ..Output::PLAIN }
    }

    pub(super) fn fixed(scale: f32) -> Self {
        Output { is_rounded: true, scale, ..Output::PLAIN }
    }

    fn element(&self, activation: DType) -> DType {
        if self.is_rounded { DType::F8E4M3 } else { activation }
    }
}

/// Returns `true` if the kernels support the GEMM.
fn fits(product: GemmProblem, places: GemmOperands, output: Output<'_>) -> bool {
    let bytes = product.scheme.size();
    let starts = [places.weight as usize, places.x as usize, places.out as usize];
    let out_pitch = output.element(DType::F16).bytes(product.out_pitch).as_usize();
    let rows = [product.in_features * bytes, product.x_pitch * bytes, out_pitch];
    product.rows > if product.scheme.is_unquantized() { FEW_ROWS } else { linear_few::ROWS_MAX }
        && !product.out_is_f32
        && !(product.gates && product.accumulates)
        && product.in_features > 0
        && product.features().is_multiple_of(COLUMNS)
        && starts.iter().chain(&rows).all(|bytes| bytes.is_multiple_of(ALIGNMENT))
        && places.bias.is_none_or(|bias| bias.is_multiple_of(BIAS_ALIGNMENT))
}

/// Returns the number of thread blocks of a launch: at most one cluster per tile, and at most as
/// many clusters as the device runs at once.
fn blocks(product: GemmProblem, processors: usize) -> usize {
    let across = TILE_WEIGHTS / if product.gates { 2 } else { 1 };
    let tiles = product.rows.div_ceil(CLUSTER * TILE_ROWS) * product.features().div_ceil(across);
    CLUSTER * tiles.min(processors / CLUSTER)
}

/// Returns `true` if this project's kernel should compute the GEMM. `other` computes the same GEMM
/// without this kernel. During autotuning, the first call for a GEMM times both, which leaves
/// meaningless numbers in the output.
///
/// # Errors
/// Any error that the device reports for a measurement.
pub(super) fn chosen(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
    output: Output<'_>,
    other: impl Fn() -> Result<(), KernelError>,
) -> Result<bool, KernelError> {
    if !cuda.kernels.functions.is_machine_code() || !fits(product, places, output) {
        return Ok(false);
    }
    let is_unquantized = product.scheme.is_unquantized();
    match cuda.products_by {
        // cuBLASLt does not support E4M3 GEMMs with a fixed scale, and supports other E4M3 GEMMs
        // only in some versions.
        GemmBackend::Library => return Ok(!is_unquantized && !library_has(cuda, product, places)?),
        GemmBackend::Ours => return Ok(true),
        GemmBackend::Measured => {}
    }
    // A gated GEMM can always be compared with an ungated GEMM followed by the gate. An ungated
    // GEMM can only be compared with the library. A GEMM that is split is not measured. The
    // measurement of the next larger size that is not split applies to it.
    let is_whole = || parts(cuda, product, places).1.is_none();
    let has_other = || Ok::<_, KernelError>(product.gates || is_whole() && library_has(cuda, product, places)?);
    let is_measured = || cuda.kernels.blas.measured().contains_key(&product);
    if cuda.autotunes.get() && product.rows > FEW_ROWS && !is_measured() && has_other()? {
        // Warm-up: the first runs load the kernels and are not timed.
        other()?;
        // SAFETY: the op layer has checked the call, and the kernel supports the GEMM.
        let ours = || unsafe { launch(cuda, product, places, output) };
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
            cuda.kernels.blas.found(product, way);
        } else if cuda.kernels.blas.agreement.is_ours(product, shortest[1] < CLEARLY * shortest[0]) {
            // cuBLASLt's algorithm is measured by now and is kept for smaller sizes.
            cuda.kernels.blas.ours().insert(product);
        }
    }
    let measured = cuda.kernels.blas.algorithm_of(product);
    if product.gates {
        // The measured size may use the library's ungated GEMM before the gate, but the library may
        // not support this size.
        let is_odd = matches!(product.scheme, QuantScheme::E4m3Blocks { .. })
            && !product.rows.is_multiple_of(transposed_scales::ROWS);
        let lacks_library = || is_odd && product.rows > FEW_ROWS && !is_by_library(cuda, product, places);
        let is_without = !is_unquantized && (measured.is_none() || lacks_library());
        return Ok(matches!(measured, Some(GemmAlgorithm::Many)) || is_without);
    }
    let has_library = matches!(measured, Some(GemmAlgorithm::Library(_))) && library_has(cuda, product, places)?;
    if !is_unquantized && !has_library {
        return Ok(true);
    }
    let close = GemmProblem { rows: product.rows / 3 * 4, ..product };
    Ok(cuda.kernels.blas.ours().range(product..=close).next().is_some())
}

/// Returns `true` if the kernels support a GEMM of few rows. Autotuning measures
/// such GEMMs separately (`autotune.rs`).
pub(super) fn serves_few(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> bool {
    cuda.kernels.functions.is_machine_code()
        && product.rows <= FEW_ROWS
        && !product.gates
        && fits(product, places, Output::PLAIN)
}

/// Returns `true` if the library may be asked for the GEMM, or for all of its rows except the
/// last one to three.
pub(super) fn is_by_library(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> bool {
    let ((product, places), rest) = parts(cuda, product, places);
    let has_scales = match product.scheme {
        QuantScheme::Unquantized => return true,
        QuantScheme::E4m3Rows => true,
        QuantScheme::E4m3Blocks { .. } => transposed_scales::fit(product, places),
        QuantScheme::E4m3Fixed => false,
    };
    let out_pitch = DType::F16.bytes(product.out_pitch).as_usize();
    let starts = [places.out as usize, out_pitch];
    has_scales
        && cuda.kernels.functions.is_machine_code()
        && cuda.kernels.blas.version() >= SCALED_FROM
        && starts.iter().all(|bytes| bytes.is_multiple_of(ALIGNMENT))
        && !product.out_is_f32
        && rest.is_none_or(|(rest, places)| product.gates || linear_few::serves(cuda, rest, places))
}

/// Splits the GEMM into the rows that cuBLASLt computes and the remaining rows, if any. With scales
/// by blocks, cuBLASLt requires a multiple of four rows.
pub(super) fn parts(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
) -> ((GemmProblem, GemmOperands), Option<(GemmProblem, GemmOperands)>) {
    let odd = match product.scheme {
        QuantScheme::E4m3Blocks { .. } if product.rows >= SPLIT_FROM => product.rows % transposed_scales::ROWS,
        _ => 0,
    };
    let (activation, whole) = (cuda.kernels.target.activation, product.rows - odd);
    let rest = (odd > 0).then(|| linear_few::rows_of(activation, (product, places), whole, odd));
    ((GemmProblem { rows: whole, ..product }, places), rest)
}

/// Returns `true` if the library may be asked for the GEMM and has an algorithm for it. Otherwise
/// this project's kernels compute the GEMM. For an unquantized GEMM, the library is assumed to have
/// an algorithm. For a gated GEMM, the search for an algorithm is omitted too, because the library
/// would compute the ungated GEMM, which is checked by a separate call.
///
/// # Errors
/// The device is lost.
pub(super) fn library_has(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> Result<bool, KernelError> {
    if product.scheme.is_unquantized() || product.gates || !is_by_library(cuda, product, places) {
        return Ok(is_by_library(cuda, product, places));
    }
    let (blas, stream, activation) = (&cuda.kernels.blas, &cuda.stream, cuda.kernels.target.activation);
    let autotunes = cuda.autotunes.get();
    let may_guess = autotunes || cuda.products_by == GemmBackend::Library;
    let mut products = cuda.products.borrow_mut();
    let (product, places) = parts(cuda, product, places).0;
    let places = transposed_scales::as_asked(product, places);
    // SAFETY: the op layer has checked the shapes, and the creators of the tensors guarantee that
    // their memory is valid.
    Ok(unsafe { products.has(blas, stream, activation, (product, places), (autotunes, may_guess))? })
}

/// Launches the kernel, then calls `output.then`.
///
/// # Safety
/// `places` and `output` must match `product`, and the kernels must support the GEMM: [`chosen`] or
/// [`serves_few`] has returned true.
pub(super) unsafe fn launch(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
    output: Output<'_>,
) -> Result<(), KernelError> {
    let activation = cuda.kernels.target.activation;
    let is_unquantized = product.scheme.is_unquantized();
    let (operand, step) = if is_unquantized { (activation, STEP_COLUMNS) } else { (DType::F8E4M3, FP8_BLOCK) };
    let map = |address: u64, of: Rows, tall: usize| TensorMap::of_rows(address, operand, of, [tall, step]);
    let GemmProblem { rows, in_features, .. } = product;
    let columns = product.features();
    let out = Rows { rows, columns, pitch: product.out_pitch };
    let wide = if output.is_rounded { 2 * BOX } else { BOX };
    let mut arguments = arguments![
        map(places.x, product.x(), TILE_ROWS)?,
        map(places.weight, product.weight(), TILE_WEIGHTS / 2)?,
        TensorMap::of_rows(places.out, output.element(activation), out, [BOX, wide])?,
        Address(places.bias.unwrap_or(0)),
        count(rows),
        count(columns),
        count(in_features),
        GROUP,
    ];
    if !is_unquantized {
        let scales = output.scales.unwrap_or(Address(0));
        arguments = linear_few::with_scales(arguments, product, places).with(scales).with(output.scale);
    }
    let kernels = cuda.entry_points().hopper.as_ref().expect("the product was chosen");
    let e4m3 = |kernels: &LinearE4m3<Function>| match (product.gates, product.accumulates) {
        (true, _) if output.is_rounded => kernels.gated_rounded,
        (true, _) => kernels.gated,
        (false, true) => kernels.add,
        (false, false) => kernels.plain,
    };
    let kernel = match product.scheme {
        QuantScheme::Unquantized if product.gates => kernels.linear_gated,
        QuantScheme::Unquantized if product.accumulates => kernels.linear_add,
        QuantScheme::Unquantized => kernels.linear,
        QuantScheme::E4m3Blocks { .. } => e4m3(&kernels.linear_e4m3_blocks),
        QuantScheme::E4m3Rows | QuantScheme::E4m3Fixed => e4m3(&kernels.linear_e4m3_rows),
    };
    let blocks = blocks(product, cuda.kernels.target.processors);
    let extent = Extent { grid: [blocks, 1, 1], block: [THREADS, 1], shared: SHARED_BYTES };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(kernel, extent, arguments)? };
    output.then.map_or(Ok(()), |then| then())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(gates: bool, rows: usize, out_features: usize) -> GemmProblem {
        GemmProblem {
            scheme: QuantScheme::Unquantized,
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
        assert_eq!(blocks(product(true, 8192, 37_888), 132), 132);
        assert_eq!(blocks(product(true, 257, 272), 132), 8, "two pairs of row tiles, two tiles of 128 gates");
        assert_eq!(blocks(product(false, 256, 256), 132), 2);
        assert_eq!(blocks(product(false, 8192, 4608), 79), 78, "the last has no partner");
    }

    #[test]
    fn what_the_copy_engine_or_the_pairs_of_a_bias_cannot_reach_is_left_to_the_library() {
        let many = product(false, 257, 4608);
        assert!(fits(many, places(), Output::PLAIN));
        assert!(fits(product(true, 8192, 37_888), places(), Output::PLAIN));
        let otherwise = [
            GemmProblem { rows: FEW_ROWS, ..many },
            GemmProblem { out_is_f32: true, ..many },
            GemmProblem { in_features: 3580, x_pitch: 3584, ..many },
            GemmProblem { x_pitch: 3588, ..many },
            GemmProblem { out_pitch: 4609, ..many },
            GemmProblem { out_features: 4607, ..many },
            GemmProblem { out_features: 4606, out_pitch: 4608, ..many },
        ];
        for product in otherwise {
            assert!(!fits(product, places(), Output::PLAIN), "{product:?}");
        }
        for places in [
            GemmOperands { x: 1032, ..places() },
            GemmOperands { out: 8, ..places() },
            GemmOperands { bias: Some(2), ..places() },
        ] {
            assert!(!fits(many, places, Output::PLAIN));
        }
    }
}
