//! Families without pictures compared with results of transformers: ids, logits and answers, with
//! whole prompts, in chunks, and batched with other sequences. The checkpoints are:
//!
//! - Qwen2 and Mistral, each with full attention and with sliding windows;
//! - Qwen3 with unscaled frequencies and with YaRN;
//! - Llama with Llama 3.1's frequencies, and with linear scaling and biases everywhere;
//! - mixtures of experts in all layers and in some layers;
//! - hybrids of gated delta nets and attention, with unscaled frequencies and with YaRN;
//! - Gemma 3, with the keys of the first releases and with the keys that transformers saves;
//! - Gemma 4 with keys that are values, and with shared keys, wide MLPs and per-layer embeddings.

use crate::bench::{Bench, Case, alone, assert_recorded, assert_same_run, together};

const FOLDERS: [&str; 17] = [
    "tests/golden/qwen2",
    "tests/golden/qwen3",
    "tests/golden/qwen3_yarn",
    "tests/golden/llama",
    "tests/golden/llama_biased",
    "tests/golden/mistral",
    WINDOWED[0],
    WINDOWED[1],
    "tests/golden/qwen3_moe",
    "tests/golden/qwen3_moe_sparse",
    "tests/golden/qwen3_5_text",
    "tests/golden/qwen3_5_yarn",
    "tests/golden/gemma3_text",
    "tests/golden/gemma3",
    "tests/golden/gemma4_text",
    "tests/golden/gemma4_sharing",
    "tests/golden/gemma4_moe",
];
// A sliding window in all layers, and a window in two of four layers.
pub const WINDOWED: [&str; 2] = ["tests/golden/mistral_windowed", "tests/golden/qwen2_windowed"];
const CASES: [&str; 2] = ["short", "long"];

// The same tolerances as for Qwen2.5-VL.
const REFERENCE_TOLERANCE: f32 = 1e-4;
const NOISE_TOLERANCE: f32 = 1e-5;
// The rounding of every token stays in the states of gated delta nets.
const HYBRID_NOISE_TOLERANCE: f32 = 3e-5;

fn noise(folder: &str) -> f32 {
    if folder.contains("qwen3_5") { HYBRID_NOISE_TOLERANCE } else { NOISE_TOLERANCE }
}

fn cases(folder: &str, bench: &Bench) -> Vec<Case> {
    CASES.iter().map(|name| Case::read(folder, &bench.checkpoint, name)).collect()
}

#[test]
fn prompts_match_the_recording_and_positions_count_tokens() {
    for folder in FOLDERS {
        let bench = Bench::load(folder, 1);
        for case in cases(folder, &bench) {
            assert_eq!(
                bench.checkpoint.template.render(&case.messages, &Default::default()).expect("the template renders"),
                case.prompt
            );
            let ids = case.prompt_ids(&bench.checkpoint);
            let recorded = case.integers("input_ids").expect("ids");
            assert_eq!(ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>(), recorded, "{}", case.name);
            let layout = bench.model.config().lay_out(ids, &[]).expect("the prompt is laid out");
            assert_eq!(layout.next_position as usize, recorded.len());
            assert!(layout.positions.iter().enumerate().all(|(index, place)| *place == [index as u32; 3]));
        }
    }
}

#[test]
fn every_case_gets_the_recorded_logits_and_answer() {
    for folder in FOLDERS {
        let bench = Bench::load(folder, 2);
        for case in cases(folder, &bench) {
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
            for sizes in [&[1][..], &[7], &[16], &[33], &[17, 1, 29, 5]] {
                let what = format!("{} in chunks of {sizes:?}", case.name);
                let chunked = alone(&bench, case, &[], sizes);
                println!("{what}: {:.1e}", assert_same_run(&what, &chunked, whole, noise(folder)));
            }
        }
        // Each case runs twice, so that a sequence is in the batch at two positions.
        let company: Vec<_> = cases.iter().chain(&cases).map(|case| (case, Vec::new())).collect();
        for (steps_between, seed) in [(0, 1), (3, 2), (9, 3)] {
            let runs = together(&bench, &company, steps_between, seed);
            for ((case, run), alone) in cases.iter().chain(&cases).zip(&runs).zip(whole.iter().chain(&whole)) {
                let what = format!("{} among all, {steps_between} steps apart", case.name);
                println!("{what}: {:.1e}", assert_same_run(&what, run, alone, noise(folder)));
            }
        }
    }
}
