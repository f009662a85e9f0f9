//! What may happen, with everything that is known of it then.

use bursar_budgets::{Bytes, Class, Holding, Label, LeaseId, Refusal};
use serde::{Serialize, Serializer};

/// A lease of device memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leased {
    /// Its number.
    pub lease: LeaseId,
    /// Of which model; `user` for a lease of the user's own.
    pub model: Label,
    /// What for.
    #[serde(serialize_with = "label")]
    pub class: Class,
    /// How much.
    pub bytes: Bytes,
}

impl From<&Holding> for Leased {
    fn from(holding: &Holding) -> Self {
        let Holding { id, model, class, bytes, .. } = holding.clone();
        Leased { lease: id, model, class, bytes }
    }
}

/// Something that happened to the memory of a device, or to who lives on it. None of it has content: no prompt, no picture,
/// no reply.
///
/// Leases of host memory are told of when they are refused only: each picture has one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// Device memory was leased.
    LeaseGranted(Leased),
    /// Memory was not leased, or a lease did not become larger.
    LeaseRefused {
        /// Of which model.
        model: Label,
        /// What for.
        #[serde(serialize_with = "label")]
        class: Class,
        /// How much was asked for: all of a new lease, or the size that one should have had.
        bytes: Bytes,
        /// Why.
        #[serde(serialize_with = "text")]
        reason: Refusal,
    },
    /// A lease is larger or smaller.
    LeaseResized {
        /// The lease.
        lease: LeaseId,
        /// Of which model.
        model: Label,
        /// What for.
        #[serde(serialize_with = "label")]
        class: Class,
        /// Its bytes before.
        from: Bytes,
        /// Its bytes now.
        to: Bytes,
    },
    /// Whoever held a lease has died: it ends when the device is past its last use.
    LeaseRevoked(Leased),
    /// A lease has ended, and its bytes are free.
    LeaseFreed(Leased),
    /// So much of the canary was given up: another process wants what was kept free.
    CanaryGiven {
        /// How much.
        bytes: Bytes,
    },
    /// So much of the canary is kept free again.
    CanaryTaken {
        /// How much.
        bytes: Bytes,
    },
    /// Keys and values become fewer, since another process wants memory or memory was refused.
    Shrink {
        /// Whose.
        model: Label,
        /// Blocks before.
        from_blocks: usize,
        /// Blocks now.
        to_blocks: usize,
    },
    /// Keys and values have become more again.
    Growth {
        /// Whose.
        model: Label,
        /// Blocks before.
        from_blocks: usize,
        /// Blocks now.
        to_blocks: usize,
    },
    /// Memory was refused to a model: by the device, or by the ledger where a neighbour was there first.
    Oom {
        /// To whom.
        model: Label,
        /// When: `load`, `probe`, `capture`, `back`, `validate` or `serve`.
        phase: &'static str,
    },
    /// An actor has ended and another follows: it died, or it was an attempt at sizing that came to nothing.
    Restart {
        /// Of which model; none if it is the runtime's own.
        model: Option<Label>,
        /// Which.
        actor: &'static str,
        /// Why.
        reason: String,
    },
    /// A model serves: for the first time, or again.
    Ready {
        /// Which.
        model: Label,
        /// Tokens whose keys and values there is room for.
        kv_tokens: usize,
    },
    /// A model did not start.
    Failed {
        /// Which.
        model: Label,
        /// Why.
        reason: String,
    },
    /// A model is over: unloaded, shut down, or given up.
    Stopped {
        /// Which.
        model: Label,
        /// Why.
        reason: String,
    },
    /// The device is lost, with all that was on it.
    DeviceLost {
        /// What it said.
        reason: String,
    },
}

impl Event {
    /// Its name, as JSON has it under `event`.
    pub fn name(&self) -> &'static str {
        match self {
            Event::LeaseGranted(_) => "lease_granted",
            Event::LeaseRefused { .. } => "lease_refused",
            Event::LeaseResized { .. } => "lease_resized",
            Event::LeaseRevoked(_) => "lease_revoked",
            Event::LeaseFreed(_) => "lease_freed",
            Event::CanaryGiven { .. } => "canary_given",
            Event::CanaryTaken { .. } => "canary_taken",
            Event::Shrink { .. } => "shrink",
            Event::Growth { .. } => "growth",
            Event::Oom { .. } => "oom",
            Event::Restart { .. } => "restart",
            Event::Ready { .. } => "ready",
            Event::Failed { .. } => "failed",
            Event::Stopped { .. } => "stopped",
            Event::DeviceLost { .. } => "device_lost",
        }
    }
}

/// As metrics have it; a tenant's with the name that it gave itself.
fn label<S: Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&class.label().replace(' ', "_"))
}

fn text<S: Serializer>(refusal: &Refusal, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(refusal)
}
