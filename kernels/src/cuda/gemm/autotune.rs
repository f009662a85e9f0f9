//! Autotuning of GEMMs of up to 256 rows: finds the fastest implementation of each GEMM that a
//! pass has called, at several row counts. A row count in between uses the result of the next
//! larger measured row count.
//!
//! A decode step reads each weight once, and no cache still holds a layer's weights when the next
//! step reads them, so a trial cycles through the weights of several layers. As in a model, small
//! kernels run between the GEMMs, so a GEMM kernel that can start early overlaps with a small
//! kernel. A trial also loads the kernels that it runs, so no GEMM of up to 256 rows has to load a
//! kernel later.

use std::mem;

use bursar_budgets::{Address, CudaDevice};
use cudarc::driver::sys;

use super::{
    super::{elementwise, lane::Cuda, target::CUDA_LINEAR_SCRATCH},
    algorithm::GemmAlgorithm,
    blas::Described,
    large_m::Output,
    launch,
    linear::linear,
    plan::{GemmBackend, GemmPlan, library_supports},
    problem::{GemmOperands, GemmProblem, MEMORY_BOUND_ROWS},
    recorded::{LayerWeight, RecordedGemms},
    scale_scratch,
    table::Kernel,
    tiles::Cut,
    transposed_scales,
};
use crate::{
    Activations, DType, KernelError, SCALE_BLOCK, Shape, Tensor, Weight,
    calls::{self, GateActivation},
};

/// Row counts to measure. Up to 64, these are 1 and the row counts that this project's kernels are
/// compiled for. A row count in between runs the kernel of the next larger count and takes equally
/// long. Above 64, these are multiples of the tile height, 64 rows.
const MEASURED_ROWS: [usize; 8] = [1, 8, 16, 32, 64, 128, 192, MEMORY_BOUND_ROWS];

/// Row counts to measure for a GEMM that no pass has called with few rows. Such a GEMM belongs
/// either to the vision tower, where only a batch of one very small picture has few rows, or to
/// prefill. A GEMM of prefill is also called with few rows when decoding is autotuned, and is then
/// measured at all row counts.
const SELDOM_FEW: [usize; 2] = [64, MEMORY_BOUND_ROWS];

/// If a trial cycles through this many bytes of weights, a weight is no longer in the L2 cache when
/// it is read again: the cache is about half this size.
const COLD_BYTES: usize = 96 << 20;

/// Maximum bytes written before a trial that cycles through fewer than `COLD_BYTES`: more than fit
/// in the L2 cache.
const WRITTEN_MAX: usize = 192 << 20;

/// Maximum number of GEMMs per trial in the first round.
const FIRST_TURNS: usize = 3;
/// Maximum number of GEMMs per trial in the final round.
const TURNS: usize = 8;
/// Maximum bytes of weights that a trial reads. If a trial would read more, it has fewer GEMMs.
const READ_MAX: usize = 2 << 30;

/// Number of cuBLASLt's proposals that are tried first. If they are all much slower than this
/// project's kernels, the remaining proposals are skipped: at the first use of one of the
/// library's kernels, the driver takes 3 ms to load it, often most of a trial's time.
/// `benches/h200.md` lists the skipped proposals.
const GUESSES: usize = 2;
/// The remaining proposals are tried if the fastest of the first proposals takes at most this many
/// times as long as the fastest of this project's kernels.
const FAR_BEHIND: f32 = 1.15;

/// Maximum number of algorithms in the final round.
const FINALISTS: usize = 4;
/// Trials of each finalist. The shortest time counts.
const TRIALS: usize = 3;

/// Milliseconds that `gemm_small_m.cu` may be slower than cuBLASLt and still be chosen.
/// `gemm_small_m.cu` reads weights while the preceding kernel runs, and lets the next kernel start
/// early. This overlap saves more time after a kernel whose thread blocks end at different times,
/// such as attention, than after the uniform kernel of a trial. The difference is about this much
/// per GEMM in a decode step of 64 rows with the shapes of a 7B model (`tools/gpu/products.py`).
const HEAD_START: f32 = 1.5e-3;

/// Measures each recorded GEMM that has not been measured yet.
pub(in super::super) fn measure(cuda: &Cuda, call: calls::Measure<'_>) -> Result<(), KernelError> {
    // With this backend, nothing reads the measurements. In addition, ranks that share a GPU must
    // not load the library's kernels.
    if cuda.gemm.backend == GemmBackend::Ours {
        return Ok(());
    }
    cuda.enter()?;
    let RecordedGemms { by_shape } = mem::take(&mut *cuda.gemm.recorded.borrow_mut());
    // A gated GEMM is compared with the ungated GEMM followed by the gate, so ungated
    // GEMMs are measured first.
    for gates in [false, true] {
        for (alike, recorded) in by_shape.iter().filter(|(alike, _)| alike.gates == gates) {
            let measured = if recorded.has_few_rows { &MEASURED_ROWS[..] } else { &SELDOM_FEW };
            for &rows in measured {
                // With 4-bit integers, more rows are computed in several launches.
                let rows = if alike.is_int4() { rows.min(alike.small_m_rows_max()) } else { rows };
                let problem = GemmProblem { rows, ..*alike };
                if cuda.kernels.tuned.measured().contains_key(&problem) {
                    continue;
                }
                // A GEMM that does not fit in this memory does not fit in a pass either.
                let Some(trial) = Trial::within(cuda, problem, &recorded.weights, &call.memory) else { break };
                if let Some(fastest) = trial.fastest()? {
                    let agreed = cuda.kernels.tuned.found(problem, fastest);
                    if agreed != fastest {
                        trial.run_once(agreed)?;
                    }
                }
            }
            cuda.gemm.library.borrow_mut().forget_small_m(*alike);
        }
    }
    Ok(())
}

/// Returns the shortest time, or infinity if nothing was timed.
fn shortest(timed: &[(f32, GemmAlgorithm)]) -> f32 {
    timed.iter().map(|(milliseconds, _)| *milliseconds).fold(f32::INFINITY, f32::min)
}

/// Returns `true` if the library's remaining proposals may beat this project's kernels. `guessed`
/// is the shortest time of the library's first proposals. `ours` is the shortest time of this
/// project's kernels. The result is also `true` if no kernel of this project supports the GEMM, or
/// if the first proposals all fail to run.
fn may_win(guessed: f32, ours: f32) -> bool {
    guessed.is_infinite() || guessed <= FAR_BEHIND * ours
}

/// One GEMM of one size, and the memory in which it is timed.
struct Trial<'t> {
    cuda: &'t Cuda,
    problem: GemmProblem,
    weights: &'t [LayerWeight],
    /// Address and bytes of the memory for the trial. All of it may be overwritten.
    memory: (Address, usize),
    scratch: u64,
    x: u64,
    x_scales: u64,
    out: u64,
    /// Address of the ungated GEMM's output, which the gate reads.
    gate_up: u64,
}

impl<'t> Trial<'t> {
    /// Creates a trial in `memory`. Returns `None` if `memory` is too small.
    fn within(
        cuda: &'t Cuda,
        problem: GemmProblem,
        weights: &'t [LayerWeight],
        memory: &Tensor<'_>,
    ) -> Option<Trial<'t>> {
        let start = memory.address().0;
        let mut end = start;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(256) as u64;
            at
        };
        let activation = cuda.kernels.target.activation;
        let scratch = take(CUDA_LINEAR_SCRATCH.as_usize());
        let x = take(activation.bytes(problem.rows * problem.x_pitch).as_usize());
        let x_scales = take(DType::F32.bytes(problem.rows * problem.in_features.div_ceil(SCALE_BLOCK)).as_usize());
        let out_type = if problem.out_is_f32 { DType::F32 } else { activation };
        let out = take(out_type.bytes(problem.rows * problem.out_pitch).as_usize());
        let between = if problem.gates { problem.rows * problem.out_features } else { 0 };
        let gate_up = take(activation.bytes(between).as_usize());
        let fits = end - start <= memory.bytes().0;
        let memory = (memory.address(), memory.bytes().as_usize());
        fits.then_some(Trial { cuda, problem, weights, memory, scratch, x, x_scales, out, gate_up })
    }

    /// Finds the fastest algorithm. Returns `None` if no algorithm runs.
    fn fastest(&self) -> Result<Option<GemmAlgorithm>, KernelError> {
        let blas = &self.cuda.kernels.blas;
        let activation = self.cuda.kernels.target.activation;
        let mut described = None;
        let mut others = Vec::new();
        if self.problem.gates && self.problem.quantizes_x() {
            // There is no kernel for gated GEMMs of few rows with quantized x.
            return Ok(Some(GemmAlgorithm::Unfused));
        }
        if !library_supports(&self.cuda.gemm.gpu, activation, self.problem, self.operands(0)) {
            // Only this project's kernels can compute the GEMM.
        } else if self.problem.gates {
            others.push(GemmAlgorithm::Unfused);
        } else {
            let problem = described.insert(Described::of(blas, activation, self.problem)?);
            match problem.proposals(blas, scale_scratch::for_library(self.problem, self.operands(0))) {
                Ok(algorithms) => others.extend(algorithms.into_iter().map(GemmAlgorithm::Library)),
                Err(error) if error.is_lost() => return Err(error.into()),
                // The library has no algorithm for this size. The size may never be needed.
                Err(_) => {}
            }
        }
        let mut timed = self.try_each(described.as_ref(), &self.ours())?;
        let ours = shortest(&timed);
        let (guesses, rest) = others.split_at(GUESSES.min(others.len()));
        let guessed = self.try_each(described.as_ref(), guesses)?;
        if may_win(shortest(&guessed), ours) {
            timed.extend(self.try_each(described.as_ref(), rest)?);
        }
        timed.extend(guessed);
        if let [(_, only)] = timed[..] {
            return Ok(Some(only));
        }
        timed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        timed.truncate(FINALISTS);
        timed.iter_mut().for_each(|(shortest, _)| *shortest = f32::INFINITY);
        for _ in 0..TRIALS {
            for (shortest, algorithm) in &mut timed {
                *shortest = shortest.min(self.time(described.as_ref(), *algorithm, TURNS)?);
            }
        }
        Ok(timed.into_iter().min_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, algorithm)| algorithm))
    }

    /// Runs the algorithm chosen by another rank one time, untimed, so that its kernels are loaded.
    fn run_once(&self, algorithm: GemmAlgorithm) -> Result<(), KernelError> {
        let kernels = &self.cuda.kernels;
        let described = match algorithm {
            GemmAlgorithm::Library(_) => Some(Described::of(&kernels.blas, kernels.target.activation, self.problem)?),
            GemmAlgorithm::Unfused => None,
            ours if self.ours().contains(&ours) => None,
            _ => return Err(KernelError::NoKernel { op: "linear" }),
        };
        self.run(described.as_ref(), algorithm, 0)?;
        Ok(self.cuda.stream.wait()?)
    }

    /// Returns this project's kernels that support the GEMM.
    fn ours(&self) -> Vec<GemmAlgorithm> {
        let mut ours = Vec::new();
        if self.cuda.gemm.backend == GemmBackend::Library {
            return ours;
        }
        let supports = |kernel| self.cuda.gemm.gpu.supports(kernel, self.problem, self.operands(0));
        if supports(Kernel::SmallM) {
            ours.extend(Cut::ALL.map(GemmAlgorithm::SmallM));
        }
        if supports(Kernel::Int4) {
            ours.push(GemmAlgorithm::Int4);
        }
        if supports(Kernel::MediumM) {
            ours.push(GemmAlgorithm::MediumM);
        }
        if !self.problem.gates && self.problem.quantizes_x() && supports(Kernel::LargeM) {
            ours.push(GemmAlgorithm::LargeM);
        }
        ours
    }

    /// Tries each algorithm in `algorithms`. Returns the algorithms that run, with their
    /// milliseconds.
    fn try_each(
        &self,
        described: Option<&Described>,
        algorithms: &[GemmAlgorithm],
    ) -> Result<Vec<(f32, GemmAlgorithm)>, KernelError> {
        let mut timed = Vec::new();
        for algorithm in algorithms {
            // Warm-up: the first run loads the algorithm's kernels and is not timed. An algorithm
            // that fails to run is left out.
            match self.run(described, *algorithm, 0).and_then(|()| Ok(self.cuda.stream.wait()?)) {
                Ok(()) => timed.push((self.time(described, *algorithm, FIRST_TURNS)?, *algorithm)),
                Err(KernelError::Device(error)) if !error.is_lost() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(timed)
    }

    /// Returns the mean milliseconds of the GEMM and the small kernel before it, over at most
    /// `turns` runs, with weights that are not in the L2 cache. For the small-m kernel,
    /// `HEAD_START` is subtracted, except with 4-bit integers.
    fn time(&self, described: Option<&Described>, algorithm: GemmAlgorithm, turns: usize) -> Result<f32, KernelError> {
        let elements = self.problem.out_features * self.problem.in_features;
        let weight_bytes = self.problem.weight_type(self.cuda.kernels.target.activation).bytes(elements).as_usize();
        let mut turns = turns.min(READ_MAX / weight_bytes).max(1);
        if self.weights.len() * weight_bytes < COLD_BYTES {
            turns = turns.min(self.weights.len());
            let (address, bytes) = (self.memory.0.0, self.memory.1.min(WRITTEN_MAX));
            // SAFETY: this call has exclusive use of the memory, and the stream is alive.
            let written = unsafe { sys::cuMemsetD8Async(address, 0, bytes, self.cuda.stream.raw()) };
            CudaDevice::check("cuMemsetD8Async", written)?;
        }
        let milliseconds = self.cuda.gemm.clock.time(&self.cuda.stream, || {
            (0..turns).try_for_each(|turn| {
                self.run_preceding_kernel()?;
                self.run(described, algorithm, turn % self.weights.len())
            })
        })?;
        // Both kernels for 4-bit integers start early, so neither has an advantage.
        let is_early = matches!(algorithm, GemmAlgorithm::SmallM(_)) && !self.problem.is_int4();
        let head_start = if is_early { HEAD_START } else { 0.0 };
        Ok(milliseconds / turns as f32 - head_start)
    }

    /// Runs a small kernel that writes the GEMM's input.
    fn run_preceding_kernel(&self) -> Result<(), KernelError> {
        let (cuda, shape) = (self.cuda, [self.problem.rows, self.problem.in_features]);
        let x = Tensor::over(Address(self.x), shape.into(), cuda.kernels.target.activation);
        elementwise::gelu(cuda, calls::ApplyGelu { x, kind: calls::Gelu::Erf })
    }

    /// Launches the GEMM with weight number `turn`.
    fn run(&self, described: Option<&Described>, algorithm: GemmAlgorithm, turn: usize) -> Result<(), KernelError> {
        let (cuda, operands) = (self.cuda, self.operands(turn));
        let plan = match (algorithm, described) {
            (GemmAlgorithm::Library(algorithm), Some(described)) => {
                // SAFETY: the trial's memory has space for the operands, and the weights keep their
                // addresses until autotuning ends.
                unsafe {
                    let operands = transposed_scales::transpose(cuda, self.problem, operands)?;
                    described.multiply(&cuda.kernels.blas, &cuda.stream, operands, &algorithm)?;
                }
                return Ok(());
            }
            (GemmAlgorithm::SmallM(cut), _) => GemmPlan::SmallM(cut),
            (GemmAlgorithm::MediumM, _) => GemmPlan::MediumM,
            (GemmAlgorithm::LargeM, _) => GemmPlan::LargeM,
            (GemmAlgorithm::Int4, _) => GemmPlan::Int4,
            (GemmAlgorithm::Unfused | GemmAlgorithm::Library(_), _) => return self.run_unfused(operands),
        };
        // SAFETY: the trial's memory has space for the operands, the weights keep their addresses
        // until autotuning ends, and the table says that the kernel supports the GEMM.
        unsafe { launch::launch(cuda, plan, self.problem, operands, Output::PLAIN) }
    }

    /// Runs the ungated GEMM and then the gate, as a pass does without a fused kernel.
    fn run_unfused(&self, operands: GemmOperands) -> Result<(), KernelError> {
        let GemmProblem { rows, out_features, in_features, out_pitch, x_pitch, .. } = self.problem;
        let activation = self.cuda.kernels.target.activation;
        let tensor = |address: u64, shape: [usize; 2], dtype| Tensor::over(Address(address), shape.into(), dtype);
        let (x, out) =
            (tensor(operands.x, [rows, x_pitch], activation), tensor(operands.out, [rows, out_pitch], activation));
        let scratch = tensor(self.scratch, [1, operands.workspace_bytes / DType::F32.size()], DType::F32);
        let gate_up = tensor(self.gate_up, [rows, out_features], activation);
        let bias = operands.bias.map(|bias| Tensor::over(Address(bias), Shape::new(&[out_features]), activation));
        linear(
            self.cuda,
            calls::Linear {
                x: Activations::of_plain(x.column_range(0..in_features)),
                weight: Weight::plain(tensor(operands.weight, [out_features, in_features], activation)),
                bias,
                accumulate: false,
                scratch,
                out: gate_up.view(),
            },
        )?;
        elementwise::gate_mul(
            self.cuda,
            calls::GateMul::of(
                &gate_up,
                GateActivation::Silu,
                Activations::of_plain(out.column_range(0..out_features / 2)),
            ),
        )
    }

    fn operands(&self, turn: usize) -> GemmOperands {
        let LayerWeight { weight, bias, scales, zero_points, x_scale } = self.weights[turn];
        GemmOperands {
            weight,
            x: self.x,
            bias,
            weight_scales: scales,
            weight_zero_points: zero_points,
            x_scales: if self.problem.x_scales() == 0 { 0 } else { self.x_scales },
            x_scale,
            out: self.out,
            out_is_quantized: false,
            activation: GateActivation::Silu,
            workspace: self.scratch,
            workspace_bytes: CUDA_LINEAR_SCRATCH.as_usize(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_tried_unless_the_first_are_far_behind_ours() {
        assert!(may_win(1.1, 1.0) && may_win(0.5, 1.0));
        assert!(!may_win(1.2, 1.0));
        assert!(!may_win(1e-3, -2e-4), "our time may be negative after its head start is subtracted");
        assert!(may_win(1.0, f32::INFINITY), "our kernel does not support the GEMM");
        assert!(may_win(f32::INFINITY, 1.0), "the library's first algorithms do not run");
    }
}
