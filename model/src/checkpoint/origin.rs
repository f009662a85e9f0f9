//! The origin of a checkpoint whose files may not be on this machine yet.

use std::path::PathBuf;
use std::sync::Arc;

use super::checkpoint_source::CheckpointSource;
use super::error::CheckpointError;
use super::fetch_watch::FetchWatch;
use super::gguf::{GgufArchitecture, GgufFile};
#[cfg(feature = "hub")]
use super::hub::{HubModel, HubOptions};

/// A local checkpoint, or a checkpoint that must be fetched first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CheckpointOrigin {
    /// A checkpoint on this machine. Nothing is fetched.
    Local(CheckpointSource),
    /// A GGUF file on this machine.
    /// [`registry::gguf`](crate::registry::gguf) supplies the architectures.
    Gguf(PathBuf, &'static [GgufArchitecture]),
    /// A model on the Hugging Face hub.
    #[cfg(feature = "hub")]
    Hub(HubModel),
}

impl CheckpointOrigin {
    /// The checkpoint that a user names: a folder, or otherwise a model of the public hub, `org/name`
    /// or `org/name@revision`. An existing folder wins over a model of the same name.
    pub fn named(name: &str) -> Self {
        #[cfg(feature = "hub")]
        if !std::path::Path::new(name).exists() && HubModel::is_id(name) {
            return CheckpointOrigin::Hub(HubModel::new(name, HubOptions::default()));
        }
        CheckpointOrigin::Local(CheckpointSource::Folder(name.into()))
    }

    /// The same origin for a draft model, which needs no tokenizer.
    pub fn as_draft_model(self) -> Self {
        match self {
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => CheckpointOrigin::Hub(model.as_draft_model()),
            origin => origin,
        }
    }

    /// Whether files may have to be fetched over the network.
    pub fn is_remote(&self) -> bool {
        !matches!(self, CheckpointOrigin::Local(_) | CheckpointOrigin::Gguf(..))
    }

    /// The location of the files, for messages and comparison. Different paths to the same folder
    /// or file give the same text.
    pub fn place(&self) -> String {
        match self {
            CheckpointOrigin::Local(CheckpointSource::Folder(path)) | CheckpointOrigin::Gguf(path, _) => {
                let real = path.canonicalize();
                real.as_deref().unwrap_or(path).display().to_string()
            }
            CheckpointOrigin::Local(source) => source.place(),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.place(),
        }
    }

    /// Fetches the files that are not on this machine yet, or opens a GGUF file. This call blocks.
    ///
    /// # Errors
    /// The errors of [`GgufFile::open`]. [`CheckpointError::Hub`] for the id, the cache or the
    /// download. [`CheckpointError::Malformed`] or [`CheckpointError::ShardName`] if the index of
    /// the weight files is not valid.
    pub fn fetch(self, watch: &dyn FetchWatch) -> Result<CheckpointSource, CheckpointError> {
        // `watch` is unused without the feature `hub`.
        let _ = watch;
        match self {
            CheckpointOrigin::Local(source) => Ok(source),
            CheckpointOrigin::Gguf(path, known) => Ok(CheckpointSource::Gguf(Arc::new(GgufFile::open(&path, known)?))),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.fetch(watch).map(CheckpointSource::Folder),
        }
    }

    /// Like [`fetch`](Self::fetch), but does not fetch weights.
    ///
    /// # Errors
    /// See [`fetch`](Self::fetch).
    pub fn fetch_settings(self) -> Result<CheckpointSource, CheckpointError> {
        match self {
            CheckpointOrigin::Local(source) => Ok(source),
            CheckpointOrigin::Gguf(path, known) => Ok(CheckpointSource::Gguf(Arc::new(GgufFile::open(&path, known)?))),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.fetch_settings(&()).map(CheckpointSource::Folder),
        }
    }
}
