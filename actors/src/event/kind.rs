//! The events that can happen, with everything known at that time.

use bursar_budgets::{Bytes, Class, Holding, Label, LeaseId, Refusal};
use serde::{Serialize, Serializer};

use crate::metric::DeviceLabel;

/// A lease of device memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leased {
    /// The lease's number.
    pub lease: LeaseId,
    /// The model; `user` for a lease of the user's own.
    pub model: Label,
    /// The class of the lease.
    #[serde(serialize_with = "label")]
    pub class: Class,
    /// The size of the lease.
    pub bytes: Bytes,
}

impl From<&Holding> for Leased {
    fn from(holding: &Holding) -> Self {
        let Holding { id, model, class, bytes, .. } = holding.clone();
        Leased { lease: id, model, class, bytes }
    }
}

/// Something that happened to the memory of a device, or to what runs on it. No event contains a prompt, picture or
/// reply.
///
/// Leases of host memory appear only when they are refused, because each picture has one.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// Device memory was leased.
    LeaseGranted(Leased),
    /// A lease was refused, or could not grow.
    LeaseRefused {
        /// The model; `user` for a lease of the user's own.
        model: Label,
        /// The class of the lease.
        #[serde(serialize_with = "label")]
        class: Class,
        /// The bytes asked for: a new lease's size, or the size to grow to.
        bytes: Bytes,
        /// Why it was refused.
        #[serde(serialize_with = "text")]
        reason: Refusal,
    },
    /// A lease has grown or shrunk.
    LeaseResized {
        /// The lease's number.
        lease: LeaseId,
        /// The model; `user` for a lease of the user's own.
        model: Label,
        /// The class of the lease.
        #[serde(serialize_with = "label")]
        class: Class,
        /// Bytes before.
        from: Bytes,
        /// Bytes now.
        to: Bytes,
    },
    /// The owner of a lease has died. The lease ends when the device is past its last use.
    LeaseRevoked(Leased),
    /// A lease has ended, and its bytes are free.
    LeaseFreed(Leased),
    /// Part of the canary was given up, because another process took memory.
    CanaryGiven {
        /// Bytes given up.
        bytes: Bytes,
        /// The card of a group that has the least left. None for one device, or if all have the same.
        #[serde(skip_serializing_if = "Option::is_none")]
        card: Option<DeviceLabel>,
    },
    /// Part of the canary is kept free again.
    CanaryTaken {
        /// Bytes kept free again.
        bytes: Bytes,
    },
    /// Keys and values shrink, because another process needs memory or memory was refused.
    Shrink {
        /// The model.
        model: Label,
        /// Blocks before.
        from_blocks: usize,
        /// Blocks now.
        to_blocks: usize,
        /// The card of a group that has the least left: all its cards shrink. None as for the canary.
        #[serde(skip_serializing_if = "Option::is_none")]
        card: Option<DeviceLabel>,
    },
    /// Keys and values have grown again.
    Growth {
        /// The model.
        model: Label,
        /// Blocks before.
        from_blocks: usize,
        /// Blocks now.
        to_blocks: usize,
    },
    /// Memory was refused to a model: by the device, or by the ledger after a neighbour took it.
    Oom {
        /// The model.
        model: Label,
        /// The phase: `load`, `probe`, `capture`, `back`, `validate` or `serve`.
        phase: &'static str,
    },
    /// An actor has ended and a successor follows. It died, or was a failed attempt at sizing.
    Restart {
        /// The model. None for the runtime's own actors.
        model: Option<Label>,
        /// The actor's role.
        actor: &'static str,
        /// The reason of the death, or the error.
        reason: String,
    },
    /// As many devices share a model out as it needs, by plan; told when the runtime starts.
    RanksChosen {
        /// The model.
        model: Label,
        /// The fewest devices that it fits on.
        ranks: usize,
        /// By how much fewer are too few.
        reason: String,
    },
    /// A model serves, for the first time or again.
    Ready {
        /// The model.
        model: Label,
        /// Tokens that keys and values have room for.
        kv_tokens: usize,
    },
    /// A model sleeps: it holds no device memory.
    Asleep {
        /// The model.
        model: Label,
        /// 1 if its weights are in host memory, 2 if they were dropped.
        level: u8,
    },
    /// A model that slept takes requests.
    Awake {
        /// The model.
        model: Label,
    },
    /// A model could not wake up, and sleeps on.
    NotWoken {
        /// The model.
        model: Label,
        /// The error, in words.
        reason: String,
    },
    /// A model did not start.
    Failed {
        /// The model.
        model: Label,
        /// The error, in words.
        reason: String,
    },
    /// A model is over: unloaded, shut down, or given up.
    Stopped {
        /// The model.
        model: Label,
        /// The reason given.
        reason: String,
    },
    /// The device was lost, with everything on it.
    DeviceLost {
        /// The device's error.
        reason: String,
    },
}

impl Event {
    /// The event's name: `event` in JSON.
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
            Event::RanksChosen { .. } => "ranks_chosen",
            Event::Ready { .. } => "ready",
            Event::Asleep { .. } => "asleep",
            Event::Awake { .. } => "awake",
            Event::NotWoken { .. } => "not_woken",
            Event::Failed { .. } => "failed",
            Event::Stopped { .. } => "stopped",
            Event::DeviceLost { .. } => "device_lost",
        }
    }
}

/// As in metrics, except that a tenant's class carries the name that it chose.
fn label<S: Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&class.label().replace(' ', "_"))
}

fn text<S: Serializer>(refusal: &Refusal, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(refusal)
}
