//! What leased bytes are for.

use std::fmt;

use serde::{Serialize, Serializer};

/// Which memory a class is paid from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// The device's own memory: rule 1 counts it.
    Device,
    /// Host memory: decoded pictures, swapped blocks. It has its own total and never touches rule 1.
    Host,
}

/// What leased bytes are for. The order is the order of the lines in tables.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A checkpoint's tensors. They outlive every restart of the actors around them.
    Weights,
    /// Keys and values of sequences; elastic, the last thing to shrink when another process grows.
    Kv,
    /// Temporaries of a text step.
    StepWorkspace,
    /// Temporaries of a vision launch.
    VisionWorkspace,
    /// Embeddings of pictures on their way to a step; elastic, and the first lease to shrink where its owner obeys.
    VisionCache,
    /// Instantiated graphs: driver memory that no address of ours covers.
    Graphs,
    /// Bytes kept free of use. Only the ledger's own account is of this class; nobody can ask for it.
    Canary,
    /// Host memory: pictures are leased too.
    Host,
    /// A user's own code, by the name that it gave itself.
    Tenant(String),
}

impl Class {
    /// What [`kind`](Class::kind) may be of a lease: all classes but the canary.
    pub const KINDS: [&'static str; 8] =
        ["weights", "kv", "step_workspace", "vision_workspace", "vision_cache", "graphs", "host", "tenant"];

    /// A tenant of this name.
    pub fn tenant(name: impl Into<String>) -> Self {
        Class::Tenant(name.into())
    }

    /// The name in tables, metrics and logs; a tenant's is `tenant:name`.
    ///
    /// ```
    /// use bursar_budgets::Class;
    /// assert_eq!(Class::StepWorkspace.label(), "step workspace");
    /// assert_eq!(Class::tenant("my-index").label(), "tenant:my-index");
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
            Class::Tenant(name) => format!("tenant:{name}"),
        }
    }

    /// The class as one word, whoever the tenant is: there are nine, whatever tenants call themselves.
    ///
    /// ```
    /// use bursar_budgets::Class;
    /// assert_eq!(Class::StepWorkspace.kind(), "step_workspace");
    /// assert_eq!(Class::tenant("my-index").kind(), "tenant");
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
            Class::Tenant(_) => "tenant",
        }
    }

    /// Which memory pays for this class.
    pub fn memory(&self) -> Memory {
        match self {
            Class::Host => Memory::Host,
            _ => Memory::Device,
        }
    }

    /// Elastic leases may grow after READY, and can be ordered to shrink when another process takes memory.
    /// Lower ranks are ordered first: losing a cached picture costs one encoder launch, losing KV preempts a sequence.
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

    /// Whether a claimant of this class may first appear after READY: tenants and pictures come and go.
    pub fn is_guest(&self) -> bool {
        matches!(self, Class::Tenant(_) | Class::Host)
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
