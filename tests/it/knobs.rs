//! Settings under the names of other engines: valid settings are applied when a model is loaded,
//! and impossible settings are refused before the load.

use std::process::{Command, Output};

use bursar::{Bytes, Class, LoadOptions, TokenScore, knobs::Knobs};
use serde_json::{Value, json};

use crate::stage::{Folder, Stage, about, answer, ask, small, story};

fn options(settings: Value) -> LoadOptions {
    let knobs: Knobs = serde_json::from_value(settings).expect("all knobs are known");
    knobs.over(LoadOptions { kv_tokens: None, ..small() }).expect("the knobs agree")
}

#[test]
fn a_fraction_of_the_device_bounds_all_bytes_of_bursar() {
    story(async {
        // The device has 64 MiB, of which 4 MiB are the canary.
        for (share, most) in [(0.5, Bytes::mib(32)), (0.75, Bytes::mib(48)), (1.0, Bytes::mib(60))] {
            let stage = Stage::set(options(json!({ "gpu_memory_utilization": share }))).await;
            let ledger = stage.snapshot().await;
            let ours = ledger.granted + ledger.overhead;
            assert!(ours <= most && ours + Bytes::mib(1) > most, "{share} of the device: {ours} of {most}\n{ledger}");
            assert!(!answer(&stage.model, about(1)).await.is_empty());
            stage.runtime.shutdown().await;
        }
    });
}

#[test]
fn a_kv_cache_size_in_bytes_is_leased_exactly() {
    story(async {
        let stage = Stage::set(options(json!({ "kv_cache_memory_bytes": "9MiB", "mem_fraction": 1.0 }))).await;
        let ledger = stage.snapshot().await;
        let kv: Bytes = ledger.leases.iter().filter(|line| line.class == Class::Kv).map(|line| line.bytes).sum();
        assert!(kv <= Bytes::mib(9) && kv + Bytes::mib(1) > Bytes::mib(9), "{kv}: each layer has whole pages");
        let tokens = stage.model.serving().await.expect("the model serves").record.kv_tokens();
        assert_eq!(tokens * 2048, kv.as_usize(), "four layers of 512 bytes per token");
        assert!(!answer(&stage.model, about(1)).await.is_empty());
    });
}

#[test]
fn an_fp8_cache_holds_more_tokens_and_gives_stable_logits() {
    story(async {
        let stage = Stage::set(options(json!({ "kv_cache_memory_bytes": "9MiB", "kv_cache_dtype": "fp8" }))).await;
        let serving = stage.model.serving().await.expect("the model serves");
        let ledger = stage.snapshot().await;
        let kv: Bytes = ledger.leases.iter().filter(|line| line.class == Class::Kv).map(|line| line.bytes).sum();
        assert_eq!(serving.record.kv_tokens() * 512, kv.as_usize(), "four layers of 128 bytes per token");
        let chat = || about(1).max_tokens(12).log_probabilities(3);
        let first = ask(&stage.model, chat()).await.expect("the model answers");
        let again = ask(&stage.model, chat()).await.expect("the model answers");
        assert_eq!((first.cached_tokens, again.text == first.text), (0, true));
        assert!(again.cached_tokens >= 16, "the prefix is found in the cache");
        let near = |(a, b): (&TokenScore, &TokenScore)| (a.token.log_probability - b.token.log_probability).abs();
        let worst = first.tokens.iter().zip(&again.tokens).map(near).fold(0.0, f32::max);
        assert!(!first.tokens.is_empty() && worst < 1e-3, "{worst}");
    });
}

#[test]
fn limits_by_alias_names_are_stressed_and_enforced() {
    story(async {
        let settings = json!({
            "max_model_len": 200, "running_max_req_size": 3, "batch_max_tokens": 40,
            "limit_mm_per_prompt": { "image": 1 }, "mm_processor_kwargs": { "max_pixels": 12_544 },
            "max_total_token_num": 1600,
        });
        let stage = Stage::set(options(settings)).await;
        let serving = stage.model.serving().await.expect("the model serves");
        let (envelope, record) = (&serving.context.envelope, &serving.record);
        assert_eq!((envelope.context_tokens, envelope.pictures, envelope.picture_patches), (200, 1, 64));
        assert_eq!((record.sequences, record.step_tokens, record.kv_tokens()), (3, 40, 1600));
        assert!(!answer(&stage.model, about(1)).await.is_empty());
    });
}

fn chat(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bursar"));
    command.args(["chat", "--json", "--device", "host", "--temperature", "0", "--max-tokens", "2"]);
    command.args(["--profile-cache", "none"]);
    command.args(arguments).arg("Who are you?").output().expect("the binary is there")
}

#[test]
fn flags_work_by_any_name_and_contradictions_are_reported() {
    let folder = Folder::empty();
    let file = folder.path().join("knobs.json");
    std::fs::write(&file, json!({ "max_model_len": 256, "canary": "1MiB" }).to_string()).expect("the file is written");
    let file = file.display().to_string();
    let output =
        chat(&["--knobs", &file, "--max-num-seqs=2", "--step_tokens", "64", "--mem-fraction", "0.5", "--full-stress"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    for (arguments, expected) in [
        (&["--max-num-seqs", "4", "--sequences", "8"][..], "both set --sequences"),
        (&["--swap-space", "-2"], "--swap-space is -2"),
        (&["--full-stress=perhaps"], "--full-stress is perhaps"),
        (&["--knobs", &file, "--context-tokens", "128"], "--max-model-len is 256"),
        (&["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
        (&["--limit-mm-per-prompt", "{"], "--limit-mm-per-prompt"),
        (&["--mm-processor-kwargs", r#"{"max_pixel": 3}"#], "max_pixel"),
    ] {
        let output = chat(arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let error: Value = serde_json::from_slice(&output.stdout).expect("one event");
        assert!(error["error"].as_str().is_some_and(|error| error.contains(expected)), "{error}");
        assert!(error["hint"].as_str().is_some_and(|hint| !hint.is_empty()), "{error}");
    }
    let output = chat(&["--max-num-seq", "4"]);
    assert_eq!(output.status.code(), Some(2), "clap refuses the unknown flag");
    assert!(String::from_utf8_lossy(&output.stderr).contains("--max-num-seqs"), "the message names the nearest flag");
}
