//! GGUF files of Gemma 3 and Gemma 4: golden checkpoints written again as llama.cpp writes them.

use bursar_budgets::Hint;
use bursar_model::registry::FamilyConfig;
use serde_json::json;

use crate::{
    bench::{Bench, BenchMemory, Case, Memory, assert_recorded, on_ranks, open},
    common::{golden_bytes, golden_json},
    gguf::{File, Written, float, list, number, switch, text, word},
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
        assert_eq!(ours, theirs, "{name}: the file declares only one of the end tokens");
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

/// The header of a file whose vocabulary has Gemma's tokens with the wrong kinds that released files have.
fn header(architecture: &str) -> Written {
    const TEXT: i32 = 1;
    const USER_DEFINED: i32 = 4;
    let tokens = ["<unk>", "<bos>", "<eos>", "<turn|>", "<|tool_response>", "<|turn>", "a", "aa"];
    let kinds = [2, 3, TEXT, 3, USER_DEFINED, TEXT, TEXT, TEXT];
    let [integers, floats, texts] = [5, 6, 8];
    Written::good()
        .with("general.architecture", word(architecture))
        .with("tokenizer.ggml.tokens", list(texts, &tokens.map(text)))
        .with("tokenizer.ggml.token_type", list(integers, &kinds.map(|kind: i32| kind.to_le_bytes().to_vec())))
        .with("tokenizer.ggml.scores", list(floats, &[0f32; 8].map(|score| score.to_le_bytes().to_vec())))
        .with("tokenizer.ggml.merges", list(texts, &[text("a a")]))
        .with("tokenizer.ggml.add_space_prefix", switch(false))
        .with("tokenizer.ggml.bos_token_id", number(1))
        .with("tokenizer.ggml.eos_token_id", number(3))
        .with("tokenizer.ggml.model", word("llama"))
        .with("gemma3.block_count", number(62))
        .with("gemma3.context_length", number(131_072))
        .with("gemma3.embedding_length", number(5376))
        .with("gemma3.feed_forward_length", number(21_504))
        .with("gemma3.attention.head_count", number(32))
        .with("gemma3.attention.key_length", number(128))
        .with("gemma3.attention.sliding_window", number(1024))
        .with("gemma3.attention.layer_norm_rms_epsilon", float(1e-6))
        .with("gemma3.rope.freq_base", float(1e6))
        .with("gemma3.rope.scaling.type", word("linear"))
        .with("gemma3.rope.scaling.factor", float(8.0))
}

#[test]
fn a_gguf_file_of_gemma_3_27b_has_the_released_settings() {
    let config = header("gemma3").open().expect("the checkpoint opens").config;
    assert_eq!(config["query_pre_attn_scalar"], json!(168));
    assert_eq!(config["rope_scaling"], json!({ "rope_type": "linear", "factor": 8.0 }));
    assert_eq!((&config["rope_theta"], &config["rope_local_base_freq"]), (&json!(1e6), &json!(1e4)));
    assert_eq!(config["sliding_window"], json!(1024));
    let smaller = header("gemma3").with("gemma3.block_count", number(48)).open().expect("the checkpoint opens").config;
    assert_eq!(smaller["query_pre_attn_scalar"], json!(128));
    let error = header("gemma3").with("gemma3.vision.block_count", number(27)).refused();
    assert!(error.contains("encoders must be in a separate file"), "{error}");
}

#[test]
fn special_tokens_of_gemma_with_wrong_kinds_are_special() {
    let checkpoint = header("gemma3").open().expect("the checkpoint opens");
    assert_eq!(checkpoint.generation.eos_ids, [3, 2, 4]);
    let prompts = checkpoint.prompts().expect("a tokenizer");
    let ids = |adds_bos| prompts.tokenizer().encode("<|turn>aa<eos>", adds_bos).expect("ids");
    assert_eq!((ids(false), ids(true)), (vec![5, 7, 2], vec![1, 5, 7, 2]));
    // Gemma 3 follows the setting, and files of Gemma 4 have a wrong one.
    let without = header("gemma3").with("tokenizer.ggml.add_bos_token", switch(false));
    let first = |file: Written| {
        file.open().expect("the checkpoint opens").prompts().expect("a tokenizer").tokenizer().encode("a", true)
    };
    assert_eq!(first(without.clone()).expect("ids"), [6]);
    assert_eq!(first(without.with("tokenizer.ggml.model", word("gemma4"))).expect("ids"), [1, 6]);
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
        ("gemma4_moe", "rope_freqs.weight", "rope_fleas.weight", "rope_freqs.weight is absent"),
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
