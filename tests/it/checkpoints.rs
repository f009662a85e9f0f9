//! Checkpoints with every kind of damage. Each is refused with a typed error and a hint, takes no
//! memory, and leaves the runtime working. Damage that shows only when a chat is rendered fails
//! only the chat.

use bursar_budgets::testing::HostControl;
use std::{fs, os::unix::fs::symlink, path::PathBuf};

use bursar::{ChatError, Hint, ModelSource, Runtime, RuntimeError, StartError};
use bursar_model::{
    LoadError,
    error::{CheckpointError, TextError},
    weights::WeightError,
};
use serde_json::{Value, json};

use crate::stage::{Folder, answer, ask, device, eventually, runtime_on, small, story, text};

const WEIGHTS: &str = "model.safetensors";
const SHARD: &str = "model-00001-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A copy of a golden checkpoint that a test may damage.
pub struct Copy(pub Folder);

impl Copy {
    pub fn of(checkpoint: &str) -> Copy {
        let folder = Folder::empty();
        let golden = bursar_golden::path(checkpoint);
        for entry in fs::read_dir(golden).expect("the golden checkpoint can be listed").flatten() {
            if entry.path().is_file() {
                fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("the file is copied");
            }
        }
        Copy(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    pub fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.path(file)).expect("a file")
    }

    pub fn write(&self, file: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(file), content).expect("the file is written");
    }

    pub fn remove(&self, file: &str) {
        fs::remove_file(self.path(file)).expect("the file was there");
    }

    /// Changes one field of a JSON file.
    pub fn set(&self, file: &str, pointer: &[&str], value: Value) {
        let mut json: Value = serde_json::from_slice(&self.read(file)).expect("JSON");
        let (last, outer) = pointer.split_last().expect("a field");
        outer.iter().fold(&mut json, |json, name| &mut json[*name])[*last] = value;
        self.write(file, json.to_string());
    }

    /// Changes the header of a safetensors file and keeps its data.
    fn edit_header(&self, file: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>, usize)) {
        let bytes = self.read(file);
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header: Value = serde_json::from_slice(header).expect("a header");
        change(header.as_object_mut().expect("an object"), data.len());
        let header = header.to_string();
        self.write(file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat());
    }
}

fn header(json: &str, data: usize) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; data]].concat()
}

/// A kind of damage: its name, the checkpoint, the change, a check of the error, and
/// words of the message.
type Row = (&'static str, &'static str, fn(&Copy), fn(&StartError) -> bool, &'static [&'static str]);

const TEXT: &str = "qwen2";
const VISION: &str = "qwen2_5_vl";
const NORM: &str = "model.norm.weight";

fn is_malformed(error: &StartError) -> bool {
    matches!(error, StartError::Checkpoint(CheckpointError::Malformed { .. }))
}

fn is_header(error: &StartError) -> bool {
    matches!(error, StartError::Checkpoint(CheckpointError::Header { .. }))
}

fn is_config(error: &StartError) -> bool {
    matches!(error, StartError::Model(LoadError::Config(_) | LoadError::Quantization(_)))
}

fn is_missing(error: &StartError) -> bool {
    matches!(error, StartError::Checkpoint(CheckpointError::MissingFile { .. } | CheckpointError::MissingShard { .. }))
}

fn is_unreadable(error: &StartError) -> bool {
    matches!(error, StartError::Checkpoint(CheckpointError::Unreadable { .. }))
}

fn is_sampling(error: &StartError) -> bool {
    matches!(error, StartError::Checkpoint(CheckpointError::Sampling(_)))
}

fn is_template(error: &StartError) -> bool {
    matches!(
        error,
        StartError::Checkpoint(CheckpointError::Text(
            TextError::TemplateSource { .. } | TextError::TemplateShape { .. } | TextError::TemplateSourceBytes { .. }
        ))
    )
}

fn files() -> Vec<Row> {
    vec![
        ("no config", TEXT, |c| c.remove("config.json"), is_missing, &["config.json"]),
        ("no tokenizer", TEXT, |c| c.remove("tokenizer.json"), is_missing, &["tokenizer.json"]),
        ("no weights", TEXT, |c| c.remove(WEIGHTS), is_missing, &[WEIGHTS]),
        ("a shard is missing", VISION, |c| c.remove(SHARD), is_missing, &[SHARD, "2"]),
        ("an empty config", TEXT, |c| c.write("config.json", ""), is_malformed, &["config.json"]),
        ("a config that is a list", TEXT, |c| c.write("config.json", "[]"), is_malformed, &["config.json"]),
        (
            "a config of a million brackets",
            TEXT,
            |c| c.write("config.json", "[".repeat(1_000_000)),
            is_malformed,
            &["config.json"],
        ),
        (
            "an empty tokenizer",
            TEXT,
            |c| c.write("tokenizer.json", ""),
            |e| matches!(e, StartError::Checkpoint(CheckpointError::Text(TextError::Tokenizer { .. }))),
            &["tokenizer"],
        ),
        ("an empty file of weights", TEXT, |c| c.write(WEIGHTS, ""), |e| is_header(e) || is_unreadable(e), &[WEIGHTS]),
        ("an empty index", VISION, |c| c.write(INDEX, ""), is_malformed, &[INDEX]),
        (
            "an index that leaves the folder",
            VISION,
            |c| c.set(INDEX, &["weight_map", NORM], json!("../../etc/passwd")),
            |e| matches!(e, StartError::Checkpoint(CheckpointError::ShardName { .. })),
            &["../../etc/passwd"],
        ),
        (
            "an index that names a missing tensor",
            VISION,
            |c| c.set(INDEX, &["weight_map", "ghost"], json!(SHARD)),
            |e| matches!(e, StartError::Checkpoint(CheckpointError::Inconsistent { .. })),
            &["ghost"],
        ),
        (
            "two shards with one tensor",
            VISION,
            |c| {
                c.edit_header(SHARD, |header, data| {
                    let second = json!({"dtype": "BF16", "shape": [0], "data_offsets": [data, data]});
                    header.insert("model.embed_tokens.weight".to_owned(), second);
                })
            },
            |e| matches!(e, StartError::Checkpoint(CheckpointError::Inconsistent { .. })),
            &["model.embed_tokens.weight"],
        ),
        (
            "a link to itself",
            TEXT,
            |c| {
                c.remove("config.json");
                symlink("config.json", c.path("config.json")).expect("a link");
            },
            is_unreadable,
            &["config.json"],
        ),
        (
            "weights that are a cycle of links",
            TEXT,
            |c| {
                c.remove(WEIGHTS);
                symlink("a", c.path(WEIGHTS)).expect("a link");
                symlink(WEIGHTS, c.path("a")).expect("a link");
            },
            is_unreadable,
            &[WEIGHTS],
        ),
        (
            "a folder in place of a file",
            TEXT,
            |c| {
                c.remove(WEIGHTS);
                fs::create_dir(c.path(WEIGHTS)).expect("a folder");
            },
            is_unreadable,
            &[WEIGHTS],
        ),
        (
            "a file larger than any vocabulary",
            TEXT,
            |c| {
                let file = fs::File::create(c.path("tokenizer.json")).expect("a file");
                file.set_len(1 << 40).expect("a sparse file");
            },
            |e| matches!(e, StartError::Checkpoint(CheckpointError::TooLarge { bytes: 0x100_0000_0000, .. })),
            &["1099511627776", "134217728"],
        ),
    ]
}

fn tensors() -> Vec<Row> {
    vec![
        ("weights cut short", TEXT, |c| c.write(WEIGHTS, &c.read(WEIGHTS)[..400_000]), is_header, &[WEIGHTS]),
        ("a header cut short", TEXT, |c| c.write(WEIGHTS, &c.read(WEIGHTS)[..100]), is_header, &[WEIGHTS]),
        (
            "a header longer than the file",
            TEXT,
            |c| c.write(WEIGHTS, [&u64::MAX.to_le_bytes()[..], &c.read(WEIGHTS)[8..]].concat()),
            is_header,
            &[WEIGHTS],
        ),
        (
            "tensors that overlap",
            TEXT,
            |c| {
                c.write(WEIGHTS, header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#, 12))
            },
            is_header,
            &[WEIGHTS],
        ),
        (
            "a shape whose size overflows",
            TEXT,
            |c| {
                c.write(
                    WEIGHTS,
                    header(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,16]}}"#, 16),
                )
            },
            is_header,
            &[WEIGHTS],
        ),
        (
            "a tensor beyond the end of the file",
            TEXT,
            |c| c.write(WEIGHTS, header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#, 4)),
            is_header,
            &[WEIGHTS],
        ),
        (
            "a missing tensor",
            TEXT,
            |c| {
                c.edit_header(WEIGHTS, |header, _| {
                    let norm = header.remove(NORM).expect("the norm was there");
                    header.insert("model.nrom.weight".to_owned(), norm);
                })
            },
            |e| {
                matches!(
                    e,
                    StartError::Model(LoadError::Weights(WeightError::Checkpoint(
                        CheckpointError::MissingTensor { .. }
                    )))
                )
            },
            &[NORM],
        ),
        (
            "an extra tensor",
            TEXT,
            |c| {
                c.edit_header(WEIGHTS, |header, data| {
                    let extra = json!({"dtype": "F16", "shape": [0], "data_offsets": [data, data]});
                    header.insert("model.adapter.weight".to_owned(), extra);
                })
            },
            |e| matches!(e, StartError::Model(LoadError::Weights(WeightError::Extra { count: 1, .. }))),
            &["model.adapter.weight", "1 tensors"],
        ),
        (
            "a tensor of another shape",
            TEXT,
            |c| c.set("config.json", &["intermediate_size"], json!(7)),
            |e| matches!(e, StartError::Model(LoadError::Weights(WeightError::Shape { .. }))),
            &["7"],
        ),
        (
            "a tensor of integers",
            TEXT,
            |c| c.edit_header(WEIGHTS, |header, _| header[NORM]["dtype"] = json!("I16")),
            |e| {
                matches!(
                    e,
                    StartError::Model(LoadError::Weights(WeightError::Checkpoint(CheckpointError::TensorType { .. })))
                )
            },
            &[NORM, "I16", "BF16"],
        ),
    ]
}

fn settings() -> Vec<Row> {
    vec![
        (
            "an unknown architecture",
            TEXT,
            |c| c.set("config.json", &["architectures"], json!(["FalconForCausalLM"])),
            |e| matches!(e, StartError::Model(LoadError::Architecture(_))),
            &["FalconForCausalLM", "Qwen2, ", "}ForCausalLM"],
        ),
        ("no layers", TEXT, |c| c.set("config.json", &["num_hidden_layers"], json!(0)), is_config, &["0", "4096"]),
        (
            "a width above the limit",
            TEXT,
            |c| c.set("config.json", &["hidden_size"], json!(u64::MAX)),
            is_config,
            &["18446744073709551615", "1048576"],
        ),
        ("a negative width", TEXT, |c| c.set("config.json", &["hidden_size"], json!(-48)), is_config, &["-48"]),
        (
            "a width that is a string",
            TEXT,
            |c| c.set("config.json", &["hidden_size"], json!("wide")),
            is_config,
            &["wide"],
        ),
        (
            "positions of another family",
            VISION,
            |c| c.set("config.json", &["rope_scaling", "mrope_interleaved"], json!(true)),
            is_config,
            &["rope_scaling.mrope_interleaved is true"],
        ),
        (
            "layers of another family",
            TEXT,
            |c| c.set("config.json", &["layer_types"], json!(["linear_attention", "full_attention"])),
            is_config,
            &["layer_types[0]", "linear_attention"],
        ),
        (
            "weights in an unsupported quantization",
            TEXT,
            |c| c.set("config.json", &["quantization_config"], json!({"quant_method": "hqq", "bits": 4})),
            is_config,
            &["quantization_config", "hqq"],
        ),
        (
            "a context of 0 tokens",
            TEXT,
            |c| c.set("config.json", &["max_position_embeddings"], json!(0)),
            |e| matches!(e, StartError::Limit(_) | StartError::Model(_)),
            &["0"],
        ),
        (
            "a vision tower of a million layers",
            VISION,
            |c| c.set("config.json", &["vision_config", "depth"], json!(1_000_000)),
            is_config,
            &["1000000", "4096"],
        ),
        (
            "a window of 0 pixels",
            VISION,
            |c| c.set("config.json", &["vision_config", "window_size"], json!(0)),
            is_config,
            &["window"],
        ),
        (
            "a token beyond the vocabulary",
            VISION,
            |c| c.set("config.json", &["image_token_id"], json!(4_000_000_000_u32)),
            is_config,
            &["4000000000", "384"],
        ),
        (
            "a processor of another model",
            VISION,
            |c| c.set("preprocessor_config.json", &["patch_size"], json!(16)),
            is_config,
            &["14", "16"],
        ),
        (
            "a processor without a size",
            VISION,
            |c| c.set("preprocessor_config.json", &["patch_size"], json!(0)),
            |e| matches!(e, StartError::Checkpoint(CheckpointError::Processor(_))),
            &["patch_size", "0"],
        ),
        ("no processor", VISION, |c| c.remove("preprocessor_config.json"), is_config, &["preprocessor_config.json"]),
        (
            "a negative temperature",
            TEXT,
            |c| c.set("generation_config.json", &["temperature"], json!(-1.0)),
            is_sampling,
            &["temperature", "-1"],
        ),
        ("a top_p of 0", TEXT, |c| c.set("generation_config.json", &["top_p"], json!(0)), is_sampling, &["top_p", "0"]),
        ("a negative top_k", TEXT, |c| c.set("generation_config.json", &["top_k"], json!(-5)), is_sampling, &["top_k"]),
        (
            "a penalty that is NaN",
            TEXT,
            |c| {
                let file = String::from_utf8(c.read("generation_config.json")).expect("UTF-8");
                c.write("generation_config.json", file.replace("1.1", "NaN"));
            },
            is_sampling,
            &["generation_config.json"],
        ),
        (
            "a penalty of 0",
            TEXT,
            |c| c.set("generation_config.json", &["repetition_penalty"], json!(0)),
            is_sampling,
            &["repetition_penalty", "0"],
        ),
        (
            "a broken template",
            VISION,
            |c| c.set("chat_template.json", &["chat_template"], json!("{% for m in messages %}")),
            is_template,
            &["does not compile"],
        ),
        (
            "a template that is a number",
            VISION,
            |c| c.set("chat_template.json", &["chat_template"], json!(5)),
            is_template,
            &["chat_template.json"],
        ),
        (
            "a huge template",
            VISION,
            |c| c.write("chat_template.jinja", "so ".repeat(1 << 20)),
            is_template,
            &["3145728", "262144"],
        ),
        (
            "a template of another encoding",
            VISION,
            |c| c.write("chat_template.jinja", [0xff, 0xfe, 0x00]),
            is_template,
            &["chat_template.jinja"],
        ),
    ]
}

async fn ledger(runtime: &Runtime) -> bursar::Snapshot {
    runtime.budget().snapshot().await.expect("the budget answers")
}

/// Runs a table. Afterward the same runtime loads the undamaged checkpoint,
/// and that model answers.
fn each_is_refused(rows: Vec<Row>) {
    story(async {
        let device = device();
        let runtime = runtime_on(&device).await;
        let before = ledger(&runtime).await;
        for (name, checkpoint, damage, says, words) in rows {
            let copy = Copy::of(checkpoint);
            damage(&copy);
            let error = runtime.load_with(ModelSource::folder(copy.0.path()), small(), |_| {}).await;
            let error = error.map(drop).expect_err(name);
            let RuntimeError::Start(start) = &error else { panic!("{name}: {error:?}") };
            assert!(says(start), "{name}: {start:?}");
            for word in words {
                assert!(error.to_string().contains(word), "{name} does not say '{word}': {error}");
            }
            assert!(error.to_string().len() < 600, "{name}: the error is too long: {error}");
            assert!(!error.hint().is_empty(), "{name} has no hint");
            let after = ledger(&runtime).await;
            assert_eq!((after.granted, after.leases), (before.granted, before.leases.clone()), "{name}");
        }
        assert_eq!(device.counts().backs, 0, "no memory was backed for a broken checkpoint");
        let good = Copy::of(TEXT);
        let model = runtime.load_with(ModelSource::folder(good.0.path()), small(), |_| {}).await;
        let model = model.unwrap_or_else(|error| panic!("the intact checkpoint does not load: {error}"));
        answer(&model, text("Hello").max_tokens(2)).await;
        runtime.shutdown().await;
    });
}

#[test]
fn each_bad_file_is_refused_and_the_runtime_continues() {
    each_is_refused(files());
}

#[test]
fn each_bad_tensor_is_refused_and_the_runtime_continues() {
    each_is_refused(tensors());
}

#[test]
fn each_bad_setting_is_refused_and_the_runtime_continues() {
    each_is_refused(settings());
}

#[test]
fn a_file_and_an_empty_folder_are_refused_as_models() {
    story(async {
        let runtime = runtime_on(&device()).await;
        let folder = Folder::empty();
        fs::write(folder.path().join("file"), "content").expect("the file is written");
        for place in [folder.path().join("file"), folder.path().to_owned(), folder.path().join("absent")] {
            let error = runtime.load_with(ModelSource::folder(&place), small(), |_| {}).await.map(drop);
            let error = error.expect_err("there is no checkpoint");
            assert!(!error.hint().is_empty(), "{error}");
            let named =
                error.to_string().contains("config.json") || error.to_string().starts_with("there is no folder");
            assert!(named, "{error}");
        }
        assert!(ledger(&runtime).await.leases.is_empty());
        runtime.shutdown().await;
    });
}

/// Damage that shows only when a chat is rendered: the model starts, and only the chat fails.
#[test]
fn a_missing_endless_or_greedy_template_fails_only_its_chat() {
    story(async {
        let runtime = runtime_on(&device()).await;
        type Says = fn(&TextError) -> bool;
        let table: [(&str, Option<&str>, Says, &str); 5] = [
            ("missing", None, |e| matches!(e, TextError::NoTemplate), "no chat template"),
            (
                "endless",
                Some("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"),
                |e| matches!(e, TextError::TemplateSteps { .. }),
                "5000000",
            ),
            (
                "endless output",
                Some("{% for i in range(100000) %}{{ messages[0].content * 1000 }}{% endfor %}"),
                |e| matches!(e, TextError::TemplateBytes { .. }),
                "16777216",
            ),
            (
                "greedy",
                Some("{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}"),
                |e| matches!(e, TextError::TemplateMemory { .. }),
                "4194304",
            ),
            (
                "refusing",
                Some("{{ raise_exception('no') }}"),
                |e| matches!(e, TextError::TemplateRefused { .. }),
                "rejects",
            ),
        ];
        for (name, template, says, word) in table {
            let copy = Copy::of(VISION);
            copy.remove("chat_template.json");
            copy.set("tokenizer_config.json", &["chat_template"], Value::Null);
            if let Some(template) = template {
                copy.write("chat_template.jinja", template);
            }
            let model = runtime.load_with(ModelSource::folder(copy.0.path()), small(), |_| {}).await;
            let model = model.unwrap_or_else(|error| panic!("{name}: {error}"));
            let before = ledger(&runtime).await;
            let error = ask(&model, text("Hello")).await.expect_err(name);
            let ChatError::Text(source) = &error else { panic!("{name}: {error:?}") };
            assert!(says(source), "{name}: {source:?}");
            assert!(error.to_string().contains(word) && !error.hint().is_empty(), "{name}: {error}");
            eventually("the ledger is as before", async || ledger(&runtime).await == before).await;
            let names: Vec<_> = runtime.supervised().await.expect("the runtime answers").engines.into_keys().collect();
            for name in names {
                runtime.unload(name).await.expect("the model unloads");
            }
        }
        runtime.shutdown().await;
    });
}
