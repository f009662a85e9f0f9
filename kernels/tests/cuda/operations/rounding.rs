//! Kernels that share their arithmetic give the same bits: kernels for many rows and kernels for
//! few rows, and a fused operation and the two operations that it combines.

use bursar_budgets::Bytes;
use bursar_kernels::{
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm},
    *,
};

use super::{
    gpu,
    ground::{NORMED_SUMS, Random, narrowed, normed_sum},
    target_of,
};

#[test]
fn the_fused_norm_of_a_mixtures_sum_matches_two_operations() {
    let Some((_turn, gpu)) = gpu() else { return };
    for kernels in &gpu.kernels {
        let target = kernels.target();
        for case in NORMED_SUMS
            .into_iter()
            .filter(|case| case.2.quantization.is_none() || target.has_quantized(QuantizationScheme::ROW, [8, 128]))
        {
            let of = |by_one| {
                gpu.compute(kernels, Bytes::mib(64), GemmBackend::Ours, |scope| normed_sum(scope, case, by_one))
            };
            assert!(of(true) == of(false), "{case:?} on {target:?}");
        }
    }
}

/// Quantizes the rows of `x`, after a norm or a gate if `operation` names one of these. Returns the
/// codes, and the bits of the scales.
fn quantized_rows(
    scope: &Scope<'_, Cuda>,
    (operation, quantization): (&str, Quantization),
    (x, weight): (&Tensor<'_>, &Tensor<'_>),
) -> Result<(Vec<u8>, Vec<u32>), KernelError> {
    let format = ActivationFormat::of(Some(quantization));
    let made = match operation {
        "rms_norm" => scope.rms_norm_as(x, RmsNorm { weight_offset: 0.5, ..RmsNorm::new(weight, 1e-6) }, format)?,
        "silu_mul" => scope.gate_mul_as(x, GateActivation::Silu, format)?,
        "gelu_mul" => scope.gate_mul_as(x, GateActivation::GeluTanh, format)?,
        _ => scope.quantize(x, quantization)?,
    };
    let quantized = made.quantized.as_ref().expect("the quantized output was requested");
    let codes = scope.download::<E4m3>(&quantized.data)?.into_iter().map(|code| code.0).collect();
    Ok((codes, scope.download::<f32>(&quantized.scales)?.into_iter().map(f32::to_bits).collect()))
}

#[test]
fn rounding_many_rows_gives_the_bits_of_smaller_batches() {
    let Some((_turn, gpu)) = gpu() else { return };
    for kernels in
        gpu.kernels.iter().filter(|kernels| kernels.target().has_quantized(QuantizationScheme::ROW, [8, 128]))
    {
        let CudaTarget { activation, sms, .. } = target_of(kernels);
        // Rows of which a thread keeps one or two vectors, and long rows, for which an SM runs two
        // thread blocks or one.
        let (long, most) = (4 * sms + 2, sms.min(100));
        let sizes = [(sms + 1, 16), (300, 3584), (201, 5128), (long, 8208), (long, 20_488)];
        for ((rows, columns), operation) in sizes
            .into_iter()
            .flat_map(|size| ["quantize", "rms_norm", "silu_mul", "gelu_mul"].map(|operation| (size, operation)))
        {
            if operation == "rms_norm" && rows == long {
                continue;
            }
            let width = if operation.ends_with("_mul") { 2 * columns } else { columns };
            let mut numbers = Random::new(21).floats(rows * width);
            numbers[width..2 * width].fill(0.0);
            numbers[5] = f32::NAN;
            let weight = Random::new(22).floats(columns);
            for quantization in [Quantization::Rows, Quantization::Groups, Quantization::Fixed(0.003)] {
                let case = (operation, quantization);
                gpu.compute(kernels, Bytes::mib(128), GemmBackend::Ours, |scope| {
                    let x = narrowed(scope, [rows, width], activation, &numbers)?;
                    let weight = narrowed(scope, [columns], activation, &weight)?;
                    let all = quantized_rows(scope, case, (&x, &weight))?;
                    let mut few = (Vec::new(), Vec::new());
                    for first in (0..rows).step_by(most) {
                        let some = x.row_range(first..rows.min(first + most));
                        let (codes, scales) = quantized_rows(scope, case, (&some, &weight))?;
                        few.0.extend(codes);
                        few.1.extend(scales);
                    }
                    assert!(all == few, "{case:?} of {rows} x {columns} in {activation} differs in smaller batches");
                    Ok(())
                });
            }
        }
    }
}
