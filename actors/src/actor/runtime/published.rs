//! State that a runtime publishes about its device.

use std::sync::Arc;

use bursar_budgets::Device;
use tokio::sync::watch;

use crate::losses::Losses;

#[derive(Clone)]
pub struct Shown {
    pub device: Arc<watch::Sender<Arc<dyn Device>>>,
    pub losses: Arc<watch::Sender<Losses>>,
}

impl Shown {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Shown { device: Arc::new(watch::Sender::new(device)), losses: Arc::default() }
    }
}
