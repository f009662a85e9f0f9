//! What an owner asks the ledger for.

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Class, Label, Owner};

/// The number that whoever drives the ledger gives a question, so that its one answer finds the way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// Who is served first while memory is short; later variants go first. Inside one priority it is first come, first served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// What nobody waits for: giving spare memory back to KV after another process has left.
    Background,
    /// A user's own code beside the models.
    Tenant,
    /// What an accepted chat needs to go on.
    #[default]
    Serving,
    /// A model being loaded, or an actor being restarted: until it has its bytes nothing of that model is served.
    Startup,
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Priority::Background => "background",
            Priority::Tenant => "tenant",
            Priority::Serving => "serving",
            Priority::Startup => "startup",
        })
    }
}

/// A wish for one lease.
///
/// ```
/// use bursar_budgets::*;
/// let request = Request::new(Owner::new("weights", 0), Class::Weights, "demo", Bytes::mib(8)).priority(Priority::Startup);
/// assert_eq!(request.bytes, Bytes::mib(8));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    /// Who will hold the lease.
    pub owner: Owner,
    /// What for.
    pub class: Class,
    /// Of which model; a tenant names whatever it likes.
    pub model: Label,
    /// How much; more than nothing.
    pub bytes: Bytes,
    /// How urgent.
    pub priority: Priority,
}

impl Request {
    /// A wish at the priority that its class has by default: tenants below what serves chats.
    pub fn new(owner: Owner, class: Class, model: impl Into<Label>, bytes: Bytes) -> Self {
        let priority = match class {
            Class::Tenant(_) => Priority::Tenant,
            _ => Priority::Serving,
        };
        Request { owner, class, model: model.into(), bytes, priority }
    }

    /// The same wish with this priority.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}
