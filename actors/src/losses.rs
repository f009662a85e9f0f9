//! Devices that were lost, as requests are told.

use std::sync::Arc;

/// The devices that a runtime has lost so far. Requests of before a loss end with it.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    /// How many.
    pub count: u64,
    /// What was said of the last.
    pub reason: Arc<str>,
}
