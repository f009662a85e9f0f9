//! FP8 weights and activations: operations that quantize while they write give the same result as
//! separate quantization, rows do not affect each other, and operands that do not fit are refused.

use bursar_kernels::{
    ops::{gate_mul::GateActivation, rms_norm::RmsNorm, route::RoutingRule},
    *,
};

use crate::ground::{NORMED_SUMS, Random, compute, normed_sum, plan};

const WAYS: [Quantization; 3] = [Quantization::Groups, Quantization::Rows, Quantization::Fixed(0.002)];

/// The codes and scales of quantized activations.
fn bits<B: Backend>(scope: &Scope<'_, B>, x: &Activations<'_>) -> Result<Bits, KernelError> {
    let quantized = x.quantized.as_ref().expect("the quantized output was requested");
    let scales: Vec<f32> = scope.download(&quantized.scales)?;
    Ok((scope.download(&quantized.data)?, scales.into_iter().map(f32::to_bits).collect()))
}

/// Quantized numbers, and the bits of their scales.
type Bits = (Vec<E4m3>, Vec<u32>);

/// Checks that an operation quantizes the same rows that it would write unquantized, whether or not
/// it also writes them unquantized.
fn assert_rounds(made: impl Fn(&Scope<'_, Cpu>, ActivationFormat) -> Result<(Vec<f32>, Bits), KernelError>) {
    for way in WAYS {
        let alone = compute(2, |scope| made(scope, ActivationFormat::of(Some(way))));
        let (_, beside) = compute(2, |scope| made(scope, ActivationFormat::of(Some(way)).and_plain()));
        let (plain, _) = compute(2, |scope| made(scope, ActivationFormat::PLAIN));
        let columns = plain.len() / 5;
        let expected = compute(1, |scope| {
            let x = scope.upload([5, columns], &plain)?;
            bits(scope, &scope.quantize(&x, way)?)
        });
        assert!(alone.1 == expected && beside == expected, "{way:?}");
    }
}

/// The contents of both formats, or nothing for a format that is missing.
fn formats(scope: &Scope<'_, Cpu>, x: &Activations<'_>) -> Result<(Vec<f32>, Bits), KernelError> {
    let plain = x.plain.as_ref().map_or(Ok(Vec::new()), |plain| scope.download(plain))?;
    let quantized = if x.quantized.is_some() { bits(scope, x)? } else { Default::default() };
    Ok((plain, quantized))
}

#[test]
fn a_quantizing_norm_rounds_the_plain_result() {
    let (x, weight) = (Random::new(1).floats(5 * 333), Random::new(2).floats(333));
    assert_rounds(|scope, format| {
        let (x, weight) = (scope.upload([5, 333], &x)?, scope.upload([333], &weight)?);
        formats(scope, &scope.rms_norm_as(&x, RmsNorm::new(&weight, 1e-6), format)?)
    });
}

#[test]
fn the_fused_norm_of_a_mixtures_sum_matches_two_operations() {
    for case in NORMED_SUMS {
        let [one, two] = [true, false].map(|by_one| compute(2, |scope| normed_sum(scope, case, by_one)));
        assert!(one == two, "{case:?}");
    }
}

#[test]
fn a_quantizing_gate_rounds_the_plain_result() {
    let (x, weight) = (Random::new(3).floats(5 * 260), Random::new(4).floats(260 * 40));
    for activation in [GateActivation::Silu, GateActivation::GeluTanh] {
        assert_rounds(|scope, format| {
            formats(scope, &scope.gate_mul_as(&scope.upload([5, 260], &x)?, activation, format)?)
        });
        assert_rounds(|scope, format| {
            let (x, weight) = (scope.upload([5, 40], &x[..200])?, scope.upload([260, 40], &weight)?);
            formats(scope, &scope.gated_linear_as(&x, &weight, None, activation, format)?)
        });
    }
}

#[test]
fn quantizing_experts_round_the_plain_result() {
    let (x, weight) = (Random::new(5).floats(5 * 40), Random::new(6).floats(3 * 2 * 150 * 40));
    for activation in [GateActivation::Silu, GateActivation::GeluTanh] {
        assert_rounds(|scope, format| {
            let logits = scope.upload([5, 3], &Random::new(7).floats(15))?;
            let routing = scope.route(&logits, RoutingRule::renormalized(1), &scope.upload([3], &[0u32; 3])?)?;
            let (x, weight) = (scope.upload([5, 40], &x)?, scope.upload([3 * 2 * 150, 40], &weight)?);
            formats(scope, &scope.gated_experts_as(&x, &weight, &routing, activation, format)?)
        });
    }
}

/// A weight with scales by block, all of whose numbers are 1.
fn ones<'s, B: Backend>(scope: &'s Scope<'_, B>, rows: usize, columns: usize) -> Result<Weight<'s>, KernelError> {
    let (down, across) = (rows.div_ceil(128), columns.div_ceil(128));
    let data = scope.upload([rows, columns], &vec![E4m3::from_f32(1.0); rows * columns])?;
    let scales = WeightScales::blocks(scope.upload([down, across], &vec![1.0f32; down * across])?, 128);
    Ok(Weight { scales: Some(scales), ..Weight::plain(data) })
}

#[test]
fn zeros_and_nan_affect_only_their_own_rows() {
    let mut x = Random::new(8).floats(9 * 300);
    x[300..600].fill(0.0);
    x[4 * 300 + 131] = f32::NAN;
    x[6 * 300 + 1] = f32::INFINITY;
    let found: Vec<f32> = compute(2, |scope| {
        scope.download(&scope.linear(&scope.upload([9, 300], &x)?, &ones(scope, 70, 300)?, None)?)
    });
    for (row, products) in found.chunks(70).enumerate() {
        let is_spoilt = row == 4 || row == 6;
        assert!(products.iter().all(|product| product.is_nan() == is_spoilt), "row {row}: {products:?}");
        assert!(row != 1 || products.iter().all(|product| *product == 0.0), "zeros stay zeros");
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let x = Random::new(9).floats(70 * 300);
    let products = |rows: usize| -> Vec<f32> {
        compute(2, |scope| {
            scope.download(&scope.linear(
                &scope.upload([rows, 300], &x[..rows * 300])?,
                &ones(scope, 70, 300)?,
                None,
            )?)
        })
    };
    let alone = products(1);
    for rows in [2, 5, 70] {
        assert_eq!(products(rows)[..70], alone);
    }
}

#[test]
fn unsuitable_scales_and_formats_are_refused_with_an_explanation() {
    let text = |refused: fn(&Scope<'_, Plan>) -> Result<(), KernelError>| {
        plan(1, |scope| refused(scope).expect_err("the shape is refused").to_string()).0
    };
    let found = [
        text(|scope| {
            let Weight { data, .. } = ones(scope, 130, 130)?;
            let scales = Some(WeightScales::blocks(scope.empty_f32([1, 2])?, 128));
            scope.linear(&scope.empty([2, 130])?, &Weight { scales, ..Weight::plain(data) }, None).map(drop)
        }),
        text(|scope| {
            let Weight { data, .. } = ones(scope, 130, 130)?;
            let scales = Some(WeightScales::blocks(scope.empty_f32([2, 2])?, 100));
            scope.linear(&scope.empty([2, 130])?, &Weight { scales, ..Weight::plain(data) }, None).map(drop)
        }),
        text(|scope| {
            let Weight { data, .. } = ones(scope, 130, 130)?;
            let scales = Some(WeightScales::rows(scope.empty_f32([129])?, None));
            scope.linear(&scope.empty([2, 130])?, &Weight { scales, ..Weight::plain(data) }, None).map(drop)
        }),
        text(|scope| {
            let Weight { data, .. } = ones(scope, 130, 130)?;
            let scales = WeightScales { activations: None, ..WeightScales::rows(scope.empty_f32([130])?, None) };
            scope
                .linear(&scope.empty([2, 130])?, &Weight { scales: Some(scales), ..Weight::plain(data) }, None)
                .map(drop)
        }),
        text(|scope| {
            let scales = Some(WeightScales::rows(scope.empty_f32([7])?, None));
            let data = scope.empty([7, 130])?;
            scope.linear(&scope.empty([2, 130])?, &Weight { scales, ..Weight::plain(data) }, None).map(drop)
        }),
        text(|scope| {
            let Weight { data, .. } = ones(scope, 7, 130)?;
            scope.linear(&scope.empty([2, 130])?, &data, None).map(drop)
        }),
    ];
    assert_eq!(
        found.join("\n"),
        "linear: scales is [1, 2]; expected [2, 2]\n\
         linear: scales is [2, 2]; expected blocks of a height that divides 128\n\
         linear: scales is [129]; expected [130]\n\
         linear: scales is [130]; expected activation groups for block scales, rows for row scales\n\
         linear: weight holds f32; expected quantized elements for its scales\n\
         linear: weight holds f8e4m3; expected floating-point numbers"
    );
}

#[test]
fn a_pass_counts_exact_bytes_of_rounded_activations_and_scales() {
    let ((), taken, work) = plan(1, |scope| {
        let (x, weight) = (scope.empty([3, 300]).unwrap(), scope.empty([300]).unwrap());
        scope.rms_norm_as(&x, RmsNorm::new(&weight, 1e-6), ActivationFormat::of(Some(Quantization::Groups))).unwrap();
    });
    assert_eq!(work.bytes.0, 4 * 3 * 300 + 4 * 300 + 3 * 300 + 4 * 3 * 3);
    assert_eq!(taken.0, 3840 + 1280 + 1024 + 256, "each buffer takes whole multiples of 256 bytes");
}
