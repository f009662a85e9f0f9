//! The devices lost so far, as requests see them.

use std::sync::Arc;

/// The devices that a runtime has lost so far. A request that began before a loss ends with it.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    /// Devices lost since the runtime started.
    pub count: u64,
    /// The driver's error for the latest loss.
    pub reason: Arc<str>,
}
