//! What is known of memory that was refused.

use std::fmt;

use bursar_budgets::{Bytes, Class, DeviceError, Refusal, Snapshot};
use bursar_kernels::{KernelError, OpenError};
use serde::Serialize;

use super::{Phase, ProfileError};
use crate::{budget::LeaseError, compute::lane::LaneError};

/// Who asked for how much, and what there was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// When.
    pub phase: Phase,
    /// For which lease; none for what the driver wanted for itself, as a launch does.
    pub class: Option<Class>,
    /// How much was asked for; nothing where the driver does not say.
    pub asked: Bytes,
    /// How much there was, by whoever refused.
    pub free: Bytes,
    /// What other processes held.
    pub foreign: Bytes,
    /// What was said.
    pub said: String,
}

impl Evidence {
    /// What `error` says, if it says that memory was refused, beside what the ledger knows.
    pub fn of(error: &ProfileError, phase: Phase, ledger: Option<&Snapshot>) -> Option<Self> {
        let (class, (asked, free)) = match error {
            ProfileError::Lease { class, source: LeaseError::Refused(refusal), .. } => {
                (class.as_deref(), ledgers(refusal))
            }
            ProfileError::Device { class, source, .. } => (class.as_deref(), devices(source)?),
            ProfileError::Lanes(OpenError::Device(source)) => (None, devices(source)?),
            ProfileError::Stress { source, .. } => (None, lanes(source)?),
            _ => return None,
        };
        let free = free.or(ledger.map(|ledger| ledger.free)).unwrap_or_default();
        let foreign = ledger.map(|ledger| ledger.foreign).unwrap_or_default();
        let class = class.cloned();
        Some(Evidence { phase, class, asked, free, foreign, said: error.to_string() })
    }

    /// What was missing at least: of what the driver wanted for itself nobody knows, so all that was asked for.
    pub fn missing(&self) -> Bytes {
        match self.asked.saturating_sub(self.free) {
            Bytes::ZERO => self.asked,
            short => short,
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory was refused in phase {}: {}", self.phase, self.said)?;
        if let Some(class) = &self.class {
            write!(f, "; it was for {class}")?;
        }
        write!(f, "; {} asked, {} free, {} held by others", self.asked.exact(), self.free.exact(), self.foreign.exact())
    }
}

/// What was asked for, and what there was if that was said.
type AskedAndFree = (Bytes, Option<Bytes>);

/// Every no of the ledger's is one for want of memory, or may be over by the next attempt.
fn ledgers(refusal: &Refusal) -> AskedAndFree {
    match refusal {
        Refusal::Short { asked, available, .. } => (*asked, Some(*available)),
        Refusal::TooLarge { asked, attainable, .. } => (*asked, Some(*attainable)),
        Refusal::Behind { asked, .. } | Refusal::GateClosed { asked, .. } => (*asked, None),
        Refusal::Overloaded(_)
        | Refusal::OwnerDead { .. }
        | Refusal::PredecessorHolds { .. }
        | Refusal::NotHeld { .. }
        | Refusal::Nothing
        | Refusal::CanaryAsked
        | Refusal::Withdrawn => (Bytes::ZERO, None),
    }
}

fn devices(error: &DeviceError) -> Option<AskedAndFree> {
    match error {
        DeviceError::Refused { asked, free, .. } => Some((*asked, Some(*free))),
        _ => None,
    }
}

/// What a lane was refused, if it was memory.
fn lanes(error: &LaneError) -> Option<AskedAndFree> {
    match error {
        LaneError::Kernel(KernelError::Device(error)) => devices(error),
        _ => None,
    }
}
