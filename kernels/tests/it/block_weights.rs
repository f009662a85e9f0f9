//! Weights in ggml's blocks of quantized elements. The blocks are written, and widened a second time,
//! by candle.

use bursar_budgets::Workspace;
use bursar_kernels::{
    BlockRows, BlockType, CudaTarget, DType, KernelError, Plan, Scope, Target, Weight, WorkCounter, widen_blocks,
};
use candle_core::{
    Device, Tensor as Candle,
    quantized::{GgmlDType, QTensor},
};

use crate::ground::{Random, compute, plan};

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
        assert!((ours - theirs).abs() <= 1e-6 * theirs.abs(), "{kind}: {ours} and {theirs} of candle");
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

/// The products of `x` `[rows, columns]` and a widened matrix, in f64, and the largest error that
/// the rounding of activations may cause.
///
/// Each group of 32 columns is rounded to steps of its largest magnitude divided by 127, so an
/// activation is off by at most half a step, and a product by the sum of these errors, each
/// multiplied by the magnitude of a weight. Sums of f32 numbers add the second term.
fn exact(x: &[f32], wide: &[f32], columns: usize) -> Vec<(f64, f64)> {
    let product = |x: &[f32], weight: &[f32]| {
        let (mut sum, mut most) = (0.0, 0.0);
        for (x, weight) in x.chunks(32).zip(weight.chunks(32)) {
            let step = f64::from(x.iter().fold(0.0f32, |most, x| most.max(x.abs()))) / 127.0;
            let magnitudes: f64 = weight.iter().map(|weight| f64::from(weight.abs())).sum();
            sum += x.iter().zip(weight).map(|(x, weight)| f64::from(*x) * f64::from(*weight)).sum::<f64>();
            most += (0.5 + 1e-4) * step * magnitudes;
        }
        (sum, most + 1e-6 * columns as f64)
    };
    x.chunks(columns).flat_map(|x| wide.chunks(columns).map(move |weight| product(x, weight))).collect()
}

#[test]
fn a_product_is_off_by_no_more_than_activations_of_eight_bits_are() {
    let mut random = Random::new(21);
    for format in TYPES {
        for (columns, features) in [(1, 5), (3, 70), (5, 33)].map(|(blocks, rows)| (blocks * format.0.elements(), rows))
        {
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
                let expected = exact(&x, &weights.wide, columns);
                let mut greatest = 0.0f64;
                for (at, (expected, most)) in expected.into_iter().enumerate() {
                    let more = f64::from(bias[at % features]) + f64::from(before[at]);
                    for (found, expected) in [(plain[at], expected), (added[at], expected + more)] {
                        let off = (f64::from(found) - expected).abs();
                        assert!(off <= most, "{format:?} {rows} x {columns}: {found} is not {expected} within {most}");
                        greatest = greatest.max(off / most);
                    }
                }
                assert!(greatest > 0.001, "{format:?}: activations are rounded ({greatest})");
            }
        }
    }
}

#[test]
fn many_rows_give_what_each_row_gives_alone() {
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
        let alone: Vec<f32> = (0..rows).flat_map(|row| found(row, 1)).collect();
        assert_eq!(found(0, 7), alone[..7 * features], "{format:?}: a few rows have the same bits");
        for (many, alone) in found(0, rows).iter().zip(&alone) {
            assert!((many - alone).abs() < columns as f32 * f32::EPSILON, "{format:?}: {many} and {alone}");
        }
    }
}

#[test]
fn fused_matrices_of_different_types_give_the_product_of_each() {
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
fn a_look_up_gives_the_widened_row_to_the_bit() {
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

/// Activations rounded to 8 bits as products with blocks round them.
fn rounded(x: &[f32]) -> Vec<f32> {
    let group = |x: &[f32]| {
        let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let (scale, inverse) = (most / 127.0, 127.0 / most);
        x.iter().map(|x| scale * (x * inverse).round_ties_even()).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(group).collect()
}

#[test]
fn experts_in_blocks_are_those_of_widened_weights_on_rounded_rows() {
    let mut random = Random::new(25);
    let (experts, hidden, features, rows) = (4, 256, 64, 9);
    // Gate and up alternate between two formats, as when a file has them in different ones.
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
            let routing = scope.route(&scope.upload([rows, experts], &logits)?, 2, true, &loads)?;
            let mut sum = scope.upload([rows, hidden], &vec![0.0f32; rows * hidden])?;
            let gated = if is_packed {
                let x = scope.upload([rows, hidden], &x)?;
                scope.gated_experts(&x, &weight(scope, hidden, &parts)?, &routing)?
            } else {
                let x = scope.upload([rows, hidden], &rounded(&x))?;
                scope.gated_experts(&x, &scope.upload([wide.len() / hidden, hidden], &wide)?, &routing)?
            };
            let middle: Vec<f32> = scope.download(&gated)?;
            if is_packed {
                scope.add_experts(&gated, &weight(scope, features, &[&down])?, &routing, &mut sum)?;
            } else {
                let gated = scope.upload([rows * 2, features], &rounded(&middle))?;
                scope.add_experts(
                    &gated,
                    &scope.upload([experts * hidden, features], &down.wide)?,
                    &routing,
                    &mut sum,
                )?;
            }
            Ok([middle, scope.download(&sum)?])
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut random = Random::new(26);
    let weights = packed(&mut random, TYPES[0], 5, 96);
    for rows in [3, 12] {
        let mut x = random.floats(rows * 96);
        x[40] = f32::NAN;
        x[96 + 3] = f32::INFINITY;
        x[2 * 96..3 * 96].fill(0.0);
        let found: Vec<f32> = compute(2, |scope| {
            let x = scope.upload([rows, 96], &x)?;
            scope.download(&scope.linear(&x, &weight(scope, 96, &[&weights])?, None)?)
        });
        assert!(found[..10].iter().all(|product| product.is_nan()), "{:?}", &found[..10]);
        assert!(found[10..15].iter().all(|product| *product == 0.0), "{:?}", &found[10..15]);
        assert!(found[15..].iter().all(|product| product.is_finite()));
    }
}

#[test]
fn a_plan_takes_the_scratch_that_the_product_takes() {
    let mut random = Random::new(27);
    let weights = packed(&mut random, TYPES[2], 200, 160);
    for rows in [1, 8, 9, 40] {
        let (_, planned, work) = plan(3, |scope| {
            let x = scope.empty([rows, 160]).unwrap();
            scope.linear(&x, &weight(scope, 160, &[&weights]).unwrap(), None).map(drop).unwrap();
        });
        let of_operands = rows * (160 + 200) * 4;
        let scratch = Target::Cpu { threads: 3 }.block_linear_scratch(rows, 200, 160);
        assert!(planned.0 as usize >= of_operands + scratch.0 as usize, "{rows} rows: {planned}");
        assert_eq!(work.flops, 2 * (rows * 160 * 200) as u64);
    }
}

#[test]
fn blocks_that_do_not_fit_are_refused_in_words() {
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
