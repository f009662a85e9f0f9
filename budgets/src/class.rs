//! Classes of leased bytes by purpose, and the memory that pays for each class.

use std::fmt;

use serde::{Serialize, Serializer};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// The device's own memory, which rule 1 limits: `granted + overhead + foreign + canary <=
    /// total`.
    Device,
    /// Host memory, for decoded pictures, the weights of sleeping models, and content that was
    /// offloaded from the device. The ledger limits all leases of host memory by a separate total.
    Host,
}

/// The purpose of leased bytes. Tables list classes in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// The tensors of a checkpoint. Their leases outlive restarts of the model's actors.
    Weights,
    /// The KV cache. Elastic: the last class to shrink when another process takes memory.
    Kv,
    /// Recurrent states of sequences, and snapshots of them that later sequences resume from.
    States,
    /// Temporaries of a text step.
    StepWorkspace,
    /// Temporaries of a batch of the vision encoder.
    VisionWorkspace,
    /// The vision cache (encoder cache): picture embeddings that a step has yet to read, and
    /// embeddings kept for later requests. Elastic: the first class to shrink, if its owner follows
    /// orders to shrink.
    VisionCache,
    /// Instantiated CUDA graphs: driver memory at unknown addresses.
    Graphs,
    /// Bytes kept free on purpose. This class is only the canary's label in tables. The ledger
    /// refuses requests for this class.
    Canary,
    Host,
    /// Host memory for KV blocks, state snapshots and picture embeddings that were offloaded from
    /// the device.
    HostKv,
    /// Memory of a user's own code, under a name of the user's choice.
    External(String),
}

impl Class {
    /// Every [`kind`](Class::kind) that a lease can have, which is every kind except `canary`.
    pub const KINDS: [&'static str; 10] = [
        "weights",
        "kv",
        "states",
        "step_workspace",
        "vision_workspace",
        "vision_cache",
        "graphs",
        "host",
        "host_kv",
        "tenant",
    ];

    pub fn external(name: impl Into<String>) -> Self {
        Class::External(name.into())
    }

    /// The name in tables, metrics and logs. For [`Class::External`] this is `tenant:name`.
    ///
    /// ```
    /// use bursar_budgets::Class;
    /// assert_eq!(Class::StepWorkspace.label(), "step workspace");
    /// assert_eq!(Class::external("my-index").label(), "tenant:my-index");
    /// ```
    pub fn label(&self) -> String {
        match self {
            Class::Weights => "weights".into(),
            Class::Kv => "kv".into(),
            Class::States => "states".into(),
            Class::StepWorkspace => "step workspace".into(),
            Class::VisionWorkspace => "vision workspace".into(),
            Class::VisionCache => "vision cache".into(),
            Class::Graphs => "graphs".into(),
            Class::Canary => "canary".into(),
            Class::Host => "host".into(),
            Class::HostKv => "host kv".into(),
            Class::External(name) => format!("tenant:{name}"),
        }
    }

    /// The class as one word. All [`Class::External`] share one word, so there are eleven words.
    ///
    /// ```
    /// use bursar_budgets::Class;
    /// assert_eq!(Class::StepWorkspace.kind(), "step_workspace");
    /// assert_eq!(Class::external("my-index").kind(), "tenant");
    /// ```
    pub const fn kind(&self) -> &'static str {
        match self {
            Class::Weights => "weights",
            Class::Kv => "kv",
            Class::States => "states",
            Class::StepWorkspace => "step_workspace",
            Class::VisionWorkspace => "vision_workspace",
            Class::VisionCache => "vision_cache",
            Class::Graphs => "graphs",
            Class::Canary => "canary",
            Class::Host => "host",
            Class::HostKv => "host_kv",
            Class::External(_) => "tenant",
        }
    }

    pub fn memory(&self) -> Memory {
        match self {
            Class::Host | Class::HostKv => Memory::Host,
            _ => Memory::Device,
        }
    }

    /// The rank of this class when elastic leases must shrink: the class with the lowest number
    /// shrinks first. `None` if the class is not elastic. Losing a cached picture costs one run of
    /// the encoder. Losing KV blocks preempts a sequence.
    pub fn gives_up_rank(&self) -> Option<u8> {
        match self {
            Class::VisionCache => Some(0),
            Class::Kv => Some(1),
            _ => None,
        }
    }

    /// Whether leases of this class may change their size after READY.
    pub fn is_elastic(&self) -> bool {
        self.gives_up_rank().is_some()
    }

    /// Whether an owner may request its first lease of this class after READY, for example for a
    /// user's own code or for decoded pictures.
    pub fn is_guest(&self) -> bool {
        matches!(self, Class::External(_) | Class::Host)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.label())
    }
}

impl Serialize for Class {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.label())
    }
}
