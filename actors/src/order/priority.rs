//! A request's rank among those that wait.

use super::{QueuePosition, Tenants};
use crate::tenant::Tenant;

/// What decides when a request is served, besides its age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Priority {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
    /// Whose it is.
    pub tenant: Tenant,
    /// It had its turn, and lost what it got: its reader may have had a part of the reply, and waits for the rest.
    pub had_turn: bool,
}

impl Priority {
    /// Its place beside others, by what tenants were given.
    pub(super) fn place<I>(&self, tenants: &Tenants, id: I) -> QueuePosition<I> {
        QueuePosition::of(self.priority, self.had_turn, tenants.counter(&self.tenant), id)
    }
}
