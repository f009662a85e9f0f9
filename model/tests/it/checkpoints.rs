//! Checkpoints: intact checkpoints, and downloads that are damaged in every way.

use std::path::{Path, PathBuf};

use bursar_budgets::Hint;
use bursar_model::checkpoint::{Checkpoint, CheckpointSource, EmbeddedFile, TensorType};
use bursar_model::error::CheckpointError;

use crate::common::golden;

/// A copy of a golden checkpoint that a test may damage, removed at the end.
struct Copy(PathBuf);

impl Copy {
    fn of(checkpoint: &str, story: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("bursar-{}-{story}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for entry in std::fs::read_dir(golden(checkpoint)).expect("the checkpoint").flatten() {
            if entry.path().is_file() {
                std::fs::copy(entry.path(), folder.join(entry.file_name())).expect("a copy");
            }
        }
        Copy(folder)
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(CheckpointSource::Folder(self.0.clone()))
    }

    fn remove(&self, file: &str) {
        std::fs::remove_file(self.0.join(file)).expect("the file was there");
    }

    fn write(&self, file: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(file), content).expect("the file can be written");
    }

    fn read(&self, file: &str) -> Vec<u8> {
        std::fs::read(self.0.join(file)).expect("the file can be read")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn shard(number: usize) -> String {
    format!("model-{number:05}-of-00002.safetensors")
}

#[test]
fn a_sharded_vision_checkpoint_opens_with_all_its_parts() {
    let checkpoint = Checkpoint::open(CheckpointSource::Folder(golden("qwen2_5_vl"))).expect("the checkpoint opens");
    assert_eq!(Some("qwen2_5_vl"), checkpoint.model_type());
    assert_eq!(vec!["Qwen2_5_VLForConditionalGeneration"], checkpoint.architectures().collect::<Vec<_>>());
    assert!(!checkpoint.generation.eos_ids.is_empty());
    assert!(checkpoint.image_processor.is_some());
    assert!(checkpoint.template.sources().templates.contains_key("default"));
    assert_eq!(2, checkpoint.tensors.shards().len());
    let names: Vec<_> = checkpoint.tensors.names().collect();
    assert!(names.is_sorted() && names.len() > 40);
    for name in names {
        let tensor = checkpoint.tensor(name).expect("a tensor");
        assert_eq!(TensorType::BF16, tensor.dtype);
        assert_eq!(tensor.shape.iter().product::<usize>() * 2, tensor.bytes.len(), "{name}");
    }
}

#[test]
fn tensors_have_the_bytes_that_the_safetensors_crate_reads() {
    for (folder, file) in [("qwen2", "model.safetensors".into()), ("qwen2_5_vl", shard(2))] {
        let checkpoint = Checkpoint::open(CheckpointSource::Folder(golden(folder))).expect("the checkpoint opens");
        let content = std::fs::read(golden(folder).join(file)).expect("a shard");
        let reference = safetensors::SafeTensors::deserialize(&content).expect("safetensors");
        assert!(!reference.is_empty());
        for (name, view) in reference.iter() {
            let tensor = checkpoint.tensor(name).expect("a tensor");
            assert_eq!((view.shape(), view.data()), (tensor.shape, tensor.bytes), "{name}");
        }
    }
}

#[test]
fn an_embedded_checkpoint_is_the_same_as_a_folder() {
    let folder = Checkpoint::open(CheckpointSource::Folder(golden("qwen2"))).expect("the checkpoint opens");
    // Leaked once per test run, because embedded files live as long as the program.
    let files: Vec<(&'static str, EmbeddedFile)> = std::fs::read_dir(golden("qwen2"))
        .expect("the checkpoint")
        .flatten()
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name: &'static str = entry.file_name().to_string_lossy().into_owned().leak();
            (name, EmbeddedFile::Plain(std::fs::read(entry.path()).expect("a file").leak()))
        })
        .collect();
    let embedded = Checkpoint::open(CheckpointSource::Embedded(files.leak())).expect("the checkpoint opens");
    assert_eq!(folder.fingerprint(), embedded.fingerprint());
    assert!(folder.tensors.names().eq(embedded.tensors.names()));
    for name in folder.tensors.names() {
        assert_eq!(folder.tensor(name).expect("a tensor").bytes, embedded.tensor(name).expect("a tensor").bytes);
    }
    let error = Checkpoint::open(CheckpointSource::Embedded(&[])).expect_err("the embedded list is empty");
    assert_eq!("the checkpoint at (embedded) has no config.json", error.to_string());
}

#[test]
fn a_missing_file_is_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let copy = Copy::of("qwen2", &format!("missing-{file}"));
        copy.remove(file);
        let error = copy.open().expect_err("a file is missing");
        assert!(matches!(&error, CheckpointError::MissingFile { file: named, .. } if named == file), "{error}");
    }
    let copy = Copy::of("qwen2_5_vl", "missing-shard");
    copy.remove(&shard(2));
    let error = copy.open().expect_err("a shard is missing");
    assert!(matches!(&error, CheckpointError::MissingShard { shards: 2, .. }), "{error}");
    assert_eq!(format!("download {} into the same folder", shard(2)), error.hint());
}

#[test]
fn weights_are_found_without_standard_names_or_an_index() {
    let names = |copy: &Copy| -> Vec<String> {
        let checkpoint = copy.open().expect("the checkpoint opens");
        checkpoint.tensors.names().map(str::to_owned).collect()
    };
    let whole = Copy::of("qwen2", "whole-beside-index");
    let expected = names(&whole);
    whole.write("model.safetensors.index.json", r#"{"weight_map": {"gone": "model-00001-of-00009.safetensors"}}"#);
    assert_eq!(names(&whole), expected, "names come from the file that exists, not from the stale index");
    whole.remove("model.safetensors.index.json");
    std::fs::rename(whole.0.join("model.safetensors"), whole.0.join("qwen2.bf16.safetensors"))
        .expect("the file exists");
    whole.write("adapter_model.safetensors", "none");
    assert_eq!(names(&whole), expected, "the only file is read");
    whole.write("other.safetensors", whole.read("qwen2.bf16.safetensors"));
    let two = whole.open().expect_err("two files without an index are ambiguous");
    assert!(matches!(two, CheckpointError::MissingFile { .. }), "{two}");

    let shards = Copy::of("qwen2_5_vl", "shards-without-index");
    let expected = names(&shards);
    shards.remove("model.safetensors.index.json");
    assert_eq!(names(&shards), expected);
    shards.remove(&shard(1));
    let error = shards.open().expect_err("one shard is missing");
    assert!(matches!(&error, CheckpointError::MissingShard { shard: lacks, shards: 2, .. } if *lacks == shard(1)));
    shards.write(&shard(1), shards.read(&shard(2)));
    let twice = shards.open().expect_err("each tensor is in two files");
    assert!(matches!(twice, CheckpointError::Inconsistent { .. }), "{twice}");
}

#[test]
fn an_adapter_is_refused_with_its_base_model() {
    let copy = Copy::of("qwen2", "adapter");
    copy.remove("config.json");
    copy.write("adapter_config.json", r#"{"peft_type": "LORA", "base_model_name_or_path": "org/base"}"#);
    let error = copy.open().expect_err("an adapter is not a model");
    assert!(error.to_string().ends_with("is an adapter of org/base, not a model"), "{error}");
    assert_eq!(error.hint(), "merge it into org/base (peft's `merge_and_unload`) and load the merged folder");
    copy.write("adapter_config.json", "{}");
    assert!(copy.open().expect_err("an empty adapter is not a model").hint().contains("its base model"));
}

#[test]
fn optional_checkpoint_files_may_be_missing() {
    let copy = Copy::of("qwen2_5_vl", "optional");
    for file in ["preprocessor_config.json", "generation_config.json", "chat_template.json"] {
        copy.remove(file);
    }
    let checkpoint = copy.open().expect("the checkpoint opens");
    assert!(checkpoint.image_processor.is_none());
    let own = checkpoint.config["eos_token_id"].as_u64().map(|id| id as u32);
    assert_eq!(own.into_iter().collect::<Vec<_>>(), checkpoint.generation.eos_ids, "end tokens come from config.json");
}

#[test]
fn damaged_headers_and_files_are_reported_by_name() {
    let copy = Copy::of("qwen2", "damage");
    let good = copy.read("model.safetensors");
    let huge = u64::MAX.to_le_bytes();
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[0; 16]].concat();
    let bad: [(&str, Vec<u8>); 8] = [
        ("empty", Vec::new()),
        ("cut off", good[..good.len() - 1].to_vec()),
        ("cut in the header", good[..100].to_vec()),
        ("a length beyond everything", [&huge[..], &good[8..]].concat()),
        ("no JSON", header("hello")),
        ("offsets beyond the file", header(r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,17]}}"#)),
        (
            "a shape that overflows",
            header(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,16]}}"#),
        ),
        ("a hole", header(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#)),
    ];
    for (story, content) in bad {
        copy.write("model.safetensors", content);
        let error = copy.open().expect_err(story);
        let named = matches!(&error, CheckpointError::Header { file, .. } | CheckpointError::Unreadable { file, .. }
            if file == "model.safetensors");
        assert!(named, "{story}: {error}");
    }
    copy.write("model.safetensors", good);
    copy.write("config.json", "[]");
    assert!(matches!(copy.open(), Err(CheckpointError::Malformed { .. })));
    copy.write("config.json", "{}");
    assert_eq!(None, copy.open().expect("an empty config opens, because families check it").model_type());
    copy.write("tokenizer.json", "{}");
    let prompts = copy.open().expect("an invalid tokenizer is not parsed on opening").prompts();
    assert!(matches!(prompts, Err(CheckpointError::Text(_))));
}

#[test]
fn an_index_with_outside_paths_or_wrong_entries_is_refused() {
    let copy = Copy::of("qwen2_5_vl", "index");
    let file = "model.safetensors.index.json";
    let good = String::from_utf8(copy.read(file)).expect("UTF-8");
    for name in ["../../etc/passwd", "/etc/passwd", ".hidden", "c:x", ""] {
        copy.write(file, good.replace(&shard(1), name));
        let error = copy.open().expect_err("the index is refused");
        assert!(matches!(error, CheckpointError::ShardName { .. }), "{name}: {error}");
    }
    copy.write(file, good.replace("\"weight_map\": {", &format!("\"weight_map\": {{\"ghost\": \"{}\",", shard(1))));
    let error = copy.open().expect_err("the index names a tensor that no file has");
    assert!(matches!(&error, CheckpointError::Inconsistent { tensor, .. } if tensor == "ghost"), "{error}");
    copy.write(file, good.replace(&shard(1), &shard(2)));
    assert!(matches!(copy.open(), Err(CheckpointError::Inconsistent { .. })));
    copy.write(file, "{}");
    assert!(matches!(copy.open(), Err(CheckpointError::Malformed { .. })));
}

#[test]
fn a_missing_tensor_error_lists_the_nearest_names() {
    let checkpoint = Checkpoint::open(CheckpointSource::Folder(golden("qwen2"))).expect("the checkpoint opens");
    let error =
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weights").expect_err("the tensor name has a typing error");
    let hint = error.hint();
    assert!(
        hint.starts_with("check the checkpoint's release; the nearest names are model.layers.0.self_attn."),
        "{hint}"
    );
    assert!(hint.contains("model.layers.0.self_attn.q_proj.weight"), "{hint}");
}

#[test]
fn unsupported_tensor_types_are_refused_on_access() {
    let copy = Copy::of("qwen2", "types");
    let json = r#"{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
    copy.write("model.safetensors", [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &[7; 16]].concat());
    let checkpoint = copy.open().expect("the header is valid");
    assert_eq!(&[7; 8], checkpoint.tensor("b").expect("f32").bytes);
    let error = checkpoint.tensor("a").expect_err("i64");
    assert_eq!("the tensor a has the type I64; supported: BF16, F16, F32 and F8_E4M3", error.to_string());
}

#[test]
fn the_fingerprint_depends_on_content_but_not_the_path() {
    let print = |folder: &Path| {
        Checkpoint::open(CheckpointSource::Folder(folder.to_owned())).expect("the checkpoint opens").fingerprint()
    };
    let copy = Copy::of("qwen2_5_vl", "fingerprint");
    let before = print(&golden("qwen2_5_vl"));
    assert_eq!(before, print(&copy.0));
    let template = copy.read("chat_template.json");
    for file in ["generation_config.json", "preprocessor_config.json", "config.json"] {
        let good = copy.read(file);
        let mut changed = good.clone();
        changed.push(b'\n');
        copy.write(file, changed);
        assert_ne!(before, print(&copy.0), "{file}");
        copy.write(file, good);
    }
    assert_eq!(before, print(&copy.0));
    copy.remove("chat_template.json");
    assert_ne!(before, print(&copy.0));
    copy.write("chat_template.json", template);
    assert_eq!(64, before.to_string().len());
}

#[test]
fn configuration_and_weights_have_separate_fingerprints() {
    let print = |folder: &Path| {
        let checkpoint = Checkpoint::open(CheckpointSource::Folder(folder.to_owned())).expect("the checkpoint opens");
        (checkpoint.config_fingerprint(), checkpoint.weights_fingerprint())
    };
    let copy = Copy::of("qwen2_5_vl", "two-fingerprints");
    let (config, weights) = print(&copy.0);
    for file in ["generation_config.json", "preprocessor_config.json", "chat_template.json"] {
        let mut changed = copy.read(file);
        changed.push(b'\n');
        copy.write(file, changed);
        assert_eq!(print(&copy.0), (config, weights), "the profile fingerprint does not depend on the bytes of {file}");
    }
    let mut changed = copy.read("config.json");
    changed.push(b'\n');
    copy.write("config.json", changed);
    let after = print(&copy.0);
    assert!(after.0 != config && after.1 == weights);
    let shard_file = shard(1);
    let mut shard = copy.read(&shard_file);
    let header_bytes = u64::from_le_bytes(shard[..8].try_into().expect("eight bytes"));
    // Spaces are allowed after a header. The tensors move by the same number of bytes.
    shard.splice(8 + header_bytes as usize..8 + header_bytes as usize, [b' '; 8]);
    shard[..8].copy_from_slice(&(header_bytes + 8).to_le_bytes());
    copy.write(&shard_file, shard);
    assert!(print(&copy.0).1 != weights, "another header changes the weights' fingerprint");
}
