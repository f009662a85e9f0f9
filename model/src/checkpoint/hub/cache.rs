//! The cache that all Hugging Face tools share: blobs by etag, a folder of links for each commit,
//! and refs to commits.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::{HubError, HubOptions};
use crate::checkpoint::error::CheckpointError;

/// Interval between attempts to lock a file that another process fetches.
const LOCK_LOOK: Duration = Duration::from_millis(100);

/// The part of the cache for one model at one revision.
pub(super) struct HubCache {
    cache: Cache,
    repository: CacheRepo,
    folder: PathBuf, // models--org--name
    locks: PathBuf,
    revision: String,
}

impl HubCache {
    /// Opens the cache without creating anything. `id` and `revision` must be valid already.
    pub fn open(options: &HubOptions, id: &str, revision: &str) -> Result<Self, HubError> {
        let own = || std::env::home_dir().map(|home| home.join(".cache/huggingface/hub"));
        let path = options.cache.clone().or_else(own).ok_or(HubError::NoCache)?;
        let repository = Repo::with_revision(id.to_owned(), RepoType::Model, revision.to_owned());
        let name = repository.folder_name();
        let cache = Cache::new(path.clone());
        Ok(HubCache {
            repository: cache.repo(repository),
            cache,
            folder: path.join(&name),
            locks: path.join(".locks").join(name),
            revision: revision.to_owned(),
        })
    }

    /// The token that `hf auth login` stores.
    pub fn token(&self) -> Option<String> {
        self.cache.token()
    }

    /// The commit of the revision, if known: the revision itself, or the content of its ref.
    pub fn commit(&self) -> Option<String> {
        if is_commit(&self.revision) {
            return Some(self.revision.clone());
        }
        let commit = fs::read_to_string(self.folder.join("refs").join(&self.revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    pub fn remember_commit(&self, commit: &str) -> Result<(), HubError> {
        if self.revision == commit {
            Ok(())
        } else {
            self.repository.create_ref(commit).map_err(failed(&self.revision))
        }
    }

    /// The folder of a commit's files.
    pub fn folder(&self, commit: &str) -> PathBuf {
        self.repository.pointer_path(commit)
    }

    pub fn has(&self, commit: &str, file: &str) -> bool {
        self.folder(commit).join(file).is_file()
    }

    pub fn read(&self, commit: Option<&str>, file: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(commit) = commit else { return Ok(None) };
        match fs::read(self.folder(commit).join(file)) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(file)(error).into()),
        }
    }

    /// Whether the hub has reported before that this commit has no such file.
    pub fn is_known_absent(&self, commit: &str, file: &str) -> bool {
        self.absent(commit, file).is_file()
    }

    pub fn remember_absent(&self, commit: &str, file: &str) -> Result<(), HubError> {
        let path = self.absent(commit, file);
        fs::create_dir_all(path.parent().expect("a file is in a folder")).map_err(failed(file))?;
        File::create(path).map(drop).map_err(failed(file))
    }

    fn absent(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(file)
    }

    /// Locks the location of a file's bytes against other processes until the [`Blob`] is dropped.
    /// If another process is fetching the same file, this call waits for that process.
    ///
    /// # Errors
    /// [`HubError::Cancelled`] if `is_cancelled` becomes true during the wait; [`HubError::Cache`].
    pub fn blob(&self, etag: &str, file: &str, is_cancelled: impl Fn() -> bool) -> Result<Blob, HubError> {
        let failed = failed(file);
        fs::create_dir_all(&self.locks).map_err(&failed)?;
        let lock = File::create(self.locks.join(format!("{etag}.lock"))).map_err(&failed)?;
        while let Err(busy) = lock.try_lock() {
            match busy {
                TryLockError::WouldBlock if is_cancelled() => return Err(HubError::Cancelled),
                TryLockError::WouldBlock => std::thread::park_timeout(LOCK_LOOK),
                TryLockError::Error(error) => return Err(failed(error)),
            }
        }
        let path = self.folder.join("blobs").join(etag);
        fs::create_dir_all(self.folder.join("blobs")).map_err(&failed)?;
        // Other tools do not use this name. They write `<etag>.incomplete` at several offsets at
        // once, so the length of that file does not show how much of it is valid.
        let partial = self.folder.join("blobs").join(format!("{etag}.bursar.incomplete"));
        Ok(Blob { path, partial, file: file.to_owned(), _lock: lock })
    }

    /// Links a commit's file to a blob.
    pub fn point(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let folder = self.folder(commit);
        fs::create_dir_all(&folder).map_err(failed(file))?;
        let pointer = folder.join(file);
        match link(&self.folder.join("blobs").join(etag), etag, &pointer) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && pointer.is_file() => Ok(()),
            // The link points to a blob that was removed.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                fs::remove_file(&pointer).map_err(failed(file))?;
                link(&self.folder.join("blobs").join(etag), etag, &pointer).map_err(failed(file))
            }
            outcome => outcome.map_err(failed(file)),
        }
    }
}

/// Links a commit's file to a blob. The link is relative, so that the cache can be moved.
#[cfg(unix)]
fn link(_blob: &Path, etag: &str, pointer: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), pointer)
}

#[cfg(not(unix))]
fn link(blob: &Path, _etag: &str, pointer: &Path) -> io::Result<()> {
    fs::hard_link(blob, pointer)
}

/// A file's bytes in the cache, complete or partial.
pub(super) struct Blob {
    path: PathBuf,
    partial: PathBuf,
    file: String,
    _lock: File,
}

impl Blob {
    pub fn is_complete(&self, bytes: u64) -> bool {
        fs::metadata(&self.path).is_ok_and(|metadata| metadata.len() == bytes)
    }

    /// The partial file, opened for appending, and its size in bytes.
    pub fn continued(&self) -> Result<(File, u64), HubError> {
        let failed = failed(&self.file);
        let file = OpenOptions::new().append(true).create(true).open(&self.partial).map_err(&failed)?;
        let bytes = file.metadata().map_err(&failed)?.len();
        Ok((file, bytes))
    }

    /// Deletes the partial file.
    pub fn discard(&self) -> Result<(), HubError> {
        match fs::remove_file(&self.partial) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(&self.file)(error)),
            _ => Ok(()),
        }
    }

    /// Turns the partial file into the blob, or deletes it and fails if it does
    /// not have `bytes_total` bytes.
    pub fn finish(&self, bytes_total: u64) -> Result<(), HubError> {
        let (file, bytes) = self.continued()?;
        if bytes != bytes_total {
            self.discard()?;
            return Err(HubError::Size { file: self.file.clone(), bytes, bytes_total });
        }
        file.sync_all().and_then(|()| fs::rename(&self.partial, &self.path)).map_err(failed(&self.file))
    }
}

fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub(super) fn failed(file: &str) -> impl Fn(io::Error) -> HubError {
    move |error| HubError::Cache { file: file.to_owned(), kind: error.kind() }
}
