//! Models that sleep: how deeply, who is in, and who waits for them.

mod error;
mod level;
mod wakefulness;

pub use error::{NotWoken, SleepError};
pub use level::SleepLevel;
pub use wakefulness::{Inside, Rest, Waiting, Wakefulness};

use std::{sync::Arc, time::Duration};

use crate::{metric::WakeReason, responder::Responder};

/// What a model's handle asks of its runtime.
pub enum SleepOrder {
    /// To fall asleep once the running requests have ended.
    Sleep {
        /// How deeply.
        level: SleepLevel,
        /// How long running requests may still take.
        within: Duration,
        /// Answered when the device's memory is back, or the model goes on.
        reply: Responder<Result<(), SleepError>>,
    },
    /// To wake up. Who waits for that looks at the model's [`Wakefulness`].
    Wake(WakeReason),
}

/// Takes a model's orders to its runtime.
pub type SendSleepOrder = Arc<dyn Fn(SleepOrder) + Send + Sync>;
