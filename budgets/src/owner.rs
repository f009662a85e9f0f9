//! The actor that holds a lease, with its generation.

use std::fmt;

use serde::Serialize;

use crate::Label;

/// An actor with its generation. A restarted actor keeps its name and gets the next generation,
/// which distinguishes its leases from the leases that the actor held before the restart.
///
/// ```
/// use bursar_budgets::Owner;
/// let first = Owner::new("kv", 0);
/// assert_eq!(first.successor().to_string(), "kv#1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Owner {
    /// The actor's name, unique among all users of the ledger.
    pub name: Label,
    /// The number of times that the actor was restarted.
    pub generation: u64,
}

impl Owner {
    pub fn new(name: impl Into<Label>, generation: u64) -> Self {
        Owner { name: name.into(), generation }
    }

    /// The same actor in generation 0.
    pub fn first(&self) -> Self {
        Owner { name: self.name.clone(), generation: 0 }
    }

    /// The same actor after one more restart.
    pub fn successor(&self) -> Self {
        Owner { name: self.name.clone(), generation: self.generation + 1 }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}#{}", self.name, self.generation))
    }
}
