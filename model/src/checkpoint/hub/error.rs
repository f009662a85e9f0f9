//! Errors of fetching a checkpoint from the hub.

use bursar_budgets::Hint;
use thiserror::Error;

/// A checkpoint could not be fetched. Files that were fetched before the error stay in the cache.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum HubError {
    /// The id is not of the form `org/name`.
    #[error("{id:?} is not a valid id of a model on the hub")]
    Id { id: String },
    /// The revision is not the name of a branch, tag or commit.
    #[error("{revision:?} is not a valid name of a revision on the hub")]
    Revision { revision: String },
    /// No cache folder was given, and the user has no home folder.
    #[error("the hub's cache has no folder, since no home folder is set")]
    NoCache,
    /// The proxy's address does not parse.
    #[error("the address of the proxy is not valid")]
    Proxy,
    /// The hub does not respond.
    #[error("{endpoint} could not be reached: {reason}")]
    Unreachable { endpoint: String, reason: String },
    /// The cache lacks a file, and offline mode forbids requests to the hub.
    #[error("the Hugging Face cache has no {file}, and offline mode forbids downloading it")]
    Offline { file: String },
    /// There is no such model, or it has no such revision.
    #[error("the hub has no {repository}")]
    NoRepository { repository: String },
    /// The token, or the lack of a token, does not give access to the model. The hub's response is
    /// the same for private models and for models that do not exist.
    #[error("the hub refused access to {repository} with status {status}")]
    Refused {
        repository: String,
        /// The HTTP status, which is 401 or 403.
        status: u16,
    },
    /// The model lacks a file that every checkpoint has.
    #[error("{repository} has no {file}")]
    NoFile { repository: String, file: String },
    /// The hub responds with an unexpected status.
    #[error("the hub answered {status} for {file}")]
    Status { file: String, status: u16 },
    /// The response lacks a header that describes the file, or the header is malformed.
    #[error("the hub's answer for {file} has no usable {header}")]
    Answer {
        file: String,
        /// The header that is missing or malformed.
        header: &'static str,
    },
    /// A file is larger than any valid file of its kind.
    #[error("{file} has {bytes} bytes on the hub; the limit is {bytes_max}")]
    TooLarge { file: String, bytes: u64, bytes_max: u64 },
    /// Three connections in a row ended without delivering a new byte.
    #[error("the download of {file} stopped after {bytes} of {bytes_total} bytes")]
    Interrupted {
        file: String,
        /// Bytes received so far, including earlier fetches.
        bytes: u64,
        /// Bytes that the hub announced.
        bytes_total: u64,
    },
    /// The file's size differs from the announced size.
    #[error("{file} has {bytes} bytes, but {bytes_total} were announced")]
    Size {
        file: String,
        /// Number of bytes that were received.
        bytes: u64,
        /// Bytes that the hub announced.
        bytes_total: u64,
    },
    /// The cache could not be written or read.
    #[error("{file} could not be stored in the hub's cache: {kind}")]
    Cache { file: String, kind: std::io::ErrorKind },
    /// The caller's `FetchWatch` cancelled the fetch.
    #[error("the download was cancelled")]
    Cancelled,
}

impl Hint for HubError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            HubError::Id { .. } => "write the organization and the name, as in Qwen/Qwen2.5-VL-7B-Instruct".into(),
            HubError::Revision { .. } => "name a branch, a tag or a commit, as in org/name@main".into(),
            HubError::NoCache => "name a folder in `HubOptions::cache`".into(),
            HubError::Proxy => "write the address of the proxy as http://host:3128".into(),
            HubError::Offline { .. } => {
                "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE, or download the model first".into()
            }
            HubError::Unreachable { .. } => {
                "check the network, the proxy and `HubOptions::endpoint`; a model in the cache needs no network".into()
            }
            HubError::NoRepository { .. } => "check the spelling of the id and the revision".into(),
            HubError::Refused { .. } => {
                "check the spelling; for a gated model accept its license on its page and set a token".into()
            }
            HubError::NoFile { .. } => {
                "choose a repository with safetensors weights and a tokenizer.json, or convert the model first".into()
            }
            HubError::Status { .. } => "load the model again later; the hub may be busy".into(),
            HubError::Answer { .. } => "check that `HubOptions::endpoint` is a hub or a full mirror of one".into(),
            HubError::TooLarge { .. } => "do not use this file; a checkpoint's file is never this large".into(),
            HubError::Interrupted { .. } => "load the model again: the download continues where it stopped".into(),
            HubError::Size { .. } => "load the model again: the file was deleted and will be fetched again".into(),
            HubError::Cache { kind: std::io::ErrorKind::StorageFull, .. } => {
                "free space on the disk, or name another folder in `HubOptions::cache`; then load again".into()
            }
            HubError::Cache { .. } => "check that the cache's folder is writable".into(),
            HubError::Cancelled => "load the model again: the download continues where it stopped".into(),
        }
    }
}
