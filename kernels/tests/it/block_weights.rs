//! Weights in ggml's blocks of quantized elements. candle packs the blocks, and also widens them
//! for comparison.

use bursar_budgets::Workspace;
use bursar_kernels::{
    BlockRows, BlockType, CudaTarget, DType, KernelError, Plan, Scope, Target, Weight, WorkCounter,
    ops::route::RoutingRule, widen_blocks,
};
use candle_core::{
    Device, Tensor as Candle,
    quantized::{GgmlDType, QTensor},
};

use crate::ground::{Random, compute};

const TYPES: [(BlockType, GgmlDType); 8] = [
    (BlockType::Q4_0, GgmlDType::Q4_0),
    (BlockType::Q4_1, GgmlDType::Q4_1),
    (BlockType::Q5_0, GgmlDType::Q5_0),
    (BlockType::Q5_1, GgmlDType::Q5_1),
    (BlockType::Q8_0, GgmlDType::Q8_0),
    (BlockType::Q4_K, GgmlDType::Q4K),
    (BlockType::Q5_K, GgmlDType::Q5K),
    (BlockType::Q6_K, GgmlDType::Q6K),
];

/// A matrix that candle has packed.
struct Packed {
    kind: BlockType,
    rows: usize,
    bytes: Vec<u8>,
    /// The elements of the blocks.
    wide: Vec<f32>,
}

fn packed(random: &mut Random, (kind, dtype): (BlockType, GgmlDType), rows: usize, columns: usize) -> Packed {
    let numbers = random.floats(rows * columns);
    let numbers = Candle::from_slice(&numbers, (rows, columns), &Device::Cpu).unwrap();
    let packed = QTensor::quantize(&numbers, dtype).unwrap();
    let bytes = packed.data().unwrap().into_owned();
    let mut wide = vec![f32::NAN; rows * columns];
    widen_blocks(kind, &bytes, &mut wide);
    let of_candle: Vec<f32> = packed.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    for (ours, theirs) in wide.iter().zip(&of_candle) {
        assert!((ours - theirs).abs() <= 1e-6 * theirs.abs(), "{kind}: {ours} here, but {theirs} in candle");
    }
    Packed { kind, rows, bytes, wide }
}

/// Uploads matrices as one weight, at an address without alignment.
fn weight<'s, B: bursar_kernels::Backend>(
    scope: &'s Scope<'_, B>,
    columns: usize,
    parts: &[&Packed],
) -> Result<Weight<'s>, KernelError> {
    let bytes: Vec<u8> = [&[0; 3][..], &parts.iter().flat_map(|part| part.bytes.clone()).collect::<Vec<_>>()].concat();
    let data = scope.upload([1, bytes.len()], &bytes)?.into_column_range(3..bytes.len());
    Ok(Weight::in_blocks(data, BlockRows::new(columns, parts.iter().map(|part| (part.kind, part.rows)))))
}

/// The products of `x` `[rows, columns]` and a widened matrix, in f64.
fn exact(x: &[f32], wide: &[f32], columns: usize) -> Vec<f64> {
    let product = |x: &[f32], weight: &[f32]| x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
    x.chunks(columns).flat_map(|x| wide.chunks(columns).map(move |weight| product(x, weight))).collect()
}

/// Bound on the rounding error of an f32 sum of `columns` products of activations and weights with
/// magnitudes of at most 1. The integers, which are up to twice as large as the weights, and the
/// offsets are summed separately.
fn tolerance(columns: usize) -> f64 {
    3.0 * (columns + 2) as f64 * f64::from(f32::EPSILON) / 2.0
}

#[test]
fn a_product_with_packed_blocks_matches_their_widened_elements() {
    let mut random = Random::new(21);
    for format in TYPES {
        for (blocks, features) in [(1, 5), (3, 70), (5, 33)] {
            let columns = blocks * format.0.elements();
            let weights = packed(&mut random, format, features, columns);
            let bias = random.floats(features);
            for rows in [1, 2, 7, 8, 9, 64] {
                let (x, before) = (random.floats(rows * columns), random.floats(rows * features));
                let [plain, added]: [Vec<f32>; 2] = compute(2, |scope| {
                    let (x, weight) = (scope.upload([rows, columns], &x)?, weight(scope, columns, &[&weights])?);
                    let (bias, mut sum) = (scope.upload([features], &bias)?, scope.upload([rows, features], &before)?);
                    scope.linear_add(&x, &weight, Some(&bias), &mut sum)?;
                    Ok([scope.download(&scope.linear(&x, &weight, None)?)?, scope.download(&sum)?])
                });
                for (at, expected) in exact(&x, &weights.wide, columns).into_iter().enumerate() {
                    let more = f64::from(bias[at % features]) + f64::from(before[at]);
                    for (found, expected) in [(plain[at], expected), (added[at], expected + more)] {
                        let off = (f64::from(found) - expected).abs();
                        assert!(off <= tolerance(columns), "{format:?} {rows} x {columns}: {found} is not {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_packed_product_of_many_rows_matches_single_rows() {
    let mut random = Random::new(22);
    for format in TYPES {
        let (columns, features, rows) = (512, 130, 11);
        let weights = packed(&mut random, format, features, columns);
        let x = random.floats(rows * columns);
        let found = |first: usize, count: usize| -> Vec<f32> {
            compute(2, |scope| {
                let x = scope.upload([count, columns], &x[first * columns..][..count * columns])?;
                scope.download(&scope.linear(&x, &weight(scope, columns, &[&weights])?, None)?)
            })
        };
        let single: Vec<f32> = (0..rows).flat_map(|row| found(row, 1)).collect();
        assert_eq!(
            found(0, 7),
            single[..7 * features],
            "{format:?}: a batch of seven rows differs bitwise from single rows"
        );
        for (many, single) in found(0, rows).iter().zip(&single) {
            assert!(f64::from((many - single).abs()) < tolerance(columns), "{format:?}: {many} and {single}");
        }
    }
}

#[test]
fn fused_matrices_of_different_types_match_separate_products() {
    let mut random = Random::new(23);
    let columns = 512;
    let parts = [(5, 70), (7, 9), (4, 17)].map(|(at, rows)| packed(&mut random, TYPES[at], rows, columns));
    for rows in [1, 5, 20] {
        let x = random.floats(rows * columns);
        let found = |parts: &[&Packed]| -> Vec<f32> {
            compute(3, |scope| {
                let x = scope.upload([rows, columns], &x)?;
                scope.download(&scope.linear(&x, &weight(scope, columns, parts)?, None)?)
            })
        };
        let fused = found(&parts.each_ref());
        let each = parts.each_ref().map(|part| found(&[part]));
        for row in 0..rows {
            let expected: Vec<f32> =
                parts.iter().zip(&each).flat_map(|(part, of)| of[row * part.rows..][..part.rows].to_vec()).collect();
            for (found, expected) in fused[row * 96..][..96].iter().zip(expected) {
                assert!(
                    (found - expected).abs() < columns as f32 * f32::EPSILON,
                    "row {row} of {rows}: {found} and {expected}"
                );
            }
        }
    }
}

#[test]
fn embedding_from_packed_blocks_gives_exactly_the_widened_row() {
    let mut random = Random::new(24);
    for format in TYPES {
        let (columns, tokens) = (256, 20);
        let table = packed(&mut random, format, tokens, columns);
        let found: Vec<f32> = compute(2, |scope| {
            let ids = scope.upload([3], &[19u32, 0, 7])?;
            scope.download(&scope.embed(&weight(scope, columns, &[&table])?, &ids, &scope.upload([0], &[0u32; 0])?)?)
        });
        let expected = [19, 0, 7].map(|row| &table.wide[row * columns..][..columns]).concat();
        assert_eq!(
            found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            expected.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        );
    }
}

#[test]
fn experts_with_packed_weights_match_widened_weights() {
    let mut random = Random::new(25);
    let (experts, hidden, features, rows) = (4, 256, 64, 9);
    // Gate and up alternate between two formats, as in a file that stores them differently.
    let parts: Vec<_> = (0..2 * experts)
        .map(|part| packed(&mut random, TYPES[if part % 2 == 0 { 5 } else { 7 }], features, hidden))
        .collect();
    let (wide, parts): (Vec<f32>, Vec<&Packed>) =
        (parts.iter().flat_map(|part| part.wide.clone()).collect(), parts.iter().collect());
    let down = packed(&mut random, TYPES[1], experts * hidden, features);
    let (x, logits) = (random.floats(rows * hidden), random.floats(rows * experts));
    let run = |is_packed: bool| -> [Vec<f32>; 2] {
        compute(2, |scope| {
            let loads = scope.upload([experts], &vec![0u32; experts])?;
            let routing =
                scope.route(&scope.upload([rows, experts], &logits)?, RoutingRule::renormalized(2), &loads)?;
            let mut sum = scope.upload([rows, hidden], &vec![0.0f32; rows * hidden])?;
            let x = scope.upload([rows, hidden], &x)?;
            let [gate_up, down] = if is_packed {
                [weight(scope, hidden, &parts)?, weight(scope, features, &[&down])?]
            } else {
                let plain = |wide: &[f32], columns| scope.upload([wide.len() / columns, columns], wide);
                [Weight::plain(plain(&wide, hidden)?), Weight::plain(plain(&down.wide, features)?)]
            };
            let gated = scope.gated_experts(&x, &gate_up, &routing)?;
            scope.add_experts(&gated, &down, &routing, &mut sum)?;
            let middle: Vec<f32> = scope.download(&gated)?;
            Ok([middle, scope.download(&sum)?])
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn unsuitable_packed_weights_are_refused_with_an_explanation() {
    let text = |target: Target, bytes: usize| {
        let (plan, workspace, counter) = (Plan::new(target), Workspace::dry(), WorkCounter::default());
        let scope = Scope::new(&plan, &workspace, &counter);
        let run = || {
            let data = scope.upload([bytes], &vec![0u8; bytes])?;
            let weight = Weight::in_blocks(data, BlockRows::new(64, [(BlockType::Q8_0, 2)]));
            scope.linear(&scope.empty([2, 64])?, &weight, None).map(drop)
        };
        run().expect_err("the weight is refused").to_string()
    };
    assert_eq!(text(Target::Cpu { threads: 1 }, 135), "linear: weight is [135]; expected 136 u8 with the blocks");
    let gpu = Target::Cuda(CudaTarget { capability: (9, 0), sms: 132, activation: DType::BF16 });
    assert_eq!(text(gpu, 136), "linear: weight is [136]; expected no blocks of quantized elements on this target");
}
