//! Why a model did not start.

use bursar_budgets::{DeviceError, Hint};
use bursar_kernels::{KernelError, OpenError};
use bursar_model::{LimitError, LoadError, error::CheckpointError};
use thiserror::Error;

use super::{PrecisionError, Suggestion, Unfit};
use crate::{
    budget::LeaseError,
    profile::{AttemptReport, ProfileError},
    responder::AskError,
};

/// Why a model did not start. Everything that it had leased is home.
#[derive(Debug, Error)]
pub enum StartError {
    /// The checkpoint's files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The checkpoint's model.
    #[error(transparent)]
    Model(#[from] LoadError),
    /// By plan it does not fit the device.
    #[error(transparent)]
    DoesNotFit(#[from] Box<Unfit>),
    /// One of the envelope's worst cases does not go together.
    #[error("the envelope cannot be planned: {0}")]
    Plan(#[from] KernelError),
    /// Limits contradict each other.
    #[error("the envelope cannot be served: {0}")]
    Limit(#[from] LimitError),
    /// The GPU cannot be computed on.
    #[error("the device's kernels were not loaded: {0}")]
    Backend(#[from] OpenError),
    /// The device does not compute in the type that was asked for.
    #[error(transparent)]
    Precision(#[from] PrecisionError),
    /// The share of memory is no share.
    #[error("`{name}` is {value}, it must be above 0 and at most 1")]
    MemoryFraction {
        /// Which.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// No lease for the weights.
    #[error("while leasing the weights: {0}")]
    Lease(#[from] LeaseError),
    /// No memory for the weights.
    #[error("while backing the weights: {0}")]
    Device(#[from] DeviceError),
    /// Every attempt failed, or the last of them while it served.
    #[error("attempt {attempt} was the last: {source}")]
    Profile {
        /// How many attempts there were.
        attempt: u32,
        /// Each of them.
        attempts: Vec<AttemptReport>,
        /// The last one's error.
        source: Box<ProfileError>,
        /// If it was refused memory: each knob with the value that by plan frees as much as it was short of.
        knobs: Vec<Suggestion>,
    },
    /// An actor did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// A thread died while it loaded.
    #[error("the model's loader died: {0}")]
    Died(String),
    /// The runtime takes no more models.
    #[error("the runtime is shutting down and loads no more models")]
    ShuttingDown,
    /// It was ended while it started: unloaded, shut down, or a crash loop.
    #[error("the model was stopped while it started: {reason}")]
    Stopped {
        /// Why.
        reason: std::sync::Arc<str>,
    },
}

impl StartError {
    /// What to change.
    pub fn hint(&self) -> String {
        let report = || "this is a bug in Bursar; please report it".to_owned();
        match self {
            StartError::Checkpoint(error) => error.hint(),
            StartError::Model(error) => error.hint(),
            StartError::DoesNotFit(unfit) => unfit.hint(),
            StartError::Limit(LimitError { limit, required, .. }) => format!("set `{limit}` to {required}"),
            StartError::Backend(error) => error.hint().unwrap_or_else(|| "choose `DeviceChoice::Host`".to_owned()),
            StartError::Precision(error) => error.hint(),
            StartError::MemoryFraction { .. } => {
                "0.9 leaves a tenth to others, and without one nearly all of a GPU is taken".to_owned()
            }
            StartError::Lease(error) => error.hint(),
            StartError::Device(error) => error.hint().unwrap_or_else(|| "raise the `capacity`".to_owned()),
            StartError::Profile { source, knobs, .. } => match Suggestion::advice(knobs) {
                Some(advice) => format!("{advice}; or leave more memory free on the device"),
                None => source.hint(),
            },
            StartError::Stopped { .. } => "load the model again".to_owned(),
            StartError::ShuttingDown => "start another runtime and load it there".to_owned(),
            StartError::Unanswered(_) => "the runtime is shutting down; start it again".to_owned(),
            StartError::Plan(_) | StartError::Died(_) => report(),
        }
    }
}
