//! Comparison of the large-m kernels with other implementations during autotuning.
//!
//! Each kernel is timed once on the operands of the pass: against cuBLASLt or, for a gated GEMM,
//! against an ungated GEMM followed by the gate. For a gated GEMM, the faster implementation is
//! used for this size and, like a measured algorithm of cuBLASLt, for smaller sizes. For an ungated
//! GEMM, this project's kernel is at best a little faster, and much slower if its tall tiles leave
//! SMs idle, so the comparison applies only to slightly smaller sizes.

use super::{
    super::lane::Cuda,
    algorithm::GemmAlgorithm,
    large_m::{self, Output},
    launch::launch,
    plan::GemmPlan,
    planning,
    problem::{GemmOperands, GemmProblem},
};
use crate::KernelError;

/// Runs of a GEMM that one timing covers.
const RUNS: usize = 4;
/// Timings per implementation. The shortest timing counts.
const TRIALS: usize = 2;

/// The time of this project's kernel must be less than this fraction of the library's time, because
/// two measurements of the same kernel differ by a few percent.
const CLEARLY: f32 = 0.97;

/// Times the large-m kernel against another implementation: cuBLASLt, or `unfused` for a gated
/// GEMM. `unfused` computes the gated GEMM as an ungated GEMM followed by the gate. Returns without
/// timing if this GEMM was compared before, or if autotuning cannot compare it
/// ([`can_compare_large_m`](planning::can_compare_large_m)). The output is meaningless after the
/// timing.
///
/// # Errors
/// Any error that the device reports for a measurement.
pub(super) fn compare_large_m(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    output: Output<'_>,
    unfused: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let tuned = &cuda.kernels.tuned;
    let is_measured = || tuned.measured().contains_key(&problem);
    if is_measured() || !planning::can_compare_large_m(cuda, problem, operands)? {
        return Ok(());
    }
    // A GEMM that would leave rows for the small-m kernel is not compared.
    let library = GemmPlan::Library { rest: 0 };
    // SAFETY: the op layer has checked the call, and the table says that the library and the
    // large-m kernel support the GEMM.
    let other = || if problem.gates { unfused() } else { unsafe { launch(cuda, library, problem, operands, output) } };
    // SAFETY: the op layer has checked the call, and the table says that the kernel supports the
    // GEMM.
    let ours = || unsafe { large_m::launch(cuda, problem, operands, output) };
    // Warm-up: the first runs load the kernels and are not timed.
    other()?;
    ours()?;
    let time = |run: &dyn Fn() -> Result<(), KernelError>| {
        cuda.gemm.clock.time(&cuda.stream, || (0..RUNS).try_for_each(|_| run()))
    };
    let mut shortest = [f32::INFINITY; 2];
    for _ in 0..TRIALS {
        shortest = [shortest[0].min(time(&other)?), shortest[1].min(time(&ours)?)];
    }
    if problem.gates {
        let is_faster = shortest[1] < shortest[0];
        tuned.found(problem, if is_faster { GemmAlgorithm::LargeM } else { GemmAlgorithm::Unfused });
    } else {
        // The algorithm of cuBLASLt for this size is measured by now, and is also used for smaller
        // sizes.
        tuned.compared_large_m(problem, shortest[1] < CLEARLY * shortest[0]);
    }
    Ok(())
}
