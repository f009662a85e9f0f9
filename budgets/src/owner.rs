//! Who holds a lease: an actor, and which of its lives.

use std::fmt;

use serde::Serialize;

use crate::Label;

/// An actor with a generation. A restarted actor keeps its name and gets the next generation, so that what its dead
/// predecessor held can be told from what it asks for itself.
///
/// ```
/// use bursar_budgets::Owner;
/// let first = Owner::new("kv", 0);
/// assert_eq!(first.successor().to_string(), "kv#1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Owner {
    /// The actor's name, unique among those that ask one ledger.
    pub name: Label,
    /// How often it was started before.
    pub generation: u64,
}

impl Owner {
    /// The owner of this name in its `generation`-th life.
    pub fn new(name: impl Into<Label>, generation: u64) -> Self {
        Owner { name: name.into(), generation }
    }

    /// The same actor in its first life.
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
