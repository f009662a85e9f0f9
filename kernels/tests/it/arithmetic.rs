//! Each operation compared with its definition.

use bursar_kernels::{
    Cpu, DType, KernelError, StateDtype, UnseenToken,
    ops::{argmax::NO_CHOICE, attention_packed::PackedSequences, gelu::Gelu, transfer},
};
use candle_core::{D, Device, Tensor as Candle};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::ground::{self, Pass, Product, Random, Variant, assert_close, compute, passes, widened};

/// Copies are exact. A sum of `n` products of numbers below one is off by less than `n` times half
/// a unit in the last place of one.
fn tolerance(pass: &Pass) -> f64 {
    match pass {
        Pass::Embed { .. } | Pass::GatherRows { .. } | Pass::ScatterRows { .. } => 0.0,
        Pass::Argmax { .. } | Pass::Clustered(_) => 0.0,
        Pass::Linear { in_features, .. } => (in_features + 2) as f64 * f64::from(f32::EPSILON) / 2.0,
        Pass::Fp8(fp8) => match fp8.product {
            Product::Quantize => 0.0,
            _ => 8.0 * (fp8.in_features + 2) as f64 * f64::from(f32::EPSILON) / 2.0,
        },
        // Sums over all experts of a row, with two products per expert.
        Pass::Mixed(mixed) => {
            4.0 * (mixed.top * (mixed.features + mixed.hidden)) as f64 * f64::from(f32::EPSILON) / 2.0
        }
        // Half a step of E4M3, because the expected numbers are not rounded to E4M3.
        Pass::RotaryKv(rotary) if rotary.is_fp8 => 1.0 / 16.0,
        Pass::GatedLinear { in_features, .. } => 4.0 * (in_features + 2) as f64 * f64::from(f32::EPSILON) / 2.0,
        Pass::Variant(Variant::GeluLinear { in_features, .. }) => {
            4.0 * (in_features + 2) as f64 * f64::from(f32::EPSILON) / 2.0
        }
        // Half a step of bf16, to which states are rounded.
        Pass::Step(step) if step.state_dtype == StateDtype::Bf16 => 1.0 / 512.0 + 2e-5,
        // Sums over all tokens of a sequence.
        Pass::Step(_) => 2e-5,
        _ => 2e-6,
    }
}

#[test]
fn every_operation_matches_its_definition() {
    passes().into_par_iter().for_each(|pass| {
        let found = compute(2, |scope| pass.run(scope));
        assert_close(&format!("{pass:?}"), &found, &pass.expected(DType::F32), tolerance(&pass));
    });
}

#[test]
fn a_matrix_product_matches_candle() {
    let mut random = Random::new(1);
    let (rows, in_features, out_features) = (37, 211, 149);
    let (x, weight) = (random.floats(rows * in_features), random.floats(out_features * in_features));
    let candle = |numbers: &[f32], shape| Candle::from_slice(numbers, shape, &Device::Cpu).unwrap();
    let expected =
        candle(&x, (rows, in_features)).matmul(&candle(&weight, (out_features, in_features)).t().unwrap()).unwrap();
    let found = compute(2, |scope| {
        let x = scope.upload([rows, in_features], &x)?;
        let weight = scope.upload([out_features, in_features], &weight)?;
        scope.download(&scope.linear(&x, &weight, None)?)
    });
    let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
    assert_close("linear", &found, &widened(&expected), 1e-5);
}

#[test]
fn activation_functions_match_candle() {
    let numbers: Vec<f32> = Random::new(2).floats(2 * 997).iter().map(|number| number * 30.0).collect();
    let candle = Candle::from_slice(&numbers, (1, 2 * 997), &Device::Cpu).unwrap();
    let expected = candle.gelu_erf().unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let found = compute(1, |scope| {
        let mut x = scope.upload([2, 997], &numbers)?;
        scope.gelu(&mut x, Gelu::Erf)?;
        scope.download(&x)
    });
    assert_close("gelu", &found, &widened(&expected), 1e-6);
    let (gate, up) = (candle.narrow(1, 0, 997).unwrap(), candle.narrow(1, 997, 997).unwrap());
    let expected = (gate.silu().unwrap() * up).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let found = compute(1, |scope| scope.download(&scope.silu_mul(&scope.upload([1, 2 * 997], &numbers)?)?));
    assert_close("silu_mul", &found, &widened(&expected), 1e-6);
}

#[test]
fn attention_over_a_picture_matches_candle() {
    let (rows, heads, head_dim) = (197, 3, 80);
    let qkv = Random::new(3).floats(rows * 3 * heads * head_dim);
    let parts =
        Candle::from_slice(&qkv, (rows, 3, heads, head_dim), &Device::Cpu).unwrap().permute((1, 2, 0, 3)).unwrap();
    let part = |index: usize| parts.get(index).unwrap().contiguous().unwrap();
    let scores = (part(0).matmul(&part(1).t().unwrap()).unwrap() * (head_dim as f64).powf(-0.5)).unwrap();
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1).unwrap()).unwrap().exp().unwrap();
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1).unwrap()).unwrap();
    let expected = weights.matmul(&part(2)).unwrap().transpose(0, 1).unwrap().flatten_all().unwrap();
    let found = compute(2, |scope| {
        let starts = scope.upload([2], &[0u32, rows as u32])?;
        let sequences = PackedSequences { starts, longest: rows, query_key_pairs: (rows * rows) as u64 };
        scope.download(&scope.attention_packed(
            &scope.upload([rows, 3 * heads * head_dim], &qkv)?,
            heads,
            &sequences,
        )?)
    });
    assert_close("attention_packed", &found, &widened(&expected.to_vec1::<f32>().unwrap()), 1e-6);
}

#[test]
fn attention_scores_in_the_thousands_do_not_overflow() {
    // Scores of several thousand, whose exponentials would be infinite without the running maximum.
    let mut qkv = Random::new(4).floats(150 * 3 * 32);
    qkv.chunks_mut(96).for_each(|row| row[..32].iter_mut().for_each(|query| *query *= 5000.0));
    let found: Vec<f32> = compute(1, |scope| {
        let sequences =
            PackedSequences { starts: scope.upload([2], &[0u32, 150])?, longest: 150, query_key_pairs: 150 * 150 };
        scope.download(&scope.attention_packed(&scope.upload([150, 96], &qkv)?, 1, &sequences)?)
    });
    let vector = |row: usize, part: usize| &qkv[(row * 3 + part) * 32..][..32];
    let [keys, values] = [1, 2].map(|part| (0..150).map(|row| vector(row, part)).collect::<Vec<_>>());
    let expected: Vec<f64> = (0..150).flat_map(|row| ground::attend(vector(row, 0), &keys, &values)).collect();
    // A score in the thousands is itself rounded to about 1e-4.
    assert_close("attention_packed", &found, &expected, 1e-3);
}

#[test]
fn argmax_chooses_the_first_largest_element_and_never_nan() {
    let nan = f32::NAN;
    let rows = [
        [1.0, 3.0, 3.0, 2.0],
        [nan, 1.0, nan, 1.0],
        [nan, f32::NEG_INFINITY, nan, f32::NEG_INFINITY],
        [0.0, -0.0, nan, 0.0],
        [-1.0, f32::INFINITY, f32::INFINITY, nan],
        [nan; 4],
    ];
    let found: Vec<u32> = compute(1, |scope| {
        let x = scope.upload([rows.len(), 4], rows.as_flattened())?;
        scope.download(&scope.argmax(&x)?)
    });
    assert_eq!(found, [1, 1, 1, 0, 1, NO_CHOICE]);
}

#[test]
fn copied_rows_keep_the_gaps_of_both_tensors() {
    let found: Vec<f32> = compute(1, |scope| {
        let x = scope.upload([3, 3], &[0.0f32, 1.0, 2.0, 10.0, 11.0, 12.0, 20.0, 21.0, 22.0])?;
        let mut out = scope.upload([3, 4], &[9.0f32; 12])?;
        scope.copy_rows_into(&x.column_range(1..3), &mut out.column_range_mut(0..2))?;
        scope.download(&out)
    });
    assert_eq!(found, [1.0, 2.0, 9.0, 9.0, 11.0, 12.0, 9.0, 9.0, 21.0, 22.0, 9.0, 9.0]);
}

#[test]
fn a_pass_embeds_tokens_that_only_the_device_knows() {
    let found: (Vec<u32>, Vec<f32>) = compute(1, |scope| {
        let table = scope.upload([3, 2], &[0.0f32, 1.0, 10.0, 11.0, 20.0, 21.0])?;
        let mut previous = scope.upload([4], &[9u32; 4])?;
        let logits = scope.upload([2, 3], &[0.0f32, 1.0, 5.0, 0.0, 7.0, 5.0])?;
        scope.argmax_into(&logits, &mut previous.row_range_mut(0..2))?;
        let ids = scope.upload([3], &[UnseenToken { row: 1 }.code(), 0, UnseenToken { row: 0 }.code()])?;
        let embedded = scope.embed(&table, &ids, &previous)?;
        Ok((scope.download(&previous)?, scope.download(&embedded)?))
    });
    assert_eq!(found.0, [2, 1, 9, 9], "only the chosen rows are written");
    assert_eq!(found.1, [10.0, 11.0, 0.0, 1.0, 20.0, 21.0]);
}

#[test]
fn a_deferred_download_has_the_contents_at_the_request() {
    let (before, after): (Vec<u32>, Vec<u32>) = compute(1, |scope| {
        let mut chosen = scope.upload([2], &[7u32, 8])?;
        let before = scope.download_later(&chosen)?;
        scope.argmax_into(&scope.upload([2, 3], &[0.0f32, 1.0, 0.0, 1.0, 0.0, 0.0])?, &mut chosen)?;
        let after = scope.download_later(&chosen)?;
        let moment = scope.moment()?;
        assert!(moment.is_ready() && before.is_ready(), "work on the CPU is complete when its call returns");
        assert!(moment.wait()?.is_empty());
        Ok((before.wait()?, after.wait()?))
    });
    assert_eq!((before, after), (vec![7, 8], vec![1, 0]));
}

#[test]
fn a_plan_downloads_zeros_and_its_moments_take_no_memory() {
    let (found, peak, _) = ground::plan(1, |scope| -> Result<Vec<f32>, KernelError> {
        scope.moment()?.wait()?;
        scope.download_later(&scope.empty([2, 3])?)?.wait()
    });
    assert_eq!((found.unwrap(), peak.0), (vec![0.0; 6], 256));
}

#[test]
fn uploaded_numbers_are_downloaded_with_the_same_bits() {
    let numbers = [half::bf16::from_f32(1.5), half::bf16::NAN, half::bf16::MIN];
    let found: Vec<half::bf16> = compute(1, |scope| {
        let tensor = scope.upload([3], &numbers)?;
        assert_eq!(tensor.dtype(), DType::BF16);
        scope.download(&tensor)
    });
    let bits = |numbers: &[half::bf16]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&found), bits(&numbers));
}

#[test]
fn separate_host_slices_are_uploaded_as_one_tensor() {
    let found: Vec<u8> = compute(1, |scope| {
        let tensor = scope.upload_parts(&[&[1u8, 2, 3][..], &[], &[4]])?;
        assert_eq!((tensor.shape(), tensor.dtype()), ([4].into(), DType::U8));
        scope.download(&tensor)
    });
    assert_eq!(found, [1, 2, 3, 4]);
}

#[test]
fn filling_a_row_leaves_adjacent_rows_unchanged() {
    let found: Vec<f32> = compute(1, |scope| {
        let mut weights = scope.upload([3, 2], &[9.0f32; 6])?;
        let source: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|number| number.to_le_bytes()).collect();
        transfer::fill(&Cpu::new(1), &source, &mut weights.row_range_mut(1..2))?;
        scope.download(&weights)
    });
    assert_eq!(found, [9.0, 9.0, 1.0, 2.0, 9.0, 9.0]);
}
