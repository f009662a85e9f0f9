//! How a failure is told: what happened, and what to change.

use std::{fmt, io, process::ExitCode};

use bursar::{ChatError, FaultError, Hint, ImageError, RuntimeError};

use crate::logging;

/// An error with its hint.
#[derive(Debug)]
pub struct Failure {
    /// What happened.
    pub error: String,
    /// What to change.
    pub hint: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}\n hint: {}", self.error, self.hint)
    }
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        Failure { hint: error.hint(), error: error.to_string() }
    }
}

impl From<ChatError> for Failure {
    fn from(error: ChatError) -> Self {
        Failure { hint: error.hint(), error: error.to_string() }
    }
}

impl From<FaultError> for Failure {
    fn from(error: FaultError) -> Self {
        Failure { hint: error.hint().unwrap_or_default(), error: error.to_string() }
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Failure { hint: error.hint(), error: error.to_string() }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure { error: error.to_string(), hint: "check where the output goes".to_owned() }
    }
}

/// Tells a failure on standard error, in the form that `--log` asks for.
pub fn tell(failure: &Failure) {
    logging::fail(failure);
}

/// Tells a failure, if there is one.
pub fn report(outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            tell(&failure);
            ExitCode::FAILURE
        }
    }
}
