//! GEMMs with and without a gate. cuBLASLt computes them, except where this project's kernels were
//! measured to be faster, or cuBLASLt does not support the GEMM.

use super::{
    super::{elementwise, lane::Cuda, quantize},
    compare::compare_large_m,
    int4_dequantized,
    large_m::Output,
    launch::launch,
    operands::Operands,
    plan::GemmPlan,
    planning,
    problem::{GemmOperands, GemmProblem},
};
use crate::{
    KernelError, Quantization, QuantizedRows, Tensor,
    calls::{self, GateActivation},
};

pub(in super::super) fn linear(cuda: &Cuda, call: calls::Linear<'_>) -> Result<(), KernelError> {
    let no_kernel = || KernelError::NoKernel { op: "linear" };
    let operands = Operands::of(&call.x, &call.weight).ok_or_else(no_kernel)?;
    let problem = GemmProblem { accumulates: call.accumulate, ..operands.problem(call.bias.as_ref(), &call.out) };
    let operands = operands.addresses(call.bias.as_ref(), &call.scratch, &call.out);
    compute(cuda, problem, operands, Output::PLAIN, &|| Err(no_kernel()))
}

pub(in super::super) fn gated_linear(cuda: &Cuda, call: calls::GatedLinear<'_>) -> Result<(), KernelError> {
    let operands = Operands::of(&call.x, &call.weight).ok_or(KernelError::NoKernel { op: "gated_linear" })?;
    let unfused = || {
        let ungated = calls::Linear {
            x: call.x.view(),
            weight: call.weight.view(),
            bias: call.bias.as_ref().map(Tensor::view),
            accumulate: false,
            scratch: call.scratch.view(),
            out: call.gate_up.view(),
        };
        linear(cuda, ungated)?;
        elementwise::gate_mul(cuda, calls::GateMul::of(&call.gate_up, call.activation, call.out.view()))
    };
    // The fused kernels for quantized weights support only SiLU.
    if call.activation != GateActivation::Silu && operands.scheme.is_some() {
        return unfused();
    }
    let features = call.weight.rows() / 2;
    let compute = |out: &Tensor<'_>, output: Output<'_>| {
        let problem = GemmProblem { gates: true, ..operands.problem(call.bias.as_ref(), out) };
        let addresses = operands.addresses(call.bias.as_ref(), &call.scratch, out);
        compute(cuda, problem, GemmOperands { activation: call.activation, ..addresses }, output, &unfused)
    };
    match (&call.out.plain, &call.out.quantized) {
        (Some(plain), None) => compute(plain, Output::PLAIN),
        (None, Some(quantized)) if operands.scheme.is_some() => match quantized.quantization {
            Quantization::Groups => compute(&quantized.data, Output::groups(quantized.scales.address())),
            Quantization::Fixed(scale) => compute(&quantized.data, Output::fixed(scale)),
            // The scale of a row is known only when all tiles of the row are
            // computed. The unquantized output is therefore written to the memory of the
            // gate's input, and quantized afterward.
            Quantization::Rows => {
                let rows = call.gate_up.rows();
                let plain = Tensor::over(call.gate_up.address(), [rows, features].into(), call.gate_up.dtype());
                let round = || {
                    let out = QuantizedRows {
                        data: quantized.data.view(),
                        scales: quantized.scales.view(),
                        quantization: quantized.quantization,
                    };
                    quantize::quantize(cuda, calls::Quantize { x: plain.view(), out })
                };
                compute(&plain, Output::followed_by(&round))
            }
        },
        _ => unfused(),
    }
}

/// Plans the GEMM and launches it. `unfused` computes a gated GEMM as an ungated GEMM followed by
/// the gate.
fn compute(
    cuda: &Cuda,
    problem: GemmProblem,
    operands: GemmOperands,
    output: Output<'_>,
    unfused: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    cuda.enter()?;
    if problem.rows == 0 || problem.out_features == 0 {
        return Ok(());
    }
    if cuda.gemm.autotunes.get() {
        cuda.gemm.recorded.borrow_mut().record(problem, operands);
        compare_large_m(cuda, problem, operands, output, unfused)?;
    }
    match planning::plan(cuda, problem, operands)? {
        // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that
        // their memory is valid, and nothing else uses the workspace until this GEMM has ended.
        Some(GemmPlan::DequantizedInt4) => unsafe { int4_dequantized::compute(cuda, problem, operands, unfused) },
        // SAFETY: the op layer has checked the shapes, the creators of the tensors guarantee that
        // their memory is valid, nothing else uses the workspace until this GEMM has ended,
        // kernels that write weights have finished before a pass starts, and the planned kernel
        // supports the GEMM.
        Some(plan) => unsafe { launch(cuda, plan, problem, operands, output) },
        None => unfused(),
    }
}
