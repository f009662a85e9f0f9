//! Copies of the golden checkpoints that a test may change.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use bursar_budgets::Hint;
use bursar_kernels::Target;
use bursar_model::{
    LoadError, Model,
    blocks::DecoderConfig,
    checkpoint::{Checkpoint, CheckpointSource},
    registry::FamilyConfig,
    text::PromptEncoder,
};
use serde_json::{Map, Value, json};

use crate::bench::repository;

pub const QWEN2: &str = "tests/golden/qwen2";
pub const QWEN2_5_VL: &str = "tests/golden/qwen2_5_vl";
pub const QWEN2_VL: &str = "tests/golden/qwen2_vl";
pub const QWEN3_VL: &str = "tests/golden/qwen3_vl";
pub const QWEN3_MOE: &str = "tests/golden/qwen3_moe";
pub const QWEN3_VL_MOE: &str = "tests/golden/qwen3_vl_moe";
pub const GEMMA3_TEXT: &str = "tests/golden/gemma3_text";
pub const GEMMA3: &str = "tests/golden/gemma3";
pub const INTERNVL: &str = "tests/golden/internvl";
pub const INTERNVL_CHAT: &str = "tests/golden/internvl_chat";

/// A copy of a golden checkpoint, deleted on drop.
pub struct Copy(pub PathBuf);

impl Copy {
    pub fn of(folder: &str) -> Self {
        static COPIES: AtomicUsize = AtomicUsize::new(0);
        let name = format!("weights-{}-{}", std::process::id(), COPIES.fetch_add(1, Relaxed));
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&copy).expect("a temporary folder");
        for entry in fs::read_dir(repository(folder)).expect("the golden checkpoint") {
            let entry = entry.expect("an entry");
            if entry.file_type().expect("a type").is_file() {
                fs::copy(entry.path(), copy.join(entry.file_name())).expect("a copy");
            }
        }
        Copy(copy)
    }

    /// Changes a field of a JSON file. `null` removes the field.
    pub fn set(self, file: &str, pointer: &[&str], value: Value) -> Self {
        let path = self.0.join(file);
        let mut json: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        let (last, folders) = pointer.split_last().expect("a field");
        let object = folders.iter().fold(&mut json, |json, name| &mut json[*name]).as_object_mut().expect("an object");
        match value {
            Value::Null => drop(object.remove(*last)),
            value => drop(object.insert((*last).to_owned(), value)),
        }
        fs::write(path, json.to_string()).expect("the file is written");
        self
    }

    /// A copy of a checkpoint with some keys of its `config.json` changed. `null` removes a key.
    pub fn edited(folder: &str, edit: Value) -> Self {
        let edits: Map<String, Value> = serde_json::from_value(edit).expect("an object");
        edits.into_iter().fold(Copy::of(folder), |copy, (key, value)| copy.set("config.json", &[key.as_str()], value))
    }

    /// Changes a tensor's entry in a safetensors header, and renames the tensor to `name`.
    /// The data stays unchanged.
    pub fn edit_header(self, file: &str, tensor: &str, name: &str, change: impl FnOnce(&mut Value)) -> Self {
        self.rewrite(file, |header, _| {
            let mut entry = header.as_object_mut().expect("an object").remove(tensor).expect("the tensor");
            change(&mut entry);
            header[name] = entry;
        })
    }

    /// Adds an empty tensor to a safetensors header.
    pub fn add(self, file: &str, name: &str) -> Self {
        self.rewrite(file, |header, data| {
            header[name] = json!({ "dtype": "F32", "shape": [0], "data_offsets": [data.len(), data.len()] });
        })
    }

    /// Adds `name`, a copy of `tensor` whose bytes `change` may edit.
    pub fn double(self, file: &str, tensor: &str, name: &str, change: impl FnOnce(&mut [u8])) -> Self {
        self.rewrite(file, |header, data| {
            let mut entry = header[tensor].clone();
            let [start, end] = [0, 1].map(|side| entry["data_offsets"][side].as_u64().expect("a place") as usize);
            let mut bytes = data[start..end].to_vec();
            change(&mut bytes);
            entry["data_offsets"] = json!([data.len(), data.len() + bytes.len()]);
            header[name] = entry;
            data.extend(bytes);
        })
    }

    /// Renames all tensors of a safetensors file.
    pub fn rename(self, file: &str, name: impl Fn(&str) -> String) -> Self {
        self.rewrite(file, |header, _| {
            let renamed = header.as_object().expect("an object").iter().map(|(old, entry)| match old.as_str() {
                "__metadata__" => (old.clone(), entry.clone()),
                old => (name(old), entry.clone()),
            });
            *header = Value::Object(renamed.collect());
        })
    }

    /// Changes a safetensors file: its header and its data.
    pub fn rewrite(self, file: &str, change: impl FnOnce(&mut Value, &mut Vec<u8>)) -> Self {
        let path = self.0.join(file);
        let bytes = fs::read(&path).expect("a file");
        let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header: Value = serde_json::from_slice(header).expect("a header");
        let mut data = data.to_vec();
        change(&mut header, &mut data);
        let header = header.to_string();
        let parts = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data];
        fs::write(path, parts.concat()).expect("the file is written");
        self
    }

    /// Content of a JSON file.
    pub fn json(&self, file: &str) -> Value {
        serde_json::from_slice(&fs::read(self.0.join(file)).expect("a file")).expect("JSON")
    }

    pub fn write(self, file: &str, content: impl AsRef<[u8]>) -> Self {
        fs::write(self.0.join(file), content).expect("the file is written");
        self
    }

    pub fn remove(self, file: &str) -> Self {
        fs::remove_file(self.0.join(file)).expect("the file existed");
        self
    }

    pub fn open(&self) -> Checkpoint {
        Checkpoint::open(CheckpointSource::Folder(self.0.clone())).expect("the files are well formed")
    }

    /// The encoder of the checkpoint's prompts.
    pub fn prompts(&self) -> PromptEncoder {
        self.open().prompts().expect("the tokenizer is well formed")
    }

    /// The error of planning the checkpoint.
    pub fn error(&self) -> LoadError {
        match Model::plan(&self.open(), &Target::Cpu { threads: 2 }) {
            Ok(_) => panic!("the broken checkpoint was planned"),
            Err(error) => {
                assert!(!error.hint().is_empty());
                error
            }
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The settings of a checkpoint's decoder, or why they are refused.
pub fn read_decoder(copy: &Copy) -> Result<DecoderConfig, String> {
    let config = FamilyConfig::of(&copy.open());
    let message = |text: String| text.trim_start_matches("config.json: ").to_owned();
    config.map(|config| config.decoder().clone()).map_err(|error| message(error.to_string()))
}

/// The settings of a checkpoint's decoder.
pub fn decoder(copy: &Copy) -> DecoderConfig {
    read_decoder(copy).unwrap_or_else(|error| panic!("{error}"))
}
