//! GEMMs of up to 64 rows by this project's kernel for Hopper (`kernels/cuda/linear_few.cu`), which
//! streams the weight once.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use bursar_budgets::{Address, Bytes, DeviceError, Overhead};
use serde::{Deserialize, Serialize};

pub(super) use super::contract::linear_few::ROWS_MAX;
use super::{
    Cuda,
    blas::{GemmAlgorithm, GemmOperands, GemmProblem, QuantScheme},
    contract::{
        FewRows,
        linear_few::{
            ADD_TO_OUT, CHUNK_COLUMNS, GATE_ROWS, OUT_IS_F32, STEP_COLUMNS, STREAM_COUNTERS, STREAMS, TEAM, THREADS,
            TILE_ROWS, part_numbers, shared_bytes,
        },
    },
    error::OpenError,
    launch::{Arguments, Extent, Functions, arguments, count},
    linear_many,
    stream::Stream,
    tensor_map::{Layout, Rows, Swizzle, TensorMap},
};
use crate::{DType, FP8_BLOCK, KernelError};

/// Alignment of rows in bytes, which TMA requires.
const ALIGNMENT: usize = 16;

/// The implementation that computes GEMMs of any number of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmBackend {
    /// The implementation that autotuning measured to be fastest, or cuBLASLt
    /// if nothing was measured.
    #[default]
    Measured,
    /// This project's kernels for every GEMM that they support, for comparison.
    Ours,
    /// cuBLASLt only, for comparison.
    Library,
}

/// Number of thread blocks that share a tile, if the device has enough. A larger number means
/// taller tiles, up to 128 rows, and more partial sums that thread blocks exchange. With two, the
/// sums stay within a cluster (`TEAM`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cut(usize);

/// The cuts that autotuning chooses from; `tools/gpu/products.py` times the same cuts. The last cut
/// makes as few tiles as possible.
pub(super) const CUTS: [Cut; 4] = [Cut(2), Cut(1), Cut(4), Cut(132)];

/// Bit mask of the counter sets in use.
#[derive(Default)]
pub(super) struct CounterSets(AtomicU32);

/// The counters of one stream, which are zero between launches. Streams that run concurrently
/// must not share counters.
pub(super) struct Counters {
    address: Address,
    set: usize,
    sets: Arc<CounterSets>,
    stream: Arc<Overhead<Stream>>,
}

impl Counters {
    /// Takes a set of counters for `stream`. Returns `None` if the device does not have this
    /// kernel, or if eight other streams use all sets.
    pub(super) fn take(
        functions: &Functions,
        sets: &Arc<CounterSets>,
        stream: &Arc<Overhead<Stream>>,
    ) -> Result<Option<Counters>, OpenError> {
        if !functions.is_machine_code() {
            return Ok(None);
        }
        let free = |taken: u32| (taken.trailing_ones() < STREAMS as u32).then(|| taken | (taken + 1));
        let Ok(taken) = sets.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, free) else { return Ok(None) };
        let set = taken.trailing_ones() as usize;
        let mut counters = Counters { address: Address(0), set, sets: sets.clone(), stream: stream.clone() };
        let first = functions.variable("linear_few", c"linear_few_counters")?;
        counters.address = first.offset(DType::U32.bytes(set * STREAM_COUNTERS));
        Ok(Some(counters))
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // Wait first: running work still uses the counters.
        drop(self.stream.wait());
        self.sets.0.fetch_and(!(1 << self.set), Ordering::AcqRel);
    }
}

/// The size of a GEMM's work, and its division into tiles.
struct Work {
    blocks: usize,
    tiles: usize,
    /// Weight rows of the tallest tile. In a gated GEMM, this includes the up rows.
    tile_rows: usize,
    steps: usize,
}

impl Work {
    fn of(product: GemmProblem, cut: Cut, processors: usize) -> Work {
        let steps = product.in_features.div_ceil(STEP_COLUMNS * DType::F16.size() / product.scheme.size());
        // Tiles are cut between features. In a gated GEMM, tiles are cut between groups of eight
        // features with their gates.
        let (groups, most, rows) = if product.gates {
            (product.out_features / 2 / GATE_ROWS, TILE_ROWS / 2 / GATE_ROWS, 2 * GATE_ROWS)
        } else {
            (product.out_features, TILE_ROWS, 1)
        };
        let blocks = (processors / TEAM * TEAM).min(groups * cut.0);
        // Every thread block, or every group of thread blocks that share tiles, gets the same
        // number of tiles. The number is chosen so that no tile is too tall.
        let at_once = (blocks / cut.0).max(1);
        let tiles = at_once * groups.div_ceil(at_once * most);
        Work {
            blocks: blocks.min(tiles * steps).next_multiple_of(TEAM),
            tiles,
            tile_rows: groups.div_ceil(tiles) * rows,
            steps,
        }
    }

    /// Returns the bytes that thread blocks need for the partial sums of shared tiles.
    fn parts(&self, kernel_rows: FewRows) -> Bytes {
        DType::F32.bytes(2 * self.blocks * part_numbers(kernel_rows))
    }
}

/// Returns `true` if this kernel supports the GEMM.
pub(super) fn serves(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> bool {
    let Some(kernel_rows) = FewRows::holding(product.rows) else { return false };
    let row_bytes = |elements: usize| elements * product.scheme.size();
    let starts =
        [places.weight as usize, places.x as usize, row_bytes(product.in_features), row_bytes(x_pitch(product))];
    let is_aligned = starts.iter().all(|start| start.is_multiple_of(ALIGNMENT));
    let can_gate = !product.gates
        || product.scheme.is_unquantized() && !product.has_bias && product.out_features.is_multiple_of(2 * GATE_ROWS);
    cuda.counters.is_some()
        && is_aligned
        && can_gate
        && CUTS.iter().all(|cut| {
            let work = Work::of(product, *cut, cuda.kernels.target.processors);
            let has_room = work.parts(kernel_rows).as_usize() <= places.workspace_bytes;
            has_room && work.tiles <= STREAM_COUNTERS
        })
}

/// Returns the cut to use, or `None` if this kernel should not compute the GEMM.
pub(super) fn chosen(cuda: &Cuda, product: GemmProblem, places: GemmOperands) -> Option<Cut> {
    if !serves(cuda, product, places) {
        return None;
    }
    match cuda.products_by {
        // Ignore the error of a lost device here: the launch reports it again.
        GemmBackend::Library if linear_many::library_has(cuda, product, places).unwrap_or(false) => None,
        GemmBackend::Library => Some(CUTS[0]),
        GemmBackend::Ours => Some(CUTS[0]),
        GemmBackend::Measured => match cuda.kernels.blas.algorithm_of(product) {
            Some(GemmAlgorithm::Few(cut)) => Some(cut),
            None if !product.scheme.is_unquantized() => Some(CUTS[0]),
            _ => None,
        },
    }
}

/// Returns the pitch of x for the tensor map. A single row may have any pitch, but TMA requires a
/// multiple of 16 bytes even if there is no second row.
fn x_pitch(product: GemmProblem) -> usize {
    if product.rows == 1 { product.in_features } else { product.x_pitch }
}

/// Launches the kernel.
///
/// # Safety
/// `places` must match `product`, and [`serves`] must have returned true. No kernel that may still
/// run at the launch may write the weight or its scales, because the first copies of both do not
/// wait for the preceding kernel. Nothing may write them until this kernel has ended.
pub(super) unsafe fn launch(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
    cut: Cut,
) -> Result<(), KernelError> {
    let work = Work::of(product, cut, cuda.kernels.target.processors);
    let kernel_rows = FewRows::holding(product.rows).expect("it is served");
    let kernels = cuda.entry_points().hopper.as_ref().expect("it is served");
    let counters = cuda.counters.as_ref().expect("it is served");
    let activation = cuda.kernels.target.activation;
    let rows = Rows { pitch: x_pitch(product), ..product.x() };
    let (operand, chunk) =
        if product.scheme.is_unquantized() { (activation, CHUNK_COLUMNS) } else { (DType::F8E4M3, FP8_BLOCK) };
    let x = TensorMap::of_rows(places.x, operand, rows, [kernel_rows.rows(), chunk])?;
    let weight = if product.gates {
        gated_map(product, places, &work, activation)?
    } else {
        TensorMap::of_rows(places.weight, operand, product.weight(), [work.tile_rows, chunk])?
    };
    let mut arguments = arguments![weight, x, Address(places.out)];
    if !product.gates {
        arguments = arguments.with(Address(places.bias.unwrap_or(0)));
    }
    arguments = arguments
        .with(Address(places.workspace))
        .with(counters.address)
        .with(count(product.out_pitch))
        .with(count(product.rows))
        .with(count(product.features()))
        .with(count(work.steps))
        .with(count(work.tiles))
        .with(count(work.tile_rows));
    if !product.gates {
        let flags = u32::from(product.accumulates) * ADD_TO_OUT + u32::from(product.out_is_f32) * OUT_IS_F32;
        arguments = arguments.with(flags);
    }
    let of_rows = match product.scheme {
        QuantScheme::Unquantized if product.gates => &kernels.gate_up_few,
        QuantScheme::Unquantized => &kernels.linear_few,
        QuantScheme::E4m3Blocks { .. } => &kernels.linear_few_e4m3_blocks,
        QuantScheme::E4m3Rows | QuantScheme::E4m3Fixed => &kernels.linear_few_e4m3_rows,
    };
    if !product.scheme.is_unquantized() {
        arguments = with_scales(arguments, product, places);
    }
    let extent = Extent { grid: [work.blocks, 1, 1], block: [THREADS, 1], shared: shared_bytes(kernel_rows) };
    // SAFETY: the arguments match the kernel's parameters, and the caller guarantees that
    // their addresses are valid.
    unsafe { cuda.launch(of_rows[kernel_rows], extent, arguments) }
}

/// Computes a GEMM with any number of rows, up to [`ROWS_MAX`] at a time. This is the fallback for
/// E4M3 GEMMs whose output is not aligned for any other kernel.
///
/// # Safety
/// The same as for [`launch`].
pub(super) unsafe fn launch_in_turns(
    cuda: &Cuda,
    product: GemmProblem,
    places: GemmOperands,
) -> Result<(), KernelError> {
    for first in (0..product.rows).step_by(ROWS_MAX) {
        let rows = ROWS_MAX.min(product.rows - first);
        let (turn, places) = rows_of(cuda.kernels.target.activation, (product, places), first, rows);
        if !serves(cuda, turn, places) {
            return Err(KernelError::NoKernel { op: "linear" });
        }
        // SAFETY: the caller guarantees that `places` match the GEMM, of which these
        // rows are a part.
        unsafe { launch(cuda, turn, places, CUTS[0])? };
    }
    Ok(())
}

/// Returns the GEMM of `rows` rows of `product`, starting at row `first`, and its operands.
pub(super) fn rows_of(
    activation: DType,
    (product, places): (GemmProblem, GemmOperands),
    first: usize,
    rows: usize,
) -> (GemmProblem, GemmOperands) {
    let out = if product.out_is_f32 { DType::F32 } else { activation };
    let groups = match product.scheme {
        QuantScheme::E4m3Blocks { .. } => product.in_features.div_ceil(FP8_BLOCK),
        QuantScheme::Unquantized | QuantScheme::E4m3Rows => 1,
        QuantScheme::E4m3Fixed => 0,
    };
    let behind = |address: u64, bytes: Bytes| Address(address).offset(bytes).0;
    let places = GemmOperands {
        x: behind(places.x, Bytes((first * product.x_pitch * product.scheme.size()) as u64)),
        x_scales: behind(places.x_scales, DType::F32.bytes(first * groups)),
        out: behind(places.out, out.bytes(first * product.out_pitch)),
        ..places
    };
    (GemmProblem { rows, ..product }, places)
}

/// Appends the arguments for scales that all E4M3 kernels take.
pub(super) fn with_scales(arguments: Arguments, product: GemmProblem, places: GemmOperands) -> Arguments {
    let height = if let QuantScheme::E4m3Blocks { height } = product.scheme { height } else { 1 };
    arguments
        .with(Address(places.weight_scales))
        .with(Address(places.x_scales))
        .with(places.x_scale)
        .with(count(product.in_features.div_ceil(FP8_BLOCK)))
        .with(count(height))
}

/// Tensor map of a gated weight: groups of eight gate rows alternate with the
/// corresponding eight up rows.
fn gated_map(
    product: GemmProblem,
    places: GemmOperands,
    work: &Work,
    activation: DType,
) -> Result<TensorMap, DeviceError> {
    let (columns, rows, gates) = (product.in_features as u64, product.out_features as u64, GATE_ROWS as u64);
    let pitch = 2 * columns;
    let layout = Layout {
        dimensions: &[columns, gates, 2, rows / 2 / gates],
        strides: &[pitch, pitch * (rows / 2), pitch * gates],
        cube: &[count(CHUNK_COLUMNS), count(GATE_ROWS), 2, count(work.tile_rows / (2 * GATE_ROWS))],
        swizzle: Swizzle::Bytes128,
    };
    TensorMap::new(Address(places.weight), activation, &layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(gates: bool, out_features: usize, in_features: usize) -> GemmProblem {
        GemmProblem {
            scheme: QuantScheme::Unquantized,
            gates,
            out_features,
            in_features,
            out_pitch: out_features,
            x_pitch: in_features,
            out_is_f32: false,
            has_bias: false,
            accumulates: false,
            rows: 1,
        }
    }

    #[test]
    fn the_tiles_of_a_product_hold_all_of_its_features_and_none_is_too_tall() {
        for (gates, features) in [(false, 3584), (false, 152_064), (false, 1), (false, 77), (true, 37_888), (true, 16)]
        {
            for cut in CUTS {
                let work = Work::of(product(gates, features, 3584), cut, 132);
                assert!(work.tiles * work.tile_rows >= features, "{features} features, {cut:?}");
                assert!((1..=TILE_ROWS).contains(&work.tile_rows), "{features} features, {cut:?}: {}", work.tile_rows);
                assert!((1..=132).contains(&work.blocks) && work.tiles <= STREAM_COUNTERS);
                assert!(work.blocks.is_multiple_of(TEAM), "{features} features, {cut:?}: {} blocks", work.blocks);
            }
        }
        let shared = Work::of(product(false, 3584, 3584), Cut(2), 132);
        assert_eq!((shared.blocks, shared.tiles, shared.tile_rows, shared.steps), (132, 66, 55, 28));
        let gated = Work::of(product(true, 37_888, 3584), Cut(1), 132);
        assert_eq!((gated.tiles, gated.tile_rows), (396, 96), "gates and ups of 48 features");
        assert_eq!(Work::of(product(false, 4608, 3584), Cut(132), 132).tiles, 36, "as few as can be");
    }

    #[test]
    fn a_block_takes_more_than_half_of_a_multiprocessors_shared_memory() {
        for rows in FewRows::ALL {
            assert!((114 * 1024..=213 * 1024).contains(&shared_bytes(rows)), "{rows:?}: {}", shared_bytes(rows));
        }
        let kernel_rows = [0, 1, 8, 9, 64, 65].map(|rows| FewRows::holding(rows).map(FewRows::rows));
        assert_eq!(kernel_rows, [None, Some(8), Some(8), Some(16), Some(64), None]);
    }
}
