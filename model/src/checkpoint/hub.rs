//! A checkpoint on the Hugging Face hub: which files it takes, and bringing them into the cache that all tools share.
//!
//! What is in the cache is not asked for again. A model whose files are all there is opened without a word to the
//! network, so a branch that has moved on is noticed only when its files are removed from the cache or another revision
//! is named.

mod cache;
mod error;
mod transfer;

use std::path::PathBuf;

use self::cache::HubCache;
use self::transfer::Remote;
use super::checkpoint_files::{ADDED_TOKENS, OPTIONAL, TEXT_BYTES_MAX, TOKENIZER, VOCABULARY};
use super::error::CheckpointError;
use super::origin::FetchWatch;
use super::tensors::{INDEX, IndexFile, SINGLE};
pub use error::HubError;

/// A branch, as every repository has it.
const MAIN: &str = "main";
const ENDPOINT: &str = "https://huggingface.co";

/// Where the hub is, who asks, and where its files go.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// The hub's address, `https://huggingface.co` by default.
    pub endpoint: String,
    /// Who asks, for gated and private models. By default what `hf auth login` keeps beside the cache.
    pub token: Option<String>,
    /// The folder of the cache, `~/.cache/huggingface/hub` by default.
    pub cache: Option<PathBuf>,
    /// A branch, tag or commit; one that stands behind the id's `@` wins.
    pub revision: Option<String>,
    /// The address of a proxy that is asked instead of the hub.
    pub proxy: Option<String>,
}

/// The public hub, the user's own cache.
impl Default for HubOptions {
    fn default() -> Self {
        HubOptions { endpoint: ENDPOINT.into(), token: None, cache: None, revision: None, proxy: None }
    }
}

/// Never the token: it is a password. A proxy's address may hold one too.
impl std::fmt::Debug for HubOptions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("has_token", &self.token.is_some())
            .field("cache", &self.cache)
            .field("revision", &self.revision)
            .field("has_proxy", &self.proxy.is_some())
            .finish()
    }
}

/// A model on the hub. Nothing is checked and nobody is asked before [`fetch`](Self::fetch).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    id: String,
    revision: String,
    options: HubOptions,
}

impl HubModel {
    /// `org/name`, or `org/name@revision`.
    pub fn new(id: &str, options: HubOptions) -> Self {
        let (id, revision) = match id.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (id, options.revision.as_deref()),
        };
        HubModel { id: id.to_owned(), revision: revision.unwrap_or(MAIN).to_owned(), options }
    }

    /// Whether `text` has the shape of an id, with or without a revision: for command lines, where it may be a folder.
    pub fn is_id(text: &str) -> bool {
        let model = HubModel::new(text, HubOptions::default());
        model.check().is_ok()
    }

    /// The model's name without its organisation.
    pub fn name(&self) -> &str {
        self.id.rsplit('/').next().unwrap_or(&self.id)
    }

    /// `org/name@revision`, for messages.
    pub fn place(&self) -> String {
        format!("{}@{}", self.id, self.revision)
    }

    /// Brings every file of the checkpoint that is not in the cache yet; gives the folder that then holds all of them.
    /// Blocks; files that were fetched in part before are continued.
    ///
    /// # Errors
    /// [`CheckpointError::Hub`], and what an index may be refused for: [`CheckpointError::Malformed`],
    /// [`CheckpointError::ShardName`].
    pub fn fetch(&self, watch: &dyn FetchWatch) -> Result<PathBuf, CheckpointError> {
        let mut fetch = self.settings(watch)?;
        for file in fetch.weight_files()? {
            fetch.require(&file, u64::MAX)?;
        }
        Ok(fetch.folder())
    }

    /// The same without the weights: what a plan follows from.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch).
    pub fn fetch_settings(&self, watch: &dyn FetchWatch) -> Result<PathBuf, CheckpointError> {
        Ok(self.settings(watch)?.folder())
    }

    fn settings<'a>(&'a self, watch: &'a dyn FetchWatch) -> Result<Fetch<'a>, CheckpointError> {
        self.check()?;
        let cache = HubCache::open(&self.options, &self.id, &self.revision)?;
        let remote = Remote::new(&self.options, &self.id, cache.token(), watch)?;
        let mut fetch = Fetch { commit: cache.commit(), revision: &self.revision, cache, remote };
        fetch.require("config.json", TEXT_BYTES_MAX)?;
        fetch.bring_tokenizer()?;
        // Without the network a model is complete that has all it must have; what it may have was asked for before its
        // weights were.
        let mut is_offline = false;
        for file in OPTIONAL.into_iter().chain([INDEX]) {
            match fetch.bring(file, TEXT_BYTES_MAX) {
                Err(HubError::Unreachable { .. }) if fetch.has_weights()? => is_offline = true,
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
        match self.revision.split('/').all(is_word) {
            true => Ok(()),
            false => Err(HubError::Revision { revision: self.revision.clone() }),
        }
    }
}

/// A fetch under way: all files are of one commit, the first one's.
struct Fetch<'a> {
    commit: Option<String>,
    revision: &'a str,
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

    /// One file, or the files that it was made of.
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

    /// The shards that the index names, or the one file that there is without an index.
    fn weight_files(&self) -> Result<Vec<String>, CheckpointError> {
        let Some(json) = self.cache.read(self.commit.as_deref(), INDEX)? else { return Ok(vec![SINGLE.to_owned()]) };
        IndexFile::parse(&json)?.shards()
    }

    fn has_weights(&self) -> Result<bool, CheckpointError> {
        let Some(commit) = &self.commit else { return Ok(false) };
        Ok(self.weight_files()?.iter().all(|file| self.cache.has(commit, file)))
    }

    fn folder(&self) -> PathBuf {
        self.cache.folder(self.commit.as_deref().expect("a file was brought, so its commit is known"))
    }
}
