//! What is known about refused memory.

use std::fmt;

use bursar_budgets::{Bytes, Class, DeviceError, Refusal, Snapshot};
use bursar_kernels::{KernelError, OpenError};
use serde::Serialize;

use super::{Phase, ProfileError};
use crate::{budget::LeaseError, compute::lane::LaneError};

/// A refusal of memory: what was requested, and what there was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// The phase of the refusal.
    pub phase: Phase,
    /// The class of the lease. None for what the driver needed for itself, as for a launch.
    pub class: Option<Class>,
    /// Bytes asked for. 0 if the driver does not say.
    pub asked: Bytes,
    /// Bytes free, according to the budget or device that refused.
    pub free: Bytes,
    /// Bytes of other processes.
    pub foreign: Bytes,
    /// The error, in words.
    pub said: String,
}

impl Evidence {
    /// The evidence from `error`, if it says that memory was refused, and from the ledger.
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

    /// The least that was missing. For what the driver needed for itself that is unknown, so all bytes asked for.
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

/// The bytes asked for, and the bytes free if that is known.
type AskedAndFree = (Bytes, Option<Bytes>);

/// Every refusal of the ledger is for lack of memory, or may be over by the next attempt.
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
