//! Errors of a model start.

use bursar_budgets::{Bytes, DeviceError, Hint};
use bursar_kernels::{KernelError, OpenError};
use bursar_model::{LimitError, LoadError, error::CheckpointError};
use thiserror::Error;

use super::{KvCacheTypeError, NoRanksFit, PrecisionError, Suggestion, Unfit};
use crate::{
    budget::LeaseError,
    profile::{AttemptReport, ProfileError},
    responder::AskError,
};

/// Why a model did not start. All memory that it had leased has been returned.
#[derive(Debug, Error)]
pub enum StartError {
    /// The checkpoint's files cannot be fetched or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint's model cannot be loaded.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// The plan does not fit the device.
    #[error(transparent)]
    DoesNotFit(#[from] Box<Unfit>),
    /// The model does not fit on any number of the devices found.
    #[error(transparent)]
    NoRanksFit(#[from] NoRanksFit),
    /// The runtime's device has fewer ranks than the model asks for.
    #[error("`ranks` asks for {wanted} devices, but the runtime has {has}")]
    TooFewDevices {
        /// The value of [`LoadOptions::ranks`](super::LoadOptions::ranks).
        wanted: usize,
        has: usize,
    },
    /// A worst case of the envelope has tensor shapes that do not match.
    #[error("the envelope cannot be planned: {0}")]
    Plan(#[from] KernelError),
    /// Limits contradict each other.
    #[error("the envelope is not valid: {0}")]
    Limit(#[from] LimitError),
    /// The GPU's kernels could not be loaded.
    #[error("the device's kernels could not be loaded: {0}")]
    Backend(#[from] OpenError),
    /// The device does not compute in the requested type.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// The device does not support the requested type of the KV cache.
    #[error(transparent)]
    KvCacheType(#[from] KvCacheTypeError),
    /// A memory fraction is not in the valid range, which is above 0 and up to 1.
    #[error("`{name}` is {value}; expected a number above 0 and at most 1")]
    MemoryFraction {
        /// The option, under the name that the user set.
        name: &'static str,
        value: f64,
    },
    /// The runtime can lease less host memory than `swap_space` needs.
    #[error("`swap_space` needs {needed} of host memory, but only {available} can be leased")]
    HostMemory {
        /// Bytes needed for all devices.
        needed: Bytes,
        /// Bytes that can be leased now.
        available: Bytes,
    },
    /// The lease for the weights was refused.
    #[error("while leasing the weights: {0}")]
    Lease(#[from] LeaseError),
    /// The device refused memory for the weights.
    #[error("while backing the weights: {0}")]
    Device(#[from] DeviceError),
    /// Every attempt failed, or the last attempt failed while it served.
    #[error("attempt {attempt} failed and was the last: {source}")]
    Profile {
        /// The number of the last attempt.
        attempt: u32,
        attempts: Vec<AttemptReport>,
        source: Box<ProfileError>,
        /// Knobs that would have helped, each with a value that frees the missing memory according
        /// to the plan. Empty if no memory was refused.
        knobs: Vec<Suggestion>,
    },
    /// An actor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// A thread panicked while loading.
    #[error("the model's loader died: {0}")]
    Died(String),
    /// The runtime is shutting down.
    #[error("the runtime is shutting down and loads no more models")]
    ShuttingDown,
    /// The model was stopped while it started: it was unloaded, the runtime shut down, or the model
    /// was in a crash loop.
    #[error("the model was stopped while it started: {reason}")]
    Stopped { reason: std::sync::Arc<str> },
}

impl StartError {
    /// Bytes of device memory that the plan lacks. `None` if the error has another cause.
    pub fn short_by(&self) -> Option<Bytes> {
        match self {
            StartError::DoesNotFit(unfit) => Some(unfit.short_by()).filter(|bytes| !bytes.is_zero()),
            _ => None,
        }
    }
}

impl Hint for StartError {
    type Text = String;

    fn hint(&self) -> String {
        let report = || "this is a bug in Bursar; please report it".to_owned();
        match self {
            StartError::Checkpoint(error) => error.hint(),
            StartError::Model(error) => error.hint(),
            StartError::DoesNotFit(unfit) => unfit.hint(),
            StartError::NoRanksFit(error) => error.hint(),
            StartError::TooFewDevices { .. } => {
                "start the runtime on more devices, let `PlacementRequest` choose them, or leave `ranks` out".to_owned()
            }
            StartError::Limit(LimitError { limit, required, .. }) => format!("set `{limit}` to {required}"),
            StartError::Backend(error) => error.hint().unwrap_or_else(|| "choose `DeviceChoice::Host`".to_owned()),
            StartError::Precision(error) => error.hint(),
            StartError::KvCacheType(error) => error.hint(),
            StartError::MemoryFraction { .. } => {
                "set it to 0.9 to leave a tenth to other processes, or leave it out to use nearly all of a GPU"
                    .to_owned()
            }
            StartError::HostMemory { .. } => "lower `swap_space`, or raise `host_bytes`".to_owned(),
            StartError::Lease(error) => error.hint(),
            StartError::Device(error) => error.hint().unwrap_or_else(|| "raise `capacity`".to_owned()),
            StartError::Profile { source, knobs, .. } => match Suggestion::advice(knobs) {
                Some(advice) => format!("{advice}; or leave more memory free on the device"),
                None => source.hint(),
            },
            StartError::Stopped { .. } => "load the model again".to_owned(),
            StartError::ShuttingDown => "start another runtime and load the model there".to_owned(),
            StartError::Unanswered(_) => "start the runtime again: it is shutting down".to_owned(),
            StartError::Plan(_) | StartError::Died(_) => report(),
        }
    }
}
