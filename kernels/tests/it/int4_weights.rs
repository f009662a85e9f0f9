//! 4-bit integer weights with a scale per group of columns, on a CPU.

use bursar_budgets::{Bytes, Workspace};
use bursar_kernels::*;

use crate::ground::{Int4, Way, assert_close, compute, plan};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Bound on the rounding error of an f32 sum of `columns` products of numbers up to 1.
fn tolerance(columns: usize) -> f64 {
    (columns + 2) as f64 * f64::from(f32::EPSILON)
}

#[test]
fn a_product_with_4_bit_integers_is_that_of_their_elements() {
    let cases = Int4::cases();
    assert!(cases.len() > 50);
    for (case, kept) in cases.into_iter().zip(TYPES.into_iter().cycle()) {
        let found = compute(2, |scope| case.run(scope, kept));
        assert_close(
            &format!("{case:?}, {kept}"),
            &found,
            &case.expected(kept, DType::F32),
            tolerance(case.in_features),
        );
    }
}

#[test]
fn a_plan_takes_the_workspace_and_the_work_of_a_run() {
    let case = Int4 { rows: 3, out_features: 144, in_features: 256, group: 64, has_zero_points: true, way: Way::Plain };
    for threads in [1, 2] {
        let (planned, peak, work) = plan(threads, |scope| case.run(scope, DType::BF16).map(drop));
        planned.expect("the case is valid");
        let (cpu, counter) = (Cpu::new(threads), WorkCounter::default());
        let workspace = crate::ground::poisoned(Bytes::mib(4));
        case.run(&Scope::new(&cpu, &workspace, &counter), DType::BF16).expect("it runs");
        assert_eq!((workspace.high_water(), counter.total()), (peak, work));
    }
}

#[test]
fn a_weight_has_the_bytes_of_integers_scales_and_zero_points() {
    let tensor = |shape: [usize; 2], dtype| {
        // SAFETY: nothing accesses the memory.
        unsafe { Tensor::persistent(bursar_budgets::Address(1 << 40), shape, dtype) }
    };
    let (scales, zero_points) = (tensor([144, 4], DType::BF16), tensor([144, 4], DType::U8));
    let scales = WeightScales::int4(scales, Some(zero_points), 64);
    let weight = Weight { scales: Some(scales), ..Weight::plain(tensor([144, 256], DType::U4)) };
    assert_eq!(weight.bytes().0, 144 * 256 / 2 + 144 * 4 * (2 + 1));
    assert_eq!(weight.scheme(), Some(QuantizationScheme::int4(64, true)));
    assert_eq!(weight.wants(), None, "activations are not quantized");
}

#[test]
fn a_gpu_plans_space_for_dequantized_rows() {
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    let scratch = |shape: [usize; 2], out: DType| {
        gpu.linear_scratch(shape, DType::U4, out) - gpu.linear_scratch(shape, DType::BF16, out)
    };
    assert_eq!(scratch([4608, 3584], DType::BF16).0, 4608 * 3584 * 2, "all rows fit");
    assert_eq!(scratch([3584, 18_944], DType::BF16).0, 1792 * 18_944 * 2, "half of the rows fit");
    assert_eq!(scratch([4608, 3584], DType::F32), Bytes(0), "an f32 output needs no dequantized rows");
    let has = |scheme, shape| gpu.has_quantized(scheme, shape);
    assert!(has(QuantizationScheme::int4(32, true), [80, 96]) && !has(QuantizationScheme::int4(64, true), [80, 96]));
    assert!(!has(QuantizationScheme::int4(32, true), [81, 96]), "a block has 8 rows");
    let older = Target::Cuda(CudaTarget { capability: (7, 5), sms: 40, activation: DType::F16 });
    assert!(!older.has_quantized(QuantizationScheme::int4(128, false), [128, 128]));
    assert!(!gpu.has_quantized_experts(QuantizationScheme::int4(128, false), [128, 128]));
}

#[test]
fn invalid_4_bit_weights_are_refused() {
    let refused = |rows: usize, columns: usize, group: usize, groups: usize, kept: DType| {
        let (plan, workspace, counter) =
            (Plan::new(Target::Cpu { threads: 1 }), Workspace::dry(), WorkCounter::default());
        let scope = Scope::new(&plan, &workspace, &counter);
        let x = scope.empty([2, columns])?;
        let factors = match kept {
            DType::U32 => scope.empty_u32([rows, groups])?,
            _ => scope.empty_f32([rows, groups])?,
        };
        // SAFETY: a plan does not access memory.
        let data = unsafe { Tensor::persistent(bursar_budgets::Address(1 << 40), [rows, columns], DType::U4) };
        let weight = Weight { scales: Some(WeightScales::int4(factors, None, group)), ..Weight::plain(data) };
        scope.linear(&x, weight, None).map(drop)
    };
    refused(32, 256, 128, 2, DType::F32).expect("a valid weight");
    for (rows, columns, group, groups, kept, expected) in [
        (32, 200, 128, 2, DType::F32, "whole groups"),
        (32, 256, 16, 16, DType::F32, "whole groups"),
        (36, 256, 128, 2, DType::F32, "whole blocks of 8 rows"),
        (32, 256, 128, 3, DType::F32, "[32, 2]"),
        (32, 256, 128, 2, DType::U32, "floating-point numbers"),
    ] {
        let error = refused(rows, columns, group, groups, kept).expect_err("the weight is refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}
