//! GGUF files of Gemma 3 and Gemma 4: golden checkpoints written again as llama.cpp writes them.

use bursar_budgets::Hint;
use bursar_model::registry::FamilyConfig;

use crate::{
    bench::{Bench, BenchMemory, Case, Memory, assert_recorded, on_ranks, open},
    common::{golden_bytes, golden_json},
    gguf::File,
    gguf_hybrids::{replaced, set},
};

/// A file with scores of pieces, a file with shared keys, embeddings per layer and a wide MLP, and a
/// file with experts and with keys that are also values.
const FILES: [&str; 3] = ["gemma3_text", "gemma4_sharing", "gemma4_moe"];

fn recorded(name: &str) -> Vec<u8> {
    golden_bytes(&format!("gguf/{name}.gguf"))
}

#[test]
fn a_gguf_file_of_gemma_answers_like_its_source() {
    for name in FILES {
        let (folder, file) = (format!("tests/golden/{name}"), File::of(&recorded(name)));
        let bench = Bench::of(file.open().expect("the checkpoint opens"), 2);
        for case in ["short", "long"].map(|case| Case::read(&folder, &bench.checkpoint, case)) {
            assert_eq!(case.prompt_ids(&bench.checkpoint), case.prompt_ids(&open(&folder)), "{name}");
            assert_recorded(&bench, &case, &[], 1e-4);
        }
    }
}

#[test]
fn a_rank_reads_its_experts_in_a_gguf_file_of_gemma() {
    let file = File::of(&recorded("gemma4_moe"));
    on_ranks(2, |cpu| {
        let checkpoint = file.open().expect("the checkpoint opens");
        let bench = Bench::on(checkpoint, cpu, Memory::new(BenchMemory::GOLDEN.capacity), BenchMemory::GOLDEN);
        assert_recorded(&bench, &Case::read("tests/golden/gemma4_moe", &bench.checkpoint, "short"), &[], 1e-4);
    });
}

#[test]
fn a_gguf_file_of_gemma_has_the_settings_and_tokens_of_its_source() {
    for name in FILES {
        let (file, folder) = (File::of(&recorded(name)), open(&format!("tests/golden/{name}")));
        let checkpoint = file.open().expect("the checkpoint opens");
        let [ours, theirs] = [&checkpoint, &folder].map(|checkpoint| {
            let family = FamilyConfig::of(checkpoint).expect("the family serves it");
            family.decoder().clone()
        });
        if name == "gemma3_text" {
            // The file's query norms make up for the other divisor of attention scores.
            assert_eq!((ours.layers, ours.sliding), (theirs.layers, theirs.sliding));
        } else {
            assert_eq!(ours, theirs, "{name}");
        }
        let [ours, theirs] = [&checkpoint, &folder].map(|checkpoint| &checkpoint.generation.eos_ids);
        assert!(theirs.iter().all(|id| ours.contains(id)), "{name} lists every end token");
        let [ours, theirs] = [&checkpoint, &folder].map(|checkpoint| checkpoint.prompts().expect("a tokenizer"));
        let texts = golden_json("gguf/pieces.json");
        let texts = texts["texts"].as_array().expect("texts").iter().map(|text| text.as_str().expect("a text"));
        for text in texts.chain(["are that picture", "<start_of_turn>user  \n\n   the  sister"]) {
            for adds_bos in [false, true] {
                let [ours, theirs] = [&ours, &theirs].map(|prompts| prompts.tokenizer().encode(text, adds_bos));
                assert_eq!(ours.expect("ids"), theirs.expect("ids"), "{text} of {name}");
            }
        }
    }
}

#[test]
fn invalid_settings_of_a_gemma_file_are_refused_by_name() {
    let refused = |bytes: &[u8]| {
        let error = File::of(bytes).open().expect_err("the file is refused");
        assert!(!error.hint().is_empty());
        error.to_string()
    };
    for (file, name, number, expected) in [
        ("gemma3_text", "gemma3.attention.value_length", 32, "value_length is 32; supported: 64"),
        ("gemma4_moe", "gemma4.attention.key_length_swa", 30, "gemma4.attention.value_length_swa is 32; supported: 30"),
        ("gemma4_moe", "gemma4.rope.dimension_count", 16, "gemma4.rope.dimension_count is 16; supported: 64"),
        ("gemma4_moe", "gemma4.block_count", 4, "sliding_window_pattern is 5 values; supported: one for each of 4"),
    ] {
        let error = refused(&set(recorded(file), name, number));
        assert!(error.contains(expected), "{error} should say: {expected}");
    }
    let renamed = |file: &str, from: &str, to: &str| refused(&replaced(recorded(file), from.as_bytes(), to.as_bytes()));
    for (file, from, to, expected) in [
        (
            "gemma4_moe",
            "gemma4.expert_used_count",
            "gemma4.expert_used_coins",
            "expert_used_coins is 3; supported: none",
        ),
        ("gemma4_moe", "sliding_window_pattern", "sliding_window_packets", "sliding_window_packets is"),
        ("gemma4_moe", "tokenizer.ggml.merges", "tokenizer.ggml.verges", "tokenizer.ggml.merges is absent"),
        ("gemma3_text", "tokenizer.ggml.scores", "tokenizer.ggml.stores", "tokenizer.ggml.scores is absent"),
        ("gemma3_text", "add_space_prefix", "add_space_suffix", "add_space_prefix is true; supported: false"),
    ] {
        let error = renamed(file, from, to);
        assert!(error.contains(expected), "{error} should say: {expected}");
    }
    // A frequency that is neither kept nor removed.
    let divisors = 1e30f32.to_le_bytes().repeat(2);
    let error =
        refused(&replaced(recorded("gemma4_moe"), &divisors, &[2f32.to_le_bytes(), 2f32.to_le_bytes()].concat()));
    assert!(error.contains("rope_freqs.weight") && error.contains("1 for the first pairs and 1e30"), "{error}");
}
