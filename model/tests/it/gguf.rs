//! GGUF files: three golden checkpoints written again by the Python package `gguf`, and files that
//! are damaged in every way.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use bursar_budgets::Hint;
use bursar_model::{
    Model,
    checkpoint::{BlockType, Checkpoint, Stored, TensorType, WeightQuantization},
    error::CheckpointError,
    registry,
};
use serde_json::json;

use crate::{
    bench::{Bench, Case, Random, alone, assert_recorded, assert_same_run, open},
    common::{golden_bytes, golden_json},
};

const FILES: [&str; 3] = ["llama", "qwen2", "qwen3"];

/// A file that a test may damage, removed at the end.
pub struct File(PathBuf);

impl File {
    pub fn of(bytes: &[u8]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("bursar-{}-{}.gguf", std::process::id(), NUMBER.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).expect("the file can be written");
        File(path)
    }

    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(registry::open_gguf(&self.0)?)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn recorded(name: &str) -> Vec<u8> {
    golden_bytes(&format!("gguf/{name}.gguf"))
}

/// The content of a GGUF file that a test writes field by field.
#[derive(Clone)]
pub struct Written {
    pub settings: Vec<(&'static str, Vec<u8>)>,
    tensors: Vec<(&'static str, Vec<u64>, u32, u64)>,
    data: usize,
}

pub fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn of_kind(kind: u32, value: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], value].concat()
}

pub fn number(number: u32) -> Vec<u8> {
    of_kind(4, &number.to_le_bytes())
}

pub fn float(number: f32) -> Vec<u8> {
    of_kind(6, &number.to_le_bytes())
}

pub fn switch(is_on: bool) -> Vec<u8> {
    of_kind(7, &[is_on.into()])
}

pub fn word(word: &str) -> Vec<u8> {
    of_kind(8, &text(word))
}

pub fn list(kind: u32, entries: &[Vec<u8>]) -> Vec<u8> {
    let head = [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(entries.len() as u64).to_le_bytes()].concat();
    [head, entries.concat()].concat()
}

impl Written {
    /// A complete file, except that most of its tensors are missing, because opening does not read
    /// them.
    pub fn good() -> Self {
        let settings = vec![
            ("general.architecture", word("llama")),
            ("llama.block_count", number(1)),
            ("llama.context_length", number(64)),
            ("llama.embedding_length", number(32)),
            ("llama.feed_forward_length", number(32)),
            ("llama.attention.head_count", number(2)),
            ("llama.attention.layer_norm_rms_epsilon", float(1e-5)),
            ("tokenizer.ggml.model", word("gpt2")),
            ("tokenizer.ggml.pre", word("smollm")),
            ("tokenizer.ggml.tokens", list(8, &["a", "b", "ab", "<end>", "[PAD4]"].map(text))),
            ("tokenizer.ggml.token_type", list(5, &[1i32, 1, 1, 3, 5].map(|kind| kind.to_le_bytes().to_vec()))),
            ("tokenizer.ggml.merges", list(8, &[text("a b")])),
            ("tokenizer.ggml.eos_token_id", number(3)),
        ];
        let tensors = vec![
            ("token_embd.weight", vec![32, 5], 8, 0),
            ("blk.0.attn_q.weight", vec![32, 32], 2, 192),
            ("output_norm.weight", vec![32], 0, 768),
        ];
        Written { settings, tensors, data: 768 + 128 }
    }

    pub fn with(mut self, name: &'static str, value: Vec<u8>) -> Self {
        self.settings.retain(|(known, _)| *known != name);
        self.settings.push((name, value));
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        self.settings.retain(|(known, _)| *known != name);
        self
    }

    fn tensor(mut self, at: usize, dims: &[u64], kind: u32, offset: u64) -> Self {
        let name = self.tensors[at].0;
        self.tensors[at] = (name, dims.to_vec(), kind, offset);
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.settings.len() as u64).to_le_bytes());
        for (name, value) in &self.settings {
            bytes.extend(text(name));
            bytes.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }

    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        File::of(&self.bytes()).open()
    }

    #[track_caller]
    pub fn refused(&self) -> String {
        self.open().expect_err("the file is refused").to_string()
    }
}

#[test]
fn a_gguf_file_answers_like_its_source_checkpoint() {
    for name in FILES {
        let (folder, file) = (format!("tests/golden/{name}"), File::of(&recorded(name)));
        let (one, other) = (Bench::load(&folder, 2), Bench::of(file.open().expect("the checkpoint opens"), 2));
        for case in ["short", "long"].map(|case| Case::read(&folder, &one.checkpoint, case)) {
            assert_eq!(case.prompt_ids(&other.checkpoint), case.prompt_ids(&one.checkpoint), "{name}");
            assert_recorded(&other, &case, &[], 1e-4);
            let [ours, theirs] = [&other, &one].map(|bench| alone(bench, &case, &[], &[usize::MAX]));
            // The first two files store each weight in the type that the checkpoint folder has. The
            // weights of qwen3 are widened to f32.
            let tolerance = if name == "qwen3" { 1e-6 } else { 0.0 };
            println!("{name} {}: {:.1e}", case.name, assert_same_run(name, &ours, &theirs, tolerance));
        }
    }
}

#[test]
fn a_gguf_file_is_rounded_to_fp8_like_its_source() {
    // The file has the rows of Llama's queries and keys in another order.
    for name in ["llama", "qwen2"] {
        let (folder, file) = (format!("tests/golden/{name}"), File::of(&recorded(name)));
        for quantization in WeightQuantization::ROUNDING.map(Some) {
            let [one, other] = [open(&folder), file.open().expect("the checkpoint opens")]
                .map(|checkpoint| Bench::of(checkpoint.with_quantization(quantization), 2));
            let case = Case::read(&folder, &one.checkpoint, "short");
            let [ours, theirs] = [&other, &one].map(|bench| alone(bench, &case, &[], &[usize::MAX]));
            assert_same_run(&format!("{name} {quantization:?}"), &ours, &theirs, 0.0);
        }
    }
}

#[test]
fn a_gguf_file_has_the_settings_of_its_source() {
    for name in FILES {
        let (file, folder) = (File::of(&recorded(name)), open(&format!("tests/golden/{name}")));
        let checkpoint = file.open().expect("the checkpoint opens");
        for key in
            ["architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"]
        {
            assert_eq!(checkpoint.config.get(key), folder.config.get(key), "{key} of {name}");
        }
        assert_eq!(
            checkpoint.config.get("rope_scaling"),
            folder.config.get("rope_scaling").filter(|value| !value.is_null())
        );
        let [ours, theirs] = [&checkpoint, &folder].map(|checkpoint| &checkpoint.generation.eos_ids);
        assert!(
            theirs.iter().all(|id| ours.contains(id)),
            "the GGUF file of {name} lists every end token, though it sets only one"
        );
        assert_eq!(checkpoint.template.sources().templates, folder.template.sources().templates, "{name}");
        let [ours, theirs] = [&checkpoint, &folder].map(|checkpoint| checkpoint.prompts().expect("a tokenizer"));
        assert_eq!(ours.tokenizer().vocabulary_size(), theirs.tokenizer().vocabulary_size(), "{name}");
        for text in golden_json("gguf/pieces.json")["texts"].as_array().expect("texts") {
            let ids = |prompts: &bursar_model::text::PromptEncoder| {
                prompts.tokenizer().encode(text.as_str().expect("a text"), false).expect("ids")
            };
            assert_eq!(ids(&ours), ids(&theirs), "{text} of {name}");
        }
    }
}

#[test]
fn a_gguf_fingerprint_depends_on_settings_but_not_on_weights() {
    let bytes = recorded("llama");
    let fingerprint = |bytes: &[u8]| {
        let (file, path) =
            (File::of(bytes), std::env::temp_dir().join(format!("bursar-{}-same.gguf", std::process::id())));
        std::fs::copy(&file.0, &path).expect("a copy");
        let checkpoint = File(path).open().expect("the checkpoint opens");
        (checkpoint.fingerprint(), checkpoint.config_fingerprint(), checkpoint.weights_fingerprint())
    };
    let first = fingerprint(&bytes);
    let mut other = bytes.clone();
    *other.last_mut().expect("a byte") ^= 1;
    assert_eq!(fingerprint(&other), first, "the fingerprint ignores the weights");
    let context =
        bytes.windows(20).position(|at| at == b"llama.context_length").expect("the file contains the name") + 24;
    other[context] ^= 64;
    let changed = fingerprint(&other);
    assert!(
        changed.0 != first.0 && changed.1 != first.1 && changed.2 == first.2,
        "the fingerprint depends on the settings"
    );
}

#[test]
fn a_handwritten_gguf_header_opens_with_types_and_names() {
    let checkpoint = Written::good().open().expect("the checkpoint opens");
    let embedding = checkpoint.tensor("model.embed_tokens.weight").expect("the embedding");
    assert_eq!((embedding.dtype, embedding.stored), (TensorType::F32, Stored::Blocks(BlockType::Q8_0)));
    assert_eq!((embedding.shape, embedding.bytes.len()), (&[5, 32][..], 5 * 34));
    let queries = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").expect("the queries");
    let rows: Vec<_> = (0..32).map(|row| queries.stored_row(row)).collect();
    assert_eq!(rows[..10], [0, 2, 4, 6, 8, 10, 12, 14, 1, 3], "the first halves of the rotary pairs come first");
    assert_eq!((rows[16], rows[31]), (16, 31), "each head is reordered separately");
    assert_eq!(checkpoint.generation.eos_ids, [3]);
    assert_eq!(checkpoint.config["head_dim"], json!(16));
    let named = |kind: i32| {
        let tokens = list(8, &["a", "b", "ab", "<end>", "<|eom_id|>"].map(text));
        let kinds = list(5, &[1, 1, 1, 3, kind].map(|kind: i32| kind.to_le_bytes().to_vec()));
        let file = Written::good().with("tokenizer.ggml.tokens", tokens).with("tokenizer.ggml.token_type", kinds);
        file.open().expect("the checkpoint opens").generation.eos_ids
    };
    assert_eq!(named(3), [3, 4], "an end token that the file does not set is found by its name");
    assert_eq!(named(1), [3], "a text token with the name of an end token does not end a reply");
    let prompts = checkpoint.prompts().expect("a tokenizer");
    assert_eq!(prompts.tokenizer().encode("abab<end>", false).expect("ids"), [2, 2, 3]);
    assert_eq!(prompts.tokenizer().vocabulary_size(), 4, "padding entries are not tokens");
}

#[test]
fn gguf_settings_give_rope_scaling_sampling_and_templates() {
    let good = || Written::good().with("llama.rope.scaling.factor", float(4.0));
    let scaling = |written: Written| written.open().expect("the checkpoint opens").config.get("rope_scaling").cloned();
    let linear = json!({ "rope_type": "linear", "factor": 4.0 });
    assert_eq!(scaling(good().with("llama.rope.scaling.type", word("linear"))), Some(linear.clone()));
    assert_eq!(scaling(good()), Some(linear), "a factor without a type means linear scaling, as in llama.cpp");
    assert_eq!(scaling(good().with("llama.rope.scaling.type", word("none"))), None);
    let yarn = good().with("llama.rope.scaling.type", word("yarn"));
    let yarn = scaling(yarn.with("llama.rope.scaling.original_context_length", number(32))).expect("a scaling");
    assert_eq!((&yarn["rope_type"], &yarn["original_max_position_embeddings"]), (&json!("yarn"), &json!(32)));

    let settings = good()
        .with("general.sampling.temp", float(0.5))
        .with("general.sampling.top_k", number(20))
        .with("tokenizer.ggml.eot_token_id", number(2))
        .with("tokenizer.chat_template", word("a"))
        .with("tokenizer.chat_templates", list(8, &[text("tool_use")]))
        .with("tokenizer.chat_template.tool_use", word("b"));
    let checkpoint = settings.open().expect("the checkpoint opens");
    assert_eq!((checkpoint.generation.sampling.temperature, checkpoint.generation.sampling.top_k), (0.5, 20));
    assert_eq!(checkpoint.generation.eos_ids, [3, 2]);
    let templates: Vec<_> = checkpoint.template.sources().templates.clone().into_iter().collect();
    assert_eq!(templates, [("default", "a"), ("tool_use", "b")].map(|(name, source)| (name.into(), source.into())));
    let greedy = Written::good().open().expect("the checkpoint opens").generation.sampling.temperature;
    assert_eq!(greedy, 0.0, "the default is greedy without a recommendation");
}

#[test]
fn unsupported_gguf_settings_are_refused_by_name() {
    let good = Written::good;
    let many = list(4, &[2u32, 4].map(|heads| heads.to_le_bytes().to_vec()));
    let cases = [
        (
            good().with("general.architecture", word("gemma")),
            "general.architecture is gemma; supported: qwen35, qwen35moe, qwen2, qwen3, llama",
        ),
        (good().with("general.type", word("mmproj")), "general.type is mmproj; supported: model"),
        (good().with("split.count", number(3)), "split.count is 3; supported: one file"),
        (good().with("llama.expert_count", number(8)), "llama.expert_count is 8"),
        (good().with("llama.logit_scale", float(0.5)), "llama.logit_scale is 0.5"),
        (good().with("llama.attention.causal", of_kind(7, &[0])), "llama.attention.causal is false"),
        (
            good().with("llama.attention.head_count", many),
            "llama.attention.head_count is a list of 2; supported: a whole number",
        ),
        (good().with("llama.attention.sliding_window", number(16)), "llama.attention.sliding_window is 16"),
        (
            good().with("llama.rope.dimension_count", number(8)).with("llama.attention.key_length", number(16)),
            "llama.rope.dimension_count is 8",
        ),
        (good().with("llama.attention.value_length", number(8)), "llama.attention.value_length is 8"),
        (good().with("llama.rope.scaling.type", word("longrope")), "llama.rope.scaling.type is longrope"),
        (good().with("llama.rope.scaling.attn_factor", float(1.2)), "llama.rope.scaling.attn_factor is 1.2"),
        (good().with("tokenizer.ggml.model", word("bert")), "tokenizer.ggml.model is bert; supported: gpt2, llama and"),
        (good().with("tokenizer.ggml.model", word("llama")), "tokenizer.ggml.scores is absent"),
        (
            good().with("tokenizer.ggml.pre", word("deepseek-coder")),
            "tokenizer.ggml.pre is deepseek-coder; supported: gpt-2, llama-bpe",
        ),
        (good().without("tokenizer.ggml.pre"), "tokenizer.ggml.pre is absent"),
        (good().without("llama.context_length"), "llama.context_length is absent"),
        (
            good().with("tokenizer.ggml.eos_token_id", number(5)),
            "tokenizer.ggml.eos_token_id is 5; supported: less than 5",
        ),
        (
            good().with("tokenizer.ggml.merges", list(4, &[vec![0; 4]])),
            "tokenizer.ggml.merges is a list of 1; supported: a list of texts",
        ),
    ];
    for (file, expected) in cases {
        let error = file.open().expect_err(expected);
        assert!(error.to_string().contains(expected), "{error} should say: {expected}");
        assert!(error.hint().contains("GGUF"), "{}", error.hint());
    }
    // Settings that have no effect are accepted.
    good()
        .with("llama.expert_count", number(0))
        .with("unknown.setting", word("x"))
        .open()
        .expect("the checkpoint opens");
}

#[test]
fn an_unsupported_gguf_type_is_refused_by_name_on_access() {
    let checkpoint = Written::good().tensor(1, &[32, 32], 20, 192).open().expect("the checkpoint opens");
    let error =
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").expect_err("the data type is not supported");
    assert!(
        error.to_string().starts_with("the tensor model.layers.0.self_attn.q_proj.weight has the type IQ4_NL"),
        "{error}"
    );
    assert_eq!(error.hint(), "load the model in another quantization, such as Q4_K_M or Q8_0");
    let later = Written::good().tensor(1, &[32, 32], 77, 192).open().expect("the checkpoint opens");
    let error = later.tensor("model.layers.0.self_attn.q_proj.weight").expect_err("the data type is not supported");
    assert!(error.to_string().contains("77, which is unknown"), "{error}");
}

#[test]
fn a_renamed_tensor_is_refused_with_the_missing_name() {
    let mut bytes = recorded("llama");
    let at = bytes.windows(18).position(|at| at == b"output_norm.weight").expect("the file contains the name");
    bytes[at..][..18].copy_from_slice(b"output_form.weight");
    let (file, target) = (File::of(&bytes), bursar_kernels::Target::Cpu { threads: 1 });
    let error = Model::plan(&file.open().expect("the checkpoint opens"), &target)
        .map(drop)
        .expect_err("the name of the tensor is unknown");
    assert!(error.to_string().contains("model.norm.weight"), "{error}");
}

#[test]
fn damaged_gguf_headers_are_refused_without_large_allocations() {
    let good = Written::good;
    let huge = 1u64 << 60;
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good().bytes();
        bytes[at..at + value.len()].copy_from_slice(value);
        File::of(&bytes).open().expect_err("the damaged file is refused").to_string()
    };
    let list_of = |count: u64| [&9u32.to_le_bytes()[..], &8u32.to_le_bytes(), &count.to_le_bytes()].concat();
    let name_at = good().bytes().windows(7).position(|at| at == b"general").expect("the first name");
    let cases = [
        (with(0, b"GGML"), "does not begin with GGUF"),
        (with(4, &1u32.to_le_bytes()), "its version is 1; supported: 2 and 3"),
        (with(4, &3u32.to_be_bytes()), "big-endian"),
        (with(8, &huge.to_le_bytes()), "1152921504606846976 tensors"),
        (with(16, &huge.to_le_bytes()), "1152921504606846976 settings"),
        (with(24, &huge.to_le_bytes()), "bytes should follow"),
        (with(name_at, &[0xff]), "is not UTF-8"),
        (good().with("tokenizer.ggml.merges", list_of(huge)).refused(), "bytes should follow"),
        (good().with("a", list(9, &[])).with("b", list(9, &[vec![0; 12]])).refused(), "a list of lists"),
        (good().with("a", of_kind(7, &[2])).refused(), "the boolean at byte"),
        (good().with("a", of_kind(13, &[0; 8])).refused(), "unknown type 13"),
        (good().with("general.alignment", number(0)).refused(), "general.alignment is 0"),
        (good().with("general.alignment", number(48)).refused(), "general.alignment is 48"),
        (good().with("general.alignment", word("32")).refused(), "general.alignment is 32, not a power"),
        (good().tensor(0, &[32, huge, huge], 8, 0).refused(), "reaches beyond"),
        (good().tensor(0, &[32, 0], 8, 0).refused(), "an axis of 0 elements"),
        (good().tensor(0, &[], 8, 0).refused(), "has 0 axes"),
        (good().tensor(0, &[1; 5], 0, 0).refused(), "has 5 axes"),
        (
            good().tensor(0, &[33, 5], 8, 0).refused(),
            "rows of 33 elements; expected a multiple of 32, the block size of Q8_0",
        ),
        (
            good().tensor(1, &[128, 8], 12, 192).refused(),
            "rows of 128 elements; expected a multiple of 256, the block size of Q4_K",
        ),
        (good().tensor(2, &[32], 8, 768).refused(), "is a vector of type Q8_0; only matrices may be in blocks"),
        (good().tensor(2, &[32], 0, u64::MAX - 31).refused(), "reaches beyond"),
        (good().tensor(2, &[32], 0, 769).refused(), "is at 769, not a multiple of 32"),
        (good().tensor(2, &[32], 0, 800).refused(), "reaches beyond"),
        (good().tensor(2, &[32], 0, 736).refused(), "overlap"),
        (good().tensor(1, &[32, 30], 2, 192).refused(), "do not form pairs in 2 heads"),
        (good().with("llama.attention.head_count", of_kind(10, &(1u64 << 63).to_le_bytes())).refused(), "heads"),
    ];
    for (error, expected) in cases {
        assert!(error.contains(expected), "{error} should say: {expected}");
    }
    let twice = Written { settings: [good().settings, vec![("llama.block_count", number(2))]].concat(), ..good() };
    assert!(twice.refused().contains("twice"));
}

#[test]
fn inconsistent_vocabularies_are_refused() {
    let good = Written::good;
    let kinds = list(5, &[vec![1, 0, 0, 0]]);
    assert!(good().with("tokenizer.ggml.token_type", kinds).refused().contains("5 tokens, but 1 of them"));
    let twice = list(8, &["a", "b", "a", "<end>", "[PAD4]"].map(text));
    assert!(good().with("tokenizer.ggml.tokens", twice).refused().contains("the token 2 occurs earlier"));
    let merges = list(8, &[text("a b"), text("ab")]);
    assert!(good().with("tokenizer.ggml.merges", merges).refused().contains("the merge 1 does not have two tokens"));
    let unknown = good().with("tokenizer.ggml.merges", list(8, &[text("a c")])).open().expect("the checkpoint opens");
    unknown.prompts().map(drop).expect_err("the merge names \"c\", which is not a token");
}

#[test]
fn damaged_gguf_files_never_panic() {
    for (name, files) in [("llama", 1500), ("gemma3_text", 500), ("gemma4_sharing", 500), ("gemma4_moe", 500)] {
        let (bytes, mut random, mut opened) = (recorded(name), Random::new(3), 0);
        let listing = bytes.windows(18).rposition(|at| at == b"output_norm.weight").expect("the last tensors") + 60;
        for end in (0..listing).step_by(211) {
            File::of(&bytes[..end]).open().map(drop).expect_err("the header is truncated");
        }
        File::of(&bytes[..bytes.len() - 64]).open().map(drop).expect_err("the data is truncated");
        let target = bursar_kernels::Target::Cpu { threads: 1 };
        for _ in 0..files {
            let mut damaged = bytes.clone();
            for _ in 0..1 + random.below(3) {
                damaged[random.below(listing)] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6)];
            }
            // The result may be an error or a file with other settings, but not a panic.
            if let Ok(checkpoint) = File::of(&damaged).open() {
                opened += 1;
                drop(Model::plan(&checkpoint, &target));
                drop(checkpoint.prompts());
            }
        }
        assert!((1..files).contains(&opened), "{opened} damaged files opened; expected fewer than {files}, but not 0");
    }
}

#[test]
fn a_missing_gguf_file_is_reported_by_its_path() {
    let error = registry::open_gguf("/nowhere/model.gguf".as_ref()).expect_err("the file does not exist");
    assert_eq!(error.to_string(), "there is no file /nowhere/model.gguf");
    assert_eq!(error.hint(), "check the path of the .gguf file");
}
