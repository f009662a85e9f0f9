//! The shelf: what outlives an engine. Loaded weights stay while the engine's successor starts, and its lanes can be
//! ended before their memory is taken back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bursar_budgets::Owner;
use bursar_model::Model;

use super::Lanes;

/// Held by the runtime for each model.
#[derive(Clone, Default)]
pub struct Shelf(Arc<Mutex<Contents>>);

#[derive(Default)]
struct Contents {
    weights_owner: Option<Owner>,
    model: Option<Arc<Model>>,
    lanes: Option<Lanes>,
}

impl Shelf {
    /// The loaded model, if there is one.
    pub fn model(&self) -> Option<Arc<Model>> {
        self.contents().model.clone()
    }

    /// Keeps a loaded model.
    pub fn keep_model(&self, model: Arc<Model>) {
        self.contents().model = Some(model);
    }

    /// Remembers as whom the weights are leased.
    pub fn keep_weights_owner(&self, owner: Owner) {
        self.contents().weights_owner = Some(owner);
    }

    /// Remembers the threads that use an attempt's memory.
    pub fn keep_lanes(&self, lanes: Lanes) {
        self.contents().lanes = Some(lanes);
    }

    /// Ends the threads, so that nothing uses the memory any more.
    pub async fn quench_lanes(&self) {
        let lanes = self.contents().lanes.take();
        if let Some(lanes) = lanes {
            lanes.quench().await;
        }
    }

    /// Lets go of the model; gives as whom its weights were leased.
    pub fn clear(&self) -> Option<Owner> {
        let mut contents = self.contents();
        contents.model = None;
        contents.weights_owner.take()
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // Nothing panics while it holds this.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
