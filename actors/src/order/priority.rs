//! The priority of a request in a queue.

use super::{QueuePosition, Tenants};
use crate::tenant::Tenant;

/// The properties that decide when a request is served, in addition to its age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Priority {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
    pub tenant: Tenant,
    /// The request was served before, and lost its resources. Its reader may have received a part
    /// of the reply, and waits for the rest.
    pub had_turn: bool,
}

impl Priority {
    /// The request's sort key, given the tenants' counters.
    pub(super) fn place<I>(&self, tenants: &Tenants, id: I) -> QueuePosition<I> {
        QueuePosition::of(self.priority, self.had_turn, tenants.counter(&self.tenant), id)
    }
}
