//! Kinds of events. Each event carries everything that is known when it happens.

use bursar_budgets::{Bytes, Class, Holding, Label, LeaseId, Refusal};
use serde::{Serialize, Serializer};

use crate::metric::DeviceLabel;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Leased {
    pub lease: LeaseId,
    pub model: Label,
    #[serde(serialize_with = "label")]
    pub class: Class,
    pub bytes: Bytes,
}

impl From<&Holding> for Leased {
    fn from(holding: &Holding) -> Self {
        let Holding { id, model, class, bytes, .. } = holding.clone();
        Leased { lease: id, model, class, bytes }
    }
}

/// A change of a device's memory, or of the actors that use this memory. No event contains a
/// prompt, picture or reply.
///
/// A lease of host memory is reported only if it is refused, because each picture has such a lease.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event {
    /// Device memory was leased.
    LeaseGranted(Leased),
    /// A new lease, or the growth of an existing lease, was refused.
    LeaseRefused {
        model: Label,
        #[serde(serialize_with = "label")]
        class: Class,
        /// The bytes requested: the size of a new lease, or the size to grow to.
        bytes: Bytes,
        #[serde(serialize_with = "text")]
        reason: Refusal,
    },
    /// A lease has grown or shrunk.
    LeaseResized {
        lease: LeaseId,
        model: Label,
        #[serde(serialize_with = "label")]
        class: Class,
        from: Bytes,
        to: Bytes,
    },
    /// The owner of a lease has died. The lease ends once the device has finished its last use of
    /// the leased memory.
    LeaseRevoked(Leased),
    /// A lease has ended, and its bytes are free.
    LeaseFreed(Leased),
    /// Part of the canary was given up, because another process took memory.
    CanaryGiven {
        bytes: Bytes,
        /// The GPU of the group with the least memory left. `None` for a single device, or if all
        /// GPUs have the same amount left.
        #[serde(skip_serializing_if = "Option::is_none")]
        card: Option<DeviceLabel>,
    },
    /// Part of the canary is kept free again.
    CanaryTaken { bytes: Bytes },
    /// The KV cache shrinks, because another process or another model needs memory, or because
    /// memory was refused.
    Shrink {
        model: Label,
        from_blocks: usize,
        to_blocks: usize,
        /// The GPU of the group with the least memory left. The cache shrinks on all GPUs because
        /// of this GPU. `None` for a single device, or if all GPUs have the same amount left.
        #[serde(skip_serializing_if = "Option::is_none")]
        card: Option<DeviceLabel>,
    },
    /// The KV cache has grown again, or has borrowed memory of an idle model.
    Growth { model: Label, from_blocks: usize, to_blocks: usize },
    /// A model was refused memory: by the device, or by the ledger after
    /// another process took memory.
    Oom {
        model: Label,
        /// The phase: `load`, `probe`, `capture`, `back`, `validate` or `serve`.
        phase: &'static str,
    },
    /// An actor has ended, and a successor follows. Either the actor died, or its sizing attempt
    /// failed.
    Restart {
        /// `None` for the runtime's own actors.
        model: Option<Label>,
        /// The name of the actor's role; see [`Role::name`](crate::tree::Role::name).
        actor: &'static str,
        /// The reason for the death, or the error.
        reason: String,
    },
    /// The number of devices over which a model is sharded was chosen from its memory plan.
    /// Reported when the runtime starts.
    RanksChosen {
        model: Label,
        /// The smallest number of devices on which the model fits.
        ranks: usize,
        /// How much memory the model would lack on fewer devices.
        reason: String,
    },
    /// A model is ready, for the first time or again.
    Ready {
        model: Label,
        /// Size of the KV cache, in tokens.
        kv_tokens: usize,
    },
    /// A model sleeps and holds no device memory.
    Asleep {
        model: Label,
        /// The level of sleep: 1 if the model's weights are in host memory, 2 if they were dropped.
        level: u8,
    },
    /// A sleeping model has woken up and accepts requests.
    Awake { model: Label },
    /// A model could not wake up and stays asleep.
    NotWoken { model: Label, reason: String },
    /// A model failed to start.
    Failed { model: Label, reason: String },
    /// A model was unloaded, shut down, or given up.
    Stopped { model: Label, reason: String },
    /// The device was lost, with everything stored on it.
    DeviceLost { reason: String },
}

impl Event {
    /// Returns the event's name, which is the field `event` in JSON.
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

/// Serializes the class as in metrics, except that the text for an external class includes the name
/// that the user chose.
fn label<S: Serializer>(class: &Class, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&class.label().replace(' ', "_"))
}

fn text<S: Serializer>(refusal: &Refusal, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(refusal)
}
