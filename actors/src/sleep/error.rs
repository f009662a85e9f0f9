//! Errors of putting a model to sleep and waking it up.

use std::{sync::Arc, time::Duration};

use bursar_budgets::Hint;
use thiserror::Error;

use crate::{budget::LeaseError, responder::AskError};

/// The reason why a model did not wake up. The model still sleeps, and may be woken again.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the model did not wake up: {reason}")]
pub struct NotWoken {
    /// The error of the model's start.
    pub reason: Arc<str>,
    pub hint: Arc<str>,
    /// Whether the start lacked device memory, which other models may release.
    pub lacks_memory: bool,
}

/// The reason why a model was not put to sleep or did not wake up.
#[derive(Clone, Debug, Error)]
pub enum SleepError {
    /// Requests ran longer than allowed. The model is awake and the requests continue.
    #[error("{running} requests were still running after {} ms", .within.as_millis())]
    Busy {
        /// Requests that had not ended.
        running: usize,
        /// The time that the requests were allowed to take.
        within: Duration,
    },
    /// There is no host memory to keep the weights in. The model is awake.
    #[error("no host memory for the weights: {0}")]
    Host(Arc<LeaseError>),
    #[error(transparent)]
    NotWoken(#[from] NotWoken),
    /// The model did not wake up in time.
    #[error("the model was not awake within {} ms", .within.as_millis())]
    TooLate {
        /// The time allowed: `wake_within`.
        within: Duration,
    },
    /// The model has ended, or is about to end.
    #[error("the model has stopped: {reason}")]
    Stopped { reason: Arc<str> },
    /// The runtime did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
}

impl Hint for SleepError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            SleepError::Busy { .. } => "allow running requests more time".to_owned(),
            SleepError::Host(_) => "raise `host_bytes`, or use level 2, which keeps no weights".to_owned(),
            SleepError::NotWoken(error) => error.hint.to_string(),
            SleepError::TooLate { .. } => {
                "ask again when other models on the device are less busy, or raise `wake_within`".to_owned()
            }
            SleepError::Stopped { .. } => "load the model again".to_owned(),
            SleepError::Unanswered(_) => "start the runtime again".to_owned(),
        }
    }
}
