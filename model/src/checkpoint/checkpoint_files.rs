//! Where a checkpoint's files are, and reading the small ones.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use bursar_kernels::DType;
use serde_json::Value;

use super::random_checkpoint::RandomCheckpoint;
use crate::error::CheckpointError;

/// Configs and vocabularies: the largest known tokenizer.json has 33 MB.
pub(super) const TEXT_BYTES_MAX: u64 = 128 << 20;

/// A checkpoint in Hugging Face's layout.
#[derive(Clone, Debug)]
pub enum CheckpointSource {
    /// A folder.
    Folder(PathBuf),
    /// File names and contents, compiled into the binary.
    Embedded(&'static [(&'static str, &'static [u8])]),
    /// Settings in memory or in a folder, and weights from a seed.
    Random(Arc<RandomCheckpoint>),
}

impl CheckpointSource {
    /// The folder's path, "embedded", or the name of a shape: for messages.
    pub fn place(&self) -> String {
        match self {
            CheckpointSource::Folder(folder) => folder.display().to_string(),
            CheckpointSource::Embedded(_) => "(embedded)".into(),
            CheckpointSource::Random(random) => random.place(),
        }
    }

    /// A small file's content; `None` when there is no such file.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`] and [`CheckpointError::TooLarge`] (128 MiB).
    pub fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match self {
            CheckpointSource::Embedded(files) => Ok(embedded(files, file).map(Cow::Borrowed)),
            CheckpointSource::Random(random) => random.read(file),
            CheckpointSource::Folder(folder) => {
                let path = folder.join(file);
                let bytes = match std::fs::metadata(&path) {
                    Ok(metadata) => metadata.len(),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(unreadable(file, &error)),
                };
                if bytes > TEXT_BYTES_MAX {
                    return Err(CheckpointError::TooLarge { file: file.into(), bytes, bytes_max: TEXT_BYTES_MAX });
                }
                std::fs::read(&path).map(|content| Some(Cow::Owned(content))).map_err(|error| unreadable(file, &error))
            }
        }
    }

    /// The same for a file that must be there.
    ///
    /// # Errors
    /// [`CheckpointError::MissingFile`] besides.
    pub fn require(&self, file: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        self.read(file)?.ok_or_else(|| CheckpointError::MissingFile { place: self.place(), file: file.into() })
    }

    /// The type of the weights as `config.json` names it; none where it names none, or one that is not computed with.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn stored_type(&self) -> Result<Option<DType>, CheckpointError> {
        let config: Option<Value> = self.read("config.json")?.and_then(|json| serde_json::from_slice(&json).ok());
        Ok(config.as_ref().and_then(stored_type))
    }
}

/// What a `config.json` says of it: `dtype`, or `torch_dtype` before transformers 4.56, of the whole or of its text part.
fn stored_type(config: &Value) -> Option<DType> {
    let parts = [Some(config), config.get("text_config")].into_iter().flatten();
    let named =
        parts.flat_map(|part| [part.get("dtype"), part.get("torch_dtype")]).flatten().find_map(Value::as_str)?;
    match named.trim_start_matches("torch.") {
        "bfloat16" => Some(DType::BF16),
        "float16" => Some(DType::F16),
        "float32" => Some(DType::F32),
        _ => None,
    }
}

pub(super) fn embedded(files: &'static [(&'static str, &'static [u8])], file: &str) -> Option<&'static [u8]> {
    files.iter().find(|(name, _)| *name == file).map(|&(_, content)| content)
}

pub(super) fn unreadable(file: &str, error: &std::io::Error) -> CheckpointError {
    CheckpointError::Unreadable { file: file.into(), kind: error.kind() }
}
