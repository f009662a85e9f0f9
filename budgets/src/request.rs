//! Requests of owners to the ledger.

use std::fmt;

use serde::Serialize;

use crate::{Bytes, Class, Label, Owner};

/// A request's number. The caller that drives the ledger chooses it and uses it to match the
/// answer to the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// The order of service while memory is short. Later variants are served first. Requests of one
/// priority are served in order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Work that can wait, such as returning spare memory to the KV cache after
    /// another process has left.
    Background,
    /// A user's own code that uses memory next to the models.
    #[serde(rename = "tenant")]
    External,
    /// Memory that an accepted chat needs to continue.
    #[default]
    Serving,
    /// A model that is loading, or an actor that restarts. The model serves no request until this
    /// memory is granted.
    Startup,
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Priority::Background => "background",
            Priority::External => "tenant",
            Priority::Serving => "serving",
            Priority::Startup => "startup",
        })
    }
}

/// A request for one lease.
///
/// ```
/// use bursar_budgets::*;
/// let request = Request::new(Owner::new("weights", 0), Class::Weights, "demo", Bytes::mib(8)).priority(Priority::Startup);
/// assert_eq!(request.bytes, Bytes::mib(8));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Request {
    pub owner: Owner,
    pub class: Class,
    /// The model that the bytes serve. A user's own code may use any name.
    pub model: Label,
    /// At least 1, because the ledger refuses a request for 0 bytes.
    pub bytes: Bytes,
    pub priority: Priority,
}

impl Request {
    /// A request with the default priority of its class. A user's own code has a
    /// lower priority than serving.
    pub fn new(owner: Owner, class: Class, model: impl Into<Label>, bytes: Bytes) -> Self {
        let priority = match class {
            Class::External(_) => Priority::External,
            _ => Priority::Serving,
        };
        Request { owner, class, model: model.into(), bytes, priority }
    }

    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}
