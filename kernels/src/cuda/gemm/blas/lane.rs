//! GEMMs by cuBLASLt, each with the algorithm measured to be fastest on this device.
//!
//! The library proposes algorithms from a model of the device, and on small batches its first
//! proposal is often not the fastest. During autotuning (in the stress before READY, whose results
//! are discarded), each new GEMM of many rows runs all proposals and keeps the fastest. At the end
//! of autotuning, the GEMMs that passes have called are measured with few rows
//! (`gemm/autotune.rs`). Afterward, a size that was not measured uses the algorithm of another
//! measured size of the same GEMM, if that algorithm supports both sizes. Larger sizes are tried
//! first. A GEMM without such an algorithm, which no pass called during autotuning, uses the first
//! proposal. For all other GEMMs, no kernel of the library is loaded while serving.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bursar_budgets::{CudaDevice, DeviceError};

use super::{
    super::{
        super::stream::{Clock, Stream},
        algorithm::GemmAlgorithm,
        problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS},
        tuned::Tuned,
    },
    library::{Algorithm, Blas, Memory, Object, Operands, number},
};
use crate::{DType, QuantizationScheme};

/// Number of proposals that autotuning measures.
const PROPOSALS: usize = 12;

/// A proposal this many times slower than the fastest in the first round is dropped.
const DROP_RATIO: f32 = 1.25;

/// Maximum number of proposals left after the first round.
const FINALISTS: usize = 4;
/// Rounds in which the finalists alternate. They alternate because a kernel runs faster after a
/// kernel that heats the device less. If all runs of a proposal were consecutive, the result would
/// depend on the order of the proposals.
const ROUNDS: usize = 4;

/// After this many milliseconds of timing, no further round starts, because runs
/// this long vary little.
const LONG_ENOUGH: f32 = 30.0;

/// Placeholder for the address of the scales, with the same alignment.
const SOME_ADDRESS: u64 = 1 << 12;

/// Maximum number of descriptions kept. Prompts have any length, so the number of sizes has no
/// other bound, and a description takes a few hundred bytes of host memory.
const KEPT_MAX: usize = 4096;

/// The library, and the stream that its GEMMs run in.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct BlasLane<'a> {
    pub blas: &'a Blas,
    pub tuned: &'a Tuned,
    pub stream: &'a Stream,
    pub activation: DType,
}

/// The GEMMs of one lane.
pub(in crate::cuda) struct LaneGemms {
    known: BTreeMap<GemmProblem, Known>,
    /// GEMMs for which the library was found to have no algorithm.
    refused: BTreeSet<GemmProblem>,
    clock: Clock,
    /// Number of GEMMs outside autotuning that used the library's first proposal.
    guesses: usize,
}

struct Known {
    described: Described,
    algorithm: Algorithm,
    is_measured: bool,
}

/// The cuBLASLt descriptors of a GEMM.
pub(in crate::cuda) struct Described {
    problem: GemmProblem,
    desc: Object,
    weight: Object,
    x: Object,
    out: Object,
}

impl LaneGemms {
    pub(in crate::cuda) fn new(device: &Arc<CudaDevice>) -> Result<Self, DeviceError> {
        Ok(LaneGemms { known: BTreeMap::new(), refused: BTreeSet::new(), clock: Clock::new(device)?, guesses: 0 })
    }

    /// Returns the number of GEMMs outside autotuning that used the library's first proposal.
    pub(in crate::cuda) fn guesses(&self) -> usize {
        self.guesses
    }

    /// Discards the algorithms chosen for a GEMM with few rows, because a faster algorithm may have
    /// been found. `alike` is the GEMM with any number of rows.
    pub(in crate::cuda) fn forget_small_m(&mut self, alike: GemmProblem) {
        let is_other = |problem: &GemmProblem| {
            problem.rows > MEMORY_BOUND_ROWS || GemmProblem { rows: alike.rows, ..*problem } != alike
        };
        self.known.retain(|known, _| is_other(known));
        self.refused.retain(is_other);
    }

    /// Discards the record of GEMMs for which the library had no algorithm, so that it is queried
    /// again.
    pub(in crate::cuda) fn forget_refusals(&mut self) {
        self.refused.clear();
    }

    /// Returns `true` if the library has an algorithm for the GEMM: an algorithm that was measured
    /// for this or another size, or any algorithm if `may_guess` is true. During autotuning, this
    /// call also measures a new GEMM of many rows, which leaves meaningless numbers in the output.
    ///
    /// # Safety
    /// `operands` must match the problem.
    pub(in crate::cuda) unsafe fn has(
        &mut self,
        lane: BlasLane<'_>,
        (problem, operands): (GemmProblem, GemmOperands),
        (autotunes, may_guess): (bool, bool),
    ) -> Result<bool, DeviceError> {
        if self.is_known(&problem, autotunes) {
            return Ok(true);
        }
        if self.refused.contains(&problem) {
            return Ok(false);
        }
        // SAFETY: the caller guarantees that `operands` match the problem.
        match unsafe { self.meet(lane, (problem, operands), (autotunes, may_guess)) } {
            Ok(()) => Ok(true),
            Err(error) if error.is_lost() => Err(error),
            Err(_) => {
                if self.refused.len() >= KEPT_MAX {
                    self.refused.clear();
                }
                self.refused.insert(problem);
                Ok(false)
            }
        }
    }

    /// Launches a GEMM in the stream.
    ///
    /// # Safety
    /// `operands` must match the problem.
    pub(in crate::cuda) unsafe fn multiply(
        &mut self,
        lane: BlasLane<'_>,
        (problem, operands): (GemmProblem, GemmOperands),
        autotunes: bool,
    ) -> Result<(), DeviceError> {
        if !self.is_known(&problem, autotunes) {
            // SAFETY: the caller guarantees that `operands` match the problem.
            unsafe { self.meet(lane, (problem, operands), (autotunes, true))? };
        }
        let known = &self.known[&problem];
        // SAFETY: the caller guarantees that `operands` match the problem.
        unsafe { known.described.multiply(lane.blas, lane.stream, operands, &known.algorithm) }
    }

    /// Returns `true` if the GEMM's algorithm is known. During autotuning, an algorithm for many
    /// rows counts only if it was measured.
    fn is_known(&self, problem: &GemmProblem, autotunes: bool) -> bool {
        let measures = autotunes && problem.rows > MEMORY_BOUND_ROWS;
        self.known.get(problem).is_some_and(|known| !measures || known.is_measured)
    }

    unsafe fn meet(
        &mut self,
        lane: BlasLane<'_>,
        (problem, operands): (GemmProblem, GemmOperands),
        (autotunes, may_guess): (bool, bool),
    ) -> Result<(), DeviceError> {
        let described = Described::of(lane.blas, lane.activation, problem)?;
        let measures = autotunes && problem.rows > MEMORY_BOUND_ROWS;
        let own = measured_for(lane.tuned, problem);
        let known = own.or_else(|| (!measures).then(|| tuned_for(lane, &described, operands)).flatten());
        let algorithm = match known {
            Some(algorithm) => algorithm,
            None if !may_guess => return Err(no_algorithm(problem)),
            None => {
                let algorithms = described.proposals(lane.blas, operands)?;
                if measures {
                    // SAFETY: the caller guarantees that `operands` match the problem.
                    let fastest = unsafe { self.fastest(lane, &described, operands, &algorithms)? };
                    match lane.tuned.found(problem, GemmAlgorithm::Library(fastest)) {
                        GemmAlgorithm::Library(agreed) => agreed,
                        _ => fastest,
                    }
                } else {
                    self.guesses += usize::from(!autotunes);
                    algorithms[0]
                }
            }
        };
        if self.known.len() >= KEPT_MAX {
            self.known.retain(|_, known| known.is_measured);
        }
        self.known.insert(problem, Known { described, algorithm, is_measured: measures || own.is_some() });
        Ok(())
    }

    unsafe fn fastest(
        &self,
        lane: BlasLane<'_>,
        described: &Described,
        operands: GemmOperands,
        algorithms: &[Algorithm],
    ) -> Result<Algorithm, DeviceError> {
        // SAFETY: the caller guarantees that `operands` match the problem.
        let run = |algorithm: &Algorithm| unsafe { described.multiply(lane.blas, lane.stream, operands, algorithm) };
        let (mut timed, mut refused) = (Vec::with_capacity(algorithms.len()), None);
        for algorithm in algorithms {
            // Warm-up: the first run loads the algorithm's kernels and is not timed. If one
            // algorithm fails to run, the remaining algorithms are still tried.
            match run(algorithm) {
                Ok(()) => timed.push((0.0, *algorithm)),
                Err(error) if error.is_lost() => return Err(error),
                Err(error) => refused = Some(error),
            }
        }
        let by_time = |(one, _): &(f32, Algorithm), (other, _): &(f32, Algorithm)| one.total_cmp(other);
        for (rounds, rest) in [(1, FINALISTS), (ROUNDS, 1)] {
            let mut spent = 0.0;
            for _ in 0..rounds {
                if spent > LONG_ENOUGH {
                    break;
                }
                for (milliseconds, algorithm) in &mut timed {
                    let took = self.clock.time(lane.stream, || run(algorithm))?;
                    *milliseconds += took;
                    spent += took;
                }
            }
            timed.sort_by(by_time);
            timed.truncate(rest);
            let most = timed.first().map_or(0.0, |(fastest, _)| DROP_RATIO * fastest);
            timed.retain(|(milliseconds, _)| *milliseconds <= most);
        }
        match (timed.first(), refused) {
            (Some((_, fastest)), _) => Ok(*fastest),
            (None, refused) => Err(refused.expect("there was at least one algorithm to try")),
        }
    }
}

fn no_algorithm(problem: GemmProblem) -> DeviceError {
    DeviceError::Driver {
        call: "cublasLtMatmulAlgoGetHeuristic",
        message: format!("cuBLASLt has no algorithm for {problem:?}"),
    }
}

/// Returns the library's algorithm that was measured for exactly this GEMM, if any.
fn measured_for(tuned: &Tuned, problem: GemmProblem) -> Option<Algorithm> {
    match tuned.measured().get(&problem) {
        Some(GemmAlgorithm::Library(algorithm)) => Some(*algorithm),
        _ => None,
    }
}

/// Returns the algorithm of the next larger measured size whose algorithm also supports this size.
/// If there is no such size, smaller sizes are tried in descending order.
fn tuned_for(lane: BlasLane<'_>, described: &Described, operands: GemmOperands) -> Option<Algorithm> {
    let (measured, problem) = (lane.tuned.measured(), described.problem);
    let alike = |rows| GemmProblem { rows, ..problem };
    let larger = measured.range(problem..=alike(usize::MAX));
    let smaller = measured.range(alike(0)..problem).rev();
    larger.chain(smaller).find_map(|(_, way)| match way {
        GemmAlgorithm::Library(algorithm) => {
            described.is_served_by(lane.blas, algorithm, operands.workspace_bytes).then_some(*algorithm)
        }
        _ => None,
    })
}

impl Described {
    /// Creates the descriptors. cuBLASLt's matrices are column-major, so a row of this project is a
    /// column of cuBLASLt, which computes
    /// `out^T [out, rows] = weight^T^T [out, in] @ x^T [in, rows]`.
    pub(in crate::cuda) fn of(blas: &Blas, activation: DType, problem: GemmProblem) -> Result<Described, DeviceError> {
        let desc = blas.desc()?;
        blas.set(&desc, number::DESC_TRANSA, number::OP_TRANSPOSED)?;
        if problem.has_bias {
            blas.set(&desc, number::DESC_EPILOGUE, number::EPILOGUE_BIAS)?;
        }
        if let Some(scheme) = problem.scheme {
            let [weight, x] = match scheme {
                QuantizationScheme::ROW => [number::SCALE_EACH_ROW; 2],
                QuantizationScheme::BLOCK => [number::SCALE_EACH_BLOCK, number::SCALE_EACH_128],
                _ => return Err(no_algorithm(problem)),
            };
            blas.set(&desc, number::DESC_A_SCALE_MODE, weight)?;
            blas.set(&desc, number::DESC_B_SCALE_MODE, x)?;
            if problem.has_bias {
                blas.set(&desc, number::DESC_BIAS_TYPE, number::of(activation))?;
            }
            if scheme == QuantizationScheme::BLOCK {
                // An algorithm may be checked before the scales have an address. This
                // placeholder is not read.
                for pointer in [number::DESC_A_SCALE_POINTER, number::DESC_B_SCALE_POINTER] {
                    blas.set(&desc, pointer, SOME_ADDRESS)?;
                }
            }
        }
        let (weight, x) = (problem.weight_type(activation), problem.x_type(activation));
        let out = if problem.out_is_f32 { DType::F32 } else { activation };
        Ok(Described {
            problem,
            desc,
            weight: blas.layout(number::of(weight), problem.in_features, problem.out_features, problem.in_features)?,
            x: blas.layout(number::of(x), problem.in_features, problem.rows, problem.x_pitch)?,
            out: blas.layout(number::of(out), problem.out_features, problem.rows, problem.out_pitch)?,
        })
    }

    /// Returns `true` if an algorithm that was measured for another size, or in another start of
    /// the model, supports this GEMM within `workspace_bytes`.
    pub(in crate::cuda) fn is_served_by(&self, blas: &Blas, algorithm: &Algorithm, workspace_bytes: usize) -> bool {
        blas.serves(&self.operands(), algorithm, workspace_bytes)
    }

    fn operands(&self) -> Operands<'_> {
        Operands { desc: &self.desc, weight: &self.weight, x: &self.x, out: &self.out }
    }

    /// Returns cuBLASLt's proposals, best guess first, or an error if there are no proposals.
    pub(in crate::cuda) fn proposals(
        &self,
        blas: &Blas,
        operands: GemmOperands,
    ) -> Result<Vec<Algorithm>, DeviceError> {
        // The pointers to the bias and the scales are part of the description.
        self.point_at(blas, operands)?;
        let proposals = blas.proposals(&self.operands(), operands.workspace_bytes, PROPOSALS)?;
        let algorithms: Vec<Algorithm> = proposals.iter().map(|proposal| proposal.algorithm).collect();
        if algorithms.is_empty() { Err(no_algorithm(self.problem)) } else { Ok(algorithms) }
    }

    fn point_at(&self, blas: &Blas, operands: GemmOperands) -> Result<(), DeviceError> {
        if !self.problem.is_unquantized() {
            blas.set(&self.desc, number::DESC_A_SCALE_POINTER, operands.weight_scales)?;
            blas.set(&self.desc, number::DESC_B_SCALE_POINTER, operands.x_scales)?;
        }
        operands.bias.map_or(Ok(()), |bias| blas.set(&self.desc, number::DESC_BIAS_POINTER, bias))
    }

    /// Launches the GEMM in the stream.
    ///
    /// # Safety
    /// `operands` must match the problem.
    pub(in crate::cuda) unsafe fn multiply(
        &self,
        blas: &Blas,
        stream: &Stream,
        operands: GemmOperands,
        algorithm: &Algorithm,
    ) -> Result<(), DeviceError> {
        self.point_at(blas, operands)?;
        let memory = Memory {
            weight: operands.weight,
            x: operands.x,
            out: operands.out,
            keep: if self.problem.accumulates { 1.0 } else { 0.0 },
            workspace: operands.workspace,
            workspace_bytes: operands.workspace_bytes,
        };
        // SAFETY: the caller guarantees that `operands` match the problem.
        unsafe { blas.multiply(&self.operands(), memory, algorithm, stream.raw()) }
    }
}
