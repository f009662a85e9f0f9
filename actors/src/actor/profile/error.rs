//! Errors of sizing.

use bursar_budgets::{Bytes, Class, DeviceError, Hint};
use bursar_kernels::OpenError;
use thiserror::Error;

use super::{CONTEXT_TOKENS_LEAST, Difference};
use crate::{budget::LeaseError, compute::lane::LaneError, responder::AskError};

#[derive(Debug, Error)]
pub enum ProfileError {
    /// The ledger refused a lease.
    #[error("while {doing}: {source}")]
    Lease {
        doing: &'static str,
        /// The class of the lease. `None` if no lease was requested yet.
        class: Option<Box<Class>>,
        source: LeaseError,
    },
    /// The device refused memory or is lost.
    #[error("while {doing}: {source}")]
    Device {
        doing: &'static str,
        /// The class of the memory. `None` for memory outside any lease.
        class: Option<Box<Class>>,
        source: DeviceError,
    },
    /// The lanes could not be started.
    #[error("while starting the lanes: {0}")]
    Lanes(#[from] OpenError),
    #[error("while running '{worst_case}': {source}")]
    Stress { worst_case: &'static str, source: LaneError },
    #[error(transparent)]
    Unanswered(#[from] AskError),
    /// The measured workspace differs from the plan. This is a bug in Bursar, because the memory
    /// plan must equal the measurement (rule 5).
    #[error("'{worst_case}' took {measured} of workspace, but {planned} were planned")]
    PlanDiffers {
        worst_case: &'static str,
        /// Bytes according to the plan.
        planned: Bytes,
        measured: Bytes,
    },
    /// The size that the user fixed, or the remaining memory, does not hold one sequence.
    #[error("the cache would hold {tokens} tokens, but one sequence may have {context_tokens}")]
    TooSmall {
        /// Tokens that the cache would hold.
        tokens: usize,
        /// Tokens that one sequence may have, from the envelope.
        context_tokens: usize,
    },
    /// A measurement in this start yields a different KV cache size than the recorded profile.
    #[error("the recorded profile does not match: {0}")]
    RecordedProfileDiffers(Difference),
    #[error("the profile actor died: {reason}")]
    Died { reason: String },
}

impl ProfileError {
    /// Whether a retry without changes may succeed.
    pub fn is_death(&self) -> bool {
        matches!(self, ProfileError::Died { .. } | ProfileError::Stress { source: LaneError::Gone, .. })
    }
}

impl Hint for ProfileError {
    type Text = String;

    fn hint(&self) -> String {
        let smaller =
            || "lower `step_tokens`, `sequences`, `launch_patches` or `context_tokens`, or raise `capacity`".to_owned();
        match self {
            ProfileError::Lanes(error) => error.hint().unwrap_or_else(|| "see the driver's message".to_owned()),
            ProfileError::Lease { source, .. } => source.hint(),
            ProfileError::Device { source, .. } => source.hint().unwrap_or_else(smaller),
            ProfileError::PlanDiffers { .. } => "this is a bug in Bursar; please report it".to_owned(),
            ProfileError::TooSmall { tokens, .. } => {
                let shorter = if *tokens >= CONTEXT_TOKENS_LEAST {
                    format!("lower `context_tokens` to {tokens}, or ")
                } else {
                    String::new()
                };
                format!(
                    "{shorter}set a larger `memory_fraction` (1 means all remaining memory) or `kv_tokens`, or raise \
                     `capacity`"
                )
            }
            ProfileError::RecordedProfileDiffers(_) => "delete the recorded profile".to_owned(),
            ProfileError::Unanswered(_) | ProfileError::Died { .. } => "start the model again".to_owned(),
            ProfileError::Stress { .. } => smaller(),
        }
    }
}
