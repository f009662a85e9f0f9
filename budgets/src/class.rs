//! What leased bytes are for.

use std::fmt;

use serde::{Serialize, Serializer};

/// Which memory pays for a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// The device's own memory, which rule 1 counts.
    Device,
    /// Host memory, for decoded pictures and swapped blocks. It has its own total, and rule 1 does not count it.
    Host,
}

/// What leased bytes are for. Tables list classes in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A checkpoint's tensors. They outlive restarts of the model's actors.
    Weights,
    /// Keys and values of sequences. Elastic: the last to shrink when another process takes memory.
    Kv,
    /// Temporaries of a text step.
    StepWorkspace,
    /// Temporaries of a vision launch.
    VisionWorkspace,
    /// Embeddings of pictures that a step has yet to read. Elastic: the first to shrink, if its owner obeys orders.
    VisionCache,
    /// Instantiated graphs: driver memory at addresses that we do not know.
    Graphs,
    /// Bytes kept free on purpose. Only the ledger's own account has this class; a request for it is refused.
    Canary,
    /// Host memory, such as decoded pictures.
    Host,
    /// Host memory for keys and values, and for pictures' embeddings, that had to leave the device.
    HostKv,
    /// A user's own code, by the name that it chose.
    External(String),
}

impl Class {
    /// Every [`kind`](Class::kind) that a lease can have: all but the canary's.
    pub const KINDS: [&'static str; 9] =
        ["weights", "kv", "step_workspace", "vision_workspace", "vision_cache", "graphs", "host", "host_kv", "tenant"];

    /// A tenant of this name.
    pub fn external(name: impl Into<String>) -> Self {
        Class::External(name.into())
    }

    /// The name in tables, metrics and logs; `tenant:name` for a tenant.
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

    /// The class as one word. All tenants share one, so there are ten words.
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

    /// Which memory pays for this class.
    pub fn memory(&self) -> Memory {
        match self {
            Class::Host | Class::HostKv => Memory::Host,
            _ => Memory::Device,
        }
    }

    /// The order in which elastic classes are told to shrink, lowest first; `None` if the class is not elastic. Losing
    /// a cached picture costs one encoder launch; losing KV preempts a sequence.
    pub fn gives_up_rank(&self) -> Option<u8> {
        match self {
            Class::VisionCache => Some(0),
            Class::Kv => Some(1),
            _ => None,
        }
    }

    /// Whether the class may change its size after READY.
    pub fn is_elastic(&self) -> bool {
        self.gives_up_rank().is_some()
    }

    /// Whether a claimant of this class may first appear after READY, as tenants and pictures do.
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
