//! A checkpoint on the Hugging Face hub: its files, and their download into the cache that all
//! Hugging Face tools share.
//!
//! A file in the cache is not requested again, and a model opens without the network if the cache
//! has all its files. To get the current state of a branch that has changed, name another revision
//! or remove the model's folder from the cache. The folder also records the commit of the branch.

mod cache;
mod error;
mod options;
mod transfer;

use std::path::PathBuf;

use self::cache::HubCache;
use self::transfer::Remote;
use super::error::CheckpointError;
use super::fetch_watch::FetchWatch;
use super::layout::{ADDED_TOKENS, INDEX, IndexFile, OPTIONAL, PYTORCH, SINGLE, TEXT_BYTES_MAX, TOKENIZER, VOCABULARY};
pub use error::HubError;
pub use options::HubOptions;

/// The default branch of every repository.
const MAIN: &str = "main";

/// A model on the hub. Nothing is checked and no request is made before [`fetch`](Self::fetch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    id: String,
    revision: String,
    options: HubOptions,
    is_draft_model: bool,
}

impl HubModel {
    /// Creates a model from its id: `org/name`, or `org/name@revision`.
    pub fn new(id: &str, options: HubOptions) -> Self {
        let (id, revision) = match id.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (id, options.revision.as_deref()),
        };
        HubModel { id: id.to_owned(), revision: revision.unwrap_or(MAIN).to_owned(), options, is_draft_model: false }
    }

    /// The same model as a draft model, which has no tokenizer. Its weights may be in torch's format.
    pub fn as_draft_model(self) -> Self {
        HubModel { is_draft_model: true, ..self }
    }

    /// The same model, with other settings of the hub.
    pub fn with_options(self, options: HubOptions) -> Self {
        HubModel { options, ..self }
    }

    /// Whether `text` has the form of an id, with or without a revision. Command lines use this to
    /// distinguish an id from a folder.
    pub fn is_id(text: &str) -> bool {
        let model = HubModel::new(text, HubOptions::default());
        model.check().is_ok()
    }

    /// The model's name without its organization.
    pub fn name(&self) -> &str {
        self.id.rsplit('/').next().unwrap_or(&self.id)
    }

    /// `org/name@revision`, for messages.
    pub fn place(&self) -> String {
        format!("{}@{}", self.id, self.revision)
    }

    /// Fetches every file of the checkpoint that is not in the cache yet, and returns the folder
    /// that then contains all files. This call blocks. Interrupted downloads are resumed.
    ///
    /// # Errors
    /// [`CheckpointError::Hub`] for the id, the cache or the download.
    /// [`CheckpointError::Malformed`] or [`CheckpointError::ShardName`] if the index of the weight
    /// files is not valid.
    pub fn fetch(&self, watch: &dyn FetchWatch) -> Result<PathBuf, CheckpointError> {
        let mut fetch = self.settings(watch)?;
        for file in fetch.weight_files()? {
            let is_replaceable = self.is_draft_model && file == SINGLE;
            if !is_replaceable || fetch.bring(&file, u64::MAX)? == Outcome::Absent {
                fetch.require(if is_replaceable { PYTORCH } else { &file }, u64::MAX)?;
            }
        }
        Ok(fetch.folder())
    }

    /// Like [`fetch`](Self::fetch), but without the weights, which a plan does not need.
    ///
    /// # Errors
    /// See [`fetch`](Self::fetch).
    pub fn fetch_settings(&self, watch: &dyn FetchWatch) -> Result<PathBuf, CheckpointError> {
        Ok(self.settings(watch)?.folder())
    }

    fn settings<'a>(&'a self, watch: &'a dyn FetchWatch) -> Result<Fetch<'a>, CheckpointError> {
        self.check()?;
        let cache = HubCache::open(&self.options, &self.id, &self.revision)?;
        let remote = Remote::new(&self.options, &self.id, cache.token(), watch)?;
        let mut fetch = Fetch {
            commit: cache.commit(),
            revision: &self.revision,
            is_draft_model: self.is_draft_model,
            cache,
            remote,
        };
        fetch.require("config.json", TEXT_BYTES_MAX)?;
        if !self.is_draft_model {
            fetch.bring_tokenizer()?;
        }
        let optional = if self.is_draft_model { &[][..] } else { &OPTIONAL };
        // If the hub cannot be reached but the cache has the weights, the model counts as complete,
        // because a fetch requests the optional files before the weights.
        let mut is_offline = false;
        for file in optional.iter().copied().chain([INDEX]) {
            match fetch.bring(file, TEXT_BYTES_MAX) {
                Err(HubError::Unreachable { .. } | HubError::Offline { .. }) if fetch.has_weights()? => {
                    is_offline = true
                }
                outcome => drop(outcome?),
            }
            if is_offline {
                break;
            }
        }
        Ok(fetch)
    }

    fn check(&self) -> Result<(), HubError> {
        let is_word = |word: &str| {
            (1..=96).contains(&word.len())
                && !word.starts_with(['.', '-'])
                && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        if !self.id.split_once('/').is_some_and(|(owner, name)| is_word(owner) && is_word(name)) {
            return Err(HubError::Id { id: self.id.clone() });
        }
        if self.revision.split('/').all(is_word) {
            Ok(())
        } else {
            Err(HubError::Revision { revision: self.revision.clone() })
        }
    }
}

/// A fetch in progress. All files are from one commit: the commit that the cache has for the
/// revision, or else the commit of the first file.
struct Fetch<'a> {
    commit: Option<String>,
    revision: &'a str,
    is_draft_model: bool,
    cache: HubCache,
    remote: Remote<'a>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Here,
    /// The repository has no such file.
    Absent,
}

impl Fetch<'_> {
    fn require(&mut self, file: &str, bytes_max: u64) -> Result<(), HubError> {
        match self.bring(file, bytes_max)? {
            Outcome::Here => Ok(()),
            Outcome::Absent => {
                Err(HubError::NoFile { repository: self.remote.repository().into(), file: file.to_owned() })
            }
        }
    }

    fn bring(&mut self, file: &str, bytes_max: u64) -> Result<Outcome, HubError> {
        if let Some(commit) = &self.commit {
            if self.cache.has(commit, file) {
                return Ok(Outcome::Here);
            }
            if self.cache.is_known_absent(commit, file) {
                return Ok(Outcome::Absent);
            }
        }
        let Some(found) = self.remote.find(file, self.commit.as_deref().unwrap_or(self.revision))? else {
            if let Some(commit) = &self.commit {
                self.cache.remember_absent(commit, file)?;
            }
            return Ok(Outcome::Absent);
        };
        if found.bytes > bytes_max {
            return Err(HubError::TooLarge { file: file.to_owned(), bytes: found.bytes, bytes_max });
        }
        let commit = self.commit.clone().unwrap_or_else(|| found.commit.clone());
        let blob = self.cache.blob(&found.etag, file, || self.remote.is_cancelled())?;
        if !blob.is_complete(found.bytes) {
            self.remote.download(file, &commit, &found, &blob)?;
            blob.finish(found.bytes)?;
        }
        self.cache.point(&commit, file, &found.etag)?;
        if self.commit.is_none() {
            self.cache.remember_commit(&commit)?;
            self.commit = Some(commit);
        }
        Ok(Outcome::Here)
    }

    /// Fetches tokenizer.json, or else the files that replace it.
    fn bring_tokenizer(&mut self) -> Result<(), HubError> {
        if self.bring(TOKENIZER, TEXT_BYTES_MAX)? == Outcome::Here {
            return Ok(());
        }
        for part in VOCABULARY {
            if self.bring(part, TEXT_BYTES_MAX)? == Outcome::Absent {
                return Err(HubError::NoFile { repository: self.remote.repository().into(), file: TOKENIZER.into() });
            }
        }
        self.bring(ADDED_TOKENS, TEXT_BYTES_MAX).map(drop)
    }

    /// The shards that the index names, or the single file of a checkpoint without an index. The
    /// single file of a draft model may be torch's.
    fn weight_files(&self) -> Result<Vec<String>, CheckpointError> {
        let Some(json) = self.cache.read(self.commit.as_deref(), INDEX)? else {
            let is_here = |file: &str| self.commit.as_ref().is_some_and(|commit| self.cache.has(commit, file));
            let is_torch = self.is_draft_model && is_here(PYTORCH) && !is_here(SINGLE);
            return Ok(vec![if is_torch { PYTORCH } else { SINGLE }.to_owned()]);
        };
        IndexFile::parse(INDEX, &json)?.shards()
    }

    fn has_weights(&self) -> Result<bool, CheckpointError> {
        let Some(commit) = &self.commit else { return Ok(false) };
        Ok(self.weight_files()?.iter().all(|file| self.cache.has(commit, file)))
    }

    fn folder(&self) -> PathBuf {
        self.cache.folder(self.commit.as_deref().expect("the file was downloaded, so its commit is known"))
    }
}
