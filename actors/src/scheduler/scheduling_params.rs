//! A sequence's standing among those that wait.

use crate::{deadline::Deadlines, tenant::Tenant};

/// What decides when a sequence is served, besides its age, and whether.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulingParams {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
    /// Whose it is.
    pub tenant: Tenant,
    /// The time left for each deadline that is still to be met.
    pub left: Deadlines,
}
