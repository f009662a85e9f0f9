//! Where a checkpoint comes from before its files are here.

use super::checkpoint_files::CheckpointSource;
use super::error::CheckpointError;
#[cfg(feature = "hub")]
use super::hub::HubModel;

/// Hears how far a fetch is, and can end it.
pub trait FetchWatch {
    /// So many bytes of a file are here, of so many in all. Called every few megabytes and at a file's end.
    fn fetched(&self, file: &str, bytes: u64, bytes_total: u64);
    /// Whether nobody waits for the files any more; asked between pieces.
    fn is_cancelled(&self) -> bool;
}

/// Hears nothing and waits for the end.
impl FetchWatch for () {
    fn fetched(&self, _: &str, _: u64, _: u64) {}

    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A checkpoint that is here, or one that is fetched first.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum CheckpointOrigin {
    /// Nothing is fetched.
    Local(CheckpointSource),
    /// On the Hugging Face hub.
    #[cfg(feature = "hub")]
    Hub(HubModel),
}

impl CheckpointOrigin {
    /// Whether files may have to be fetched, which takes as long as the network does.
    pub fn is_remote(&self) -> bool {
        !matches!(self, CheckpointOrigin::Local(_))
    }

    /// Where its files are or come from: one text for one place, by whichever path a folder was named.
    pub fn place(&self) -> String {
        match self {
            CheckpointOrigin::Local(CheckpointSource::Folder(folder)) => {
                let real = folder.canonicalize();
                real.as_deref().unwrap_or(folder).display().to_string()
            }
            CheckpointOrigin::Local(source) => source.place(),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.place(),
        }
    }

    /// Fetches what is not here yet. Blocks.
    ///
    /// # Errors
    /// [`CheckpointError::Hub`], and an index that names what is no plain file.
    pub fn bring(self, watch: &dyn FetchWatch) -> Result<CheckpointSource, CheckpointError> {
        // Without hubs there is nothing to watch.
        let _ = watch;
        match self {
            CheckpointOrigin::Local(source) => Ok(source),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.fetch(watch).map(CheckpointSource::Folder),
        }
    }

    /// The same without weights that are not here.
    ///
    /// # Errors
    /// As [`bring`](Self::bring).
    pub fn bring_settings(self) -> Result<CheckpointSource, CheckpointError> {
        match self {
            CheckpointOrigin::Local(source) => Ok(source),
            #[cfg(feature = "hub")]
            CheckpointOrigin::Hub(model) => model.fetch_settings(&()).map(CheckpointSource::Folder),
        }
    }
}
