//! The properties that decide a sequence's order among waiting sequences.

use crate::{deadline::Deadlines, tenant::Tenant};

/// The properties that, in addition to the age of a sequence, decide whether and when the sequence
/// is served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulingParams {
    /// Lower is served earlier, as in vLLM.
    pub priority: i32,
    pub tenant: Tenant,
    /// The time left for each deadline that has not been met yet.
    pub left: Deadlines,
}
