//! Checkpoints with FP8 weights of each format, compared with a reference model in f64 that rounds
//! activations as the format prescribes: as single sequences, in chunks and batched with others.
//!
//! In these cases, every activation is far enough from the midpoint between two E4M3 numbers that a
//! sum in f32 cannot round it to the other number (`tests/golden/recording/fp8.py`). Therefore all
//! rows agree as closely as with unquantized weights.

use crate::bench::{Bench, Case, alone, assert_recorded, assert_same_run, together};

const FOLDERS: [&str; 6] = [
    "tests/golden/qwen3_fp8",
    "tests/golden/qwen3_fp8_dynamic",
    "tests/golden/qwen3_fp8_modelopt",
    "tests/golden/qwen3_moe_fp8",
    "tests/golden/qwen3_moe_fp8_dynamic",
    "tests/golden/qwen3_5_moe_fp8",
];
const CASES: [&str; 2] = ["short", "long"];

const REFERENCE_TOLERANCE: f32 = 1e-5;
const NOISE_TOLERANCE: f32 = 2e-5;

fn cases(folder: &str, bench: &Bench) -> Vec<Case> {
    CASES.iter().map(|name| Case::read(folder, &bench.checkpoint, name)).collect()
}

#[test]
fn every_case_gets_the_recorded_logits_and_answer() {
    for folder in FOLDERS {
        let bench = Bench::load(folder, 2);
        for case in cases(folder, &bench) {
            println!("{folder}");
            assert_recorded(&bench, &case, &[], REFERENCE_TOLERANCE);
        }
    }
}

#[test]
fn chunking_and_batching_do_not_change_results() {
    for folder in FOLDERS {
        let bench = Bench::load(folder, 2);
        let cases = cases(folder, &bench);
        let whole: Vec<_> = cases.iter().map(|case| alone(&bench, case, &[], &[usize::MAX])).collect();
        for (case, whole) in cases.iter().zip(&whole) {
            let chunked = alone(&bench, case, &[], &[17, 1, 29, 5]);
            assert_same_run(&format!("{folder} {} in chunks", case.name), &chunked, whole, NOISE_TOLERANCE);
        }
        let company: Vec<_> = cases.iter().chain(&cases).map(|case| (case, Vec::new())).collect();
        let runs = together(&bench, &company, 3, 2);
        for ((case, run), alone) in cases.iter().chain(&cases).zip(&runs).zip(whole.iter().chain(&whole)) {
            assert_same_run(&format!("{folder} {} among all", case.name), run, alone, NOISE_TOLERANCE);
        }
    }
}
