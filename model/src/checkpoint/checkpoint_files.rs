//! Where a checkpoint's files are, and reading the small ones.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

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
    /// Settings in memory and weights from a seed.
    Random(Arc<RandomCheckpoint>),
}

impl CheckpointSource {
    /// The folder's path, "embedded", or the name of a shape: for messages.
    pub fn place(&self) -> String {
        match self {
            CheckpointSource::Folder(folder) => folder.display().to_string(),
            CheckpointSource::Embedded(_) => "(embedded)".into(),
            CheckpointSource::Random(random) => format!("({}, random)", random.name()),
        }
    }

    /// A small file's content; `None` when there is no such file.
    ///
    /// # Errors
    /// [`CheckpointError::Unreadable`] and [`CheckpointError::TooLarge`] (128 MiB).
    pub fn read(&self, file: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match self {
            CheckpointSource::Embedded(files) => Ok(embedded(files, file).map(Cow::Borrowed)),
            CheckpointSource::Random(random) => Ok(random.read(file)),
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
    /// [`CheckpointError::MissingFile`] and [`CheckpointError::MissingFolder`] besides.
    pub fn require(&self, file: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        self.read(file)?.ok_or_else(|| match self {
            CheckpointSource::Folder(folder) if !folder.exists() => {
                CheckpointError::MissingFolder { place: self.place() }
            }
            _ => CheckpointError::MissingFile { place: self.place(), file: file.into() },
        })
    }
}

pub(super) fn embedded(files: &'static [(&'static str, &'static [u8])], file: &str) -> Option<&'static [u8]> {
    files.iter().find(|(name, _)| *name == file).map(|&(_, content)| content)
}

pub(super) fn unreadable(file: &str, error: &std::io::Error) -> CheckpointError {
    CheckpointError::Unreadable { file: file.into(), kind: error.kind() }
}
