//! Checkpoints with FP8 weights, of each format: what is computed is what the released arithmetic gives in f64, beside
//! others and in chunks as well.
//!
//! Activations that stand near the middle of two numbers of E4M3 are rounded to either one, as sums in f32 differ from
//! those in f64 in their last bits. One such number moves a token's logits by some hundredths. So few rows may be off by
//! that much, and most have to agree as closely as with plain weights.

use std::ops::ControlFlow;

use bursar_budgets::Bytes;
use bursar_kernels::{Cpu, DType, Target};
use bursar_model::{
    Model,
    checkpoint::{Checkpoint, CheckpointSource, WeightQuantization},
};
use serde_json::{Value, json};

use crate::{
    bench::{Bench, Case, Memory, alone, greatest, prefixes, relative_error, repository, together},
    copy::{Copy, QWEN2_5_VL, QWEN3_VL_MOE},
};

const FOLDERS: [&str; 5] = [
    "tests/golden/qwen3_fp8",
    "tests/golden/qwen3_fp8_dynamic",
    "tests/golden/qwen3_fp8_modelopt",
    "tests/golden/qwen3_moe_fp8",
    "tests/golden/qwen3_moe_fp8_dynamic",
];
const CASES: [&str; 2] = ["short", "long"];

/// Of rows in which no number was rounded to the other side: as for plain weights.
const EXACT: f32 = 1e-4;
/// Of all rows.
const ROUNDED: f32 = 9e-1;

fn cases(folder: &str, bench: &Bench) -> Vec<Case> {
    CASES.iter().map(|name| Case::read(folder, &bench.checkpoint, name)).collect()
}

/// Asserts that all rows agree within a rounding of E4M3, and enough of them exactly.
fn assert_close(what: &str, errors: &[f32], exact: f64) {
    let worst = errors.iter().copied().fold(0.0, f32::max);
    let share = errors.iter().filter(|error| **error <= EXACT).count() as f64 / errors.len() as f64;
    println!("{what}: {share:.2} of {} rows are exact, the worst is off by {worst:.1e}", errors.len());
    assert!(worst <= ROUNDED, "{what}: off by {worst:e}");
    assert!(share >= exact, "{what}: only {share} of {} rows are exact", errors.len());
}

#[test]
fn every_case_gets_the_recorded_logits_and_answer() {
    for folder in FOLDERS {
        let bench = Bench::load(folder, 2);
        for case in cases(folder, &bench) {
            let (places, expected): (Vec<_>, Vec<_>) = case.logits("logit_positions", "logits").into_iter().unzip();
            let found = prefixes(&bench, &case, &[], &places);
            let errors: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| relative_error(a, b)).collect();
            assert_close(&format!("{folder} {} prefill", case.name), &errors, 0.0);
            let run = alone(&bench, &case, &[], &[usize::MAX]);
            assert_eq!(run.tokens, case.greedy_tokens(), "{folder} {}", case.name);
            let steps = case.logits("decode_steps", "decode_logits");
            let errors: Vec<f32> = steps.iter().map(|(step, row)| relative_error(&run.logits[*step], row)).collect();
            assert_close(&format!("{folder} {} decode", case.name), &errors, 0.0);
        }
    }
}
