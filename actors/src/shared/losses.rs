//! Device losses, as requests see them.

use std::sync::Arc;

/// The losses of devices in a runtime so far. A request that began before a loss fails with the
/// error of that loss.
#[derive(Clone, Debug, Default)]
pub struct Losses {
    /// Number of losses since the runtime started.
    pub count: u64,
    /// The driver's error for the latest loss.
    pub reason: Arc<str>,
}
