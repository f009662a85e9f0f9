//! Why a model could not be sized.

use bursar_budgets::{Bytes, Class, DeviceError, Hint};
use bursar_kernels::OpenError;
use thiserror::Error;

use super::{CONTEXT_TOKENS_LEAST, Difference, Evidence, Phase, attempt::CAPTURING};
use crate::{budget::LeaseError, capture::CaptureError, compute::lane::LaneError, responder::AskError};

/// Why an attempt failed, with its evidence.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The ledger refused.
    #[error("while {doing}: {source}")]
    Lease {
        /// What was being done.
        doing: &'static str,
        /// What the lease was for; none if no lease was asked for by then.
        class: Option<Box<Class>>,
        /// What was said.
        source: LeaseError,
    },
    /// The device refused or is lost.
    #[error("while {doing}: {source}")]
    Device {
        /// What was being done.
        doing: &'static str,
        /// Whose memory it was; none for what belongs to no lease.
        class: Option<Box<Class>>,
        /// What was said.
        source: DeviceError,
    },
    /// The lanes could not be started.
    #[error("while starting the lanes: {0}")]
    Lanes(#[from] OpenError),
    /// A worst case could not be run.
    #[error("while running '{worst_case}': {source}")]
    Stress {
        /// Which.
        worst_case: &'static str,
        /// What was said.
        source: LaneError,
    },
    /// Somebody did not answer.
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// Rule 5 is broken: our bug.
    #[error("'{worst_case}' took {measured} of workspace, planned were {planned}")]
    PlanDiffers {
        /// Which.
        worst_case: &'static str,
        /// By plan.
        planned: Bytes,
        /// For real.
        measured: Bytes,
    },
    /// What the user has fixed, or what is left, does not hold a single sequence.
    #[error("the cache would hold {tokens} tokens, but one sequence may have {context_tokens}")]
    TooSmall {
        /// Tokens of the target.
        tokens: usize,
        /// Tokens of the envelope.
        context_tokens: usize,
    },
    /// A size that was written down is not the one that this start would find.
    #[error("the profile that was written down does not hold: {0}")]
    WrittenDiffers(Difference),
    /// The attempt died.
    #[error("the profile actor died: {reason}")]
    Died {
        /// What it said.
        reason: String,
    },
}

impl From<CaptureError> for ProfileError {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Refused { source, .. } => ProfileError::Stress { worst_case: CAPTURING, source },
            CaptureError::Unanswered(error) => error.into(),
        }
    }
}

impl ProfileError {
    /// Whether a smaller target may succeed.
    pub fn is_out_of_memory(&self) -> bool {
        Evidence::of(self, Phase::Probe, None).is_some()
    }

    /// Whether the same may succeed when it is tried again.
    pub fn is_death(&self) -> bool {
        matches!(self, ProfileError::Died { .. } | ProfileError::Stress { source: LaneError::Gone, .. })
    }

    /// What to change.
    pub fn hint(&self) -> String {
        let smaller = || {
            "lower `step_tokens`, `sequences`, `launch_patches` or `context_tokens`, or raise the `capacity`".to_owned()
        };
        match self {
            ProfileError::Lanes(error) => error.hint().unwrap_or_else(|| "see the driver's message".to_owned()),
            ProfileError::Lease { source, .. } => source.hint(),
            ProfileError::Device { source, .. } => source.hint().unwrap_or_else(smaller),
            ProfileError::PlanDiffers { .. } => "this is a bug in Bursar; please report it".to_owned(),
            ProfileError::TooSmall { tokens, .. } => {
                let shorter = match *tokens >= CONTEXT_TOKENS_LEAST {
                    true => format!("lower `context_tokens` to {tokens}, or "),
                    false => String::new(),
                };
                format!(
                    "{shorter}set a larger `memory_fraction` (1 is all that is left) or `kv_tokens`, or raise the `capacity`"
                )
            }
            ProfileError::WrittenDiffers(_) => "remove the profile that was written down".to_owned(),
            ProfileError::Unanswered(_) | ProfileError::Died { .. } => "start the model again".to_owned(),
            ProfileError::Stress { .. } => smaller(),
        }
    }
}
