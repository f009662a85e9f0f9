//! Sleeping models: the sleep level, the active requests, and the callers that wait.

mod error;
mod level;
mod wakefulness;

pub use error::{NotWoken, SleepError};
pub use level::SleepLevel;
pub use wakefulness::{Inside, Waiting, WakeState, Wakefulness};

use std::{sync::Arc, time::Duration};

use crate::{metric::WakeReason, responder::Responder};

/// An order from a model's handle to the runtime that runs the model.
pub enum SleepOrder {
    /// Put the model to sleep once the running requests have ended.
    Sleep {
        level: SleepLevel,
        /// How long running requests may still take.
        within: Duration,
        /// Answered when the device memory has been released, or when the model stays awake.
        reply: Responder<Result<(), SleepError>>,
    },
    /// Wake the model up. Callers that wait for the wake watch the model's [`Wakefulness`].
    Wake(WakeReason),
}

/// Sends a model's orders to its runtime.
pub type SendSleepOrder = Arc<dyn Fn(SleepOrder) + Send + Sync>;
