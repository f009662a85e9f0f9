//! What a runtime publishes about its device.

use std::sync::Arc;

use bursar_budgets::Device;
use tokio::sync::watch;

use crate::losses::Losses;

/// What a runtime publishes about its device.
#[derive(Clone)]
pub struct Shown {
    /// The current device.
    pub device: Arc<watch::Sender<Arc<dyn Device>>>,
    /// The losses so far.
    pub losses: Arc<watch::Sender<Losses>>,
}

impl Shown {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Shown { device: Arc::new(watch::Sender::new(device)), losses: Arc::default() }
    }
}
