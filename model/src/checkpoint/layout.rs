//! The layout of a Hugging Face checkpoint: the names of its files, and the index of its shards.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::error::CheckpointError;

/// Size limit of a config or vocabulary file in bytes. The largest known tokenizer.json has 33 MB.
pub(super) const TEXT_BYTES_MAX: u64 = 128 << 20;

/// A tokenizer in one file.
pub(super) const TOKENIZER: &str = "tokenizer.json";
// The files that replace a missing tokenizer.json: the vocabulary, the merges, and the added
// tokens. A newer `tokenizer_config.json` also contains the added tokens.
pub(super) const VOCABULARY: [&str; 2] = ["vocab.json", "merges.txt"];
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";
/// Small files that a checkpoint may have in addition to `config.json` and its vocabulary.
pub(super) const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "hf_quant_config.json",
];

pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const EXTENSION: &str = ".safetensors";
/// Limit for the number of shards, more than any checkpoint has.
const SHARDS_MAX: usize = 10_000;
// torch's single file of weights, and torch's index of shards.
pub(super) const PYTORCH: &str = "pytorch_model.bin";
pub(super) const PYTORCH_INDEX: &str = "pytorch_model.bin.index.json";

/// The shard of each tensor: `model.safetensors.index.json`, or `pytorch_model.bin.index.json`.
#[derive(Deserialize)]
pub(super) struct IndexFile {
    pub weight_map: BTreeMap<String, String>,
}

impl IndexFile {
    /// # Errors
    /// [`CheckpointError::Malformed`].
    pub fn parse(file: &str, json: &[u8]) -> Result<Self, CheckpointError> {
        serde_json::from_slice(json)
            .map_err(|error| CheckpointError::Malformed { file: file.into(), reason: error.to_string() })
    }

    /// The shards' file names, sorted, without duplicates.
    ///
    /// # Errors
    /// [`CheckpointError::ShardName`]. The index is not trusted: a shard's name must not point to
    /// another folder on this machine or, as part of a URL, on the hub.
    pub fn shards(&self) -> Result<Vec<String>, CheckpointError> {
        let is_plain = |file: &str| {
            !file.is_empty()
                && !file.starts_with('.')
                && file.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        let mut files: Vec<String> = self.weight_map.values().cloned().collect();
        files.sort_unstable();
        files.dedup();
        match files.iter().find(|file| !is_plain(file)) {
            Some(shard) => Err(CheckpointError::ShardName { shard: shard.clone() }),
            None => Ok(files),
        }
    }
}

/// The names of all shards, derived from the name of one shard, such as
/// `model-00001-of-00002.safetensors`. `None` if the name does not have this form.
pub(super) fn every_shard(file: &str) -> Option<Vec<String>> {
    let (before, count) = file.strip_suffix(EXTENSION)?.rsplit_once("-of-")?;
    let (name, number) = before.rsplit_once('-')?;
    let (width, shards) = (number.len(), count.parse().ok().filter(|shards| (1..=SHARDS_MAX).contains(shards))?);
    Some((1..=shards).map(|shard| format!("{name}-{shard:0width$}-of-{count}{EXTENSION}")).collect())
}
