//! A GGUF file as a checkpoint: settings, vocabulary and weights in one file. The files of a
//! Hugging Face folder are generated from its metadata, and the rest of this crate reads them like
//! the files of any other checkpoint.

mod config;
mod header;
mod rope_factors;
mod settings;
mod storage;
mod tensors;
mod text_files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::config::Config;
use self::header::Header;
use self::settings::Settings;
use super::error::CheckpointError;
use super::shard::{Content, Shard};
pub use settings::GgufArchitecture;

/// An open GGUF file: its mapped tensors, and the small files that are generated from its metadata.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    files: BTreeMap<&'static str, Vec<u8>>,
    shard: Shard,
}

impl GgufFile {
    /// Maps the file at `path`, checks its header, and generates the small files. The file must
    /// have one of the `known` architectures. No weight is read.
    ///
    /// # Errors
    /// [`CheckpointError::NoGguf`] or [`CheckpointError::Unreadable`]; [`CheckpointError::Header`]
    /// for a damaged file; [`CheckpointError::Setting`] for a file with an unsupported setting.
    pub fn open(path: &Path, known: &[GgufArchitecture]) -> Result<Self, CheckpointError> {
        let file = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let missing = || CheckpointError::NoGguf { path: path.display().to_string() };
        let content = Content::map(path, &file)?.ok_or_else(missing)?;
        let header =
            Header::read(content.bytes()).map_err(|reason| CheckpointError::Header { file: file.clone(), reason })?;
        let settings = Settings { file: &file, values: &header.settings };
        settings.check()?;
        let architecture = settings.architecture(known)?;
        let config = Config::of(&settings, architecture, &header, content.bytes())?;
        let mut files = text_files::of(&settings)?;
        files.insert("config.json", config.json().to_string().into_bytes());
        let tensors = tensors::places(&settings, &header, content.bytes().len(), &config)?;
        let listing = header.listing.clone();
        Ok(GgufFile { path: path.to_owned(), files, shard: Shard::new(&file, content, listing, tensors) })
    }

    /// The file's path, for messages.
    pub(super) fn place(&self) -> String {
        self.path.display().to_string()
    }

    /// A file that was generated from the metadata.
    pub(super) fn read(&self, file: &str) -> Option<&[u8]> {
        self.files.get(file).map(Vec::as_slice)
    }

    pub(super) fn shard(&self) -> Shard {
        self.shard.clone()
    }
}
